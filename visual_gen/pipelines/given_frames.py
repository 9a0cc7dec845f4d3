"""Clean latent frames that a stream continues from: what is refused of them, and in which chunks they are committed."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from visual_gen.config import CausalConfig


def check_given(name: str, latents: torch.Tensor | None, shape: tuple[int, int, int]) -> torch.Tensor | None:
    """latents [C, F, H, W] of shape (C, H, W). ValueError on others and on values that are not finite."""
    if latents is None:
        return None
    channels, height, width = shape
    if latents.ndim != 4 or (latents.shape[0], *latents.shape[2:]) != shape or latents.shape[1] < 1:
        raise ValueError(
            f"{name} has shape {tuple(latents.shape)}; expected [{channels}, F, {height}, {width}] with F of at least 1"
        )
    if not torch.isfinite(latents).all():
        raise ValueError(f"{name} hold NaN or infinity; give finite ones")
    return latents


def given_chunks(settings: CausalConfig, total: int) -> Iterator[tuple[int, int]]:
    """(first frame, frames) of chunks in which each frame can see those up to itself."""
    room = settings.sink_frames + settings.recent_frames
    start = 0
    while start < total:
        # Where a frame overwrites the oldest one, a frame before it in the same chunk would miss that one.
        frames = min(total - start, settings.max_chunk_frames, max(room - start, 1))
        yield start, frames
        start += frames
