"""A session in host memory: its window's K/V in the order of its tokens, and what it could roll back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from attention_backend.kv_cache.chunk import Record
from attention_backend.kv_cache.errors import KVCacheError
from attention_backend.kv_cache.geometry import SessionGeometry
from attention_backend.kv_cache.rows import LayerRows, Segment
from attention_backend.kv_cache.session import Session

if TYPE_CHECKING:
    from attention_backend.kv_cache.paged import PagedKVCache


@dataclass(frozen=True, eq=False)
class SessionSnapshot:
    """K/V [layers, 2, tokens, Hkv, D] for each branch: windows, what is visible; journals, what rollbacks put back, one
    record's tokens after another. On the CPU."""

    geometry: SessionGeometry
    frames: int
    serial: int
    records: tuple[Record, ...]
    windows: tuple[torch.Tensor, ...]
    journals: tuple[torch.Tensor, ...]

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for x in (*self.windows, *self.journals))


def take_snapshot(session: Session) -> SessionSnapshot:
    geometry, rows = session.geometry, session.cache.pool.rows
    records = tuple(session._records)
    return SessionSnapshot(
        geometry, session.frames, session._serial, records,
        tuple(_gather(rows, branch.rows(_window(geometry, session.frames))) for branch in session.branches),
        tuple(_gather(rows, _journal(geometry, branch, records)) for branch in session.branches),
    )  # fmt: skip


def restore(cache: PagedKVCache, snapshot: SessionSnapshot) -> Session:
    """Checked, and in blocks of its own; KVCacheError or OutOfBlocks with nothing taken."""
    geometry = replace(snapshot.geometry, action_capacity=cache.action_capacity)
    k = cache.pool.rows.layers[0][0]
    ours = (cache.frame_tokens, len(cache.pool.rows.layers), *k.shape[-2:], k.dtype)
    window = snapshot.windows[0]
    its = (geometry.frame_tokens, window.shape[0], *window.shape[-2:], window.dtype)
    if ours != its:
        names = "tokens a frame, layers, key/value heads, head_dim, dtype"
        raise KVCacheError(
            f"the snapshot is of ({names}) {its}, the cache of {ours}; restore it into one that was made for the same"
        )
    tokens = [geometry.visible_tokens(snapshot.frames), sum(n for _, n in _slots(geometry, snapshot.records))]
    for name, tensors, count in zip(
        ("windows", "journals"), (snapshot.windows, snapshot.journals), tokens, strict=True
    ):
        shape = (*window.shape[:2], count, *window.shape[-2:])
        found = [tuple(x.shape) for x in tensors]
        if found != [shape] * geometry.branches:
            raise KVCacheError(f"the snapshot's {name} have shapes {found}; expected {geometry.branches} of {shape}")
    cache.check_window(geometry)
    branches = cache.pool.open_branches(geometry, **cache.placing)
    for branch, window, journal in zip(branches, snapshot.windows, snapshot.journals, strict=True):
        _scatter(cache.pool.rows, branch.rows(_window(geometry, snapshot.frames)), window)
        _scatter(cache.pool.rows, _journal(geometry, branch, snapshot.records), journal)
    session = Session(
        cache, geometry, branches, frames=snapshot.frames, serial=snapshot.serial, records=snapshot.records
    )
    return cache.add(session)


def _window(geometry: SessionGeometry, frames: int) -> list[Segment]:
    tokens = geometry.visible_tokens(frames)
    return [(0, tokens)] if tokens else []


def _slots(geometry: SessionGeometry, records: Sequence[Record]) -> list[Segment]:
    """(start, tokens) in the journal of each record's content."""
    return [slot for slot in (record.journaled(geometry) for record in records) if slot[1]]


def _journal(geometry: SessionGeometry, branch, records: Sequence[Record]) -> list[Segment]:
    return [row for slot in _slots(geometry, records) for row in branch.journal_rows(*slot)]


def _gather(rows: LayerRows, segments: Sequence[Segment]) -> torch.Tensor:
    kept = rows.read(segments).cpu()
    return kept.unflatten(0, (-1, 2))


def _scatter(rows: LayerRows, segments: Sequence[Segment], kept: torch.Tensor) -> None:
    rows.write(segments, kept.flatten(0, 1).to(rows.device))
