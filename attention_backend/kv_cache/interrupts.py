"""Ctrl-C finds bookkeeping done or not begun, never half done."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

P, T = ParamSpec("P"), TypeVar("T")


@contextmanager
def no_interrupt() -> Iterator[None]:
    """Holds a SIGINT back until the end, where its handler is called. Only the main thread is ever interrupted."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    held: list[tuple] = []
    signal.signal(signal.SIGINT, lambda *arguments: held.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if held:
            handler(*held[-1])


def uninterrupted(function: Callable[P, T]) -> Callable[P, T]:
    """A function that a SIGINT does not leave half-way."""

    @functools.wraps(function)
    def whole(*args: P.args, **kwargs: P.kwargs) -> T:
        with no_interrupt():
            return function(*args, **kwargs)

    return whole
