"""Q and K of self-attention, normalised over all heads together and turned by RoPE in one launch, which also writes K
and V into the rows of a KV cache, if there is one.

What a cache costs is then V's rows, read and written once; K has to be written somewhere in any case. Imports triton,
which is here with CUDA builds of torch only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


# Counts and addresses of indices change from forward to forward: a capture must not meet a kernel that is not compiled.
@triton.jit(do_not_specialize=["num_slots", "rotary_rows"], do_not_specialize_on_alignment=["slots_ptr"])
def _kernel(
    qkv_ptr,
    weight_ptr,
    rotary_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    slots_ptr,
    num_slots,
    rotary_rows,
    qkv_stride,
    stride_b,
    eps,
    INNER: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NORM: tl.constexpr,
    ROTARY: tl.constexpr,
    SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)  # 0: q, 1: k, 2: v
    channels = tl.arange(0, BLOCK)
    inside = channels < INNER
    x = tl.load(qkv_ptr + token * qkv_stride + part * INNER + channels, mask=inside, other=0)
    place = token * INNER
    if SLOTS:
        place = (token // num_slots) * stride_b + tl.load(slots_ptr + token % num_slots) * INNER
    if part == 2:
        tl.store(v_ptr + place + channels, x, mask=inside)
    else:
        y = x.to(tl.float32)
        inverse = 1.0
        if NORM:
            # One number for all of a token's q, and for its k: it may as well follow the rotation.
            inverse = tl.rsqrt(tl.sum(y * y, axis=0) / INNER + eps)
            y *= tl.load(weight_ptr + part * INNER + channels, mask=inside, other=0).to(tl.float32)
        if ROTARY:
            turns = rotary_ptr + (token % rotary_rows) * HEAD_DIM + channels % HEAD_DIM
            # Loaded as they lie, which is by 16 bytes, and seen as pairs then.
            cos, sin = tl.split(tl.reshape(tl.load(turns, mask=inside, other=0), (BLOCK // 2, 2)))
            even, odd = tl.split(tl.reshape(y, (BLOCK // 2, 2)))
            y = tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), (BLOCK,))
        y = (y * inverse).to(x.dtype)
        if part == 0:
            tl.store(q_ptr + token * INNER + channels, y, mask=inside)
        else:
            tl.store(k_ptr + place + channels, y, mask=inside)


def norm_rope(
    qkv: torch.Tensor,
    weight: torch.Tensor | None,
    rotary: torch.Tensor | None,
    eps: float,
    cache: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """qkv [total, 3, H, D] → q, k [total, H, D]. Shapes are the caller's to check.

    weight [2, H · D] normalises q and k; rotary fp32 [rows, D / 2, 2] with rows that divide total, cosines and sines,
    turns them: token i by row i % rows. Without one of them that step is left out. cache: k, v [B, rows, H, D],
    contiguous, and slots int64 [n], contiguous: token i's k and v are written at [i // n, slots[i % n]], and the k that
    is returned is the cache's.
    """
    total, _, heads, head_dim = qkv.shape
    inner = heads * head_dim
    if qkv.stride()[1:] != (inner, head_dim, 1):
        qkv = qkv.contiguous()
    weight, rotary = (x if x is None else x.contiguous() for x in (weight, rotary))
    q = torch.empty(total, heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    k, v, slots = (torch.empty_like(q), q, q) if cache is None else cache
    if total:
        block = triton.next_power_of_2(inner)
        with torch.cuda.device_of(qkv):  # triton launches on the current device, whatever the tensors are on
            _kernel[(total, 2 if cache is None else 3)](
                qkv,
                q if weight is None else weight,
                q if rotary is None else rotary,
                q,
                k,
                v,
                slots,
                1 if cache is None else len(slots),
                1 if rotary is None else len(rotary),
                qkv.stride(0),
                k.stride(0),
                eps,
                INNER=inner,
                HEAD_DIM=head_dim,
                NORM=weight is not None,
                ROTARY=rotary is not None,
                SLOTS=cache is not None,
                BLOCK=block,
                num_warps=min(16, max(1, block // 512)),
            )
    return q, k
