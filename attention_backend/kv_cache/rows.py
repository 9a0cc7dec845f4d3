"""Rows of K and V of all layers: indices of them made on the device from a few host ints, copies, zeros.

A segment is (first row, number of rows), on the host.
"""

from __future__ import annotations

import bisect
import contextlib
import gc
import importlib.util
import itertools
import math
from collections.abc import Sequence

import torch

from attention_backend.kv_cache.errors import KVCacheError
from attention_backend.kv_cache.free_runs import runs

Segment = tuple[int, int]


class TokenRows:
    """Which rows the tokens have that lie in blocks of block_size rows, one block after another."""

    def __init__(self, blocks: Sequence[int], block_size: int) -> None:
        self._runs: list[Segment] = []
        self._first_tokens: list[int] = []
        tokens = 0
        for block, count in runs(blocks):
            self._runs.append((block * block_size, count * block_size))
            self._first_tokens.append(tokens)
            tokens += count * block_size

    def segments(self, start: int, length: int) -> list[Segment]:
        """Of tokens start to start + length - 1; what lies in neighbouring blocks is one segment."""
        out: list[Segment] = []
        i = bisect.bisect(self._first_tokens, start) - 1
        while length > 0:
            row, count = self._runs[i]
            offset = start - self._first_tokens[i]
            part = min(length, count - offset)
            out.append((row + offset, part))
            start, length, i = start + part, length - part, i + 1
        return out


def row_index(segments: Sequence[Segment], device: torch.device) -> torch.Tensor:
    """int64 [total]: the rows of the segments one after another, from one small copy that nothing waits for."""
    ends = list(itertools.accumulate(length for _, length in segments))
    shifts = [start - (end - length) for (start, length), end in zip(segments, ends, strict=True)]
    # Outlives the inference_mode that may be on now, as it is copied into the buffers of graphs.
    with torch.inference_mode(False):
        host = torch.tensor([ends, shifts], dtype=torch.int64, pin_memory=device.type == "cuda")
        ends_there, shifts_there = host.to(device, non_blocking=True)
        places = torch.arange(ends[-1], device=device)
        return places + shifts_there[torch.searchsorted(ends_there, places, right=True)]


def copy_rows(
    k: torch.Tensor, v: torch.Tensor, index: torch.Tensor, source_k: torch.Tensor, source_v: torch.Tensor
) -> None:
    """k[:, index] = source_k, and v likewise.

    k, v [B, rows, H, D], contiguous; sources [B, n, H, D] of any strides. index: int64 [n], no row twice.
    """
    if not k.is_cuda:
        for x, source in ((k, source_k), (v, source_v)):
            x.index_copy_(1, index, source)
        return
    from attention_backend.kv_cache.copy_rows_triton import write_rows

    sources = [x if x.stride()[2:] == (x.shape[3], 1) else x.contiguous() for x in (source_k, source_v)]
    with torch.cuda.device_of(k):  # triton launches on the current device, whatever the tensors are on
        write_rows(k, v, index, *sources)


class LayerRows:
    """K and V of each layer, two tensors apart, zeros at first, seen as [rows, Hkv, D] by what is done here."""

    def __init__(self, num_layers: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        if torch.device(device).type == "cuda" and importlib.util.find_spec("triton") is None:
            raise KVCacheError("a KV cache on a GPU needs Triton, which is not here: install torch's CUDA build")
        self.layers = _zeros(num_layers, shape, dtype, device)
        self._flat = [x.view(-1, *shape[-2:]) for layer in self.layers for x in layer]
        self.num_rows = len(self._flat[0])
        self.device = self._flat[0].device
        self.nbytes = sum(x.nbytes for x in self._flat)
        self._addresses: tuple[int, torch.Tensor] | None = None
        if self.device.type == "cuda" and self.num_rows:
            self.copy([(0, 1)], self, [(0, 1)])  # compiles its kernel, which no stream is to wait for

    def zero(self, segments: Sequence[Segment]) -> None:
        if segments:
            index = row_index(segments, self.device)
            for x in self._flat:
                x.index_fill_(0, index, 0)

    def copy(self, segments: Sequence[Segment], source: LayerRows, source_segments: Sequence[Segment]) -> None:
        """Rows of `source` to rows here, as many; both may be the same tensors, if no row is in both but
        at the same place."""
        if not segments:
            return
        found, own = ((len(x.layers), x._flat[0][0].nbytes, x._flat[0].dtype) for x in (source, self))
        if found != own:
            raise ValueError(f"rows of layers, bytes and dtype {found} are copied to rows of {own}; they must be alike")
        index, source_index = row_index([*segments, *source_segments], self.device).chunk(2)
        if self.device.type != "cuda":
            for x, other in zip(self._flat, source._flat, strict=True):
                x.index_copy_(0, index, other.index_select(0, source_index))
            return
        from attention_backend.kv_cache.copy_rows_triton import copy_rows_of_layers

        with torch.cuda.device_of(index):  # one launch for all layers: before a chunk, the host is what takes the time
            copy_rows_of_layers(self._table(), source._table(), index, source_index, self._flat[0][0].nbytes)

    def _table(self) -> torch.Tensor:
        """int64 [2 · layers]: addresses of the tensors, which do not move. A copy of this object makes its own."""
        first = self._flat[0].data_ptr()
        if self._addresses is None or self._addresses[0] != first:
            with torch.inference_mode(False):
                table = torch.tensor([x.data_ptr() for x in self._flat], device=self.device)
            self._addresses = first, table
        return self._addresses[1]

    def read(self, segments: Sequence[Segment]) -> torch.Tensor:
        """[2 · layers, total, Hkv, D], K before V of each layer."""
        if not segments:
            return torch.stack([x[:0] for x in self._flat])
        index = row_index(segments, self.device)
        return torch.stack([x.index_select(0, index) for x in self._flat])

    def write(self, segments: Sequence[Segment], values: torch.Tensor) -> None:
        """What read gave, on this device."""
        if segments:
            index = row_index(segments, self.device)
            for x, value in zip(self._flat, values, strict=True):
                x.index_copy_(0, index, value)


def _zeros(
    num_layers: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> list[tuple[torch.Tensor, ...]]:
    """K and V of each layer; KVCacheError if the device has no room for them."""

    def made() -> list[tuple[torch.Tensor, ...]]:
        # Ordinary tensors whatever mode is on, so that they can be written in any.
        with torch.inference_mode(False):
            return [tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in "kv") for _ in range(num_layers)]

    with contextlib.suppress(torch.OutOfMemoryError):
        return made()
    # A cache with open sessions refers to itself, so one that nobody has any more is there until Python looks for such.
    gc.collect()
    try:
        return made()
    except torch.OutOfMemoryError as error:
        gib = 2 * num_layers * math.prod(shape) * dtype.itemsize / 2**30
        raise KVCacheError(
            f"K and V of {num_layers} layers of shape {tuple(shape)} in {dtype} take {gib:.2f} GiB, for which {device} "
            "has no room: make the cache for fewer or smaller sessions (`visual-gen plan` says how many fit), or free "
            "what else is there"
        ) from error
