"""The line that `visual-gen stream` shows while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from visual_gen.commands.stream_videos import StreamVideo
    from visual_gen.pipelines.stream_engine import StreamEngine


class StreamProgress:
    """On stderr: the chunk, frames per second of all videos together, blocks of the cache in use, and the time left.
    A context manager: it leaves the terminal as it was."""

    def __init__(self, chunks: int) -> None:
        self._progress = Progress(
            TextColumn("chunk {task.completed}/{task.total}"),
            BarColumn(),
            TextColumn("{task.fields[rate]:.1f} frames/s"),
            TextColumn("{task.fields[used]}/{task.fields[blocks]} blocks"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            refresh_per_second=4,
        )
        self._task = self._progress.add_task("", total=chunks, rate=0.0, used=0, blocks=0)

    def __enter__(self) -> StreamProgress:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def show(self, videos: Sequence[StreamVideo], engine: StreamEngine, seconds: float) -> None:
        going = [video for video in videos if video.record.fault is None] or videos
        self._progress.update(
            self._task,
            completed=min(len(video.record.chunk_seconds) for video in going),
            rate=sum(video.record.frames for video in videos) / seconds,
            used=engine.used_blocks,
            blocks=engine.record().num_blocks,
        )
