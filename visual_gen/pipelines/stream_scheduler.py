"""Which streams a forward takes, and what becomes of its results."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from visual_gen.pipelines.errors import GenerationError
from visual_gen.pipelines.stream import Stream
from visual_gen.pipelines.stream_forward import StreamForward
from visual_gen.pipelines.stream_record import EngineRecord, ForwardRecord
from visual_gen.pipelines.stream_room import StreamRoom
from visual_gen.pipelines.stream_state import StreamEvent


class StreamScheduler:
    """run: the forward; batch_rows: the most rows of one. `events` are what happened since they were last taken."""

    def __init__(self, room: StreamRoom, run: StreamForward, batch_rows: int, record: EngineRecord) -> None:
        self._room, self._run, self._batch_rows, self._record = room, run, batch_rows, record
        self._started_at = time.perf_counter()
        self.forwards = 0
        self.events: list[StreamEvent] = []

    def take_events(self) -> list[StreamEvent]:
        events, self.events = self.events, []
        return events

    def note(self, event: StreamEvent) -> None:
        self.events.append(event)
        self._record.chunks += event.kind == "committed"
        self._record.failed_chunks += event.kind == "failed"

    def forward(self, streams: Sequence[Stream]) -> None:
        """One, for as many of the streams as it holds."""
        self._forward(self._group(streams))

    def chunk(self, streams: Sequence[Stream]) -> None:
        """Forwards until each of the streams has finished a chunk, or failed, and that is known."""
        goals = {stream: stream._now.chunk_index + 1 for stream in streams if stream._ready}
        left = list(goals)
        while left:
            self._forward(self._group(left))
            over = {s for s in left if s.error is not None or s.closed_because is not None}
            left = [s for s in left if s not in over and s._now.chunk_index < goals[s]]
        for stream in goals:
            stream._settle()

    def _group(self, streams: Sequence[Stream]) -> list[Stream]:
        """Of those that can go on, the ones that were not stepped for longest, as many as the batch has rows for."""
        group, rows = [], 0
        for stream in sorted((s for s in streams if s._ready or s._making), key=self._room.last_forward.__getitem__):
            if rows + len(stream._text) <= self._batch_rows:
                group.append(stream)
                rows += len(stream._text)
        return group

    @torch.no_grad()
    def _forward(self, group: list[Stream]) -> None:
        start, before = time.perf_counter(), self.forwards
        try:
            begun = [stream for stream in group if self._begun(stream)]
            group = [stream for stream in begun if stream.closed_because is None]  # making room may have closed some
            if group:
                self._launch(group, start)
        except BaseException:
            for stream in group:
                stream._recover()
            raise
        # Now that the device has work, what it said of the forwards before.
        for stream in self._room.streams:
            stream._settle(before=before + 1)

    def _begun(self, stream: Stream) -> bool:
        if stream.closed_because is not None:
            return False
        try:
            stream._begin()
        except (ValueError, GenerationError) as error:
            stream._recover()
            stream._fail(error)
            return False
        return True

    def _launch(self, group: list[Stream], start: float) -> None:
        self.forwards += 1
        flows, outputs, batch = self._run([stream._part() for stream in group])
        committing = [stream for stream in group if stream._making.commits]
        finite, done = _checks([flow for stream, flow in zip(group, flows, strict=True) if stream in committing])
        flags = dict(zip(committing, finite, strict=True))
        for stream, flow, output in zip(group, flows, outputs, strict=True):
            self._room.last_forward[stream] = self.forwards
            if stream in flags:
                stream._commit(flags[stream], done, self.forwards)
            else:
                index = stream._now.chunk_index
                stream._denoise(flow, output)
                self.note(StreamEvent(stream, "denoised", index))
        rows, now = sum(len(stream._text) for stream in group), time.perf_counter()
        self._record.add(
            ForwardRecord(
                start - self._started_at, now - start, tuple(stream.id for stream in group), rows,
                batch.num_rows - rows, sum(batch.frames), len(group) - len(flags), len(flags),
                self._room.used_blocks, batch.read,
            )
        )  # fmt: skip


def _checks(flows: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], torch.cuda.Event | None]:
    """Whether each flow is finite throughout, on its way to the host, and when it will be there."""
    if not flows:
        return [], None
    finite = torch.stack([torch.isfinite(flow).all() for flow in flows])
    if finite.device.type != "cuda":
        return list(finite), None
    host = torch.empty(finite.shape, dtype=torch.bool, pin_memory=True)
    host.copy_(finite, non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    return list(host), done
