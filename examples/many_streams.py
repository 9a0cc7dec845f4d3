"""Streams that come and go, all in one batch. Run: python examples/many_streams.py"""

import sys

from visual_gen import FrameStream, StreamEngine, load_config
from visual_gen.runtime.video import VideoWriter

PROMPTS = ["a red circle moving right", "a blue square moving up", "a green star spinning", "a yellow ring bouncing"]
engine = StreamEngine.from_pretrained(
    sys.argv[1] if len(sys.argv) > 1 else "wan-shapes-causal",
    causal=load_config("configs/wan_shapes_stream.yaml").causal,
    height=96,
    width=96,
    max_sequence_length=64,
    max_streams=3,
)
waiting, watched = list(enumerate(PROMPTS)), []
while waiting or watched:
    while waiting and len(engine.streams) < engine.options.max_streams:  # one joins as soon as there is room
        index, prompt = waiting.pop(0)
        video = VideoWriter(f"outputs/many-{index}.mp4", fps=16)
        stream = engine.open(f"{prompt} on a navy background", seed=index)
        watched.append((FrameStream(engine, stream, engine.vae, on_frames=video.append), video, 2 + index))
    engine.step()  # one forward: rows at different steps of different chunks
    for frames, video, chunks in list(watched):
        frames.pump()
        if frames.error is not None:
            raise frames.error
        if frames.chunks == chunks:  # and leaves when it has what it wanted
            frames.stream.close()
            video.finish()
            watched.remove((frames, video, chunks))
            print(f"{video.path}: {video.frames} frames")
print("forwards by rows:", dict(sorted(engine.record().batch_sizes.items())))
