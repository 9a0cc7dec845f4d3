"""What a stream engine did: one entry for each forward, and totals."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

# Of the last forwards, so that a server's memory does not grow.
TIMELINE_FORWARDS = 10_000


@dataclass(frozen=True)
class ForwardRecord:
    """One forward. at_s: when it was launched, in seconds since the engine was made; seconds: what the host took.
    rows: streams' branches; pad_rows: rows that fill the bucket. used_blocks: of the cache, then."""

    at_s: float
    seconds: float
    streams: tuple[int, ...]
    rows: int
    pad_rows: int
    frames: int
    denoising: int
    committing: int
    used_blocks: int
    read: str


@dataclass
class EngineRecord:
    """Totals since the engine was made, and the last forwards. max_streams, num_blocks: what there is room for.

    read_counts: (read of the KV cache, why that one) → forwards so read; beside those in `forwards`, they are the ones
    that commit given frames or compute a window anew.
    """

    max_streams: int
    batch_rows: int
    num_blocks: int
    block_size: int
    attention: dict[str, dict[str, str]]
    read_counts: Counter[tuple[str, str]]
    forwards: int = 0
    rows: int = 0
    pad_rows: int = 0
    chunks: int = 0
    failed_chunks: int = 0
    opened: int = 0
    evicted: int = 0
    peak_blocks: int = 0
    batch_sizes: dict[int, int] = field(default_factory=dict)  # rows, pads left out → forwards
    timeline: deque[ForwardRecord] = field(default_factory=lambda: deque(maxlen=TIMELINE_FORWARDS))

    def add(self, forward: ForwardRecord) -> None:
        self.forwards += 1
        self.rows += forward.rows
        self.pad_rows += forward.pad_rows
        self.batch_sizes[forward.rows] = self.batch_sizes.get(forward.rows, 0) + 1
        self.peak_blocks = max(self.peak_blocks, forward.used_blocks)
        self.timeline.append(forward)
