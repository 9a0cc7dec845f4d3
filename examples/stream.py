"""A video as long as you like, written while it is made. Run: python examples/stream.py "a red circle moving right" """

import itertools
import sys

from visual_gen import FrameStream, StreamEngine, load_config
from visual_gen.runtime.video import VideoWriter

prompt = sys.argv[1] if len(sys.argv) > 1 else "a red circle moving right on a navy background"
model = sys.argv[2] if len(sys.argv) > 2 else "wan-shapes-causal"
engine = StreamEngine.from_pretrained(
    model,
    causal=load_config("configs/wan_shapes_stream.yaml").causal,  # 3 latent frames a chunk, 4 steps, a window of 12
    height=96,
    width=96,
    max_sequence_length=64,
)
frames = FrameStream(engine, engine.open(prompt, seed=0), engine.vae)
with VideoWriter("outputs/stream.mp4", fps=16) as video:
    for chunk in itertools.islice(frames, 8):  # uint8 [frames, 96, 96, 3], as soon as a chunk is there
        video.append(chunk)
        print(f"chunk {frames.chunks}: {video.frames} frames, {engine.used_blocks} blocks of the KV cache")
engine.close()
