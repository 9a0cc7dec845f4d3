"""What a forward over a paged cache needs: the places of its tokens and the metadata of its read, built once."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attention_backend.graph_buffers import GraphBuffers
from attention_backend.kv_cache.batch import KVBatch, LayerKV
from attention_backend.kv_cache.chunk import Chunk
from attention_backend.kv_cache.errors import KVCacheError
from attention_backend.kv_cache.pool import BranchStorage
from attention_backend.kv_cache.rows import LayerRows, Segment, row_index
from attention_backend.metadata import AttentionMetadata
from attention_backend.metadata_state import AttentionMetadataState

if TYPE_CHECKING:
    from attention_backend.kv_cache.pool import BlockPool
    from attention_backend.kv_cache.staging import Staging


@dataclass(frozen=True, eq=False)
class Row:
    """A branch of a session in one forward."""

    chunk: Chunk
    index: int  # of the branch
    branch: BranchStorage
    extra_tokens: int

    @property
    def staged(self) -> bool:
        """Whether its last forward wrote into the staging buffer, and not into the pool."""
        return self.index in self.chunk._staged

    @property
    def visible_tokens(self) -> int:
        """The chunk's frames counted in, and its extra tokens."""
        geometry = self.chunk.geometry
        return geometry.visible_tokens(self.chunk.frame_start + self.chunk.frames) + self.extra_tokens

    @functools.cached_property
    def segments(self) -> list[Segment]:
        """Token positions of the chunk and the extra tokens behind all that is visible."""
        geometry = self.chunk.geometry
        out = geometry.segments(self.chunk.frame_start, self.chunk.frames)
        if self.extra_tokens:
            out.append((self.visible_tokens - self.extra_tokens, self.extra_tokens))
        return out

    def sequences(self, frame_causal: bool) -> list[tuple[int, int]]:
        """(queries, keys) of each sequence of the call."""
        tokens = self.chunk.geometry.frame_tokens
        if frame_causal:
            first = self.chunk.frame_start + 1
            visible = self.chunk.geometry.visible_tokens
            return [(tokens, visible(frames)) for frames in range(first, first + self.chunk.frames)]
        return [(self.chunk.frames * tokens + self.extra_tokens, self.visible_tokens)]


class _ReadyBatch(KVBatch):
    """Inputs of all layers, made before the forward."""

    def _set_up(self, rows: LayerRows, slots: torch.Tensor, metadata: AttentionMetadata) -> None:
        self._slots, self._metadata = slots, metadata
        self._layers = [LayerKV(k, v, slots, metadata) for k, v in rows.layers]
        self._rows = rows

    def layer(self, index: int) -> LayerKV:
        self._check_ready()
        if not 0 <= index < len(self._layers):
            raise KVCacheError(f"layer {index} of a cache of {len(self._layers)} layers")
        return self._layers[index]

    def signature(self) -> tuple:
        return ("paged_cache", self.read, self.frames, self.extra_tokens, *self._metadata.signature())

    def _check_ready(self) -> None:
        raise NotImplementedError


