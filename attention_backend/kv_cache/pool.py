"""The blocks of a paged cache: who has which, how often each changed, and where a session branch's tokens are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from attention_backend.kv_cache.errors import OutOfBlocks
from attention_backend.kv_cache.free_runs import FreeRuns, runs
from attention_backend.kv_cache.geometry import SessionGeometry
from attention_backend.kv_cache.rows import LayerRows, Segment, TokenRows


class BranchStorage:
    """The blocks of one branch of a session; block i of `blocks` has tokens from i · block_size on.

    journal: blocks that keep what open and recent chunks overwrote. changes: counts what happened to the blocks.
    """

    def __init__(self, blocks: Sequence[int], journal: Sequence[int], is_run: bool, block_size: int) -> None:
        self.blocks, self.journal, self.is_run, self.block_size = tuple(blocks), tuple(journal), is_run, block_size
        self.changes = 0
        self._rows, self._journal_rows = (TokenRows(ids, block_size) for ids in (self.blocks, self.journal))
        self._table: tuple[int, ...] = ()

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

    All free blocks are zero. versions: how often each block's kept tokens changed, never set back, so that a block
    that was given to another session is known to be another.
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
        self.versions = [0] * num_blocks
        self.references = [0] * num_blocks
        self.free = FreeRuns(1, num_blocks - 1)

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
                self.references[block] += 1
        return placed

    def close_branches(self, branches: Sequence[BranchStorage]) -> None:
        """Gives up their blocks; those that nobody else has are zeroed and free."""
        given_up = Counter(block for branch in branches for block in (*branch.blocks, *branch.journal))
        unused = [block for block, count in given_up.items() if self.references[block] == count]
        # First, as it may run out of memory, and must leave the blocks to their owner then.
        self.rows.zero([(start * self.block_size, n * self.block_size) for start, n in runs(sorted(unused))])
        for block, count in given_up.items():
            self.references[block] -= count
        for block in unused:
            self.versions[block] += 1
        self.free.give(unused)

    def changed(self, branch: BranchStorage, segments: Iterable[Segment]) -> None:
        """Notes that kept tokens of a branch are others now."""
        branch.changes += 1
        for i in branch.block_indices(segments):
            self.versions[branch.blocks[i]] += 1


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
