"""What a kernel must know of lengths and pages: frozen records that the caller builds and the kernel validates."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
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
        _check_lens(self, "kv_lens", q.shape[0], self.max_seqlen_kv)

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
    # int32 [B], the lengths once more, or None: FA4 takes up to 4 % less time if it need not subtract starts.
    seqused_kv: torch.Tensor | None = None

    def check(self, q: torch.Tensor, k: torch.Tensor) -> None:
        batch = _check_q(self, q, self.cu_seqlens_kv.shape[0] - 1)
        if self.last_key_repeats_to is not None and self.last_key_repeats_to < self.max_seqlen_kv:
            raise ValueError(
                f"last_key_repeats_to is {self.last_key_repeats_to}, below max_seqlen_kv {self.max_seqlen_kv}; "
                "no sequence may be longer than what its last key is repeated to"
            )
        _check_int32("cu_seqlens_kv", self.cu_seqlens_kv, (batch + 1,), q.device)
        if self.seqused_kv is not None:
            _check_int32("seqused_kv", self.seqused_kv, (batch,), q.device)
        _check_lens(self, "kv_lens", batch, self.max_seqlen_kv, max_total=k.shape[0])

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
        _check_lens(self, "kv_lens", batch, self.max_seqlen_kv)

    def signature(self) -> tuple:
        return ("paged", tuple(self.block_table.shape), self.block_size, self.max_seqlen_kv, self.max_seqlen_q)


@dataclass(frozen=True, eq=False)
class ExtentKV:
    """K/V read in place from flat k, v [rows, Hkv, D]: the keys of sequence b are rows starts_kv[b] onwards.

    Extents may lie in any order, with gaps between them, and may be shared. Kernels load K and V by tiles, so the rows
    behind an extent, up to the end of a tile, must be finite.
    """

    starts_kv: torch.Tensor  # int32 [B + 1], the first row of each extent; the last entry is the number of rows
    seqused_kv: torch.Tensor  # int32 [B], rows of each extent
    max_seqlen_kv: int  # an upper bound of the lengths, constant for a graph
    cu_seqlens_q: torch.Tensor | None = None  # int32 [B + 1]; None: Q is padded
    max_seqlen_q: int | None = None
    starts: tuple[int, ...] | None = None  # starts_kv [B] and seqused_kv on the host; None if only the device knows
    kv_lens: tuple[int, ...] | None = None
    q_lens: tuple[int, ...] | None = None

    def check(self, q: torch.Tensor, k: torch.Tensor) -> None:
        batch = _check_q(self, q, self.seqused_kv.shape[0])
        _check_int32("starts_kv", self.starts_kv, (batch + 1,), q.device)
        _check_int32("seqused_kv", self.seqused_kv, (batch,), q.device)
        _check_lens(self, "kv_lens", batch, self.max_seqlen_kv)
        if torch.compiler.is_compiling() or self.starts is None or self.kv_lens is None:
            return
        for start, used in zip(self.starts, self.kv_lens, strict=True):
            if start < 0 or start + used > k.shape[0]:
                raise ValueError(f"an extent has rows {start} to {start + used} but k, v have {k.shape[0]} rows")

    def signature(self) -> tuple:
        return ("extent", tuple(self.seqused_kv.shape), self.max_seqlen_kv, self.max_seqlen_q)


AttentionMetadata = PaddedKV | PackedKV | PagedKV | ExtentKV


@dataclass(frozen=True, eq=False)
class PackedPadKV:
    """Packed real rows plus, for each sequence, a count of identical pad rows that were left out of the packing.

    formulation "merge": `packed` has the real rows alone, and merge_pad_rows adds the pad rows' share to the result.
    "repeated_key": each sequence with pads ends in one pad row, which the kernel counts as often as there were pads.
    """

    packed: PackedKV
    pad_lens: tuple[int, ...] | None  # [B] on the host; None if only the device knows them
    log_pad_lens: torch.Tensor  # fp64 [B], natural log; -inf where a sequence has no pads
    formulation: str = "merge"

    def signature(self) -> tuple:
        return ("packed_pad", self.formulation, *self.packed.signature())


@dataclass(frozen=True, eq=False)
class MaskedKV:
    """Packed K/V of the rows that a mask [B, L] keeps, and where those rows stood."""

    packed: PackedKV
    gather_index: torch.Tensor  # int32 [total_kv], rows of the K/V before packing, viewed [B · L, Hkv, D]

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """The kept rows of x [B, L, ...], one after the other: [total_kv, ...]."""
        return x.flatten(0, 1).index_select(0, self.gather_index)

    def signature(self) -> tuple:
        return ("masked", *self.packed.signature())


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
    # Block tables have thousands of entries: good ones are told without a step of Python for each.
    if set(map(type, out)) == {int} and min(out) >= 0 and (max_len is None or max(out) <= max_len):
        return out
    for i, n in enumerate(out):
        if not isinstance(n, int) or isinstance(n, bool):
            raise ValueError(f"{name}[{i}] is {n!r}; lengths must be host ints")
        if n < 0 or (max_len is not None and n > max_len):
            limit = "at least 0" if max_len is None else f"between 0 and {max_len}"
            raise ValueError(f"{name}[{i}] is {n}; it must be {limit}")
    return out


def host_mask(
    name: str, mask: Sequence[Sequence[bool]] | torch.Tensor, shape: tuple[int, int] | None = None
) -> tuple[tuple[bool, ...], ...]:
    """The mask [B, L] (of `shape`, if given) as rows of host bools, or ValueError. True or 1 marks a row that is kept.

    A tensor on the CPU is converted; one on a device is refused, because reading it would wait for the device.
    """
    if isinstance(mask, torch.Tensor):
        if mask.device.type != "cpu":
            raise ValueError(
                f"{name} is a tensor on {mask.device}; a mask must be known on the host, so that no layer or step "
                f"waits for the device: convert it once, before the steps, with {name}.cpu(), or give lengths"
            )
        mask = mask.tolist()
    if not isinstance(mask, Sequence) or not all(isinstance(row, Sequence) for row in mask):
        raise ValueError(f"{name} is {reprlib.repr(mask)}; it must be a row of bools for each sequence, [B, L]")
    rows = tuple(map(tuple, mask))
    widths = {len(row) for row in rows}
    if len(widths) != 1 or (shape is not None and (len(rows), *widths) != shape):
        expected = "rows of one width" if shape is None else f"{shape[0]} rows of {shape[1]}"
        raise ValueError(f"{name} has {len(rows)} rows of {sorted(widths)} entries; expected {expected}")
    for b, row in enumerate(rows):
        for i, keep in enumerate(row):
            if not isinstance(keep, int) or keep not in (0, 1):
                raise ValueError(f"{name}[{b}][{i}] is {keep!r}; a mask's entries must be bools, or 0 and 1")
    return tuple(tuple(map(bool, row)) for row in rows)


def _check_int32(name: str, x: torch.Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    if x.dtype != torch.int32 or tuple(x.shape) != shape or x.device != device:
        raise ValueError(
            f"{name} is {x.dtype} {tuple(x.shape)} on {x.device}; expected torch.int32 {shape} on {device}"
        )


def _check_lens(
    metadata: AttentionMetadata, name: str, batch: int, max_len: int, max_total: int | None = None
) -> None:
    """Host lengths against their bound and the rows that they divide. Those that only a device knows are not read."""
    # A compiled graph is tied to every host value that it has looked at, and of lengths to how many there are: looked
    # up there, they would compile each layout and each batch.
    if torch.compiler.is_compiling():
        return
    lens = getattr(metadata, name)
    if lens is None:
        return
    if len(lens) != batch or max(lens, default=0) > max_len or min(lens, default=0) < 0:
        raise ValueError(f"{name} is {lens}; expected {batch} lengths between 0 and {max_len}")
    if max_total is not None and sum(lens) > max_total:
        raise ValueError(f"{name} sum to {sum(lens)} but k, v have only {max_total} rows")


def _check_q(metadata: PackedKV | PagedKV | ExtentKV, q: torch.Tensor, batch: int) -> int:
    """The batch of the call, after checking that Q's form fits the metadata's."""
    if metadata.cu_seqlens_q is None:
        if q.shape[0] != batch:
            raise ValueError(f"q has batch {q.shape[0]} but the metadata describes {batch} sequences")
        return batch
    _check_int32("cu_seqlens_q", metadata.cu_seqlens_q, (batch + 1,), q.device)
    if metadata.max_seqlen_q is None:
        raise ValueError("cu_seqlens_q is given without max_seqlen_q; give an upper bound of the query lengths")
    _check_lens(metadata, "q_lens", batch, metadata.max_seqlen_q)
    if not torch.compiler.is_compiling() and metadata.q_lens is not None and sum(metadata.q_lens) != q.shape[0]:
        raise ValueError(f"q_lens sum to {sum(metadata.q_lens)} but q has {q.shape[0]} rows")
    return batch
