"""FlashAttention-4's public functions behind one torch operator for each family of calls.

torch.compile cannot trace the kernel package, so a block that is compiled fullgraph calls these. They take tensors and
plain numbers, never the host lengths of a layout, so that another layout is no other graph. All are inference-only;
kernel_operators.py says what they return.

q, k and v may be views: the package copies one only where its last stride is not 1, or where its address or another
stride is no multiple of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from attention_backend.kernel_operators import inference_operator, out_and_lse


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
    return out_and_lse(q, result, return_lse, "flash_attn.cute")


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
    seqused_k: torch.Tensor | None,
    max_seqlen_k: int,
    cu_seqlens_q: torch.Tensor | None,
    max_seqlen_q: int | None,
    last_key_repeats_to: int | None,
    softmax_scale: float,
    causal: bool,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B, Sq, H, D], or [total_q, H, D] with cu_seqlens_q, over packed k, v [total_kv, Hkv, D].

    With seqused_k [B] the keys of a sequence are that many rows from cu_seqlens_k on, wherever that is.
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
        seqused_k=seqused_k,
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
    return out_and_lse(q, result, return_lse, "flash_attn.cute")


def _operator(run: Callable) -> Callable:
    return inference_operator(run.__name__.replace("run", "flash_attn4"), run)


dense = _operator(run_dense)
padded = _operator(run_padded)
packed = _operator(run_packed)
paged = _operator(run_paged)
