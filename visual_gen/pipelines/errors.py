"""What a run raises when its numbers, not its inputs, are wrong."""

from __future__ import annotations

import torch


class GenerationError(RuntimeError):
    """A run that gave no usable video. `step` counts denoising steps from 1; `latents`, if there are any to keep,
    are what was about to be decoded or was."""

    def __init__(self, message: str, *, step: int, latents: torch.Tensor | None = None) -> None:
        super().__init__(message)
        self.step = step
        self.latents = latents
