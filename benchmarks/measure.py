"""What the benchmarks measure with: medians of interleaved arms, and how far results are apart."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch

Call = Callable[[], torch.Tensor]
PART = 2**26  # elements that are compared at once


def save(result: dict, path: Path | None) -> None:
    """Writes what was measured so far, if a file is wanted: after every part, so that a later one costs none before."""
    if path is not None:
        path.write_text(json.dumps(result, indent=2) + "\n")


def milliseconds(
    call: Callable[[], object], *, calls: int = 1, keep_busy: bool = False, device: str = "cuda"
) -> float:
    """Of one call out of `calls` in a row, by device events, or by the host's clock for the CPU.

    keep_busy: one more call before them, so that the device does not wait for the host at the start.
    """
    if keep_busy:
        call()
    if device == "cpu":
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return 1e3 * (time.perf_counter() - start) / calls
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls


def interleaved(arms: Mapping[str, Call], rounds: int, **options) -> dict[str, float]:
    """Median milliseconds of each arm; the first round is not counted. options: those of `milliseconds`."""
    return medians({name: partial(milliseconds, call, **options) for name, call in arms.items()}, rounds)


def medians(measures: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """The median of what each arm measures over `rounds` rounds of all of them; the first round is not counted.

    Each round has an order of its own, since what ran before decides how warm a device is and how fast its clock.
    """
    values: dict[str, list[float]] = {name: [] for name in measures}
    order = random.Random(0)
    for _ in range(rounds + 1):
        for name in order.sample(list(measures), len(measures)):
            values[name].append(measures[name]())
    return {name: round(statistics.median(found[1:]), 4) for name, found in values.items()}


class Spans:
    """Milliseconds of calls by name, each between two events of the device, or by the host's clock for the CPU.

    For calls of several kinds that take turns, so that all of them meet the device as warm, and at the same clock. What
    the device waits for the host is in a span: where that is not wanted, it must be busy when calls are launched.
    """

    def __init__(self, device: str) -> None:
        self._cuda = device != "cpu"
        self._spans: dict[str, list[tuple]] = {}

    def __call__(self, name: str, call: Callable[[], object]) -> object:
        start = self._now()
        out = call()
        self._spans.setdefault(name, []).append((start, self._now()))
        return out

    def milliseconds(self) -> dict[str, list[float]]:
        """Of each call in order; waits for the device."""
        if not self._cuda:
            return {name: [1000 * (end - start) for start, end in some] for name, some in self._spans.items()}
        torch.cuda.synchronize()
        return {name: [start.elapsed_time(end) for start, end in some] for name, some in self._spans.items()}

    def _now(self):
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def relative(out: torch.Tensor, expected: torch.Tensor) -> float:
    """RMS difference over the RMS of what is expected, of the same shape.

    Part by part, as fp32 copies may be large, and in few parts, as packed rows are tens of thousands.
    """
    if out.shape != expected.shape:
        raise ValueError(f"out has shape {tuple(out.shape)} and what is expected {tuple(expected.shape)}")
    pairs = list(zip(*(x.reshape(-1).split(PART) for x in (out, expected)), strict=True))
    parts = [(a.float() - b.float()).square().sum() for a, b in pairs]
    norms = [b.float().square().sum() for _, b in pairs]
    return round((sum(parts) / sum(norms)).sqrt().item(), 6)