class PagedBatch(_ReadyBatch):
    """The rows of one forward over a paged cache; read_reason says why its read was taken.

    storage: the pool, or the staging buffer, that its forward writes and reads.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        read: str,
        read_reason: str,
        storage: BlockPool | Staging,
        slots: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> None:
        self.retired = False  # a chunk of it is over, or another batch took its place
        self._storage, self._branches = storage, tuple(row.branch for row in rows)
        self._moves, self._places = storage.moves, self._places_now()
        self.chunks = tuple(dict.fromkeys(row.chunk for row in rows))
        self.frames = tuple(row.chunk.frames for row in rows)
        self.frame_starts = tuple(row.chunk.frame_start for row in rows)
        self.frame_runs = tuple(run for row in rows for run in row.chunk.frame_runs)
        self.frame_tokens = rows[0].chunk.geometry.frame_tokens
        self.extra_tokens = tuple(row.extra_tokens for row in rows)
        self.read, self.read_reason = read, read_reason
        self._set_up(storage.rows, slots, metadata)

    @property
    def in_place(self) -> bool:
        """Whether all rows lie where they lay when this was made."""
        # Asked for in every layer: only after something moved are the rows looked at one by one.
        if self._moves != self._storage.moves:
            if self._places != self._places_now():
                return False
            self._moves = self._storage.moves
        return True

    def _places_now(self) -> list[int]:
        return [self._storage.place_of(branch) for branch in self._branches]

    def _check_ready(self) -> None:
        if not self.retired and self.in_place:
            return
        if any(chunk.over for chunk in self.chunks):
            raise KVCacheError("a chunk of this batch is over; begin() a new one and make a batch of it")
        raise KVCacheError(
            "this batch is out of date: a row of it lies elsewhere since another forward was prepared, or a commit() "
            "or abort() of a chunk failed midway; ask the cache's batch() before every forward"
        )

    def static(self) -> StaticBatch:
        """A batch with tensors of its own at fixed addresses, for a graph; copy_into() refreshes them."""
        self._check_ready()
        return StaticBatch(self)

    def copy_into(self, static: StaticBatch) -> None:
        """Puts this batch's places and lengths into a graph's, before every replay.

        KVCacheError if the graph was captured for other shapes, bounds or another read.
        """
        self._check_ready()
        if static.signature() != self.signature():
            raise KVCacheError(
                f"the graph is for {static.signature()} and the batch has {self.signature()}; capture another"
            )
        if static._rows is not self._rows:
            raise KVCacheError("the graph is for another cache's tensors; capture one for this cache")
        static._buffers.copy_from(self._metadata)
        static._slots.copy_(self._slots)
        static.source = self


class StaticBatch(_ReadyBatch):
    """The batch that a graph was captured with; frames and places are those of the batch it was last given."""

    def __init__(self, source: PagedBatch) -> None:
        self.source = source
        self._buffers = GraphBuffers(source._metadata)
        with torch.inference_mode(False):
            slots = source._slots.clone()
        self._set_up(source._rows, slots, self._buffers.entry)
        self.read, self.frames = source.read, source.frames
        self.frame_tokens, self.extra_tokens = source.frame_tokens, source.extra_tokens

    @property
    def frame_starts(self) -> tuple[int, ...]:
        return self.source.frame_starts

    @property
    def frame_runs(self) -> tuple[Segment, ...]:
        return self.source.frame_runs

    def _check_ready(self) -> None:
        self.source._check_ready()


def pool_read(
    rows: Sequence[Row], read: str, frame_causal: bool, pool, bound: int, role: str, state: AttentionMetadataState
) -> tuple[torch.Tensor, AttentionMetadata]:
    """Slots and metadata of an "extent" or "block_table" read of the pool; bound: the most tokens that a row sees."""
    device = pool.rows.device
    slots = row_index([s for row in rows for s in row.branch.rows(row.segments)], device)
    sequences = [(row, *lens) for row in rows for lens in row.sequences(frame_causal)]
    q_lens, kv_lens = ([sequence[i] for sequence in sequences] for i in (1, 2))
    if read == "extent":
        starts = [row.branch.first_row for row, *_ in sequences]
        rows_there = pool.rows.num_rows
        metadata = state.extent_kv(role, starts, kv_lens, rows_there, device, max_seqlen_kv=bound, q_lens=q_lens)
        return slots, metadata
    width = -(-bound // pool.block_size)
    tables = [row.branch.table(width) for row, *_ in sequences]
    metadata = state.paged_kv(role, tables, kv_lens, pool.block_size, device, max_seqlen_kv=bound, q_lens=q_lens)
    return slots, metadata


def staged_read(
    rows: Sequence[Row],
    starts: Sequence[int],
    extents: bool,
    frame_causal: bool,
    staging,
    bound: int,
    role: str,
    state: AttentionMetadataState,
) -> tuple[torch.Tensor, AttentionMetadata]:
    """The same of copies that begin at rows `starts`; without extents, starts ascend."""
    device, rows_there = staging.rows.device, staging.rows.num_rows
    places = [(at + start, n) for row, at in zip(rows, starts, strict=True) for start, n in row.segments]
    slots = row_index(places, device)
    sequences = [(at, *lens) for row, at in zip(rows, starts, strict=True) for lens in row.sequences(frame_causal)]
    firsts, q_lens, kv_lens = zip(*sequences, strict=True)
    if extents:
        metadata = state.extent_kv(role, firsts, kv_lens, rows_there, device, max_seqlen_kv=bound, q_lens=q_lens)
        return slots, metadata
    # Sequences known by their ends alone: what lies before each is a sequence without queries.
    ends = [0, *(first + n for first, n in zip(firsts, kv_lens, strict=True))]
    gaps = [first - end for first, end in zip(firsts, ends, strict=False)]
    with_gaps = itertools.chain.from_iterable(zip(gaps, kv_lens, strict=True))
    q_with_gaps = itertools.chain.from_iterable((0, n) for n in q_lens)
    metadata = state.packed_kv(role, list(with_gaps), device, max_seqlen_kv=rows_there, q_lens=list(q_with_gaps))
    return slots, metadata
