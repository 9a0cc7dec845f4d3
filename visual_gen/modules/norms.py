"""Normalisation in fp32, as Wan computes it whatever the model's dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def modulated_layer_norm(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, eps: float) -> torch.Tensor:
    """LayerNorm without parameters, then · (1 + scale) + shift, all in fp32.

    x [B, S, D]; scale, shift fp32 [B or 1, S or 1, D]. Returns x's dtype.
    """
    if x.device.type == "cpu" and scale.shape[:2] == (1, 1):
        # One vector modulates every token, so the fused kernel takes it as the affine part: one pass instead of four.
        return F.layer_norm(x, x.shape[-1:], 1 + scale[0, 0], shift[0, 0], eps)
    return torch.addcmul(shift, F.layer_norm(x.float(), x.shape[-1:], eps=eps), 1 + scale).to(x.dtype)


def layer_norm_fp32(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """LayerNorm of x [..., D] in fp32 with fp32 weight and bias [D]. Returns x's dtype."""
    return F.layer_norm(x.float(), x.shape[-1:], weight, bias, eps).to(x.dtype)


def rms_norm_fp32(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of x [..., D] over D; weight [D] or broadcastable to x. Returns fp32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
