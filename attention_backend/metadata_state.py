"""The state that builds each layout's metadata once and hands it to all layers and steps."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch

from attention_backend.metadata import (
    ExtentKV,
    MaskedKV,
    PackedKV,
    PackedPadKV,
    PaddedKV,
    PagedKV,
    device_with_index,
    host_lens,
    host_mask,
)


class AttentionMetadataState:
    """Builds each layout's metadata once and hands the same object to all layers and steps.

    One per model. Entries are keyed by the host values of the layout (role, kind, lengths, bounds, device), never by a
    tensor's identity or address, so lengths that change give another entry and a freed tensor never gives a stale one.
    Least recently used entries leave beyond `max_entries`. Counts `hits`, `builds` and `device_copies` (one per
    build: an entry's integers travel to the device together). Holds no K/V.
    """

    def __init__(self, max_entries: int = 64) -> None:
        if max_entries < 1:
            raise ValueError(f"max_entries is {max_entries}; it must be at least 1")
        self.max_entries = max_entries
        self.hits = 0
        self.builds = 0
        self.device_copies = 0
        self._entries: OrderedDict[tuple, object] = OrderedDict()
        self._signatures: dict[str, tuple] = {}

    def dense_kv(self, role: str, batch: int, kv_len: int) -> None:
        """Notes for the signature that a role attends to all of K/V [batch, kv_len, Hkv, D]; nothing is built."""
        self._signatures[role] = ("dense", batch, kv_len)

    def padded_kv(self, role: str, kv_lens: Sequence[int], max_seqlen_kv: int, device: torch.device | str) -> PaddedKV:
        """Key lengths [B] over K/V padded to max_seqlen_kv rows."""
        lens = host_lens("kv_lens", kv_lens, max_seqlen_kv)

        def build(to_device) -> PaddedKV:
            (seqused_kv,) = to_device(lens)
            return PaddedKV(seqused_kv, max_seqlen_kv, lens)

        return self._get(role, ("padded", lens, max_seqlen_kv), device, build)

    def packed_kv(
        self,
        role: str,
        kv_lens: Sequence[int],
        device: torch.device | str,
        *,
        max_seqlen_kv: int | None = None,
        q_lens: Sequence[int] | None = None,
    ) -> PackedKV:
        """Packed K/V of lengths [B]. max_seqlen_kv defaults to the longest; q_lens packs Q too."""
        lens = host_lens("kv_lens", kv_lens, max_seqlen_kv)
        q = None if q_lens is None else _host_q_lens(q_lens, len(lens))
        bound = max(lens) if max_seqlen_kv is None else max_seqlen_kv

        def build(to_device) -> PackedKV:
            cu_kv, used, *cu_q = to_device(_starts(lens), lens, *(() if q is None else (_starts(q),)))
            packed_q = () if q is None else (cu_q[0], max(q), q)
            return PackedKV(cu_kv, bound, lens, *packed_q, seqused_kv=used)

        return self._get(role, ("packed", lens, bound, q), device, build)

    def masked_kv(
        self, role: str, mask: Sequence[Sequence[bool]] | torch.Tensor, device: torch.device | str
    ) -> MaskedKV:
        """The rows that a padding mask [B, L] of any pattern keeps, packed; max_seqlen_kv is L.

        mask: host bools, or a tensor on the CPU. ValueError for one that only a device knows.
        """
        rows = host_mask("mask", mask)
        length = len(rows[0])
        lens = tuple(map(sum, rows))

        def build(to_device) -> MaskedKV:
            kept = [b * length + i for b, row in enumerate(rows) for i, keep in enumerate(row) if keep]
            cu_kv, used, gather_index = to_device(_starts(lens), lens, kept)
            return MaskedKV(PackedKV(cu_kv, length, lens, seqused_kv=used), gather_index)

        return self._get(role, ("masked", rows), device, build)

    def packed_pad_kv(
        self,
        role: str,
        kv_lens: Sequence[int],
        padded_len: int,
        device: torch.device | str,
        *,
        formulation: str = "merge",
    ) -> PackedPadKV:
        """Packed real rows [B] and how many pad rows bring each sequence to padded_len.

        formulation: "merge" or "repeated_key", see PackedPadKV.
        """
        if formulation not in ("merge", "repeated_key"):
            raise ValueError(f"formulation is {formulation!r}; it must be 'merge' or 'repeated_key'")
        lens = host_lens("kv_lens", kv_lens, padded_len)
        pad_lens = tuple(padded_len - n for n in lens)
        repeats_to = padded_len if formulation == "repeated_key" else None
        packed_lens = lens if repeats_to is None else tuple(n + (n < padded_len) for n in lens)

        def build(to_device) -> PackedPadKV:
            cu_kv, pads = to_device(_starts(packed_lens), pad_lens)
            packed = PackedKV(cu_kv, padded_len, packed_lens, last_key_repeats_to=repeats_to)
            return PackedPadKV(packed, pad_lens, pads.double().log(), formulation)

        return self._get(role, ("packed_pad", lens, padded_len, formulation), device, build)

    def paged_kv(
        self,
        role: str,
        block_tables: Sequence[Sequence[int]],
        kv_lens: Sequence[int],
        block_size: int,
        device: torch.device | str,
        *,
        max_seqlen_kv: int | None = None,
        q_lens: Sequence[int] | None = None,
    ) -> PagedKV:
        """Block tables [B][width] (rows of equal width, padded with the null block 0) and lengths [B]."""
        tables = tuple(host_lens("block_tables row", row, None) for row in block_tables)
        max_block_id = max(map(max, tables))
        if len({len(row) for row in tables}) != 1:
            raise ValueError(f"block tables have widths {[len(row) for row in tables]}; pad them to one width with 0")
        if block_size < 1:
            raise ValueError(f"block_size is {block_size}; it must be at least 1")
        capacity = len(tables[0]) * block_size
        lens = host_lens("kv_lens", kv_lens, capacity if max_seqlen_kv is None else max_seqlen_kv)
        if len(lens) != len(tables):
            raise ValueError(f"{len(tables)} block tables but {len(lens)} kv_lens; there must be one each")
        q = None if q_lens is None else _host_q_lens(q_lens, len(lens))
        bound = capacity if max_seqlen_kv is None else max_seqlen_kv

        def build(to_device) -> PagedKV:
            flat = tuple(itertools.chain.from_iterable(tables))
            table, seqused, *cu_q = to_device(flat, lens, *(() if q is None else (_starts(q),)))
            table = table.view(len(tables), -1)
            if q is None:
                return PagedKV(table, seqused, block_size, bound, kv_lens=lens, max_block_id=max_block_id)
            return PagedKV(table, seqused, block_size, bound, cu_q[0], max(q), lens, q, max_block_id)

        return self._get(role, ("paged", tables, lens, block_size, bound, q), device, build)

    def extent_kv(
        self,
        role: str,
        starts: Sequence[int],
        kv_lens: Sequence[int],
        num_rows: int,
        device: torch.device | str,
        *,
        max_seqlen_kv: int,
        q_lens: Sequence[int] | None = None,
    ) -> ExtentKV:
        """Extents of lengths [B] that begin at rows `starts` [B] of flat K/V with num_rows rows; q_lens packs Q."""
        lens = host_lens("kv_lens", kv_lens, max_seqlen_kv)
        first = host_lens("starts", starts, num_rows)
        if len(first) != len(lens):
            raise ValueError(f"{len(first)} starts but {len(lens)} kv_lens; there must be one each")
        q = None if q_lens is None else _host_q_lens(q_lens, len(lens))

        def build(to_device) -> ExtentKV:
            starts_kv, seqused, *cu_q = to_device((*first, num_rows), lens, *(() if q is None else (_starts(q),)))
            if q is None:
                return ExtentKV(starts_kv, seqused, max_seqlen_kv, starts=first, kv_lens=lens)
            return ExtentKV(starts_kv, seqused, max_seqlen_kv, cu_q[0], max(q), first, lens, q)

        return self._get(role, ("extent", first, lens, num_rows, max_seqlen_kv, q), device, build)

    def signature(self) -> tuple:
        """What a CUDA graph is keyed on: each role's current kind, shapes, bounds, formulation, never its lengths."""
        return tuple(sorted(self._signatures.items()))

    def clear(self) -> None:
        """Forgets all entries; the counters go on."""
        self._entries.clear()
        self._signatures.clear()

    def _get(self, role: str, layout: tuple, device: torch.device | str, build: Callable):
        device = device_with_index(device)
        key = (role, layout, str(device))
        entry = self._entries.get(key)
        if entry is None:
            # Entries outlive the inference_mode that may be on now, and autograd refuses tensors made in it.
            with torch.inference_mode(False):
                entry = build(lambda *rows: self._to_device(rows, device))
            self.builds += 1
            self._entries[key] = entry
            if len(self._entries) > self.max_entries:
                self._entries.popitem(last=False)
        else:
            self.hits += 1
            self._entries.move_to_end(key)
        self._signatures[role] = entry.signature()
        return entry

    def _to_device(self, rows: Sequence[Sequence[int]], device: torch.device) -> list[torch.Tensor]:
        """All int rows in one buffer and one copy, each starting at 16 bytes, as kernels load them by vectors."""
        starts, flat = [], []
        for row in rows:
            flat.extend([0] * (-len(flat) % 4))
            starts.append(len(flat))
            flat.extend(row)
        # A pinned block is not handed out again before the copy that reads it is done: the allocator records it.
        buffer = torch.tensor(flat, dtype=torch.int32, pin_memory=device.type == "cuda")
        buffer = buffer.to(device, non_blocking=True)
        self.device_copies += 1
        return [buffer[start : start + len(row)] for start, row in zip(starts, rows, strict=True)]


def _host_q_lens(q_lens: Sequence[int], batch: int) -> tuple[int, ...]:
    q = host_lens("q_lens", q_lens, None)
    if len(q) != batch:
        raise ValueError(f"{batch} kv_lens but {len(q)} q_lens; there must be one each")
    return q


def _starts(lens: Sequence[int]) -> tuple[int, ...]:
    return tuple(itertools.accumulate(lens, initial=0))
