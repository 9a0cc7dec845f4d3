"""Make a video from a prompt with the checkpoint that ships. Run: python examples/text_to_video.py "a red circle" """

import sys

import torch

from visual_gen import WanPipeline
from visual_gen.runtime.video import write_video

prompt = sys.argv[1] if len(sys.argv) > 1 else "a green star moving up and right on a navy background"
# attention={"self": "sdpa", "cross_kv": "packed_pad_exact"} would choose a backend and how text is kept.
pipe = WanPipeline.from_pretrained("wan-shapes", dtype=torch.float32, device="cpu")
output = pipe(
    prompt,
    negative_prompt="anything",  # what wan-shapes takes for "no caption"
    height=96,
    width=96,
    num_frames=33,
    num_inference_steps=20,
    guidance_scale=4.0,
    max_sequence_length=64,
    generator=torch.Generator().manual_seed(0),
)
write_video("outputs/video.mp4", output.frames[0], fps=16)
print(f"outputs/video.mp4: {prompt!r}, {sum(output.record.step_seconds):.1f} s of denoising")
