"""The open streams of an engine, and what happens where there is no room for another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from attention_backend.kv_cache import OutOfBlocks, PagedKVCache
from attention_backend.kv_cache.interrupts import uninterrupted
from visual_gen.pipelines.errors import EngineFull
from visual_gen.pipelines.stream import Stream
from visual_gen.pipelines.stream_options import EngineOptions
from visual_gen.pipelines.stream_record import EngineRecord
from visual_gen.pipelines.stream_text import TextSlots

T = TypeVar("T")


class StreamRoom:
    """last_forward: of each open stream, in the engine's count. pads: sessions of the cache that are no stream's."""

    def __init__(
        self, cache: PagedKVCache, texts: TextSlots, pads: Sequence, options: EngineOptions, record: EngineRecord
    ) -> None:
        self._cache, self._texts, self._pads, self._options, self._record = cache, texts, pads, options, record
        self._blocks, self._next_id = cache.free_blocks, 0
        self.last_forward: dict[Stream, int] = {}

    @property
    def streams(self) -> list[Stream]:
        return list(self.last_forward)

    @property
    def used_blocks(self) -> int:
        return self._blocks - self._cache.free_blocks

    def make(self, make: Callable[[], T], *, keep: Stream | None = None, joins: bool = False) -> T:
        """What `make` makes; where there is no room for it, the policy decides, or EngineFull is raised. keep: a stream
        not to be closed for it. joins: it is for a stream more."""
        while True:
            why = f"{len(self.last_forward)} streams are open (max_streams)"
            if not joins or len(self.last_forward) < self._options.max_streams:
                try:
                    return make()
                except OutOfBlocks as error:
                    why = str(error)
            others = [stream for stream in self.last_forward if stream is not keep]
            if self._options.policy == "refuse" or not others:
                raise EngineFull(f"no room: {why}")
            self.close(min(others, key=self.last_forward.__getitem__), "evicted to make room")
            self._record.evicted += 1

    @uninterrupted
    def add(self, make: Callable[[int], Stream], forwards: int) -> Stream:
        """The stream that `make` makes of its id."""
        stream = make(self._next_id)
        self.last_forward[stream] = forwards
        self._next_id += 1
        self._record.opened += 1
        self._record.peak_blocks = max(self._record.peak_blocks, self.used_blocks)
        return stream

    @uninterrupted
    def close(self, stream: Stream, why: str) -> None:
        stream._settle()
        del self.last_forward[stream]
        stream.closed_because, stream._making = why, None
        self._texts.give(*stream._slots)
        stream.session.close()

    @uninterrupted
    def reconcile(self) -> None:
        """After something that ended half-way: what no stream has is free."""
        ours = [stream.session for stream in self.last_forward] + list(self._pads)
        for session in [session for session in self._cache.sessions if session not in ours]:
            session.close()
        self._texts.keep([slot for stream in self.last_forward for slot in stream._slots])


def seeded(seed: int, device: torch.device | str = "cpu") -> torch.Generator:
    """On the CPU unless said otherwise, so that a seed means the same noise whatever device the model is on."""
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63:
        raise ValueError(f"seed is {seed!r}; it must be an integer from 0 to 2**63 - 1")
    return torch.Generator(device).manual_seed(seed)
