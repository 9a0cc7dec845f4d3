"""Sessions, each with a window of frames in blocks of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from attention_backend.kv_cache.chunk import Chunk, RecomputedWindow, Record
from attention_backend.kv_cache.errors import KVCacheError
from attention_backend.kv_cache.geometry import SessionGeometry, check_count
from attention_backend.kv_cache.interrupts import uninterrupted
from attention_backend.kv_cache.pool import BranchStorage
from attention_backend.kv_cache.rows import Segment

if TYPE_CHECKING:
    from attention_backend.kv_cache.paged import PagedKVCache
    from attention_backend.kv_cache.snapshot import SessionSnapshot


class Session:
    """One stream: its committed frames, of which those in its window are kept. Made by PagedKVCache.open_session.

    As a context manager it closes on leaving. Every use after close() is a KVCacheError.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        geometry: SessionGeometry,
        branches: list[BranchStorage],
        *,
        frames: int = 0,
        serial: int = 0,
        records: tuple[Record, ...] = (),
    ) -> None:
        self.cache, self.geometry, self.branches = cache, geometry, branches
        self.closed = False
        self._frames, self._serial = frames, serial
        self._open: Chunk | None = None
        self._records = list(records)  # of the last rollback_chunks commits

    @property
    def frames(self) -> int:
        """How many are committed; also the absolute index of the next."""
        self._check_open()
        return self._frames

    @property
    def chunk(self) -> Chunk | None:
        """The open one."""
        return self._open

    @uninterrupted
    def begin(self, frames: int) -> Chunk:
        """The next `frames` frames. KVCacheError, before anything is written, if they do not fit or a chunk is open."""
        self._check_open()
        geometry = self.geometry
        check_count("frames", frames)
        self._check_no_chunk("commit() or abort() it first")
        if frames > geometry.max_chunk_frames:
            raise KVCacheError(
                f"a chunk of {frames} frames, and the session was opened for at most {geometry.max_chunk_frames}; make "
                "the chunk shorter, or open the session with a larger max_chunk_frames"
            )
        if geometry.recent_frames is None and self._frames + frames > geometry.capacity_frames:
            raise KVCacheError(
                f"{self._frames} frames are committed and {frames} more exceed capacity_frames "
                f"{geometry.capacity_frames}; open the session with more, or with recent_frames, which lets old ones go"
            )
        self._open = Chunk(self, Record(self._frames, frames, self._serial % geometry.journal_slots))
        return self._open

    @uninterrupted
    def recompute(self) -> RecomputedWindow:
        """The frames in the window once more, in one chunk with blocks of its own, for a frame_causal forward.

        Its commit() puts what was computed in the place of what was there, after which earlier chunks cannot be taken
        back; abort() leaves all as it is. KVCacheError with a chunk open or no frame committed; OutOfBlocks if there is
        no room for a second window.
        """
        self._check_open()
        self._check_no_chunk("commit() or abort() it first")
        if not self._frames:
            raise KVCacheError("no frame is committed, so there is no window to compute anew: begin() the first chunk")
        flat = replace(self.geometry, ring_turn=0)
        branches = self.cache.pool.open_branches(flat, **self.cache.placing)
        self._open = RecomputedWindow(self, flat, branches)
        return self._open

    @uninterrupted
    def rollback(self, chunks: int = 1) -> None:
        """Takes back the last `chunks` commits: window and lengths are as they were before them.

        KVCacheError, before anything is written, with a chunk open or beyond what rollback_chunks keeps.
        """
        self._check_open()
        check_count("chunks", chunks)
        self._check_no_chunk("abort() it before a rollback")
        if chunks > len(self._records):
            raise KVCacheError(
                f"{chunks} chunks to take back, and {len(self._records)} are kept (rollback_chunks is "
                f"{self.geometry.rollback_chunks}); open the session with a larger rollback_chunks"
            )
        for _ in range(chunks):
            record = self._records[-1]
            self._undo(record, extra_tokens=0, in_pool=True)
            self._records.pop()  # only now: an undo that ran out of memory is asked for again
            self._frames, self._serial = record.frame_start, self._serial - 1

    @uninterrupted
    def fork(self) -> Session:
        """A second session at the same place; from here on neither sees what the other does.

        Both hold the same blocks until one of them writes there; then that block is copied. A fork takes blocks at once
        for all that the two will ever write apart. What can be rolled back here can be there. Where sessions must each
        be one run of blocks (a cache whose only read is "extent"), all is copied now; elsewhere the fork is read by
        block table, or staged. KVCacheError, with nothing taken, if a chunk is open; OutOfBlocks.
        """
        self._check_open()
        self._check_no_chunk("commit() or abort() it before a fork")
        cache, geometry = self.cache, self.geometry
        if cache.placing["scattered"]:
            oldest = self._records[0].frame_start if self._records else self._frames
            branches = cache.pool.fork_branches(self.branches, geometry, geometry.settled_tokens(oldest))
        else:
            branches = cache.pool.open_branches(geometry, **cache.placing)
            self._copy([(0, geometry.visible_tokens(self._frames))], branches, BranchStorage.rows)
        slots = [record.journaled(geometry) for record in self._records]
        self._copy(slots, branches, lambda branch, segments: [x for s in segments for x in branch.journal_rows(*s)])
        return self.cache.add(
            Session(
                cache, geometry, branches, frames=self._frames, serial=self._serial, records=tuple(self._records)
            )
        )  # fmt: skip

    def snapshot(self) -> SessionSnapshot:
        """All of it in host memory, for PagedKVCache.restore_session. Waits for the device. KVCacheError if a chunk is
        open."""
        from attention_backend.kv_cache.snapshot import take_snapshot

        self._check_open()
        self._check_no_chunk("commit() or abort() it before a snapshot")
        return take_snapshot(self)

    @uninterrupted
    def close(self) -> None:
        """Gives all blocks back, an open chunk's with them. A second close() does nothing."""
        if self.closed:
            return
        self.cache._close(self)
        if self._open is not None:
            self._end(self._open)
        self.closed = True

    def __enter__(self) -> Session:
        self._check_open()
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def _check_open(self) -> None:
        if self.closed:
            raise KVCacheError("the session is closed; open_session() another")

    def _check_no_chunk(self, way_out: str) -> None:
        if self._open is not None:
            raise KVCacheError(f"a chunk of {self._open.frames} frames is open; {way_out}")

    def _end(self, chunk: Chunk) -> None:
        self._open = None
        self.cache.retire_batches(chunk)

    def _copy(self, segments, branches, rows_of) -> None:
        rows = self.cache.pool.rows
        sources, targets = (
            [row for branch in some for row in rows_of(branch, [s for s in segments if s[1]])]
            for some in (self.branches, branches)
        )
        rows.copy(targets, rows, sources)

    def _journal(self, record: Record) -> tuple[list[Segment], list[Segment]]:
        """Pool rows that have what a chunk overwrites, and journal rows for as many, of all branches."""
        live: list[Segment] = []
        kept: list[Segment] = []
        segments = self.geometry.segments(*self.geometry.overwriting(record.frame_start, record.frames))
        journaled = record.journaled(self.geometry)
        for branch in self.branches:
            live += branch.rows(segments)
            kept += branch.journal_rows(*journaled)
        return live, kept

    def _undo(self, record: Record, *, extra_tokens: int, in_pool: bool) -> None:
        """Leaves nothing of a chunk: what it overwrote is back, and its other rows are zero."""
        geometry, pool, staging = self.geometry, self.cache.pool, self.cache.staging
        end = record.frame_start + record.frames
        overwriting, count = geometry.overwriting(record.frame_start, record.frames)
        fresh = geometry.segments(record.frame_start, overwriting - record.frame_start)
        if extra_tokens:
            fresh.append((geometry.visible_tokens(end), extra_tokens))
        touched = fresh + geometry.segments(overwriting, count)
        if in_pool:
            for branch in self.branches:
                pool.own(branch, touched)
            live, kept = self._journal(record)
            pool.rows.copy(live, pool.rows, kept)
            pool.rows.zero([row for branch in self.branches for row in branch.rows(fresh)])
        for branch in self.branches:
            if in_pool:
                pool.changed(branch, touched)
            if staging is not None:
                staging.forget(branch, touched)
