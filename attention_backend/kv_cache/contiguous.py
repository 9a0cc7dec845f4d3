"""One buffer of K and one of V for each layer, for batches whose rows are all at the same frame.

Writes go through an index made once for each chunk, reads take the whole buffer with the used length on the device, so
that one compiled graph and one CUDA graph serve all chunks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attention_backend.kv_cache.batch import KVBatch, LayerKV
from attention_backend.kv_cache.errors import KVCacheError
from attention_backend.kv_cache.geometry import check_count
from attention_backend.kv_cache.rows import LayerRows
from attention_backend.metadata import PaddedKV
from attention_backend.metadata_state import AttentionMetadataState

PAGED = "use PagedKVCache, whose rows have histories of their own"


class ContiguousKVCache:
    """K and V [batch, capacity_frames * frame_tokens, num_kv_heads, head_dim] for each layer; everything stays visible.

    frame_tokens: tokens of a latent frame. attention_metadata_state: the model's; without one the cache has its own.
    `frames` is how many are committed. KVCacheError on sizes below 1.
    """

    def __init__(
        self,
        num_layers: int,
        batch: int,
        capacity_frames: int,
        frame_tokens: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        attention_metadata_state: AttentionMetadataState | None = None,
    ) -> None:
        sizes = {
            "num_layers": num_layers, "batch": batch, "capacity_frames": capacity_frames,
            "frame_tokens": frame_tokens, "num_kv_heads": num_kv_heads, "head_dim": head_dim,
        }  # fmt: skip
        for name, value in sizes.items():
            check_count(name, value)
        self.num_rows, self.capacity_frames, self.frame_tokens = batch, capacity_frames, frame_tokens
        self.frames = 0
        self.attention_metadata_state = attention_metadata_state or AttentionMetadataState()
        shape = (batch, capacity_frames * frame_tokens, num_kv_heads, head_dim)
        # Zeros: kernels multiply rows past the used length by zero, which NaN would survive.
        self._layers = LayerRows(num_layers, shape, dtype, torch.device(device)).layers
        self._open: ContiguousChunk | None = None

    def begin(self, frames: int) -> ContiguousChunk:
        """The next `frames` frames of all rows. KVCacheError, before anything is written, if they do not fit."""
        if isinstance(frames, Sequence):
            raise KVCacheError(
                f"frames is {frames!r}; the rows of this cache are on one timeline, so give one number, or {PAGED}"
            )
        check_count("frames", frames)
        if self._open is not None:
            raise KVCacheError(f"a chunk of {self._open.frames} frames is open; commit() or abort() it first")
        if self.frames + frames > self.capacity_frames:
            raise KVCacheError(
                f"{self.frames} frames are committed and {frames} more exceed capacity_frames {self.capacity_frames}; "
                "make the cache larger, or use PagedKVCache with recent_frames, which lets old frames go"
            )
        self._open = ContiguousChunk(self, self.frames, frames)
        return self._open

    def batch(self, chunk: ContiguousChunk | Sequence[ContiguousChunk], *, indexed: bool = True) -> KVBatch:
        """The rows of a forward over the open chunk; the same object however often it is asked for.

        indexed=False writes by slices instead of the index: the eager way, which no graph can reuse.
        """
        chunks = [chunk] if isinstance(chunk, ContiguousChunk) else list(chunk)
        if len(chunks) != 1:
            raise KVCacheError(f"{len(chunks)} chunks in one batch; this cache has one timeline for all rows: {PAGED}")
        if chunks[0] is not self._open:
            raise KVCacheError("the chunk is over, or is another cache's; begin() a new one here")
        return self._open.batch(indexed)

    def _end(self, chunk: ContiguousChunk, *, commit: bool) -> None:
        if chunk is not self._open:
            raise KVCacheError(f"the chunk of frames {chunk.frame_start} to {chunk.frame_end - 1} is already over")
        if commit:
            if not chunk.touched:
                raise KVCacheError("commit() of a chunk with no forward; run one, or abort()")
            self.frames += chunk.frames
        elif chunk.touched:
            rows = chunk.rows
            for k, v in self._layers:  # what failed may have left NaN
                k[:, rows].zero_()
                v[:, rows].zero_()
        self._open = None


class ContiguousChunk:
    """Frames being computed: any number of forwards, then commit() or abort().

    As a context manager it aborts on an exception, and on leaving uncommitted.
    """

    def __init__(self, cache: ContiguousKVCache, frame_start: int, frames: int) -> None:
        self.frame_start, self.frames = frame_start, frames
        self._cache = cache
        self._batches: dict[bool, _ContiguousBatch] = {}

    @property
    def frame_end(self) -> int:
        return self.frame_start + self.frames

    @property
    def rows(self) -> slice:
        tokens = self._cache.frame_tokens
        return slice(self.frame_start * tokens, self.frame_end * tokens)

    @property
    def over(self) -> bool:
        return self._cache._open is not self

    @property
    def touched(self) -> bool:
        """Whether a forward may have written."""
        return bool(self._batches)

    def batch(self, indexed: bool) -> _ContiguousBatch:
        if indexed not in self._batches:
            self._batches[indexed] = _ContiguousBatch(self._cache, self, indexed)
        return self._batches[indexed]

    def commit(self) -> None:
        """Keeps the K/V that the last forward wrote. KVCacheError if the chunk is over, or had no forward."""
        self._cache._end(self, commit=True)

    def abort(self) -> None:
        """Leaves the cache as it was before the chunk."""
        self._cache._end(self, commit=False)

    def __enter__(self) -> ContiguousChunk:
        return self

    def __exit__(self, *exception) -> None:
        if not self.over:
            self.abort()


class _ContiguousBatch(KVBatch):
    read = "contiguous"

    def __init__(self, cache: ContiguousKVCache, chunk: ContiguousChunk, indexed: bool) -> None:
        self._cache, self._chunk = cache, chunk
        self.frames = (chunk.frames,) * cache.num_rows
        self.frame_starts = (chunk.frame_start,) * cache.num_rows
        self.frame_runs = ((chunk.frame_start, chunk.frames),) * cache.num_rows
        self.frame_tokens = cache.frame_tokens
        self.extra_tokens = (0,) * cache.num_rows
        k, _ = cache._layers[0]
        self._slots = chunk.rows
        if indexed:
            with torch.inference_mode(False):
                self._slots = torch.arange(chunk.rows.start, chunk.rows.stop, device=k.device)
        lens = [chunk.rows.stop] * cache.num_rows
        self._metadata: PaddedKV = cache.attention_metadata_state.padded_kv("self", lens, k.shape[1], k.device)

    def layer(self, index: int) -> LayerKV:
        if self._chunk.over:
            raise KVCacheError("the chunk is over; begin() a new one")
        layers = self._cache._layers
        if not 0 <= index < len(layers):
            raise KVCacheError(f"layer {index} of a cache of {len(layers)} layers")
        return LayerKV(*layers[index], self._slots, self._metadata)

    def signature(self) -> tuple:
        return ("contiguous", self._chunk.frames * self.frame_tokens, *self._metadata.signature())
