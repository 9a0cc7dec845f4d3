"""Output files: where they go, and that they are whole or absent, written under a temporary name and renamed."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def written_whole(path: str | Path) -> Iterator[Path]:
    """Gives a temporary path beside `path`, which takes its place at the end, or is removed after any exception. The
    folder is made if there is none."""
    part = part_beside(path)
    try:
        yield part
        os.replace(part, path)
    except BaseException:  # Ctrl-C included
        part.unlink(missing_ok=True)
        raise


def part_beside(path: str | Path) -> Path:
    """A temporary name beside `path`, in a folder that is made if there is none."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Short, and not made from the name, which may be as long as the system lets it.
    return path.with_name(f".{secrets.token_hex(6)}.part")


def check_writable(path: str | Path) -> None:
    """Make sure before any work that `path` can be written, in a folder that there may not be yet. Leaves nothing.

    An existing file may be there: it is replaced at the end. Raises ValueError if something that is no file is there,
    and OSError, naming the path, if nothing can be written in its folder.
    """
    path = Path(path)
    made: list[Path] = []
    try:
        for folder in reversed(path.parents):
            if not folder.exists():
                folder.mkdir()
                made.append(folder)
        if path.exists() and not path.is_file():  # a name that is too long is an OSError here
            kind = "folder" if path.is_dir() else "device"
            raise ValueError(f"{path}: is a {kind}, not a file; name a file to write")
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise type(error)(f"cannot write {path} ({error.strerror}); name another output") from error
    finally:
        for folder in reversed(made):
            with suppress(OSError):  # somebody else's file is in it by now
                folder.rmdir()


def expanded(path: str) -> Path:
    """`path` with ~ and ~user resolved. Raises ValueError where there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{path}: {error}; write the path out") from None


def report_paths(video: str | Path) -> tuple[Path, Path]:
    """Where the JSON file and the page of a video lie: clip.mp4 has clip.report.json and clip.report.html."""
    video = Path(video)
    return video.with_name(f"{video.stem}.report.json"), video.with_name(f"{video.stem}.report.html")
