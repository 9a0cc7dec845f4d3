"""Our pipeline against diffusers' WanPipeline on the shipped checkpoint: same machine, same run, interleaved.

    python benchmarks/demo_vs_diffusers.py [--dtype float32] [--runs 5] [--output FILE.json]

Denoising is the time from the end of the last text encoder call to the start of the VAE's decode, for both; ours
therefore includes projecting the text. The whole run is the pipeline's call, prompt to frames. Peak memory is the
resident set of a process of its own for each arm, weights included, run before the timed ones. Times are medians of
interleaved runs.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from visual_gen.runtime.machine import cpu_name, peak_rss_bytes
from visual_gen.runtime.versions import installed_versions

PROMPT = "a red circle moving right on a black background"
ARMS = ("visual_gen", "diffusers")


def load(arm: str, dtype: torch.dtype):
    from visual_gen.checkpoint import resolve_folder

    folder = resolve_folder("wan-shapes")
    if arm == "visual_gen":
        from visual_gen import WanPipeline

        return WanPipeline.from_pretrained(folder, dtype=dtype)
    from diffusers import WanPipeline

    pipe = WanPipeline.from_pretrained(folder, torch_dtype=dtype)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def run(arm: str, pipe, settings: argparse.Namespace) -> tuple[float, float, torch.Tensor]:
    """(denoising seconds, whole seconds, frames [F, H, W, 3]) of one call."""
    marks: dict[str, float] = {}
    hook = pipe.text_encoder.register_forward_hook(lambda *_: marks.update(text=time.perf_counter()))
    decode = pipe.vae.decode

    def marked_decode(*args, **kwargs):
        marks.setdefault("decode", time.perf_counter())
        return decode(*args, **kwargs)

    pipe.vae.decode = marked_decode
    start = time.perf_counter()
    frames = pipe(
        prompt=PROMPT,
        negative_prompt="anything",
        height=settings.height,
        width=settings.width,
        num_frames=settings.num_frames,
        num_inference_steps=settings.steps,
        guidance_scale=settings.guidance_scale,
        max_sequence_length=settings.text_length,
        generator=torch.Generator().manual_seed(0),
        **({"progress": False} if arm == "visual_gen" else {}),
    ).frames[0]
    whole = time.perf_counter() - start
    hook.remove()
    pipe.vae.decode = decode
    return marks["decode"] - marks["text"], whole, torch.as_tensor(frames)


def peak_memory_mib(arm: str, argv: list[str]) -> float:
    child = subprocess.run(
        [sys.executable, __file__, *argv, "--peak-of", arm], capture_output=True, text=True, check=True
    )
    return float(child.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--height", type=int, default=96)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--num-frames", type=int, default=33)
    parser.add_argument("--guidance-scale", type=float, default=4.0)
    parser.add_argument("--text-length", type=int, default=64)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--peak-of", choices=ARMS, help=argparse.SUPPRESS)
    settings = parser.parse_args()
    dtype = getattr(torch, settings.dtype)

    if settings.peak_of:
        run(settings.peak_of, load(settings.peak_of, dtype), settings)
        print(peak_rss_bytes() / 2**20)
        return

    argv = [word for word in sys.argv[1:] if not word.startswith("--output") and word != str(settings.output)]
    peaks = {arm: peak_memory_mib(arm, argv) for arm in ARMS}
    pipes = {arm: load(arm, dtype) for arm in ARMS}
    frames = {arm: run(arm, pipe, settings)[2] for arm, pipe in pipes.items()}  # warm-up, and the results' difference
    times: dict[str, list[tuple[float, float]]] = {arm: [] for arm in ARMS}
    for i in range(settings.runs):
        for arm in ARMS if i % 2 == 0 else reversed(ARMS):
            times[arm].append(run(arm, pipes[arm], settings)[:2])
    result = {
        "command": " ".join(["python", "benchmarks/demo_vs_diffusers.py", *argv]),
        "settings": {k: v for k, v in vars(settings).items() if k not in ("output", "peak_of")},
        "versions": versions(),
        "max_frame_difference": (frames["visual_gen"].float() - frames["diffusers"].float()).abs().max().item(),
    }
    for arm in ARMS:
        denoise, whole = (statistics.median(column) for column in zip(*times[arm], strict=True))
        result[arm] = {
            "denoise_s": round(denoise, 3),
            "whole_s": round(whole, 3),
            "peak_memory_mib": round(peaks[arm], 1),
            "runs": [[round(x, 3) for x in pair] for pair in times[arm]],
        }
    result["ratio"] = {
        key: round(result["visual_gen"][key] / result["diffusers"][key], 3)
        for key in ("denoise_s", "whole_s", "peak_memory_mib")
    }
    print(json.dumps(result, indent=2))
    if settings.output:
        settings.output.write_text(json.dumps(result, indent=2) + "\n")


def versions() -> dict[str, str | None]:
    return {
        "python": platform.python_version(),
        **installed_versions(["torch", "diffusers", "transformers"]),
        "cpu": cpu_name(),
        "threads": str(torch.get_num_threads()),
    }


if __name__ == "__main__":
    main()
