"""Contiguous copies of session branches, for backends that read neither extents of a pool nor block tables."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from attention_backend.kv_cache.errors import KVCacheError
from attention_backend.kv_cache.free_runs import FreeRuns
from attention_backend.kv_cache.geometry import GUARD_ROWS, SessionGeometry
from attention_backend.kv_cache.pool import BlockPool, BranchStorage
from attention_backend.kv_cache.rows import LayerRows, Segment


@dataclass(eq=False)
class Region:
    """The copy of one branch: token t is row start + t."""

    start: int
    num_rows: int
    versions: dict[int, int] = field(default_factory=dict)  # of block i of the branch, when it was copied
    changes: int = -1  # of the branch, when all its visible blocks were last known to be the same
    holds_chunk: bool = False  # an open chunk's last forward wrote here, and its commit will read it

    def rows(self, segments: Sequence[Segment]) -> list[Segment]:
        return [(self.start + start, length) for start, length in segments]


class Staging:
    """num_rows rows of K and V for each layer, shared by the branches that were read last.

    region_rows: what every branch takes, so that those of unlike windows fit wherever one was; None: what each needs.
    blocks_copied counts the blocks that were copied because they had changed since, or had not been here.
    """

    def __init__(self, pool: BlockPool, num_rows: int, region_rows: int | None = None) -> None:
        k = pool.rows.layers[0][0]
        shape = (num_rows, *k.shape[-2:])
        self.pool, self.rows = pool, LayerRows(len(pool.rows.layers), shape, k.dtype, torch.device(k.device))
        self.blocks_copied, self.region_rows = 0, region_rows
        self.moves = 0  # of any copy
        self._free = FreeRuns(0, num_rows)
        self._regions: OrderedDict[BranchStorage, Region] = OrderedDict()  # least recently used first

    def prepare(self, wanted: Sequence[tuple[BranchStorage, SessionGeometry, int]], *, ascending: bool) -> list[int]:
        """Makes the first so many tokens of each branch current here; returns each one's first row.

        wanted: (branch, its geometry, tokens). ascending: the rows must follow the order of the branches, for kernels
        that know sequences by their ends alone. KVCacheError, before anything is written, if they do not fit.
        """
        starts = [self.place_of(branch) for branch, _, _ in wanted]
        if -1 in starts or (ascending and starts != sorted(starts)):
            needed = {
                branch: self.region_rows or geometry.capacity_tokens + GUARD_ROWS for branch, geometry, _ in wanted
            }
            self._place(needed, ascending)
        targets: list[Segment] = []
        sources: list[Segment] = []
        copied: list[tuple[Region, int, int]] = []
        for branch, geometry, tokens in wanted:
            region = self._regions[branch]
            self._regions.move_to_end(branch)
            region.holds_chunk = True
            if region.changes == branch.changes:
                continue
            for i in range(-(-tokens // branch.block_size)):
                version = self.pool.versions[branch.blocks[i]]
                if region.versions.get(i) != version:
                    copied.append((region, i, version))
                    start = i * branch.block_size
                    part = [(start, min(branch.block_size, geometry.capacity_tokens - start))]
                    targets += region.rows(part)
                    sources += branch.rows(part)
        self.rows.copy(targets, self.pool.rows, sources)
        # Only now: a copy that ran out of memory is to be made again.
        for region, i, version in copied:
            region.versions[i] = version
        for branch, _, _ in wanted:
            self._regions[branch].changes = branch.changes
        self.blocks_copied += len(copied)
        return [self._regions[branch].start for branch, _, _ in wanted]

    def commit(self, branch: BranchStorage, segments: Sequence[Segment]) -> None:
        """Puts a chunk that was computed here into the pool, whose blocks are then the same as the copy."""
        region = self._regions[branch]
        self.pool.rows.copy(branch.rows(segments), self.rows, region.rows(segments))
        was_current = region.changes == branch.changes
        self.pool.changed(branch, segments)
        for i in branch.block_indices(segments):
            region.versions[i] = self.pool.versions[branch.blocks[i]]
        if was_current:
            region.changes = branch.changes

    def release(self, branch: BranchStorage) -> None:
        """No open chunk's only copy is in the branch's region any more."""
        if branch in self._regions:
            self._regions[branch].holds_chunk = False

    def forget(self, branch: BranchStorage, segments: Sequence[Segment]) -> None:
        """Zeroes tokens of a branch here, and takes its blocks there for changed."""
        if branch in self._regions:
            region = self._regions[branch]
            self.rows.zero(region.rows(segments))
            for i in branch.block_indices(segments):
                region.versions.pop(i, None)
            region.changes = -1
            region.holds_chunk = False

    def drop(self, branch: BranchStorage) -> None:
        if branch in self._regions:
            region = self._regions.pop(branch)
            self.moves += 1
            self._free.give_run(region.start, region.num_rows)

    def _place(self, lengths: dict[BranchStorage, int], ascending: bool) -> None:
        free, others = FreeRuns(0, self.rows.num_rows), [b for b in self._regions if b not in lengths]
        kept = [self._regions[b] for b in others if self._regions[b].holds_chunk]
        for region in sorted(kept, key=lambda region: region.start):
            free.take(region.start, region.num_rows)
        afresh = _starts(free, list(lengths.values()), ascending)
        if afresh is None:
            raise KVCacheError(
                f"the batch needs {sum(lengths.values())} staging rows and the cache has {self.rows.num_rows}, "
                f"{sum(region.num_rows for region in kept)} of them held by other open chunks; raise staging_tokens "
                f"(a branch takes its window, its action capacity and {GUARD_ROWS} rows), or make the batch smaller"
            )
        evictable = [b for b in others if not self._regions[b].holds_chunk]
        missing = [b for b in lengths if b not in self._regions]
        while not ascending and missing:
            start = self._free.take_run(lengths[missing[0]])
            if start is not None:
                self._add(missing.pop(0), start, lengths)
            elif evictable:
                self.drop(evictable.pop(0))
            else:
                break
        if ascending or missing:
            # Room enough, but in pieces or in another order: all that can go goes, and the batch is copied anew.
            for branch in [*evictable, *lengths]:
                self.drop(branch)
            for branch, start in zip(lengths, afresh, strict=True):
                self._free.take(start, lengths[branch])
                self._add(branch, start, lengths)

    def place_of(self, branch: BranchStorage) -> int:
        """The first row of its copy, -1 without one."""
        return self._regions[branch].start if branch in self._regions else -1

    def _add(self, branch: BranchStorage, start: int, lengths: dict[BranchStorage, int]) -> None:
        self.moves += 1
        self._regions[branch] = Region(start, lengths[branch])
        try:
            self.rows.zero([(start, lengths[branch])])  # who was here before may have left NaN
        except BaseException:
            self.drop(branch)
            raise


def _starts(free: FreeRuns, lengths: Sequence[int], together: bool) -> list[int] | None:
    """Where regions of these lengths would go, one after another if `together`; None if they do not fit."""
    starts: list[int] = []
    for length in [sum(lengths)] if together else lengths:
        start = free.take_run(length)
        if start is None:
            return None
        starts.append(start)
    if together:
        for length in lengths[:-1]:
            starts.append(starts[-1] + length)
    return starts
