"""torch.compile on this machine: whether it can run, and how long it took."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def check_compile(compile: object, device: torch.device) -> None:
    """Raise ValueError if `compile` is no bool, or True where torch.compile lacks what it needs for this device."""
    if not isinstance(compile, bool):
        raise ValueError(f"compile is {compile!r}; it must be True or False")
    if not compile:
        return
    if device.type == "cpu":
        if problem := cpu_problem():
            raise ValueError(f"compile is true, and torch.compile on a CPU {problem}, or leave compile out")
    elif importlib.util.find_spec("triton") is None:
        raise ValueError(
            "compile is true, and torch.compile on a GPU needs Triton, which is not here: install torch's CUDA build, "
            "or leave compile out"
        )


def cpu_problem() -> str | None:
    """What torch.compile lacks on a CPU, with the way out; None if nothing."""
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        return (
            f"needs a C++ compiler, but there is no {compiler!r} here: install one (apt-get install g++, say), name "
            "yours in the environment variable CXX"
        )
    torch_file = importlib.util.find_spec("torch").origin
    if any(map(str.isspace, torch_file)):  # inductor hands it to the linker as it is
        return f"cannot link a torch whose path has white space, as {torch_file} has: install it elsewhere"
    return None


class _Watch:
    """Host seconds of compilations. Those of one thread hold up the others too, so they are counted for the process."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._wanted = False
        self._since = 0.0

    def begin(self) -> None:
        """From now on; again where torch._dynamo.reset has ended it."""
        from torch._dynamo.callback import callback_handler as handler

        self._wanted = True
        if self._start not in handler.start_callbacks:
            handler.register_start_callback(self._start)
            handler.register_end_callback(self._end)

    def total(self) -> float:
        if self._wanted:
            self.begin()
        return self.seconds

    def _start(self, *_: object) -> None:
        import torch

        # What the device has yet to do is no part of it. In a capture nothing may be waited for.
        if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()
        self._since = time.perf_counter()

    def _end(self, *_: object) -> None:
        self.seconds += time.perf_counter() - self._since


_WATCH = _Watch()


def watch_compilation() -> None:
    """Count compilations from now on in `compile_seconds`."""
    _WATCH.begin()


def compile_seconds() -> float:
    """Seconds that torch.compile has taken in this process, by the host's clock, since `watch_compilation`. A device
    has done its work before they begin, so that it rests meanwhile."""
    return _WATCH.total()
