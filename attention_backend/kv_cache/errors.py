"""What the caches refuse. Everything here is raised before anything is written."""

from __future__ import annotations


class KVCacheError(ValueError):
    """A cache was asked for what it cannot do; the message has the value and the way out."""


class OutOfBlocks(KVCacheError):
    """Too few blocks are free for a session."""
