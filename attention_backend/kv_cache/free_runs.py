"""Which of a range of numbered places (blocks of a pool, rows of a buffer) are free, as runs of neighbours."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable


class FreeRuns:
    """Free places of range(first, first + count); runs are kept apart by at least one place in use."""

    def __init__(self, first: int, count: int) -> None:
        self._runs = [(first, count)] if count else []  # (start, length), in order of their starts
        self.free = count

    def __str__(self) -> str:
        return ", ".join(f"{start} to {start + length - 1}" for start, length in self._runs) or "none"

    def copy(self) -> FreeRuns:
        other = FreeRuns(0, 0)
        other._runs, other.free = list(self._runs), self.free
        return other

    def take_run(self, count: int) -> int | None:
        """The first place of `count` neighbours, out of the first run that is long enough; None if no run is."""
        for i, (start, length) in enumerate(self._runs):
            if length >= count:
                self._runs[i : i + 1] = [(start + count, length - count)] if length > count else []
                self.free -= count
                return start
        return None

    def take(self, start: int, count: int) -> None:
        """Places that are known to be free."""
        i = bisect.bisect(self._runs, (start, float("inf"))) - 1
        first, length = self._runs[i]
        rest = [(first, start - first), (start + count, first + length - start - count)]
        self._runs[i : i + 1] = [run for run in rest if run[1]]
        self.free -= count

    def take_any(self, count: int) -> list[int] | None:
        """Any `count` places in ascending order, out of the shortest runs, so that long ones stay; None: too few."""
        if count > self.free:
            return None
        places: list[int] = []
        for start, length in sorted(self._runs, key=lambda run: run[1]):
            part = min(length, count - len(places))
            places += range(start, start + part)
            i = self._runs.index((start, length))
            self._runs[i : i + 1] = [(start + part, length - part)] if length > part else []
            if len(places) == count:
                break
        self.free -= count
        return sorted(places)

    def give(self, places: Iterable[int]) -> None:
        """Places that were taken and are free again."""
        for start, length in runs(sorted(places)):
            self.give_run(start, length)

    def give_run(self, start: int, length: int) -> None:
        self.free += length
        i = bisect.bisect(self._runs, (start, 0))
        if i < len(self._runs) and self._runs[i][0] == start + length:
            length += self._runs.pop(i)[1]
        if i and sum(self._runs[i - 1]) == start:
            i -= 1
            start, before = self._runs.pop(i)
            length += before
        self._runs.insert(i, (start, length))


def runs(places: Iterable[int]) -> list[tuple[int, int]]:
    """(start, length) of the runs of neighbours in ascending places."""
    groups = itertools.groupby(enumerate(places), key=lambda item: item[1] - item[0])
    parts = ([place for _, place in group] for _, group in groups)
    return [(part[0], len(part)) for part in parts]
