"""What a stream of an engine is between two forwards, in pieces that are replaced and never changed.

Shape letters: C channels, F latent frames, H, W latent height and width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attention_backend.kv_cache import Chunk
from visual_gen.config import CausalConfig

if TYPE_CHECKING:
    from visual_gen.pipelines.stream import Stream


@dataclass(frozen=True)
class StreamEvent:
    """kind: "denoised" (a step of chunk chunk_index was launched), "committed" (the chunk is finished, checked and can
    be taken), "failed" (it was dropped for `error`, and the stream is as before it)."""

    stream: Stream
    kind: str
    chunk_index: int
    error: Exception | None = None


@dataclass(frozen=True, eq=False)
class Committed:
    """A stream between two chunks. generator_state: what the next chunk's noise is drawn from. clean: (first frame,
    latents [C, F, H, W]) of chunks whose frames a window or a rollback may need again."""

    chunk_index: int
    frames: int
    generator_state: torch.Tensor
    clean: tuple[tuple[int, torch.Tensor], ...]

    def latents(self, runs: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Clean latents of runs (first frame, count), one after another."""
        parts = [
            x[:, max(first - start, 0) : first + count - start]
            for first, count in runs
            for start, x in self.clean
            if start < first + count and start + x.shape[1] > first
        ]
        return torch.cat(parts, dim=1)


@dataclass(frozen=True, eq=False)
class Making:
    """The open chunk. timesteps: on the device, one for each step and 0 for the commit; sigmas: of the steps."""

    chunk: Chunk
    latents: torch.Tensor
    timesteps: torch.Tensor
    sigmas: tuple[float, ...]
    guidance_scale: float
    step: int = 0

    @property
    def commits(self) -> bool:
        """Whether the next forward is the one that commits."""
        return self.step == len(self.sigmas)


@dataclass(frozen=True, eq=False)
class Unread:
    """A committed chunk whose check is on its way from the device: one bool, there once `done` has happened."""

    after: Committed
    latents: torch.Tensor
    finite: torch.Tensor
    done: torch.cuda.Event | None
    forward: int

    def failed(self) -> bool:
        if self.done is not None:
            self.done.synchronize()
        return not bool(self.finite)


@dataclass(frozen=True)
class Switch:
    """A prompt that the next chunk is to have, its K/V ready in a text slot."""

    slot: int
    prompt: str | None
    recache: str


def stream_settings(settings: CausalConfig, **changes) -> CausalConfig:
    """The settings with those changes that are not None, checked as a whole. Raises ValueError."""
    given = {name: value for name, value in changes.items() if value is not None}
    return CausalConfig.model_validate(settings.model_dump() | given)


def check_guidance(scale: float) -> float:
    if not isinstance(scale, int | float) or isinstance(scale, bool) or not 0 <= scale < float("inf"):
        raise ValueError(f"guidance_scale is {scale!r}; it must be a finite number of at least 0")
    return float(scale)
