"""QK norm and RoPE in fp64, and inputs for them."""

import torch


def inputs(dtype, tokens, heads, head_dim, norm, rotary_rows, device="cpu"):
    """qkv [tokens, 3, H, D], weight [2, H · D] or None, rotary fp32 [rotary_rows, D / 2, 2] or None."""
    gen = torch.Generator().manual_seed(tokens + heads)
    qkv = 3 * torch.randn(tokens, 3, heads, head_dim, generator=gen)
    weight = torch.rand(2, heads * head_dim, generator=gen) + 0.5
    angles = 100 * torch.rand(rotary_rows, head_dim // 2, generator=gen)
    rotary = torch.stack([angles.cos(), angles.sin()], dim=-1)
    return (
        qkv.to(device, dtype),
        weight.to(device, dtype) if norm else None,
        rotary.to(device) if rotary_rows else None,
    )


def oracle(qkv, weight, rotary, eps):
    """q, k fp64 [tokens, H, D]."""
    qk = qkv[:, :2].double()
    if weight is not None:
        flat = qk.flatten(2)
        flat = flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps) * weight.double()
        qk = flat.view_as(qk)
    if rotary is not None:
        turns = torch.view_as_complex(rotary.double()).repeat(len(qk) // len(rotary), 1)[:, None, None]
        qk = torch.view_as_real(torch.view_as_complex(qk.unflatten(-1, (-1, 2))) * turns).flatten(-2)
    return qk[:, 0], qk[:, 1]


def units(found, expected):
    """The largest difference in units of half the distance to the next number, and of a few roundings of fp32."""
    if not found.numel():
        return 0.0
    half = 0 if found.dtype == torch.float32 else torch.finfo(found.dtype).eps / 2
    allowed = half * expected.abs() + 8 * torch.finfo(torch.float32).eps * expected.abs().max()
    return float(((found.double() - expected).abs() / allowed).max())
