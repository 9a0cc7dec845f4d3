"""Scores a wan-shapes checkpoint: does it show what the prompt says?

    python -m examples.wan_shapes.evaluate                       # everything, on a CPU
    python -m examples.wan_shapes.evaluate --quick               # 8 prompts
    python -m examples.wan_shapes.evaluate --only vae seen       # some of the parts
    python -m examples.wan_shapes.evaluate FOLDER                # another checkpoint than the packaged one

Clips are made in 10 steps and read back by `scores.py`, which reads every drawn clip right. Prints each score beside
what it must reach, writes all of them, and contact sheets, to `--out`, and exits with 1 if one falls short.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.progress import track
from torch import Tensor

from visual_gen import WanPipeline
from visual_gen.checkpoint import resolve_folder

from .captions import NO_CAPTION
from .combinations import Prompt, load_prompts
from .measure import MEASURES
from .scorecard import Scorecard, run_measures
from .scores import Reading, read_clip

STEPS, GUIDANCE_SCALE, TEXT_LENGTH = 10, 4.0, 64
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(kw_only=True)
class Evaluation(Scorecard):
    """A pipeline with the checkpoint in `folder`, and what has been found out about it."""

    folder: Path
    pipeline: Callable | None
    batch_size: int = 8
    max_prompts: int | None = None
    made: dict[tuple, Tensor] = field(default_factory=dict)  # fp16: there are hundreds

    def prompts(self, name: str) -> list[Prompt]:
        """A committed list, or its first `max_prompts`."""
        return load_prompts(name)[: self.max_prompts]

    def generate(
        self, prompts: Sequence[Prompt], *, num_frames: int = 33, height: int = 96, width: int = 96,
        guidance_scale: float = GUIDANCE_SCALE, negative_prompts: Sequence[str] | None = None,
        text_length: int = TEXT_LENGTH, label: str = "", again: bool = False,
    ) -> list[Tensor]:
        """One clip [frames, height, width, 3] in 0..1 per prompt, from its own seed whatever the batch.

        A clip that was asked for before is taken from then, unless it is to be made `again`.
        """
        # Without a second branch there is no negative prompt.
        negatives = (negative_prompts or [NO_CAPTION] * len(prompts)) if guidance_scale > 1 else [None] * len(prompts)
        how = (num_frames, height, width, guidance_scale, text_length)
        wanted = [(row.prompt, row.seed, negative, *how) for row, negative in zip(prompts, negatives, strict=True)]
        missing = list(dict.fromkeys(key for key in wanted if again or key not in self.made))
        starts = range(0, len(missing), self.batch_size)
        for start in track(starts, description=label or "clips", disable=len(missing) <= 1, transient=True):
            batch = missing[start : start + self.batch_size]
            frames = self.pipeline(
                prompt=[prompt for prompt, *_ in batch],
                negative_prompt=[key[2] for key in batch] if guidance_scale > 1 else None,
                height=height, width=width, num_frames=num_frames, num_inference_steps=STEPS,
                guidance_scale=guidance_scale, max_sequence_length=text_length, output_type="np", progress=False,
                generator=[torch.Generator("cpu").manual_seed(seed) for _, seed, *_ in batch],
            ).frames
            self.made.update(zip(batch, (torch.as_tensor(clip).half() for clip in frames), strict=True))
        return [self.made[key].float() for key in wanted]

    def read(self, prompts: Sequence[Prompt], **how) -> tuple[list[Reading], list[Tensor]]:
        """Clips for the prompts and what they show; wrong ones are kept to be looked at."""
        clips = self.generate(prompts, **how)
        readings = [read_clip(clip) for clip in clips]
        self.note_mistakes(readings, prompts, clips)
        return readings, clips


def evaluate(evaluation: Evaluation, names: Sequence[str], out: Path | None) -> int:
    """Runs the measures of these names and writes scores.json and the sheets to `out`; 0 if all scores are reached."""
    how = {"steps": STEPS, "guidance_scale": GUIDANCE_SCALE, "text_length": TEXT_LENGTH}
    return run_measures(evaluation, MEASURES, names, how, out)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default="wan-shapes", help="diffusers folder; default the packaged one")
    parser.add_argument("--quick", action="store_true", help="8 prompts, main scores only")
    parser.add_argument("--only", nargs="+", choices=MEASURES, help="run only these parts")
    parser.add_argument("--out", type=Path, help="folder for scores.json and contact sheets")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch-size", type=int, default=8)
    options = parser.parse_args(arguments)
    pipeline = WanPipeline.from_pretrained(
        options.folder, dtype=DTYPES[options.dtype], device=options.device, progress=False
    )
    evaluation = Evaluation(
        folder=resolve_folder(options.folder), pipeline=pipeline, batch_size=options.batch_size,
        max_prompts=8 if options.quick else None,
    )
    every = [name for name in MEASURES if name != "quick"]
    return evaluate(evaluation, options.only or (["quick"] if options.quick else every), options.out)


if __name__ == "__main__":
    sys.exit(main())
