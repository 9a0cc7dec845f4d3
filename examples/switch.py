"""Another prompt while the stream runs. Run: python examples/switch.py"""

import sys

from visual_gen import FrameStream, StreamEngine, load_config
from visual_gen.runtime.video import VideoWriter

engine = StreamEngine.from_pretrained(
    sys.argv[1] if len(sys.argv) > 1 else "wan-shapes-causal",
    causal=load_config("configs/wan_shapes_stream.yaml").causal,
    height=96,
    width=96,
    max_sequence_length=64,
    max_streams=2,  # one stream, and room for a window that is computed anew
)
stream = engine.open("a red circle moving right on a navy background", seed=0)
frames = FrameStream(engine, stream, engine.vae)
with VideoWriter("outputs/switch.mp4", fps=16) as video:
    for index, chunk in enumerate(frames):
        video.append(chunk)
        if index == 3:
            # "window" computes what the model still sees of the circle again, under the new prompt; "none" leaves it.
            stream.switch_prompt("a blue square moving up on a navy background", recache="window")
        if index == 8:
            stream.close()
print(f"outputs/switch.mp4: {video.frames} frames, the last of {stream.prompt!r}")
