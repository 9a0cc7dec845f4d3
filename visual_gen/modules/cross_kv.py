"""Keys and values of a cross-attention site, and how rows of unequal length are put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attention_backend import ExtentKV, PackedKV, PackedPadKV

CROSS_KV_NEEDS = {
    "padded": frozenset(),
    "packed": frozenset({"varlen"}),
    "packed_pad_exact": frozenset({"varlen", "lse"}),
}


@dataclass(frozen=True, eq=False, repr=False)
class CrossKV:
    """Keys and values of one cross-attention site, ready for every step.

    k, v [B, L, H, D] (metadata None), packed [total, H, D] (PackedKV, PackedPadKV) or flat [rows, H, D] (ExtentKV);
    where pad rows are to be merged in, the one key and value of them all, k_pad, v_pad [H, D].
    """

    k: torch.Tensor
    v: torch.Tensor
    metadata: PackedKV | PackedPadKV | ExtentKV | None = None
    k_pad: torch.Tensor | None = None
    v_pad: torch.Tensor | None = None

    @property
    def formulation(self) -> str:
        """How pad rows are accounted for: "padded" (kept), "packed" (left out), "merge" or "repeated_key"."""
        if self.metadata is None:
            return "padded"
        return getattr(self.metadata, "formulation", "packed")

    def __repr__(self) -> str:
        tensors = [f"{name}={list(x.shape)}" for name in ("k", "v", "k_pad", "v_pad")
                   if (x := getattr(self, name)) is not None]  # fmt: skip
        metadata = None if self.metadata is None else type(self.metadata).__name__
        return f"CrossKV({', '.join(tensors)}, {self.k.dtype}, {self.k.device}, metadata={metadata})"

    def signature(self) -> tuple:
        """What a CUDA graph over these keys and values is keyed on; without the lengths."""
        metadata = None if self.metadata is None else self.metadata.signature()
        return (tuple(self.k.shape), str(self.k.dtype), metadata)


def pack_rows(x: torch.Tensor, lens: Sequence[int]) -> torch.Tensor:
    """The first lens[b] rows of each x[b], one after the other: [B, L, ...] → [sum(lens), ...]."""
    return torch.cat([x[b, :n] for b, n in enumerate(lens)])


def append_rows(
    rows: Sequence[torch.Tensor], side: int, pad: tuple[torch.Tensor, ...] | None, counts: Sequence[int]
) -> list[torch.Tensor]:
    """rows [n, H, D] of each sequence with counts[b] times pad[side] [H, D] behind them."""
    return [
        torch.cat([x, pad[side].expand(n, *pad[side].shape)]) if n else x for x, n in zip(rows, counts, strict=True)
    ]
