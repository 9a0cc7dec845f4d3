"""What a run raises when its numbers, not its inputs, are wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from visual_gen.pipelines.wan import WanPipelineOutput


class GenerationError(RuntimeError):
    """A run that gave no usable video, or not one for each prompt.

    `step` counts denoising steps from 1. If all steps were done: `latents` are what was decoded; `output` has all
    frames, good and bad, and its record's `bad_clips` says which clips are bad and why. Else both are None.
    """

    def __init__(self, message: str, *, step: int) -> None:
        super().__init__(message)
        self.step = step
        self.latents: torch.Tensor | None = None
        self.output: WanPipelineOutput | None = None


class EngineFull(ValueError):
    """There is no room for another stream; the message says what is short."""


def bad_clips_error(output: WanPipelineOutput, latents: torch.Tensor) -> GenerationError:
    bad, steps = output.record.bad_clips, len(output.record.timesteps)
    faults = "; ".join(f"prompt {row}: {fault}" for row, fault in bad.items())
    error = GenerationError(
        f"{len(bad)} of {latents.shape[0]} clip(s), decoded after step {steps}, are no usable video. {faults}",
        step=steps,
    )
    error.output, error.latents = output, latents.clone()  # out of inference mode, for any use
    return error
