"""What a run did and how long it took: the `RunRecord` that a pipeline returns, and the clock that fills it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from visual_gen.compilation import compile_seconds
from visual_gen.runtime.machine import peak_rss_bytes

STAGES = ("load", "text", "image", "compile", "denoise", "decode", "write")


@dataclass
class RunRecord:
    """One run of a pipeline, for its report.

    stage_seconds: seconds of each of STAGES; "load" is the pipeline's own loading, in the record of its first call
    alone; "compile" is what torch.compile took, which the stages and steps that it fell into leave out; "write" belongs
    to whoever writes.
    step_seconds: one number per denoising step. Device events on CUDA, the host's clock elsewhere.
    peak_memory_bytes: "cuda", the most that torch had allocated during the run; "rss", the process's peak until now.
    attention: role -> {"backend", "why"}. cross_kv_formulations: how the text's pad rows were accounted for: "padded",
    "packed", "merge" or "repeated_key"; two if the branches' forwards differ. metadata: the layout counters' growth
    during this run.
    lora_scales: transformer -> name -> scale of the LoRA files that were loaded.
    expert_steps: of a checkpoint with two transformers, which of them each step took, 0 or 1. expert_exchanges: how
    often they changed places on the device.
    checkpoint_label: what the checkpoint calls itself in recommended.json. bad_clips: of which clips decode made no
    usable video, and why. prompt_tokens, negative_prompt_tokens: real tokens of each row, the end token included.
    """

    stage_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    step_seconds: list[float] = field(default_factory=list)
    peak_memory_bytes: int = 0
    peak_memory_kind: str = "rss"
    warnings: list[str] = field(default_factory=list)
    attention: dict[str, dict[str, str]] = field(default_factory=dict)
    cross_kv: str = "padded"
    cross_kv_formulations: list[str] = field(default_factory=list)
    lora_scales: dict[str, dict[str, float]] = field(default_factory=dict)
    metadata: dict[str, int] = field(default_factory=dict)
    prompt_tokens: list[int] = field(default_factory=list)
    negative_prompt_tokens: list[int] = field(default_factory=list)
    timesteps: list[float] = field(default_factory=list)
    transformer_forwards: int = 0
    expert_steps: list[int] = field(default_factory=list)
    expert_exchanges: int = 0
    latent_shape: tuple[int, ...] = ()
    checkpoint: str = ""
    checkpoint_label: str = ""
    bad_clips: dict[int, str] = field(default_factory=dict)
    device: str = ""
    dtype: str = ""
    scheduler: str = ""
    flow_shift: float | None = None
    settings: dict[str, Any] = field(default_factory=dict)


class RunClock:
    """Times stages and denoising steps of one run on `device`, without a host sync before `finish`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_cuda = device.type == "cuda"
        self._stages: list[tuple[str, Any, Any]] = []  # name, and marks of start and end
        self._steps: list[Any] = []
        if self._on_cuda:
            torch.cuda.reset_peak_memory_stats(device)

    def _now(self) -> tuple[Any, float]:
        """A mark: the time, and the seconds of compiling until then."""
        if not self._on_cuda:
            return time.perf_counter(), compile_seconds()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event, compile_seconds()

    def _seconds(self, start: tuple[Any, float], end: tuple[Any, float]) -> float:
        """From one mark to another, without what was compiled between them."""
        seconds = start[0].elapsed_time(end[0]) / 1e3 if self._on_cuda else end[0] - start[0]
        return seconds - (end[1] - start[1])

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = self._now()
        yield
        self._stages.append((name, start, self._now()))

    def step(self) -> None:
        """Mark the start of a denoising step, which ends the one before; one more call ends the last."""
        self._steps.append(self._now())

    def finish(self, record: RunRecord) -> None:
        """Write the times and the peak memory into `record`. Waits for the device."""
        if self._on_cuda:
            torch.cuda.synchronize(self._device)
        for name, start, end in self._stages:
            record.stage_seconds[name] = self._seconds(start, end)
            record.stage_seconds["compile"] += end[1] - start[1]
        pairs = zip(self._steps, self._steps[1:], strict=False)
        record.step_seconds = [self._seconds(start, end) for start, end in pairs]
        record.peak_memory_bytes, record.peak_memory_kind = peak_memory(self._device)


def peak_memory(device: torch.device) -> tuple[int, str]:
    """(bytes, "cuda" or "rss"): torch's allocation peak on a CUDA device, else the process's peak resident size."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), "cuda"
    return peak_rss_bytes(), "rss"
