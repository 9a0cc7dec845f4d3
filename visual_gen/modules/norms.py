"""Normalisation and gating in fp32, as Wan computes them whatever the model's dtype."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F


def in_fp32(op: Callable[..., torch.Tensor], dtype: torch.dtype, *operands: torch.Tensor) -> torch.Tensor:
    """An elementwise op of operands of which at least one is fp32, computed in fp32 and rounded once, to dtype."""
    if dtype == torch.float32 or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return op(*(x.float() for x in operands)).to(dtype)  # out= has no gradients; what is compiled is fused anyway
    # The kernel reads every operand in its own dtype and rounds what it writes: one pass, without fp32 copies.
    shape = torch.broadcast_shapes(*(x.shape for x in operands))
    return op(*operands, out=torch.empty(shape, dtype=dtype, device=operands[0].device))


def modulated_layer_norm(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, eps: float) -> torch.Tensor:
    """LayerNorm without parameters, then · (1 + scale) + shift, all in fp32.

    x [B, S, D]; scale, shift fp32 [B or 1, S or 1, D]. Returns x's dtype.
    """
    if x.device.type == "cpu" and scale.shape[:2] == (1, 1):
        # One vector modulates every token, so the fused kernel takes it as the affine part: one pass instead of four.
        return F.layer_norm(x, x.shape[-1:], 1 + scale[0, 0], shift[0, 0], eps)
    return in_fp32(torch.addcmul, x.dtype, shift, F.layer_norm(x.float(), x.shape[-1:], eps=eps), 1 + scale)


def layer_norm_fp32(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """LayerNorm of x [..., D] in fp32 with fp32 weight and bias [D]. Returns x's dtype."""
    return F.layer_norm(x.float(), x.shape[-1:], weight, bias, eps).to(x.dtype)


def inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / sqrt(mean(x²) + eps) over the last dimension of x [..., D]: fp32 [..., 1]."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return torch.rsqrt(norm.square() / x.shape[-1] + eps)


def add_gated(x: torch.Tensor, update: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x + update · gate in fp32, in x's dtype. x, update [B, S, D]; gate fp32 [B or 1, S or 1, D]."""
    return in_fp32(torch.addcmul, x.dtype, x, update, gate)
