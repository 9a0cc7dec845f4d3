"""QK norm and RoPE of self-attention, in one pass on a device."""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch.autograd import forward_ad

from visual_gen.modules.norms import in_fp32, inverse_rms
from visual_gen.modules.rope import apply_rotary, check_rotary

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def norm_and_rope(
    qkv: torch.Tensor, norm_weight: torch.Tensor | None, rotary: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """qkv [B, S, 3, H, D] → q, k, v [B, S, H, D]: q and k normalised over all heads together by norm_weight [2, H · D],
    and turned by rotary (see apply_rotary), in fp32 and rounded once; v as it is. None leaves a step out.

    On a CUDA device with Triton one kernel, where nothing is compiled, and no gradient asked for.
    """
    v = qkv[:, :, 2]
    if rotary is not None and not torch.compiler.is_compiling():
        check_rotary(rotary, *qkv.shape[:2], qkv.shape[-1])
    if qkv.is_cuda and qkv.dtype in KERNEL_DTYPES and not torch.compiler.is_compiling() and _kernel_serves(
        qkv, norm_weight, rotary
    ):  # fmt: skip
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
    """What check_rotary passes, as fp32 [S or B · S, D / 2, 2]: a kernel takes rows of it by their number."""
    if rotary is None:
        return None
    parts = torch.view_as_real(rotary.resolve_conj()) if rotary.is_complex() else rotary
    return parts.reshape(-1, *parts.shape[-2:]).float()


def _kernel_serves(*tensors: torch.Tensor | None) -> bool:
    given = [x for x in tensors if x is not None]
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        return False
    return _has_triton() and all(forward_ad.unpack_dual(x).tangent is None for x in given)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
