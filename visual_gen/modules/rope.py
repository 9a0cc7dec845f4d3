"""Rotary position embedding over (frame, height, width), as Wan defines it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_ROTARY_FORM = (
    "it must be complex [tokens, 1, head_dim / 2], e^(i·angle), as RotaryTable and torch.polar give, or the parts "
    "[tokens, 1, head_dim / 2, 2] that torch.view_as_real gives of it; in front there may be a dimension for the rows"
)


class RotaryTable:
    """Angles of a video's tokens, e^(i·angle), built once for each grid and kept for the layers and steps.

    head_dim is split into a temporal part and two spatial parts of 2·(head_dim // 6) each; every part turns pairs of
    neighbouring channels by position · theta^(-2i / part). Source: Wan's rope_params, diffusers' WanRotaryPosEmbed.
    max_len: positions along each axis; `extend_frames` gives the temporal one more.
    """

    def __init__(self, head_dim: int, max_len: int, theta: float = 10000.0) -> None:
        if head_dim % 2:
            raise ValueError(f"head_dim is {head_dim}; rotary embedding turns pairs of channels, so it must be even")
        spatial = 2 * (head_dim // 6)
        self.max_len = self.max_frames = max_len
        self._theta, self._temporal = theta, head_dim - 2 * spatial
        self._angles = [self._axis(part, max_len, theta) for part in (self._temporal, spatial, spatial)]
        self._grids: dict[tuple, torch.Tensor] = {}
        self._frame_parts: dict[tuple, tuple[torch.Tensor, torch.Tensor]] = {}

    @staticmethod
    def _axis(dim: int, max_len: int, theta: float) -> torch.Tensor:
        inverse = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim)
        return torch.outer(torch.arange(max_len, dtype=torch.float64, device="cpu"), inverse)

    def extend_frames(self, count: int) -> None:
        """At least so many frames; nothing if there are. An angle depends on its own position alone, so those that
        there were stay as they are, bit for bit."""
        if count <= self.max_frames:
            return
        self._angles[0] = self._axis(self._temporal, count, self._theta)
        self.max_frames = count
        self._frame_parts.clear()

    def grid(self, frames: int, height: int, width: int, device: torch.device) -> torch.Tensor:
        """complex64 [frames·height·width, 1, head_dim / 2] for a grid of tokens. Raises past the table's end."""
        ends = (self.max_frames, self.max_len, self.max_len)
        for name, n, end in zip(("frames", "height", "width"), (frames, height, width), ends, strict=True):
            if n > end:
                raise ValueError(f"{name} is {n} tokens; the rotary table ends at rope_max_seq_len {end}")
        key = (frames, height, width, str(device))
        if key not in self._grids:
            self._keep(key, self._build(frames, height, width, device))
        return self._grids[key]

    def frames(self, runs: Sequence[tuple[int, int]], height: int, width: int, device: torch.device) -> torch.Tensor:
        """complex64 [total_frames, height·width, 1, head_dim / 2] for runs of (first frame, number of frames).

        The values are those of `grid` at the same frames. Composed on the device, with nothing to copy there, and kept
        for the next steps of the same frames. Raises ValueError past the table's end.
        """
        for first, count in runs:
            if first < 0 or first + count > self.max_frames:
                raise ValueError(
                    f"frames {first} to {first + count - 1} do not all lie in the rotary table of rope_max_seq_len "
                    f"{self.max_frames}: end the video before, start another, or extend the table "
                    "(causal.rope_max_seq_len)"
                )
        key = (tuple(runs), height, width, str(device))
        if key not in self._grids:
            temporal, spatial = self._parts(height, width, device)
            with torch.inference_mode(False):
                time = torch.cat([temporal[first : first + count] for first, count in runs])
                parts = [x.expand(len(time), len(spatial), 1, -1) for x in (time, spatial)]
                self._keep(key, torch.cat(parts, dim=-1))
        return self._grids[key]

    def _parts(self, height: int, width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """complex64 temporal part [max_frames, 1, 1, n] of all frames, spatial part [height·width, 1, m] of each."""
        key = (height, width, str(device))
        if key not in self._frame_parts:
            with torch.inference_mode(False):
                temporal = _turns(self._angles[0])[:, None, None].to(device).clone()
                spatial = self.grid(1, height, width, device)[..., temporal.shape[-1] :].clone()
            self._frame_parts[key] = temporal, spatial
        return self._frame_parts[key]

    def _keep(self, key: tuple, table: torch.Tensor) -> None:
        if len(self._grids) >= 8:
            self._grids.pop(next(iter(self._grids)))
        self._grids[key] = table

    def _build(self, frames: int, height: int, width: int, device: torch.device) -> torch.Tensor:
        shape = (frames, height, width, -1)
        axes = [
            self._angles[0][:frames].view(frames, 1, 1, -1).expand(shape),
            self._angles[1][:height].view(1, height, 1, -1).expand(shape),
            self._angles[2][:width].view(1, 1, width, -1).expand(shape),
        ]
        angles = torch.cat(axes, dim=-1).reshape(frames * height * width, 1, -1)
        # Not an inference tensor: it outlives the mode that may be on now, and autograd refuses those.
        with torch.inference_mode(False):
            return _turns(angles).to(device).clone()


def check_rotary(rotary: torch.Tensor, batch: int, tokens: int, head_dim: int) -> None:
    """Raises ValueError unless rotary is complex [S, 1, D / 2] or [1 or B, S, 1, D / 2] for S tokens, or the real and
    imaginary parts of such a tensor: other real numbers would scale, and a kernel takes rows by their number.
    Not asked in what torch.compile traces."""
    if not isinstance(rotary, torch.Tensor):
        raise ValueError(f"rotary is a {type(rotary).__name__}; {_ROTARY_FORM}")
    tail = (head_dim // 2,) if rotary.is_complex() else (head_dim // 2, 2)
    positions = ((tokens, 1), (1, tokens, 1), (batch, tokens, 1))
    numbers = rotary.is_complex() or rotary.is_floating_point()
    if not numbers or head_dim % 2 or tuple(rotary.shape) not in [(*some, *tail) for some in positions]:
        raise ValueError(
            f"rotary is {rotary.dtype} of shape {tuple(rotary.shape)} for {batch} rows of {tokens} tokens and head_dim "
            f"{head_dim}; {_ROTARY_FORM}"
        )


def _turns(angles: torch.Tensor) -> torch.Tensor:
    """e^(i·angle) of fp64 angles, complex64."""
    # Rounded to fp32 only here: angles reach thousands of radians, where fp32 would lose the phase.
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)


def apply_rotary(x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
    """Turns channel pairs of x, fp32 [B, S, ..., H, D], by rotary, complex64 [S, 1, D / 2] or [B, S, 1, D / 2], or its
    real and imaginary parts, fp32 [..., D / 2, 2]."""
    pairs = x.unflatten(-1, (-1, 2))
    between = (1,) * (x.ndim - 4)
    if rotary.is_complex() and not torch.compiler.is_compiling():
        rotary = rotary.view(*rotary.shape[:-2], *between, *rotary.shape[-2:])
        return torch.view_as_real(torch.view_as_complex(pairs) * rotary).flatten(-2)
    # Inductor makes no code for complex numbers; written out, this is fused with what stands round it.
    parts = torch.view_as_real(rotary) if rotary.is_complex() else rotary
    cos, sin = (part.view(*part.shape[:-2], *between, *part.shape[-2:]) for part in parts.unbind(-1))
    even, odd = pairs.unbind(-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)
