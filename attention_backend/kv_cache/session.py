"""Sessions, each with a window of frames in blocks of its own, and the chunks that move them on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from attention_backend.kv_cache.errors import KVCacheError
from attention_backend.kv_cache.geometry import SessionGeometry, check_count
from attention_backend.kv_cache.pool import BranchStorage
from attention_backend.kv_cache.rows import Segment

if TYPE_CHECKING:
    from attention_backend.kv_cache.paged import PagedKVCache


@dataclass(frozen=True)
class _Record:
    """A chunk's place, and the journal slot that has what it overwrote."""

    frame_start: int
    frames: int
    slot: int


class Session:
    """One stream: its committed frames, of which those in its window are kept. Made by PagedKVCache.open_session.

    As a context manager it closes on leaving. Every use after close() is a KVCacheError.
    """

    def __init__(self, cache: PagedKVCache, geometry: SessionGeometry, branches: list[BranchStorage]) -> None:
        self.cache, self.geometry, self.branches = cache, geometry, branches
        self.closed = False
        self._frames = 0
        self._open: Chunk | None = None
        self._records: list[_Record] = []  # of the last rollback_chunks commits
        self._serial = 0

    @property
    def frames(self) -> int:
        """How many are committed; also the absolute index of the next."""
        self._check_open()
        return self._frames

    def begin(self, frames: int) -> Chunk:
        """The next `frames` frames. KVCacheError, before anything is written, if they do not fit or a chunk is open."""
        self._check_open()
        geometry = self.geometry
        check_count("frames", frames)
        if self._open is not None:
            raise KVCacheError(f"a chunk of {self._open.frames} frames is open; commit() or abort() it first")
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
        self._open = Chunk(self, _Record(self._frames, frames, self._serial % geometry.journal_slots))
        return self._open

    def rollback(self, chunks: int = 1) -> None:
        """Takes back the last `chunks` commits: window and lengths are as they were before them.

        KVCacheError, before anything is written, with a chunk open or beyond what rollback_chunks keeps.
        """
        self._check_open()
        check_count("chunks", chunks)
        if self._open is not None:
            raise KVCacheError(f"a chunk of {self._open.frames} frames is open; abort() it before a rollback")
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

    def _end(self, chunk: Chunk) -> None:
        self._open = None
        self.cache._chunk_is_over(chunk)

    def _journal(self, record: _Record) -> tuple[list[Segment], list[Segment]]:
        """Pool rows that have what a chunk overwrites, and journal rows for as many, of all branches."""
        live: list[Segment] = []
        kept: list[Segment] = []
        first, count = self.geometry.overwriting(record.frame_start, record.frames)
        segments = self.geometry.segments(first, count)
        for branch in self.branches:
            live += branch.rows(segments)
            start = record.slot * self.geometry.journal_slot_tokens
            kept += branch.journal_rows(start, count * self.geometry.frame_tokens)
        return live, kept

    def _undo(self, record: _Record, *, extra_tokens: int, in_pool: bool) -> None:
        """Leaves nothing of a chunk: what it overwrote is back, and its other rows are zero."""
        geometry, pool, staging = self.geometry, self.cache.pool, self.cache.staging
        end = record.frame_start + record.frames
        overwriting, count = geometry.overwriting(record.frame_start, record.frames)
        fresh = geometry.segments(record.frame_start, overwriting - record.frame_start)
        if extra_tokens:
            fresh.append((geometry.visible_tokens(end), extra_tokens))
        touched = fresh + geometry.segments(overwriting, count)
        if in_pool:
            live, kept = self._journal(record)
            pool.rows.copy(live, pool.rows, kept)
            pool.rows.zero([row for branch in self.branches for row in branch.rows(fresh)])
        for branch in self.branches:
            if in_pool:
                pool.changed(branch, touched)
            if staging is not None:
                staging.forget(branch, touched)


class Chunk:
    """Frames being computed: any number of forwards, then commit() or abort(). Made by Session.begin.

    As a context manager it aborts on an exception, and on leaving uncommitted.
    """

    def __init__(self, session: Session, record: _Record) -> None:
        self.session, self._record = session, record
        self._journaled = False
        self._in_pool = False  # a forward may have written there
        self._staged: set[int] = set()  # branches whose last forward wrote into the staging buffer instead
        self._forwarded: set[int] = set()  # branches that a batch was made for
        self._extra_tokens = 0  # the most of any forward

    @property
    def frames(self) -> int:
        return self._record.frames

    @property
    def frame_start(self) -> int:
        """The absolute index of its first frame."""
        return self._record.frame_start

    @property
    def over(self) -> bool:
        return self.session._open is not self

    def commit(self) -> None:
        """Keeps the K/V that the last forward wrote, and moves the window on.

        KVCacheError if the chunk is over, or a branch had no forward.
        """
        self._check("commit")
        session, geometry = self.session, self.session.geometry
        missing = [i for i in range(geometry.branches) if i not in self._forwarded]
        if missing:
            raise KVCacheError(f"commit() of a chunk with no forward for branches {missing}; run one, or abort()")
        segments = geometry.segments(self.frame_start, self.frames)
        if self._staged:
            session.cache._journal([self])  # what is written below, should it fail midway, or be rolled back
            self._in_pool = True
        for i, branch in enumerate(session.branches):
            if i in self._staged:
                session.cache.staging.commit(branch, segments)
                session.cache.staging.release(branch)
            else:
                session.cache.pool.changed(branch, segments)
        session._frames += self.frames
        session._serial += 1
        session._records.append(self._record)
        del session._records[: max(len(session._records) - geometry.rollback_chunks, 0)]
        session._end(self)

    def abort(self) -> None:
        """Leaves the session as it was before the chunk, with nothing of what its forwards wrote."""
        self._check("abort")
        self.session._undo(self._record, extra_tokens=self._extra_tokens, in_pool=self._in_pool)
        self.session._end(self)

    def __enter__(self) -> Chunk:
        return self

    def __exit__(self, *exception) -> None:
        if not self.over:
            self.abort()

    def _note_forward(self, branch: BranchStorage, extra_tokens: int, *, staged: bool) -> None:
        """Of a forward that is about to run: what it writes, and where."""
        index, staging = self.session.branches.index(branch), self.session.cache.staging
        self._forwarded.add(index)
        self._extra_tokens = max(self._extra_tokens, extra_tokens)
        if staged:
            self._staged.add(index)
            return
        self._in_pool = True
        if index in self._staged:
            self._staged.remove(index)
            staging.release(branch)

    def _check(self, what: str) -> None:
        self.session._check_open()
        if self.over:
            raise KVCacheError(
                f"{what}() of a chunk that is over, of frames {self.frame_start} to "
                f"{self.frame_start + self.frames - 1}; begin() a new one"
            )
