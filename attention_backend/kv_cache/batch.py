"""What one forward needs of a cache: `KVBatch` for the forward, `LayerKV` for each attention site in it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attention_backend.kv_cache.errors import KVCacheError
from attention_backend.metadata import AttentionMetadata


@dataclass(frozen=True, eq=False)
class LayerKV:
    """What one attention site needs in one forward: where this chunk's K/V go, and what is visible."""

    # Written and read: pool [blocks, block_size, Hkv, D], rows [rows, Hkv, D], or [B, capacity, Hkv, D]; contiguous.
    # Allocated apart: of two views of one storage that a call writes, inductor copies one, reading past its end.
    k: torch.Tensor
    v: torch.Tensor
    # int64 [total_q], rows of k viewed as [rows, Hkv, D]; with PaddedKV int64 [q], an index of dimension 1. A slice of
    # dimension 1 is the eager way of the contiguous cache: no graph serves two of them.
    slots: torch.Tensor | slice
    metadata: AttentionMetadata  # the same object in all layers

    def __post_init__(self) -> None:
        if torch.compiler.is_compiling():  # no address can be traced; what it is made of was checked outside
            return
        if self.k.untyped_storage().data_ptr() == self.v.untyped_storage().data_ptr():
            raise KVCacheError(
                f"k and v share one storage, at offsets {self.k.storage_offset()} and {self.v.storage_offset()} of it: "
                "allocate each by itself"
            )


class KVBatch(ABC):
    """The rows of one forward, made by a cache's `batch`. A row is a branch of a session with its chunk.

    Tokens of a row: its chunk's frames, frame_tokens each, then its extra tokens, which only this forward sees.
    """

    frames: tuple[int, ...]  # frames of each row's chunk
    frame_starts: tuple[int, ...]  # absolute index of each row's first frame
    frame_runs: tuple[tuple[int, int], ...]  # (absolute index, count) of the runs of frames of all rows, in order
    frame_tokens: int
    extra_tokens: tuple[int, ...]  # of each row
    read: str  # "extent", "block_table", "staged", or "contiguous"

    @property
    def num_rows(self) -> int:
        return len(self.frames)

    @property
    def q_lens(self) -> tuple[int, ...]:
        """Tokens of each row; total_q is their sum."""
        return tuple(n * self.frame_tokens + a for n, a in zip(self.frames, self.extra_tokens, strict=True))

    @abstractmethod
    def layer(self, index: int) -> LayerKV:
        """The inputs of layer `index`. KVCacheError if there is no such layer, or the chunk is over."""

    @abstractmethod
    def signature(self) -> tuple:
        """What a graph is keyed on: shapes, bounds and the read path, never lengths or places."""

    def failed_rows(self, output: torch.Tensor | Sequence[torch.Tensor]) -> list[int]:
        """Rows whose output is not finite throughout: abort their chunks. Waits for the device, once.

        output: the forward's result, [num_rows, ...], or [total_q, ...], or one tensor for each row.
        """
        if isinstance(output, torch.Tensor) and len(output) not in (self.num_rows, sum(self.q_lens)):
            raise KVCacheError(
                f"output has shape {tuple(output.shape)}; its first dimension must be {self.num_rows} rows or "
                f"{sum(self.q_lens)} tokens"
            )
        if isinstance(output, torch.Tensor) and len(output) != self.num_rows:
            output = output.split(self.q_lens)
        if len(output) != self.num_rows:
            raise KVCacheError(f"output has {len(output)} tensors; the batch has {self.num_rows} rows")
        finite = torch.stack([torch.isfinite(row).all() for row in output]).tolist()
        return [row for row, good in enumerate(finite) if not good]
