"""A paged KV cache for many sessions with histories of their own, which one forward may serve together.

Shape letters: H query heads, Hkv key/value heads, D head_dim, total_q the tokens of all rows of a forward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from attention_backend.interface import AttentionBackend
from attention_backend.kv_cache import reads, sizes
from attention_backend.kv_cache.checks import check_backend, check_frame_causal, possible_reads
from attention_backend.kv_cache.chunk import Chunk
from attention_backend.kv_cache.errors import KVCacheError
from attention_backend.kv_cache.geometry import GUARD_ROWS, SessionGeometry, check_count
from attention_backend.kv_cache.interrupts import uninterrupted
from attention_backend.kv_cache.pool import BlockPool, BranchStorage
from attention_backend.kv_cache.reads import PagedBatch, Row
from attention_backend.kv_cache.session import Session
from attention_backend.kv_cache.snapshot import SessionSnapshot, restore
from attention_backend.kv_cache.staging import Staging
from attention_backend.metadata_state import AttentionMetadataState


class PagedKVCache:
    """Blocks of K and V for each layer, and the sessions that have them.

    backend: the one that attends. num_blocks, the null block included, or memory_bytes, of which staging_tokens rows
    for the staged read are a part. block_size "auto": from the backend's preference and the frame. read: for every
    forward, "extent", "block_table", "staged", or "auto": extent where the backend can and every row of the forward is
    one run of blocks, else block_table, else staged. action_capacity: the most forward-only tokens of a row.
    max_frames: the largest window of any session, for bounds and table widths that stay the same whoever shares a
    forward; None: the largest window in the forward. KVCacheError on contradictions.

    read_counts: of the batches given out, one for each forward, how many took which read and why.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        frame_tokens: int,
        *,
        num_blocks: int | None = None,
        memory_bytes: int | None = None,
        block_size: int | str = "auto",
        backend: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device | str,
        read: str = "auto",
        action_capacity: int = 0,
        staging_tokens: int = 0,
        attention_metadata_state: AttentionMetadataState | None = None,
        max_frames: int | None = None,
    ) -> None:
        given = {
            "num_layers": num_layers,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "frame_tokens": frame_tokens,
        }
        for name, value in given.items():
            check_count(name, value)
        check_count("action_capacity", action_capacity, 0)
        check_count("staging_tokens", staging_tokens, 0)
        if max_frames is not None:
            check_count("max_frames", max_frames)
        if block_size == "auto":
            block_size = sizes.choose_block_size(backend, frame_tokens)
        check_count("block_size", block_size)
        if (num_blocks is None) == (memory_bytes is None):
            raise KVCacheError(f"num_blocks is {num_blocks} and memory_bytes {memory_bytes}; give one of them")
        if num_blocks is None:
            check_count("memory_bytes", memory_bytes)
            per_row = sizes.row_bytes(num_layers, num_kv_heads, head_dim, dtype)
            num_blocks = sizes.blocks_in_memory(memory_bytes, staging_tokens, block_size, per_row)
        check_count("num_blocks", num_blocks, 2)
        check_backend(backend, num_kv_heads, head_dim, dtype, torch.device(device))
        self._reads, self._named_read = possible_reads(backend, read, staging_tokens), read != "auto"
        self.read_counts: Counter[tuple[str, str]] = Counter()
        self.backend, self.frame_tokens, self.action_capacity = backend, frame_tokens, action_capacity
        self.block_size, self.max_frames = block_size, max_frames
        self.attention_metadata_state = attention_metadata_state or AttentionMetadataState()
        self.pool = BlockPool(num_layers, num_blocks, block_size, num_kv_heads, head_dim, dtype, torch.device(device))
        largest = None if max_frames is None else max_frames * frame_tokens + action_capacity + GUARD_ROWS
        self.staging = Staging(self.pool, staging_tokens, largest) if staging_tokens else None
        self.sessions: list[Session] = []
        self._batches: dict[tuple, PagedBatch] = {}  # of open chunks alone, by what was asked for

    @property
    def free_blocks(self) -> int:
        return self.pool.free.free

    @property
    def memory_bytes(self) -> int:
        """Of all that the cache holds on the device, the staging buffer included."""
        return self.pool.rows.nbytes + (self.staging.rows.nbytes if self.staging else 0)

    @uninterrupted
    def open_session(
        self,
        *,
        sink_frames: int = 0,
        recent_frames: int | None,
        capacity_frames: int | None = None,
        branches: int = 1,
        max_chunk_frames: int | None = None,
        rollback_chunks: int = 0,
    ) -> Session:
        """A session with all the blocks that it will ever need, so that nothing fails for want of them later.

        Visible are its first sink_frames frames and the last recent_frames, the chunk being computed counted in; with
        recent_frames None all, up to capacity_frames. branches: of classifier-free guidance. max_chunk_frames: of any
        chunk, as that many frames can be set aside; None: recent_frames, which takes memory for as many again.
        KVCacheError on contradictions; OutOfBlocks if too few blocks are free: sessions are never taken from their
        owners.
        """
        geometry = self._geometry(
            sink_frames=sink_frames,
            recent_frames=recent_frames,
            capacity_frames=capacity_frames,
            branches=branches,
            max_chunk_frames=max_chunk_frames,
            rollback_chunks=rollback_chunks,
        )
        return self.add(Session(self, geometry, self.pool.open_branches(geometry, **self.placing)))

    @uninterrupted
    def restore_session(self, snapshot: SessionSnapshot) -> Session:
        """The session that a snapshot was taken of, of this cache or another. KVCacheError, with nothing taken, if that
        was made for other frames, layers, heads or dtype, or its window is larger than max_frames; OutOfBlocks."""
        return restore(self, snapshot)

    def sessions_that_fit(self, **options) -> int:
        """How many sessions could be opened now, one after another, with these options of open_session."""
        return sizes.sessions_that_fit(self.pool.free, self._geometry(**options), self.block_size, **self.placing)

    def batch(
        self,
        chunks: Sequence[Chunk],
        *,
        branches: Sequence[int] | None = None,
        extra_tokens: Sequence[int] | None = None,
        frame_causal: bool = False,
    ) -> PagedBatch:
        """The inputs of one forward; to be asked for before every forward, the same object for the same call.

        A batch whose rows moved since, as another one was prepared, is refused at its next use.

        chunks: open ones, of this cache. Rows: for each chunk in order, its branches (`branches` of each, default all).
        extra_tokens: for each chunk how many forward-only tokens each of its rows ends in. frame_causal: a frame sees
        what is before it and itself, not the later frames of its chunk. KVCacheError before anything is written.
        """
        rows = self._rows(list(chunks), branches, extra_tokens)
        if frame_causal:
            check_frame_causal(rows)
        key = (frame_causal, *((row.chunk, row.index, row.extra_tokens) for row in rows))
        batch = self._batches.get(key)
        if batch is None or not batch.in_place or any(row.staged != (batch.read == "staged") for row in rows):
            batch = self._prepare(key, rows, frame_causal)
        self.read_counts[batch.read, batch.read_reason] += 1
        return batch

    @uninterrupted
    def _prepare(self, key: tuple, rows: list[Row], frame_causal: bool) -> PagedBatch:
        """The batch of `key`, and all that is to be done before the first of its forwards in a row.

        Until a row moves or is read in another way, the forwards after it find all as they need it: a block that a
        chunk has to itself stays its own while the chunk is open, and so does its copy.
        """
        read, reason = self._choose(rows)
        starts: tuple[int, ...] = ()
        if read == "staged":
            extents = self.backend.supports_extent_kv()
            if frame_causal and not extents:
                raise KVCacheError(
                    f"frame_causal needs reads that overlap, and staged through {self.backend.name} has none; commit "
                    "the frames one by one"
                )
            wanted = [(row.branch, row.chunk.geometry, row.visible_tokens) for row in rows]
            starts = tuple(self.staging.prepare(wanted, ascending=not extents))
        else:
            for row in rows:
                self.pool.own(row.branch, row.segments)
        batch = self._batches.get(key)
        if batch is not None and not batch.in_place:
            self._batches.pop(key).retired, batch = True, None
        if batch is None:
            batch = self._build(rows, read, reason, starts, frame_causal)
        if read != "staged":
            self.set_aside(batch.chunks)
        for row in rows:
            row.chunk._note_forward(row.index, row.extra_tokens, staged=read == "staged")
        self._batches[key] = batch  # only now: what ran out of memory above is to be done again
        return batch

    @property
    def placing(self) -> dict[str, bool]:
        """How a session's blocks may lie, for the pool."""
        return {"runs": "extent" in self._reads, "scattered": self._reads != ("extent",)}

    def _geometry(self, **options) -> SessionGeometry:
        geometry = SessionGeometry(frame_tokens=self.frame_tokens, action_capacity=self.action_capacity, **options)
        self.check_window(geometry)
        return geometry

    def check_window(self, geometry: SessionGeometry) -> None:
        if self.max_frames is not None and geometry.window_frames > self.max_frames:
            raise KVCacheError(
                f"a window of {geometry.window_frames} frames in a cache for at most max_frames {self.max_frames}; "
                "make the window smaller, or the cache with a larger max_frames"
            )

    def _rows(self, chunks: list[Chunk], branches, extra_tokens) -> list[Row]:
        extra = [0] * len(chunks) if extra_tokens is None else list(extra_tokens)
        if not chunks or len(extra) != len(chunks):
            raise KVCacheError(
                f"{len(chunks)} chunks and {len(extra)} extra_tokens; give at least one chunk, and one each"
            )
        if len(set(chunks)) != len(chunks):
            raise KVCacheError("a chunk is given twice; a forward has each once")
        rows: list[Row] = []
        for chunk, extra_of_chunk in zip(chunks, extra, strict=True):
            if not isinstance(chunk, Chunk) or chunk.session.cache is not self:
                raise KVCacheError(
                    f"{type(chunk).__name__} is no chunk, or another cache's; give a list of what begin() of this "
                    "cache's sessions returned"
                )
            chunk._check("batch")
            check_count("extra_tokens", extra_of_chunk, 0)
            if extra_of_chunk > self.action_capacity:
                raise KVCacheError(
                    f"{extra_of_chunk} extra tokens in a cache with action_capacity {self.action_capacity}; make the "
                    "cache with a larger one"
                )
            storage = chunk.branches
            for i in range(len(storage)) if branches is None else branches:
                if i not in range(len(storage)):
                    raise KVCacheError(f"branch {i!r} of a session with {len(storage)} branches")
                rows.append(Row(chunk, i, storage[i], extra_of_chunk))
        if len({id(row.branch) for row in rows}) != len(rows) or not rows:
            raise KVCacheError(f"branches is {branches!r}; give at least one, and each once")
        return rows

    def _choose(self, rows: list[Row]) -> tuple[str, str]:
        if self._named_read:
            return self._reads[0], "named when the cache was made"
        if len(self._reads) == 1:
            return self._reads[0], f"the only one that {self.backend.name} and this cache can do"
        if "extent" in self._reads:
            if all(row.branch.is_run for row in rows):
                return "extent", "every row is one run of blocks"
            scattered = sum(not row.branch.is_run for row in rows)
            return self._reads[1], f"{scattered} of {len(rows)} rows lie in scattered blocks"
        return self._reads[0], f"{self.backend.name} reads no extents"

    def _build(self, rows: list[Row], read: str, reason: str, starts, frame_causal: bool) -> PagedBatch:
        window = max(row.chunk.geometry.window_frames for row in rows)
        bound = (self.max_frames or window) * self.frame_tokens + self.action_capacity
        common = (bound, self.backend.spec.role, self.attention_metadata_state)
        if read == "staged":
            extents = self.backend.supports_extent_kv()
            inputs = reads.staged_read(rows, starts, extents, frame_causal, self.staging, *common)
            return PagedBatch(rows, read, reason, self.staging, *inputs)
        inputs = reads.pool_read(rows, read, frame_causal, self.pool, *common)
        return PagedBatch(rows, read, reason, self.pool, *inputs)

    def set_aside(self, chunks: Sequence[Chunk]) -> None:
        """Keeps what the chunks are about to overwrite in the pool, in their journals, all of it in one go."""
        chunks = [chunk for chunk in chunks if not chunk._journaled]
        pairs = [chunk.session._journal(chunk._record) for chunk in chunks]
        live, kept = ([segment for pair in pairs for segment in pair[i]] for i in range(2))
        self.pool.rows.copy(kept, self.pool.rows, live)
        for chunk in chunks:
            chunk._journaled = True

    def retire_batches(self, chunk: Chunk) -> None:
        """None of this chunk's serves another forward."""
        for key, batch in list(self._batches.items()):
            if chunk in batch.chunks:
                batch.retired = True
                del self._batches[key]

    def add(self, session: Session) -> Session:
        self.sessions.append(session)
        return session

    def release(self, branches: Sequence[BranchStorage]) -> None:
        self.pool.close_branches(branches)
        for branch in branches:
            if self.staging is not None:
                self.staging.drop(branch)

    def _close(self, session: Session) -> None:
        self.release([*session.branches, *(session.chunk.own_branches if session.chunk else ())])
        self.sessions.remove(session)
