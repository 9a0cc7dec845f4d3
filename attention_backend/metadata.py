"""What a kernel must know of lengths and pages, and the state that builds it once for all layers and steps."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class PaddedKV:
    """Key lengths over padded K/V [B, Skv, Hkv, D]; rows past a length are never attended to."""

    seqused_kv: torch.Tensor  # int32 [B], on the tensors' device
    max_seqlen_kv: int  # an upper bound of the lengths, at most Skv
    kv_lens: tuple[int, ...] | None = None  # the same lengths on the host; None if only the device knows them

    def check(self, q: torch.Tensor, k: torch.Tensor) -> None:
        _check_int32("seqused_kv", self.seqused_kv, (q.shape[0],), q.device)
        if k.shape[0] != q.shape[0]:
            raise ValueError(f"q has batch {q.shape[0]} and k, v have {k.shape[0]}; they must be equal")
        if self.max_seqlen_kv > k.shape[1]:
            raise ValueError(f"max_seqlen_kv is {self.max_seqlen_kv} but k, v have only {k.shape[1]} rows")
        _check_lens("kv_lens", self.kv_lens, q.shape[0], self.max_seqlen_kv)

    def signature(self) -> tuple:
        return ("padded", tuple(self.seqused_kv.shape), self.max_seqlen_kv)


@dataclass(frozen=True, eq=False)
class PackedKV:
    """K/V of all sequences packed into [total_kv, Hkv, D]; Q padded, or packed too if cu_seqlens_q is given."""

    cu_seqlens_kv: torch.Tensor  # int32 [B + 1], starts of the sequences and the end of the last
    max_seqlen_kv: int  # an upper bound of the lengths
    kv_lens: tuple[int, ...] | None  # the same lengths on the host; None if only the device knows them
    cu_seqlens_q: torch.Tensor | None = None  # int32 [B + 1]; None: Q is padded
    max_seqlen_q: int | None = None
    q_lens: tuple[int, ...] | None = None
    # The last key of a shorter sequence counts as often as brings it to this many keys; None: all keys count once.
    last_key_repeats_to: int | None = None

    def check(self, q: torch.Tensor, k: torch.Tensor) -> None:
        batch = _check_q(self, q, self.cu_seqlens_kv.shape[0] - 1)
        if self.last_key_repeats_to is not None and self.last_key_repeats_to < self.max_seqlen_kv:
            raise ValueError(
                f"last_key_repeats_to is {self.last_key_repeats_to}, below max_seqlen_kv {self.max_seqlen_kv}; "
                "no sequence may be longer than what its last key is repeated to"
            )
        _check_int32("cu_seqlens_kv", self.cu_seqlens_kv, (batch + 1,), q.device)
        _check_lens("kv_lens", self.kv_lens, batch, self.max_seqlen_kv, max_total=k.shape[0])

    def signature(self) -> tuple:
        bounds = (self.max_seqlen_kv, self.max_seqlen_q, self.last_key_repeats_to)
        return ("packed", tuple(self.cu_seqlens_kv.shape), *bounds)


@dataclass(frozen=True, eq=False)
class PagedKV:
    """K/V in block pools [blocks, block_size, Hkv, D]; block i of a row's table holds its tokens from i·block_size."""

    block_table: torch.Tensor  # int32 [B, width], block ids; entries past a row's last used block are never read
    seqused_kv: torch.Tensor  # int32 [B], tokens of each row
    block_size: int  # tokens of a block
    max_seqlen_kv: int  # an upper bound of the lengths, constant for a graph
    cu_seqlens_q: torch.Tensor | None = None  # int32 [B + 1]; None: Q is padded
    max_seqlen_q: int | None = None
    kv_lens: tuple[int, ...] | None = None  # seqused_kv on the host; None if only the device knows it
    q_lens: tuple[int, ...] | None = None
    max_block_id: int | None = None  # the largest id in block_table, on the host; None if only the device knows it

    def check(self, q: torch.Tensor, k: torch.Tensor) -> None:
        batch = _check_q(self, q, self.block_table.shape[0])
        width = self.block_table.shape[-1]
        _check_int32("block_table", self.block_table, (batch, width), q.device)
        _check_int32("seqused_kv", self.seqused_kv, (batch,), q.device)
        if self.max_block_id is not None and self.max_block_id >= k.shape[0]:
            raise ValueError(f"the block table names block {self.max_block_id} of a pool of {k.shape[0]} blocks")
        if k.shape[1] != self.block_size:
            raise ValueError(f"block_size is {self.block_size} but the pools have blocks of {k.shape[1]} tokens")
        if self.max_seqlen_kv > width * self.block_size:
            raise ValueError(
                f"max_seqlen_kv is {self.max_seqlen_kv} but a block table of width {width} with blocks of "
                f"{self.block_size} tokens holds {width * self.block_size}"
            )
        _check_lens("kv_lens", self.kv_lens, batch, self.max_seqlen_kv)

    def signature(self) -> tuple:
        return ("paged", tuple(self.block_table.shape), self.block_size, self.max_seqlen_kv, self.max_seqlen_q)


