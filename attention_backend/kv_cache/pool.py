"""The blocks of a paged cache: who has which, how often each changed, and where a session branch's tokens are."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch

from attention_backend.kv_cache.errors import OutOfBlocks
from attention_backend.kv_cache.free_runs import FreeRuns, runs
from attention_backend.kv_cache.geometry import SessionGeometry
from attention_backend.kv_cache.rows import LayerRows, Segment, TokenRows


class BranchStorage:
    """The blocks of one branch of a session; block i of `blocks` has tokens from i · block_size on.

    journal: blocks that keep what open and recent chunks overwrote. changes: counts what happened to the tokens; moves:
    how often a block was replaced by another of the same content.
    """

    def __init__(self, blocks: Sequence[int], journal: Sequence[int], is_run: bool, block_size: int) -> None:
        self.journal, self.is_run, self.block_size = tuple(journal), is_run, block_size
        self.changes, self.moves = 0, -1
        self._journal_rows = TokenRows(self.journal, block_size)
        self.place(blocks)

    def place(self, blocks: Sequence[int]) -> None:
        """Other blocks, of the same content."""
        self.blocks, self.moves = tuple(blocks), self.moves + 1
        self._rows, self._table = TokenRows(self.blocks, self.block_size), ()

    @property
    def first_row(self) -> int:
        """Of a run: the pool's row of token 0."""
        return self.blocks[0] * self.block_size

    def rows(self, segments: Iterable[Segment]) -> list[Segment]:
        """The pool's rows of token segments."""
        return [row for segment in segments for row in self._rows.segments(*segment)]

    def journal_rows(self, start: int, length: int) -> list[Segment]:
        return self._journal_rows.segments(start, length)

    def block_indices(self, segments: Iterable[Segment]) -> set[int]:
        """Which of the blocks hold something of token segments."""
        size = self.block_size
        return {i for start, length in segments for i in range(start // size, -(-(start + length) // size))}

    def table(self, width: int) -> tuple[int, ...]:
        """The block table, padded with the null block; the same object each time."""
        if len(self._table) != width:
            self._table = (*self.blocks[:width], *[0] * (width - len(self.blocks)))
        return self._table


class BlockPool:
    """K and V of all layers in blocks [num_blocks, block_size, Hkv, D]; block 0 is the null block, and stays zero.

    All free blocks are zero. Forks hold blocks together until one of them writes; for each holder but one a spare is
    set aside from the start, so that no write fails for want of a block. versions: of each block's kept tokens, a
    number that no other content ever had, so that a copy elsewhere is known to be current whatever it was made of.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.rows = LayerRows(num_layers, (num_blocks, block_size, num_kv_heads, head_dim), dtype, device)
        self._new_version = itertools.count(num_blocks).__next__
        self.versions = list(range(num_blocks))
        self.free = FreeRuns(1, num_blocks - 1)
        self.holders: dict[int, list[BranchStorage]] = {}  # of the blocks in use
        self.spares: dict[int, list[int]] = {}  # of blocks that several hold and one may write
        self.moves = 0  # of any branch

    def open_branches(self, geometry: SessionGeometry, *, runs: bool, scattered: bool) -> list[BranchStorage]:
        """Blocks for all branches, or OutOfBlocks and nothing taken. runs and scattered: which placings will do."""
        free = self.free.copy()
        placed = place_session(free, geometry, self.block_size, runs=runs, scattered=scattered)
        if placed is None:
            needed = geometry.branches * sum(_sizes(geometry, self.block_size, run=not scattered))
            as_runs = "" if scattered else f", each branch's in one run, as the read asks for; the free are {self.free}"
            raise OutOfBlocks(
                f"a session of {geometry.branches} branches with a window of {geometry.window_frames} frames needs "
                f"{needed} blocks of {self.block_size} tokens{as_runs}, and {self.free.free} of {self.num_blocks - 1} "
                "are free; close a session, or make the cache larger (num_blocks, memory_bytes)"
            )
        self.free = free
        for branch in placed:
            for block in (*branch.blocks, *branch.journal):
                self.holders[block] = [branch]
        return placed

    def fork_branches(
        self, branches: Sequence[BranchStorage], geometry: SessionGeometry, settled_tokens: int
    ) -> list[BranchStorage]:
        """Branches that hold the blocks of `branches` with them, with journals of their own; OutOfBlocks as above.

        The first settled_tokens are never written again and need no spares.
        """
        free, size = self.free.copy(), self.block_size
        journals = [free.take_any(len(branch.journal)) for branch in branches]
        indices = range(settled_tokens // size, -(-geometry.capacity_tokens // size))
        spares = [free.take_any(len(indices)) for _ in branches]
        if None in journals or None in spares:
            needed = sum(len(branch.journal) + len(indices) for branch in branches)
            raise OutOfBlocks(
                f"a fork of a window of {geometry.window_frames} frames needs {needed} blocks of {size} tokens for "
                f"what the two will write apart, and {self.free.free} of {self.num_blocks - 1} are free; close a "
                "session, or make the cache larger (num_blocks, memory_bytes)"
            )
        self.free = free
        forks = []
        for branch, journal, spare in zip(branches, journals, spares, strict=True):
            fork = BranchStorage(branch.blocks, journal, False, size)
            forks.append(fork)
            for block in journal:
                self.holders[block] = [fork]
            for block in branch.blocks:
                self.holders[block].append(fork)
            for i, block in zip(indices, spare, strict=True):
                self.spares.setdefault(branch.blocks[i], []).append(block)
        return forks

    def own(self, branch: BranchStorage, segments: Iterable[Segment]) -> None:
        """Before a branch writes: parts the blocks that others hold too. It moves, unless it is a run: then they do."""
        if not self.spares:  # then no block that may be written is shared
            return
        shared = [i for i in branch.block_indices(segments) if len(self.holders[branch.blocks[i]]) > 1]
        if not shared:
            return
        moves = [(i, branch.blocks[i], self.spares[branch.blocks[i]][-1]) for i in shared]
        sources, targets = ([(move[side] * self.block_size, self.block_size) for move in moves] for side in (1, 2))
        self.rows.copy(targets, self.rows, sources)
        placed: dict[BranchStorage, list[int]] = {}
        for i, block, spare in moves:
            leaving = [each for each in self.holders[block] if (each is branch) != branch.is_run]
            staying = [each for each in self.holders[block] if each not in leaving]
            spares = self.spares.pop(block)[:-1]
            for each, group in ((block, staying), (spare, leaving)):
                self.holders[each] = group
                part, spares = spares[: len(group) - 1], spares[len(group) - 1 :]
                if part:
                    self.spares[each] = part
            self.versions[spare] = self.versions[block]
            for each in leaving:
                placed.setdefault(each, list(each.blocks))[i] = spare
        for each, blocks in placed.items():
            each.place(blocks)
        self.moves += 1

    @staticmethod
    def place_of(branch: BranchStorage) -> int:
        """Another number once the branch has moved."""
        return branch.moves

    def close_branches(self, branches: Sequence[BranchStorage]) -> None:
        """Gives up their blocks; those that nobody else has are zeroed and free."""
        leaving = set(branches)
        given_up = list(dict.fromkeys(block for branch in branches for block in (*branch.blocks, *branch.journal)))
        unused = [block for block in given_up if leaving.issuperset(self.holders[block])]
        # First, as it may run out of memory, and must leave the blocks to their owner then.
        self.rows.zero([(start * self.block_size, n * self.block_size) for start, n in runs(sorted(unused))])
        spare = []
        for block in given_up:
            holders = [each for each in self.holders.pop(block) if each not in leaving]
            if holders:
                self.holders[block] = holders
            spares = self.spares.pop(block, [])
            needed = max(len(holders) - 1, 0)
            spare += spares[needed:]
            if spares[:needed]:
                self.spares[block] = spares[:needed]
        for block in unused:
            self.versions[block] = self._new_version()
        self.free.give(unused + spare)

    def changed(self, branch: BranchStorage, segments: Iterable[Segment]) -> None:
        """Notes that kept tokens of a branch are others now."""
        branch.changes += 1
        for i in branch.block_indices(segments):
            self.versions[branch.blocks[i]] = self._new_version()


def place_session(
    free: FreeRuns, geometry: SessionGeometry, block_size: int, *, runs: bool, scattered: bool
) -> list[BranchStorage] | None:
    """Takes the blocks of a session's branches out of `free`; None, with `free` in any state, if they are too few.

    A run has guard rows behind its tokens, so that no kernel that loads whole tiles reaches another session's rows.
    """
    placed = []
    for _ in range(geometry.branches):
        start = None
        if runs:
            in_run, in_journal = _sizes(geometry, block_size, run=True)
            start = free.take_run(in_run)
        if start is not None:
            blocks = list(range(start, start + in_run))
        elif scattered:
            alone, in_journal = _sizes(geometry, block_size, run=False)
            blocks = free.take_any(alone)
        else:
            return None
        journal = None if blocks is None else free.take_any(in_journal)
        if journal is None:
            return None
        placed.append(BranchStorage(blocks, journal, start is not None, block_size))
    return placed


def _sizes(geometry: SessionGeometry, block_size: int, *, run: bool) -> tuple[int, int]:
    return geometry.branch_blocks(block_size, run=run), geometry.journal_blocks(block_size)
