"""Interleaved timing of arms, on a GPU by device events, on a CPU by the host's clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def interleaved(arms: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """The median of what each arm measures over `rounds` rounds of all of them; the first round is not counted."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds + 1):
        for name, measure in arms.items():
            times[name].append(measure())
    return {name: round(statistics.median(values[1:]), 4) for name, values in times.items()}


def milliseconds(call: Callable[[], object], device: str, *, before: Callable[[], object], calls: int = 1) -> float:
    """Of one of `calls` calls in a row. `before` is not timed: it keeps the device busy until the first is launched."""
    before()
    if device != "cuda":
        start_s = time.perf_counter()
        for _ in range(calls):
            call()
        return 1000 * (time.perf_counter() - start_s) / calls
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls


def rms_difference(out: torch.Tensor, expected: torch.Tensor) -> float:
    """RMS difference over the RMS of what is expected, row by row of the first dimension, as fp32 copies are large."""
    parts = [(a.float() - b.float()).square().sum() for a, b in zip(out, expected, strict=True)]
    norms = [b.float().square().sum() for b in expected]
    return round((sum(parts) / sum(norms)).sqrt().item(), 6)