AttentionMetadata = PaddedKV | PackedKV | PagedKV


@dataclass(frozen=True, eq=False)
class PackedPadKV:
    """Packed real rows plus, for each sequence, a count of identical pad rows that were left out of the packing.

    formulation "merge": `packed` has the real rows alone, and merge_pad_rows adds the pad rows' share to the result.
    "repeated_key": each sequence with pads ends in one pad row, which the kernel counts as often as there were pads.
    """

    packed: PackedKV
    pad_lens: tuple[int, ...]  # [B] on the host
    log_pad_lens: torch.Tensor  # fp64 [B], natural log; -inf where a sequence has no pads
    formulation: str = "merge"

    def signature(self) -> tuple:
        return ("packed_pad", self.formulation, *self.packed.signature())


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
            cu_kv, *cu_q = to_device(_starts(lens), *(() if q is None else (_starts(q),)))
            if q is None:
                return PackedKV(cu_kv, bound, lens)
            return PackedKV(cu_kv, bound, lens, cu_q[0], max(q), q)

        return self._get(role, ("packed", lens, bound, q), device, build)

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


def device_with_index(device: torch.device | str) -> torch.device:
    """ "cuda" as the device that it means now, so that it compares equal to the device of a tensor on it."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device


def host_lens(name: str, lens: Sequence[int], max_len: int | None) -> tuple[int, ...]:
    """The lengths as a tuple of host ints, or ValueError with the offending one."""
    if isinstance(lens, torch.Tensor):
        raise ValueError(
            f"{name} is a tensor on {lens.device}; lengths must be host ints, so that no layer or step waits for the "
            f"device: convert it once, before the steps, with {name}.tolist()"
        )
    out = tuple(lens)
    if not out:
        raise ValueError(f"{name} is empty; it needs one length for each sequence")
    for i, n in enumerate(out):
        if not isinstance(n, int) or isinstance(n, bool):
            raise ValueError(f"{name}[{i}] is {n!r}; lengths must be host ints")
        if n < 0 or (max_len is not None and n > max_len):
            limit = "at least 0" if max_len is None else f"between 0 and {max_len}"
            raise ValueError(f"{name}[{i}] is {n}; it must be {limit}")
    return out


def _host_q_lens(q_lens: Sequence[int], batch: int) -> tuple[int, ...]:
    q = host_lens("q_lens", q_lens, None)
    if len(q) != batch:
        raise ValueError(f"{batch} kv_lens but {len(q)} q_lens; there must be one each")
    return q


def _starts(lens: Sequence[int]) -> tuple[int, ...]:
    return tuple(itertools.accumulate(lens, initial=0))


def _check_int32(name: str, x: torch.Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    if x.dtype != torch.int32 or tuple(x.shape) != shape or x.device != device:
        raise ValueError(
            f"{name} is {x.dtype} {tuple(x.shape)} on {x.device}; expected torch.int32 {shape} on {device}"
        )


def _check_lens(
    name: str, lens: tuple[int, ...] | None, batch: int, max_len: int, max_total: int | None = None
) -> None:
    """Host lengths against their bound and the rows that they divide. Those that only a device knows are not read."""
    # A compiled graph is tied to every host value that it has read: lengths checked there would compile each layout.
    if lens is None or torch.compiler.is_compiling():
        return
    if len(lens) != batch or max(lens, default=0) > max_len or min(lens, default=0) < 0:
        raise ValueError(f"{name} is {lens}; expected {batch} lengths between 0 and {max_len}")
    if max_total is not None and sum(lens) > max_total:
        raise ValueError(f"{name} sum to {sum(lens)} but k, v have only {max_total} rows")


def _check_q(metadata: PackedKV | PagedKV, q: torch.Tensor, batch: int) -> int:
    """The batch of the call, after checking that Q's form fits the metadata's."""
    if metadata.cu_seqlens_q is None:
        if q.shape[0] != batch:
            raise ValueError(f"q has batch {q.shape[0]} but the metadata describes {batch} sequences")
        return batch
    _check_int32("cu_seqlens_q", metadata.cu_seqlens_q, (batch + 1,), q.device)
    if metadata.max_seqlen_q is None:
        raise ValueError("cu_seqlens_q is given without max_seqlen_q; give an upper bound of the query lengths")
    _check_lens("q_lens", metadata.q_lens, batch, metadata.max_seqlen_q)
    if metadata.q_lens is not None and not torch.compiler.is_compiling() and sum(metadata.q_lens) != q.shape[0]:
        raise ValueError(f"q_lens sum to {sum(metadata.q_lens)} but q has {q.shape[0]} rows")
    return batch
