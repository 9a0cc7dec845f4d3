"""One video of `visual-gen stream`: its stream, its frames on their way into its file, and what is told of it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from visual_gen.pipelines.errors import GenerationError
from visual_gen.pipelines.frame_stream import FrameStream
from visual_gen.runtime.stream_report import VideoRecord
from visual_gen.runtime.video import VideoWriter

if TYPE_CHECKING:
    from visual_gen.commands.stream_request import StreamRequest
    from visual_gen.pipelines.stream_engine import StreamEngine


class StreamVideo:
    """Video `index` of a request. Frames are written as they come; whatever ends it, `finish` leaves a whole file."""

    def __init__(self, engine: StreamEngine, request: StreamRequest, index: int) -> None:
        generation = request.config.generation
        self.stream = engine.open(
            generation.prompts[index], negative_prompt=generation.negative_prompt or "", seed=generation.seeds[index]
        )
        self.record = VideoRecord(generation.prompts[index], generation.seeds[index])
        self.decode_seconds = self.write_seconds = 0.0
        self._chunks, self._recache, self._switches = request.stream.chunks, request.stream.recache, request.switches
        self._writer = VideoWriter(request.files[index], generation.fps, crf=request.config.output.crf)
        self._frames = FrameStream(engine, self.stream, engine.vae, on_frames=self._write)
        self._pictures = Spread(request.config.output.report_frames)

    @property
    def going(self) -> bool:
        return self.record.fault is None and self._frames.chunks < self._chunks

    def steer(self) -> None:
        """Switch the prompt, if the next chunk is one that begins with another."""
        chunk = self.stream.chunk_index
        if chunk in self._switches and chunk not in self.record.switches and self.stream.state == "idle":
            try:
                self.stream.switch_prompt(self._switches[chunk], recache=self._recache)
                self.record.switches[chunk] = self._switches[chunk]
            except (ValueError, GenerationError) as error:  # other videos must go on
                self._fail(f"the switch at chunk {chunk}: {error}")

    def deliver(self, since: float) -> None:
        """Decode and write what the stream has finished. since: the run's start, by perf_counter."""
        before, written = time.perf_counter(), self.write_seconds
        chunks = self._frames.pump()
        now = time.perf_counter()
        self.decode_seconds += now - before - (self.write_seconds - written)
        self.record.chunk_seconds += [now - since] * chunks
        self.record.frames = self._writer.frames
        if error := self._frames.error or self.stream.error:
            self._fail(f"chunk {len(self.record.chunk_seconds)}: {error}")
        elif not self.going:
            self.stream.close()  # its blocks are free for others

    def finish(self) -> None:
        """Make a playable file of the frames so far, if there are any."""
        before = time.perf_counter()
        try:
            if self._writer.finish():
                self.record.file, self.record.pictures = self._writer.path, self._pictures.chosen()
        except Exception as error:  # the disk is full, say: other videos must be finished
            self.record.fault = f"writing {self._writer.path} failed: {error}"
        self.write_seconds += time.perf_counter() - before

    def _fail(self, fault: str) -> None:
        self.record.fault = fault
        self.stream.close()

    def _write(self, frames: np.ndarray) -> None:
        before = time.perf_counter()
        self._writer.append(frames)
        self._pictures.add(frames)
        self.write_seconds += time.perf_counter() - before


class Spread:
    """Up to `count` frames, evenly spread over a video whose end nobody knows; of those it holds at most four times as
    many."""

    def __init__(self, count: int) -> None:
        self._count, self._every, self._seen = count, 1, 0
        self._held: list[np.ndarray] = []
        self._last: np.ndarray | None = None

    def add(self, frames: np.ndarray) -> None:
        for frame in frames:
            if self._seen % self._every == 0:
                self._held.append(frame.copy())  # not a view, which would keep the chunk
            if len(self._held) == 4 * self._count:
                self._held, self._every = self._held[::2], 2 * self._every
            self._seen += 1
        self._last = frames[-1].copy()

    def chosen(self) -> list[np.ndarray]:
        """From the first frame to the last."""
        if self._last is None:
            return []
        frames = self._held if (self._seen - 1) % self._every == 0 else [*self._held, self._last]
        wanted = np.linspace(0, len(frames) - 1, self._count).round().astype(int)
        return [frames[i] for i in dict.fromkeys(wanted.tolist())]
