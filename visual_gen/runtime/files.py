"""Output files: where they go, and that they are whole or absent, written under a temporary name and renamed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(path: str | Path) -> Iterator[Path]:
    """Gives a temporary path beside `path`, which takes its place at the end, or is removed after any exception."""
    path = Path(path)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        os.replace(part, path)
    except BaseException:  # Ctrl-C included
        part.unlink(missing_ok=True)
        raise


def check_writable(path: str | Path) -> None:
    """Make sure before any work that `path` can be written, making its folder if there is none.

    An existing file may be there: it is replaced at the end. Raises ValueError if something that is no file is there,
    and OSError, naming the path, if nothing can be written in its folder.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: is a {'folder' if path.is_dir() else 'device'}, not a file; name a file to write")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise type(error)(f"cannot write {path} ({error.strerror}); name another output") from error


def report_paths(video: str | Path) -> tuple[Path, Path]:
    """Where the JSON file and the page of a video lie: clip.mp4 has clip.report.json and clip.report.html."""
    video = Path(video)
    return video.with_name(f"{video.stem}.report.json"), video.with_name(f"{video.stem}.report.html")
