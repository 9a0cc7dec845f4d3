"""One beginning, two endings: the fork shares the first one's past. Run: python examples/fork.py"""

import sys

from visual_gen import FrameStream, StreamEngine, load_config
from visual_gen.runtime.video import VideoWriter

engine = StreamEngine.from_pretrained(
    sys.argv[1] if len(sys.argv) > 1 else "wan-shapes-causal",
    causal=load_config("configs/wan_shapes_stream.yaml").causal,
    height=96,
    width=96,
    max_sequence_length=64,
    max_streams=2,
)
frames = FrameStream(engine, engine.open("a red circle moving right on a navy background", seed=0), engine.vae)
for _ in range(3):
    engine.step(until="chunk")
beginning = frames.take()
other = frames.fork()
other.stream.switch_prompt("a green star moving down on a navy background")
for _ in range(3):
    engine.step(until="chunk")  # both in one batch
for name, ending in (("first", frames.take()), ("second", other.take())):
    with VideoWriter(f"outputs/fork-{name}.mp4", fps=16) as video:
        for chunk in beginning + ending:
            video.append(chunk)
    print(f"outputs/fork-{name}.mp4: {video.frames} frames")
engine.close()
