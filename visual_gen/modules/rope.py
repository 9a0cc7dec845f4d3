"""Rotary position embedding over (frame, height, width), as Wan defines it."""

from __future__ import annotations

import torch


class RotaryTable:
    """Angles of a video's tokens, e^(i·angle), built once for each grid and kept for the layers and steps.

    head_dim is split into a temporal part and two spatial parts of 2·(head_dim // 6) each; every part turns pairs of
    neighbouring channels by position · theta^(-2i / part). Source: Wan's rope_params, diffusers' WanRotaryPosEmbed.
    """

    def __init__(self, head_dim: int, max_len: int, theta: float = 10000.0) -> None:
        if head_dim % 2:
            raise ValueError(f"head_dim is {head_dim}; rotary embedding turns pairs of channels, so it must be even")
        spatial = 2 * (head_dim // 6)
        self.max_len = max_len
        self._angles = [self._axis(part, max_len, theta) for part in (head_dim - 2 * spatial, spatial, spatial)]
        self._grids: dict[tuple, torch.Tensor] = {}

    @staticmethod
    def _axis(dim: int, max_len: int, theta: float) -> torch.Tensor:
        inverse = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim)
        return torch.outer(torch.arange(max_len, dtype=torch.float64, device="cpu"), inverse)

    def grid(self, frames: int, height: int, width: int, device: torch.device) -> torch.Tensor:
        """complex64 [frames·height·width, 1, head_dim / 2] for a grid of tokens. Raises past the table's end."""
        for name, n in (("frames", frames), ("height", height), ("width", width)):
            if n > self.max_len:
                raise ValueError(f"{name} is {n} tokens; the rotary table ends at rope_max_seq_len {self.max_len}")
        key = (frames, height, width, str(device))
        if key not in self._grids:
            if len(self._grids) >= 8:
                self._grids.pop(next(iter(self._grids)))
            self._grids[key] = self._build(frames, height, width, device)
        return self._grids[key]

    def _build(self, frames: int, height: int, width: int, device: torch.device) -> torch.Tensor:
        shape = (frames, height, width, -1)
        axes = [
            self._angles[0][:frames].view(frames, 1, 1, -1).expand(shape),
            self._angles[1][:height].view(1, height, 1, -1).expand(shape),
            self._angles[2][:width].view(1, 1, width, -1).expand(shape),
        ]
        angles = torch.cat(axes, dim=-1).reshape(frames * height * width, 1, -1)
        # Rounded to fp32 only here: angles reach thousands of radians, where fp32 would lose the phase.
        table = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)
        # Not an inference tensor: it outlives the mode that may be on now, and autograd refuses those.
        with torch.inference_mode(False):
            return table.to(device).clone()


def apply_rotary(x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
    """Turns channel pairs of x, fp32 [B, S, ..., H, D], by rotary, complex64 [S, 1, D / 2]."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    rotary = rotary.view(rotary.shape[0], *(1,) * (x.ndim - 4), *rotary.shape[1:])
    return torch.view_as_real(pairs * rotary).flatten(-2)
