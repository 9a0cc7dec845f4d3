"""merge_pad_rows in one pass on the device: Q and the output are read once, the output is written in place.

Imports triton, which is here with CUDA builds of torch only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_ROWS = 64


# Slices that start anywhere share a variant: a capture must not meet one that eager calls have not compiled.
@triton.jit(do_not_specialize_on_alignment=["lse_ptr", "log_pad_lens_ptr"])
def _kernel(
    q_ptr,
    out_ptr,
    lse_ptr,
    k_pad_ptr,
    v_pad_ptr,
    log_pad_lens_ptr,
    softmax_scale,
    num_rows,
    group,
    q_strides_b,
    q_strides_s,
    q_strides_h,
    q_strides_d,
    out_strides_b,
    out_strides_s,
    out_strides_h,
    out_strides_d,
    lse_strides_b,
    lse_strides_h,
    lse_strides_s,
    k_strides_h,
    k_strides_d,
    v_strides_h,
    v_strides_d,
    HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    # Heads are the fastest dimension of the grid, as they are of memory: programs that run together read whole rows.
    head = tl.program_id(0)
    batch = tl.program_id(2).to(tl.int64)
    log_pad_len = tl.load(log_pad_lens_ptr + batch).to(tl.float32)
    if log_pad_len != float("-inf"):  # a sequence without pads costs no bytes
        rows = tl.program_id(1).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        dims = tl.arange(0, BLOCK_DIM)
        in_rows, in_dims = rows < num_rows, dims < HEAD_DIM
        inside = in_rows[:, None] & in_dims[None, :]
        kv_head = head // group
        k_pad = tl.load(k_pad_ptr + kv_head * k_strides_h + dims * k_strides_d, mask=in_dims, other=0.0)
        v_pad = tl.load(v_pad_ptr + kv_head * v_strides_h + dims * v_strides_d, mask=in_dims, other=0.0)
        q_at = q_ptr + batch * q_strides_b + head * q_strides_h + rows[:, None] * q_strides_s
        q = tl.load(q_at + dims[None, :] * q_strides_d, mask=inside, other=0.0)
        lse_at = lse_ptr + batch * lse_strides_b + head * lse_strides_h + rows * lse_strides_s
        lse = tl.load(lse_at, mask=in_rows, other=0.0)
        out_at = out_ptr + batch * out_strides_b + head * out_strides_h + rows[:, None] * out_strides_s
        out_at += dims[None, :] * out_strides_d
        out = tl.load(out_at, mask=inside, other=0.0).to(tl.float32)

        score = tl.sum(q.to(tl.float32) * k_pad.to(tl.float32)[None, :], axis=1) * softmax_scale
        # A row without real keys has LSE -inf: the share is sigmoid(inf) = 1.
        share = tl.sigmoid(score + log_pad_len - lse)
        out += share[:, None] * (v_pad.to(tl.float32)[None, :] - out)
        tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=inside)


def launch(
    q: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    k_pad: torch.Tensor,
    v_pad: torch.Tensor,
    log_pad_lens: torch.Tensor,
    softmax_scale: float,
) -> None:
    """q, out [B, Sq, H, D]; lse [B, H, Sq]; k_pad, v_pad [Hkv, D]; log_pad_lens [B], -inf without pads; any strides."""
    batch, num_rows, num_heads, head_dim = q.shape
    grid = (num_heads, triton.cdiv(num_rows, BLOCK_ROWS), batch)
    if 0 in grid:
        return
    # A grid's second and third dimension end at 65 535, rows and sequences of any model before it.
    _kernel[grid](
        q,
        out,
        lse,
        k_pad,
        v_pad,
        log_pad_lens,
        softmax_scale,
        num_rows,
        num_heads // k_pad.shape[0],
        *q.stride(),
        *out.stride(),
        *lse.stride(),
        *k_pad.stride(),
        *v_pad.stride(),
        HEAD_DIM=head_dim,
        BLOCK_ROWS=BLOCK_ROWS,
        BLOCK_DIM=max(16, triton.next_power_of_2(head_dim)),
        num_warps=8,
    )
