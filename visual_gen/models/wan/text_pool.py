"""Text keys and values of many prompts at fixed addresses, for rows that each read their own.

Shape letters: B rows of a TextKV, L text length, H heads, D head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attention_backend import AttentionMetadataState, PackedKV
from attention_backend.metadata import ExtentKV
from visual_gen.models.wan.config import WanConfig
from visual_gen.models.wan.text_kv import TextKV
from visual_gen.modules.attention import CrossKV

SERVED_CROSS_KV = ("padded", "packed")  # in a row of its own length no pad can be merged in


class TextPool:
    """`slots` prompts of up to text_len rows: per layer one K and one V [slots · text_len, H, D], never moved.

    A prompt is written into a slot once (CausalWanTransformer.write_text) and read in place by every forward until it
    is written over, so a session's prompt can be switched between two forwards. Holds what the model's cross_kv needs:
    "padded" rows with padding, or "packed" ones without.
    """

    def __init__(
        self,
        config: WanConfig,
        slots: int,
        text_len: int,
        *,
        cross_kv: str = "padded",
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        for name, value in (("slots", slots), ("text_len", text_len)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be an integer of at least 1")
        check_served(cross_kv)
        shape = (config.num_layers, slots * text_len, config.num_attention_heads, config.attention_head_dim)
        # All layers lie in one tensor, so that a prompt is written by a few copies whatever their number. Zeros: tiles
        # are loaded whole, so rows that no prompt has filled yet must be finite.
        self._all_layers = tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in "kv")
        self.keys, self.values = (side.unbind() for side in self._all_layers)
        self.slots, self.text_len, self.cross_kv = slots, text_len, cross_kv
        self._starts = tuple(range(0, slots * text_len, text_len))
        self._lens: list[int | None] = [None] * slots

    @classmethod
    def viewing(cls, text_kv: TextKV) -> TextPool:
        """A pool whose slots are the rows of text_kv, in place."""
        check_served(text_kv.cross_kv)
        pool = cls.__new__(cls)
        pool._all_layers = None  # layers that lie apart are read only
        pool.slots, pool.text_len, pool.cross_kv = text_kv.batch, text_kv.padded_len, text_kv.cross_kv
        pool.keys, pool.values = (
            tuple(x.reshape(-1, *x.shape[-2:]) for x in side)
            for side in zip(*((layer.k, layer.v) for layer in text_kv.text), strict=True)
        )
        lens = _row_lens(text_kv)
        pool._lens, pool._starts = list(lens), tuple(sum(lens[:i]) for i in range(len(lens)))
        return pool

    @property
    def num_bytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(x.numel() * x.element_size() for x in (*self.keys, *self.values))

    @torch.no_grad()
    def write(self, slot: int, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], repeats: int = 0) -> None:
        """Fills a slot with what the layers' project_kv gave for one prompt: keys, values [n, H, D] of each layer, the
        last row standing there `repeats` times more.

        Waits for the device once, to refuse a prompt whose K/V are not finite: a kernel's tiles reach into the next
        slot, where NaN would spoil another session. Raises ValueError, before anything is written, on that, on another
        number of layers, shape or dtype, and on a text that does not fit.
        """
        rows = len(keys[0]) if keys else 0
        found = {(len(x), *x.shape[1:], x.dtype) for x in (*keys, *values)}
        heads = (rows, *self.keys[0].shape[1:], self.keys[0].dtype)
        if (len(keys), len(values)) != (len(self.keys),) * 2 or found != {heads}:
            raise ValueError(
                f"keys and values are of {len(keys)} and {len(values)} layers, of rows, heads, head_dim and dtype "
                f"{sorted(map(str, found))}; expected {len(self.keys)} layers of {heads}"
            )
        if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 0 or (repeats and not rows):
            raise ValueError(f"repeats is {repeats!r} of {rows} rows; it must be an integer of at least 0, 0 of none")
        self.check_room(slot, rows + repeats)
        new = torch.stack([*keys, *values])
        # The largest magnitude, which takes no memory to find, is NaN or infinity if any number is. No rows have none.
        if rows and not math.isfinite(torch.linalg.vector_norm(new, torch.inf)):
            raise ValueError(f"K/V of the text for slot {slot} hold NaN or infinity: the encoder's output is damaged")
        start, length = self._starts[slot], rows + repeats
        for side, source in zip(self._all_layers, new.chunk(2), strict=True):
            side[:, start : start + rows].copy_(source)
            if repeats:
                side[:, start + rows : start + length].copy_(source[:, -1:])
        self._lens[slot] = length

    def check_room(self, slot: int, length: int) -> None:
        """ValueError unless `length` rows can be written into this slot."""
        self._check_slot(slot)
        if self._all_layers is None:
            raise ValueError("this pool shows the rows of a TextKV: write into one that new_text_pool made")
        if length > self.text_len:
            raise ValueError(f"the text has {length} rows, a slot of the pool {self.text_len}: make a larger pool")

    def rows(self, slots: Sequence[int]) -> PooledText:
        """The text of a batch whose row i reads slots[i]; a slot may serve several rows."""
        for slot in slots:
            self._check_slot(slot)
        return PooledText(self, tuple(slots))

    def extents(self, slots: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """First row and number of rows of each slot. ValueError if one holds no text yet."""
        empty = [slot for slot in slots if self._lens[slot] is None]
        if empty:
            raise ValueError(f"slots {empty} of the text pool hold no text: write a prompt there first")
        return tuple(self._starts[slot] for slot in slots), tuple(self._lens[slot] for slot in slots)

    def _check_slot(self, slot: int) -> None:
        if isinstance(slot, bool) or not isinstance(slot, int) or not 0 <= slot < self.slots:
            raise ValueError(f"slot is {slot!r}; the text pool has slots 0 to {self.slots - 1}")


@dataclass(frozen=True, eq=False)
class PooledText:
    """Which slot of a pool each row of a batch reads; lengths are looked up in each forward, so a rewritten slot counts
    at once."""

    pool: TextPool
    slots: tuple[int, ...]

    def layers(self, state: AttentionMetadataState, q_lens: Sequence[int]) -> list[CrossKV]:
        """CrossKV of all layers for rows of q_lens queries each, packed one after another; one entry of `state`."""
        keys = self.pool.keys
        starts, lens = self.pool.extents(self.slots)
        metadata: ExtentKV = state.extent_kv(
            "cross_text", starts, lens, len(keys[0]), keys[0].device, max_seqlen_kv=self.pool.text_len, q_lens=q_lens
        )
        return [CrossKV(k, v, metadata) for k, v in zip(keys, self.pool.values, strict=True)]


def pooled(text_kv: TextKV | PooledText) -> PooledText:
    """text_kv itself, or a batch that project_text made as a pool's rows, with nothing copied."""
    if isinstance(text_kv, TextKV):
        return TextPool.viewing(text_kv).rows(range(text_kv.batch))
    return text_kv


def check_served(cross_kv: str) -> None:
    """Raise ValueError for a mode of text K/V that rows of their own length cannot be read in."""
    if cross_kv not in SERVED_CROSS_KV:
        raise ValueError(
            f"attention.cross_kv is {cross_kv!r}, which the causal model does not serve: use 'padded', which gives the "
            "same video"
        )


def _row_lens(text_kv: TextKV) -> tuple[int, ...]:
    """Rows of K/V that each row of text_kv has, in their order."""
    metadata = text_kv.text[0].metadata
    return metadata.kv_lens if isinstance(metadata, PackedKV) else (text_kv.padded_len,) * text_kv.batch
