"""QK norm and RoPE of self-attention, in one pass on a device."""

from __future__ import annotations

import torch

from visual_gen.modules.norms import in_fp32, inverse_rms
from visual_gen.modules.rope import apply_rotary

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def norm_and_rope(
    qkv: torch.Tensor, norm_weight: torch.Tensor | None, rotary: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """qkv [B, S, 3, H, D] → q, k, v [B, S, H, D]: q and k normalised over all heads together by norm_weight [2, H · D],
    and turned by rotary (see apply_rotary), in fp32 and rounded once; v as it is. None leaves a step out."""
    v = qkv[:, :, 2]
    # What is compiled is fused with what stands round it, and the kernel has no gradients.
    trained = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (qkv, norm_weight))
    if qkv.is_cuda and qkv.dtype in KERNEL_DTYPES and not (trained or torch.compiler.is_compiling()):
        from attention_backend.qk_norm_rope_triton import norm_rope

        q, k = norm_rope(qkv.flatten(0, 1), norm_weight, rotary_rows(rotary), eps)
        return q.view(v.shape), k.view(v.shape), v
    qk, inverse = qkv[:, :, :2].flatten(3), None
    if norm_weight is not None:
        inverse = inverse_rms(qk, eps).unsqueeze(-1)
        qk = qk * norm_weight.float()
    qk = qk.unflatten(-1, qkv.shape[3:])
    if rotary is not None:
        qk = apply_rotary(qk.float(), rotary)
    # One number for each token's q and each k, so it may as well follow the rotation, in the pass that rounds.
    qk = qk.to(qkv.dtype) if inverse is None else in_fp32(torch.mul, qkv.dtype, qk, inverse)
    q, k = qk.unbind(2)
    return q, k, v


def rotary_rows(rotary: torch.Tensor | None) -> torch.Tensor | None:
    """rotary, complex or its parts, as fp32 [rows, D / 2, 2]."""
    if rotary is None:
        return None
    parts = torch.view_as_real(rotary) if rotary.is_complex() else rotary
    return parts.reshape(-1, *parts.shape[-2:]).float()
