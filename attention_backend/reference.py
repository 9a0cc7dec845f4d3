"""Attention in plain tensor operations, for what no fused kernel serves: bounded memory, exact LSE, gradients.

Shape letters: B batch, Sq query rows, Skv key rows, H query heads, Hkv key/value heads, G = H / Hkv, D head_dim.
"""

from __future__ import annotations

import itertools

import torch
from torch.utils.checkpoint import checkpoint

SCORE_BYTES_PER_CHUNK = 16 * 2**20  # large enough to keep matmuls busy, small beside any model


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32, or fp64 for fp64: what scores, sums and the LSE are computed in."""
    return torch.promote_types(dtype, torch.float32)


def chunked_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    softmax_scale: float,
    num_visible: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact attention that never holds more than SCORE_BYTES_PER_CHUNK of scores (one row of one head at the least).

    q [B, H, Sq, D]; k, v [B, Hkv, Skv, D]. num_visible, int [B or 1, Sq or 1]: query row i sees the keys before
    num_visible[b, i]; None: all. Keys that no row sees may hold anything but NaN or infinity in v.
    Returns out [B, H, Sq, D] in q's dtype, a [B, Sq, H, D] tensor transposed, and the LSE [B, H, Sq] in
    accumulation_dtype. Both are differentiable; chunks are recomputed in the backward pass.
    """
    batch, num_heads, q_len, head_dim = q.shape
    num_kv_heads, kv_len = k.shape[1], k.shape[2]
    dtype = accumulation_dtype(q.dtype)
    if num_visible is not None:
        num_visible = num_visible.expand(batch, q_len)
    q = q.unflatten(1, (num_kv_heads, num_heads // num_kv_heads))

    bytes_per_row = kv_len * dtype.itemsize
    if batch * num_heads * q_len * bytes_per_row <= SCORE_BYTES_PER_CHUNK:
        out, lse = _attend_chunk(q, k, v, num_visible, softmax_scale)
        out = out.permute(0, 3, 1, 2, 4).reshape(batch, q_len, num_heads, head_dim)
        return out.transpose(1, 2), lse.flatten(1, 2)

    # Made before the chunks, whose memory can then be given back: nothing that stays is allocated between them.
    out = q.new_empty(batch, q_len, num_kv_heads, q.shape[2], head_dim).permute(0, 2, 3, 1, 4)
    lse = q.new_empty(q.shape[:-1], dtype=dtype)
    rows = max(1, SCORE_BYTES_PER_CHUNK // (q.shape[2] * bytes_per_row))
    grads = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    for b, h, start in itertools.product(range(batch), range(num_kv_heads), range(0, q_len, rows)):
        head, part = (slice(b, b + 1), slice(h, h + 1)), slice(start, start + rows)
        visible = None if num_visible is None else num_visible[b : b + 1, part]
        args = (q[*head, :, part], k[head], v[head], visible, softmax_scale)
        result = checkpoint(_attend_chunk, *args, use_reentrant=False) if grads else _attend_chunk(*args)
        out[*head, :, part], lse[*head, :, part] = result
    return out.flatten(1, 2), lse.flatten(1, 2)


def _attend_chunk(q, k, v, num_visible, softmax_scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """q [b, h, G, rows, D]; k, v [b, h, Skv, D]; num_visible [b, rows] or None. Returns out and lse like q."""
    dtype = accumulation_dtype(q.dtype)
    key, value = (x.to(dtype).unsqueeze(2) for x in (k, v))
    scores = (q.to(dtype) * softmax_scale) @ key.transpose(-1, -2)
    if num_visible is not None:
        hidden = torch.arange(k.shape[2], device=q.device) >= num_visible[:, None, None, :, None]
        scores = scores.masked_fill_(hidden, -torch.inf)
    # A row that sees nothing has maximum -inf, and -inf minus -inf is NaN; against 0 all its weights are exp(-inf) = 0.
    top = scores.detach().amax(dim=-1, keepdim=True)
    top = top.masked_fill(torch.isneginf(top), 0.0)
    weights = scores.sub_(top).exp_()  # in place: the scores are what this file exists to hold few of
    total = weights.sum(dim=-1, keepdim=True)
    # Not log(0) masked afterwards: its gradient would be infinity times zero.
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    lse = (top + torch.log(total)).masked_fill(empty, -torch.inf).squeeze(-1)
    return ((weights @ value) / total).to(q.dtype), lse
