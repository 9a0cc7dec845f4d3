"""copy_rows on the device: rows of K and of V in one launch, each row read once and written once, with no copy between.

Imports triton, which is here with CUDA builds of torch only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILE = 4096  # elements of K, and of V, of one program: some loads of 16 bytes under way in each thread


# Counts and indices that start anywhere share a variant, as do copies with and without an index of the source: neither
# a capture nor the first chunk that overwrites something meets a kernel that is not compiled yet.
@triton.jit(do_not_specialize=["num_rows", "indexed"], do_not_specialize_on_alignment=["index_ptr", "source_index_ptr"])
def _kernel(
    k_ptr,
    v_ptr,
    index_ptr,
    source_k_ptr,
    source_v_ptr,
    source_index_ptr,
    num_rows,
    indexed,
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
    source_rows = tl.load(source_index_ptr + places, mask=in_rows & (indexed != 0), other=0)
    source_rows = tl.where(indexed != 0, source_rows, places.to(tl.int64))[:, None]
    elements = elements[None, :]
    k = tl.load(source_k_ptr + batch * source_k_stride_b + source_rows * source_k_stride_row + elements, mask=inside)
    v = tl.load(source_v_ptr + batch * source_v_stride_b + source_rows * source_v_stride_row + elements, mask=inside)
    to = batch * stride_b + rows * stride_row + elements
    tl.store(k_ptr + to, k, mask=inside)
    tl.store(v_ptr + to, v, mask=inside)


def launch(
    k: torch.Tensor,
    v: torch.Tensor,
    index: torch.Tensor,
    source_k: torch.Tensor,
    source_v: torch.Tensor,
    source_index: torch.Tensor | None,
) -> None:
    """k, v [B, rows, H, D] of one shape, contiguous; source_k, source_v [B, any, H, D], each row contiguous; index,
    source_index int64 [n], contiguous; without source_index the sources have n rows."""
    row_elements = k.shape[2] * k.shape[3]
    divisor = row_elements & -row_elements
    block_elements = min(1024, divisor if divisor >= 128 else triton.next_power_of_2(row_elements))
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
        index if source_index is None else source_index,
        len(index),
        int(source_index is not None),
        *k.stride()[:2],
        *source_k.stride()[:2],
        *source_v.stride()[:2],
        ROW_ELEMENTS=row_elements,
        BLOCK_ROWS=block_rows,
        BLOCK_ELEMENTS=block_elements,
        num_warps=4,
    )
