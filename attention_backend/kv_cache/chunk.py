"""Chunks: frames that a session computes, in any number of forwards, and then keeps or drops."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from attention_backend.kv_cache.errors import KVCacheError
from attention_backend.kv_cache.geometry import SessionGeometry
from attention_backend.kv_cache.interrupts import uninterrupted
from attention_backend.kv_cache.pool import BranchStorage
from attention_backend.kv_cache.rows import Segment

if TYPE_CHECKING:
    from attention_backend.kv_cache.session import Session


@dataclass(frozen=True)
class Record:
    """A chunk's place, and the journal slot that has what it overwrote."""

    frame_start: int
    frames: int
    slot: int

    def journaled(self, geometry: SessionGeometry) -> Segment:
        """(start, tokens) in a branch's journal of what the chunk overwrote."""
        _, count = geometry.overwriting(self.frame_start, self.frames)
        return self.slot * geometry.journal_slot_tokens, count * geometry.frame_tokens


class Chunk:
    """Frames being computed: any number of forwards, then commit() or abort(). Made by Session.begin.

    As a context manager it aborts on an exception, and on leaving uncommitted.
    """

    def __init__(self, session: Session, record: Record) -> None:
        self.session, self._record = session, record
        self._journaled = False
        self._in_pool = False  # a forward may have written there
        self._staged: set[int] = set()  # branches whose last forward wrote into the staging buffer instead
        self._forwarded: set[int] = set()  # branches that a batch was made for
        self._extra_tokens = 0  # the most of any forward

    @property
    def geometry(self) -> SessionGeometry:
        """Of the storage that its forwards write."""
        return self.session.geometry

    @property
    def branches(self) -> list[BranchStorage]:
        return self.session.branches

    @property
    def own_branches(self) -> list[BranchStorage]:
        """Of its branches those that go with it, if it is not committed."""
        return []

    @property
    def frames(self) -> int:
        return self._record.frames

    @property
    def frame_start(self) -> int:
        """The absolute index of its first frame."""
        return self._record.frame_start

    @property
    def frame_runs(self) -> list[Segment]:
        """(first absolute index, count) of its frames, in order."""
        return [(self.frame_start, self.frames)]

    @property
    def over(self) -> bool:
        return self.session._open is not self

    @uninterrupted
    def commit(self) -> None:
        """Keeps the K/V that the last forward wrote, and moves the window on.

        KVCacheError if the chunk is over, or a branch had no forward.
        """
        self._check_commit()
        session, geometry = self.session, self.geometry
        session.cache.retire_batches(self)  # first: should this fail midway, the next forward is prepared anew
        if self._staged:
            session.cache.set_aside([self])  # what is written below, should it fail midway, or be rolled back
            self._in_pool = True
        self._keep(geometry.segments(self.frame_start, self.frames))
        session._frames += self.frames
        session._serial += 1
        session._records.append(self._record)
        del session._records[: max(len(session._records) - geometry.rollback_chunks, 0)]
        session._end(self)

    @uninterrupted
    def abort(self) -> None:
        """Leaves the session as it was before the chunk, with nothing of what its forwards wrote."""
        self._check("abort")
        self.session.cache.retire_batches(self)
        self.session._undo(self._record, extra_tokens=self._extra_tokens, in_pool=self._in_pool)
        self.session._end(self)

    def __enter__(self) -> Chunk:
        return self

    def __exit__(self, *exception) -> None:
        if not self.over:
            self.abort()

    def _check_commit(self) -> None:
        self._check("commit")
        missing = [i for i in range(self.geometry.branches) if i not in self._forwarded]
        if missing:
            raise KVCacheError(f"commit() of a chunk with no forward for branches {missing}; run one, or abort()")

    def _keep(self, segments: list[Segment]) -> None:
        """What the last forwards wrote is in the pool, and known to be new."""
        cache = self.session.cache
        for i, branch in enumerate(self.branches):
            if i in self._staged:
                cache.pool.own(branch, segments)
                cache.staging.commit(branch, segments)
                cache.staging.release(branch)
            else:
                cache.pool.changed(branch, segments)

    def _note_forward(self, index: int, extra_tokens: int, *, staged: bool) -> None:
        """Of a forward of branch `index` that is about to run: what it writes, and where."""
        self._forwarded.add(index)
        self._extra_tokens = max(self._extra_tokens, extra_tokens)
        if staged:
            self._staged.add(index)
            return
        self._in_pool = True
        if index in self._staged:
            self._staged.remove(index)
            self.session.cache.staging.release(self.branches[index])

    def _check(self, what: str) -> None:
        self.session._check_open()
        if self.over:
            raise KVCacheError(
                f"{what}() of a chunk that is over, of frames {self.frame_start} to "
                f"{self.frame_start + self.frames - 1}; begin() a new one"
            )


class RecomputedWindow(Chunk):
    """All frames of a session's window, computed once more into other blocks; made by Session.recompute.

    In storage they lie in their order from the front, so that each sees those up to itself.
    """

    def __init__(self, session: Session, geometry: SessionGeometry, branches: list[BranchStorage]) -> None:
        held = session.geometry.held(session.frames)
        super().__init__(session, Record(0, sum(count for _, count in held), 0))
        self._journaled = True  # it overwrites nothing
        self._geometry, self._branches, self._runs = geometry, branches, held
        self._in_place = False  # then the session has these branches, and its old ones are here

    @property
    def geometry(self) -> SessionGeometry:
        return self._geometry

    @property
    def branches(self) -> list[BranchStorage]:
        return self._branches

    @property
    def own_branches(self) -> list[BranchStorage]:
        return self._branches

    @property
    def frame_runs(self) -> list[Segment]:
        return self._runs

    @uninterrupted
    def commit(self) -> None:
        """Puts the new window in the place of the old one. KVCacheError if the chunk is over, or a branch had no
        forward."""
        self._check_commit()
        self.session.cache.retire_batches(self)
        if not self._in_place:
            self._put_in_place()
        # The old ones. Should memory run out here, they are the chunk's until commit() or abort() is called again.
        self.session.cache.release(self._branches)
        self.session._end(self)

    @uninterrupted
    def abort(self) -> None:
        """Leaves the session as it is."""
        self._check("abort")
        self.session.cache.release(self._branches)
        self.session._end(self)

    def _put_in_place(self) -> None:
        session, geometry = self.session, self.geometry
        self._keep(geometry.segments(0, self.frames))
        turn = 0
        if geometry.recent_frames is not None and session.frames > geometry.window_frames:
            turn = (session.frames - geometry.sink_frames) % geometry.recent_frames
        self._branches, session.branches = session.branches, self._branches
        session.geometry = replace(geometry, ring_turn=turn)
        session._records.clear()
        self._in_place = True
