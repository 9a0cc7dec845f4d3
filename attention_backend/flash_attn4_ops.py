"""FlashAttention-4's public functions behind one torch operator for each family of calls.

torch.compile cannot trace the kernel package, so a block that is compiled fullgraph calls these. They take tensors and
plain numbers, never the host lengths of a layout, so that another layout is no other graph. All are inference-only and
return (out, lse): out is contiguous and shaped like q; lse is fp32, natural log, [B, H, Sq], or [H, total_q] for packed
Q, and has no elements where return_lse is False, because an operator always returns the same number of tensors.

q, k and v may be views: the package copies one only where its last stride is not 1, or where its address or another
stride is no multiple of 16 bytes.
"""

from __future__ import annotations

import torch


def kernel_package():
    """The module with flash_attn_func and flash_attn_varlen_func; imported at the first call, as that takes seconds."""
    import flash_attn.cute

    return flash_attn.cute


def score_modifiers():
    """The modifiers of scores, in a module of their own because it imports the kernel package's compiler."""
    from attention_backend import flash_attn4_score_mod

    return flash_attn4_score_mod


def run_dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, causal: bool, return_lse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B, Sq, H, D] over all of k, v [B, Skv, Hkv, D]."""
    result = kernel_package().flash_attn_func(
        q, k, v, softmax_scale=softmax_scale, causal=causal, num_splits=1, return_lse=return_lse
    )
    return _out_and_lse(q, result, return_lse)


def run_padded(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seqused_k: torch.Tensor,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B, Sq, H, D] over the first seqused_k [B] rows of k, v [B, Skv, Hkv, D]."""
    return _varlen(q, k, v, softmax_scale, causal, return_lse, seqused_k=seqused_k, max_seqlen_k=max_seqlen_k)


def run_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_k: int,
    cu_seqlens_q: torch.Tensor | None,
    max_seqlen_q: int | None,
    last_key_repeats_to: int | None,
    softmax_scale: float,
    causal: bool,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B, Sq, H, D], or [total_q, H, D] with cu_seqlens_q, over packed k, v [total_kv, Hkv, D].

    Padded Q keeps its own form (no cu_seqlens_q is made up for it), which keeps the kernel's persistent scheduling.
    """
    modifier = {}
    if last_key_repeats_to is not None:
        modifier["score_mod"] = score_modifiers().repeated_last_key(last_key_repeats_to)
    return _varlen(
        q,
        k,
        v,
        softmax_scale,
        causal,
        return_lse,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_k=max_seqlen_k,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        **modifier,
    )


def run_paged(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    page_table: torch.Tensor,
    seqused_k: torch.Tensor,
    max_seqlen_k: int,
    cu_seqlens_q: torch.Tensor | None,
    max_seqlen_q: int | None,
    softmax_scale: float,
    causal: bool,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B, Sq, H, D], or [total_q, H, D], over k, v in pools [pages, page_size, Hkv, D] read through page_table."""
    return _varlen(
        q,
        k,
        v,
        softmax_scale,
        causal,
        return_lse,
        page_table=page_table,
        seqused_k=seqused_k,
        max_seqlen_k=max_seqlen_k,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
    )


def _varlen(q, k, v, softmax_scale: float, causal: bool, return_lse: bool, **options):
    # num_splits=1: the only value on SM90, and a row's result never depends on who shares its batch.
    result = kernel_package().flash_attn_varlen_func(
        q, k, v, softmax_scale=softmax_scale, causal=causal, num_splits=1, return_lse=return_lse, **options
    )
    return _out_and_lse(q, result, return_lse)


def _out_and_lse(q: torch.Tensor, result, return_lse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Package versions return out, (out, None) or (out, lse, ...)."""
    out, lse = (result[0], result[1]) if isinstance(result, tuple | list) else (result, None)
    if not return_lse:
        return out, _no_lse(q)
    if lse is None:
        raise RuntimeError("flash_attn.cute was asked for the LSE and returned none; use return_lse=False or sdpa")
    return out, lse


def _no_lse(q: torch.Tensor) -> torch.Tensor:
    return q.new_empty(0, dtype=torch.float32)


def _shapes(q: torch.Tensor, *rest) -> tuple[torch.Tensor, torch.Tensor]:
    """What each operator returns, without values; return_lse is the last argument of all."""
    out = q.new_empty(q.shape)
    if not rest[-1]:
        return out, _no_lse(q)
    lse_shape = (q.shape[1], q.shape[0]) if q.ndim == 3 else (q.shape[0], q.shape[2], q.shape[1])
    return out, q.new_empty(lse_shape, dtype=torch.float32)


def _operator(run) -> torch.library.CustomOpDef:
    name = run.__name__.replace("run", "flash_attn4")
    operator = torch.library.custom_op(f"attention_backend::{name}", run, mutates_args=())
    operator.register_fake(_shapes)
    return operator


dense = _operator(run_dense)
padded = _operator(run_padded)
packed = _operator(run_packed)
paged = _operator(run_paged)
