"""Rows copied on the device, each read once and written once, with no copy between: given K and V into one layer, and
from rows to rows of all layers in one launch.

Imports triton, which is here with CUDA builds of torch only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE = 4096  # elements of K, and of V, of one program: some loads of 16 bytes under way in each thread
# What rows of all layers are copied by: the widest that a row's bytes are a multiple of.
WORDS = ((8, tl.int64), (4, tl.int32), (2, tl.int16), (1, tl.int8))


# Counts and indices that start anywhere share a variant, here and below, so that no capture meets a kernel that is not
# compiled yet.
@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["index_ptr"])
def _kernel(
    k_ptr,
    v_ptr,
    index_ptr,
    source_k_ptr,
    source_v_ptr,
    num_rows,
    stride_b,
    stride_row,
    source_k_stride_b,
    source_k_stride_row,
    source_v_stride_b,
    source_v_stride_row,
    ROW_ELEMENTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_ELEMENTS: tl.constexpr,
):
    blocks_of_row: tl.constexpr = (ROW_ELEMENTS + BLOCK_ELEMENTS - 1) // BLOCK_ELEMENTS
    batch = tl.program_id(1).to(tl.int64)
    places = (tl.program_id(0) // blocks_of_row) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    elements = (tl.program_id(0) % blocks_of_row) * BLOCK_ELEMENTS + tl.arange(0, BLOCK_ELEMENTS)
    in_rows = places < num_rows
    inside = in_rows[:, None] & (elements < ROW_ELEMENTS)[None, :]
    rows = tl.load(index_ptr + places, mask=in_rows, other=0)[:, None]
    source_rows, elements = places.to(tl.int64)[:, None], elements[None, :]
    k = tl.load(source_k_ptr + batch * source_k_stride_b + source_rows * source_k_stride_row + elements, mask=inside)
    v = tl.load(source_v_ptr + batch * source_v_stride_b + source_rows * source_v_stride_row + elements, mask=inside)
    to = batch * stride_b + rows * stride_row + elements
    tl.store(k_ptr + to, k, mask=inside)
    tl.store(v_ptr + to, v, mask=inside)


def _block_of_row(length: int, most: int) -> int:
    """A power of 2 that divides a row without a rest, if there is one that is large enough."""
    divisor = length & -length
    return min(most, divisor if divisor >= most // 8 else triton.next_power_of_2(length))


def write_rows(
    k: torch.Tensor, v: torch.Tensor, index: torch.Tensor, source_k: torch.Tensor, source_v: torch.Tensor
) -> None:
    """k, v [B, rows, H, D] of one shape, contiguous; source_k, source_v [B, n, H, D], each row contiguous; index int64
    [n], contiguous."""
    row_elements = k.shape[2] * k.shape[3]
    block_elements = _block_of_row(row_elements, 1024)
    block_rows = max(1, TILE // block_elements)
    grid = (triton.cdiv(len(index), block_rows) * triton.cdiv(row_elements, block_elements), len(k))
    if 0 in grid:
        return
    _kernel[grid](
        k,
        v,
        index,
        source_k,
        source_v,
        len(index),
        *k.stride()[:2],
        *source_k.stride()[:2],
        *source_v.stride()[:2],
        ROW_ELEMENTS=row_elements,
        BLOCK_ROWS=block_rows,
        BLOCK_ELEMENTS=block_elements,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["index_ptr", "source_index_ptr"])
def _layers_kernel(
    addresses_ptr,
    source_addresses_ptr,
    index_ptr,
    source_index_ptr,
    num_rows,
    WORD: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
):
    blocks_of_row: tl.constexpr = (ROW_WORDS + BLOCK_WORDS - 1) // BLOCK_WORDS
    to = tl.load(addresses_ptr + tl.program_id(1)).to(tl.pointer_type(WORD))
    source = tl.load(source_addresses_ptr + tl.program_id(1)).to(tl.pointer_type(WORD))
    places = (tl.program_id(0) // blocks_of_row) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    words = (tl.program_id(0) % blocks_of_row) * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)
    in_rows = places < num_rows
    inside = in_rows[:, None] & (words < ROW_WORDS)[None, :]
    rows = tl.load(index_ptr + places, mask=in_rows, other=0)[:, None]
    source_rows = tl.load(source_index_ptr + places, mask=in_rows, other=0)[:, None]
    values = tl.load(source + source_rows * ROW_WORDS + words[None, :], mask=inside)
    tl.store(to + rows * ROW_WORDS + words[None, :], values, mask=inside)


def copy_rows_of_layers(
    addresses: torch.Tensor,
    source_addresses: torch.Tensor,
    index: torch.Tensor,
    source_index: torch.Tensor,
    row_bytes: int,
) -> None:
    """In every pair of tensors, row index[i] = row source_index[i]. addresses, source_addresses: int64, of as many
    tensors whose rows of row_bytes lie one after another; index, source_index int64 [n], contiguous."""
    size, word = next((size, word) for size, word in WORDS if row_bytes % size == 0)
    row_words = row_bytes // size
    block_words = _block_of_row(row_words, 256)
    block_rows = max(1, 1024 // block_words)
    grid = (triton.cdiv(len(index), block_rows) * triton.cdiv(row_words, block_words), len(addresses))
    if 0 in grid:
        return
    _layers_kernel[grid](
        addresses,
        source_addresses,
        index,
        source_index,
        len(index),
        WORD=word,
        ROW_WORDS=row_words,
        BLOCK_ROWS=block_rows,
        BLOCK_WORDS=block_words,
        num_warps=4,
    )
