"""FlashAttention-3's calls behind one torch operator for each family, whichever build carries the kernels.

kernel_operators.py says what they return. Padded Q goes in as packed Q with evenly spaced starts, which all builds take
for all families. A sequence without keys gives 0 and -inf.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from attention_backend.kernel_operators import inference_operator, lse_shape, no_lse, out_and_lse
from attention_backend.paged_flash_attn3_builds import Build, KernelFunction, find_build

ALIGNMENT_BYTES = 16  # of addresses and strides: the kernels load K and V by TMA

_made: dict[tuple, torch.Tensor] = {}


def kernel_build() -> Build:
    build, problem = find_build()
    if build is None:
        raise RuntimeError(f"no build of FlashAttention-3 with a paged path is here: {problem}")
    return build


def run_dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, causal: bool, return_lse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B, Sq, H, D] over all of k, v [B, Skv, Hkv, D]."""
    build, (batch, kv_len) = kernel_build(), k.shape[:2]
    if q.numel() == 0 or k.numel() == 0:
        return _no_keys(q, return_lse)
    if build.dense is None:
        lens = _kept(torch.full, (batch,), kv_len, device=q.device)
        return run_padded(q, k, v, lens, softmax_scale, causal, return_lse)
    result = build.dense(
        q=_loadable(q), k=_loadable(k), v=_loadable(v), softmax_scale=softmax_scale, causal=causal,
        return_lse=return_lse,
    )  # fmt: skip
    return out_and_lse(q, result, return_lse, build.name)


def run_padded(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seqused_k: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B, Sq, H, D] over the first seqused_k [B] rows of k, v [B, Skv, Hkv, D]."""
    # No max_seqlen_k: a build that takes it wants the number of rows of k.
    call = (softmax_scale, causal, return_lse)
    return _attend(kernel_build().cache, q, k, v, None, None, *call, seqused_k=seqused_k)


def run_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    seqused_k: torch.Tensor | None,
    max_seqlen_k: int,
    cu_seqlens_q: torch.Tensor | None,
    max_seqlen_q: int | None,
    softmax_scale: float,
    causal: bool,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B, Sq, H, D], or [total_q, H, D] with cu_seqlens_q, over k, v [rows, Hkv, D].

    Sequence b has the rows from cu_seqlens_k[b] to cu_seqlens_k[b + 1], or, with seqused_k, that many from
    cu_seqlens_k[b] onwards, in any order and with gaps.
    """
    keys = {"cu_seqlens_k": cu_seqlens_k, "seqused_k": seqused_k, "max_seqlen_k": max_seqlen_k}
    call = (softmax_scale, causal, return_lse)
    return _attend(kernel_build().varlen, q, k, v, cu_seqlens_q, max_seqlen_q, *call, **keys)


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
    """q [B, Sq, H, D], or [total_q, H, D] with cu_seqlens_q, over pools k, v [pages, page_size, Hkv, D]."""
    function = kernel_build().cache
    keys = {"page_table": page_table, "seqused_k": seqused_k}
    if function.takes("max_seqlen_k"):  # elsewhere the table's width bounds the lengths
        keys["max_seqlen_k"] = max_seqlen_k
    return _attend(function, q, k, v, cu_seqlens_q, max_seqlen_q, softmax_scale, causal, return_lse, **keys)


def _attend(
    function: KernelFunction,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    max_seqlen_q: int | None,
    softmax_scale: float,
    causal: bool,
    return_lse: bool,
    **keys,
) -> tuple[torch.Tensor, torch.Tensor]:
    # Without any row of K the builds write +inf into the LSE.
    if q.numel() == 0 or k.numel() == 0 or keys.get("max_seqlen_k") == 0:
        return _no_keys(q, return_lse)
    rows = q
    if cu_seqlens_q is None:
        batch, max_seqlen_q = q.shape[:2]
        rows = q.flatten(0, 1)
        cu_seqlens_q = _kept(torch.arange, 0, (batch + 1) * max_seqlen_q, max_seqlen_q, device=q.device)
    result = function(
        q=_loadable(rows), k=_loadable(k), v=_loadable(v), cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q,
        softmax_scale=softmax_scale, causal=causal, return_lse=return_lse, **keys,
    )  # fmt: skip
    out, lse = out_and_lse(q, result, return_lse, kernel_build().name)
    if q.ndim == 3:
        return out, lse
    if return_lse:
        lse = lse.unflatten(1, q.shape[:2]).transpose(0, 1).contiguous()
    return out.view(q.shape), lse


def _no_keys(q: torch.Tensor, return_lse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    out = q.new_zeros(q.shape)
    return out, q.new_full(lse_shape(q), -torch.inf, dtype=torch.float32) if return_lse else no_lse(q)


def _loadable(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy where the kernels could not load it."""
    *strides, last = x.stride()
    places = (x.data_ptr(), *(stride * x.element_size() for stride in strides))
    if last == 1 and all(strides) and not any(place % ALIGNMENT_BYTES for place in places):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _kept(make, *arguments, device: torch.device) -> torch.Tensor:
    """A few ints on the device, made once and kept for good, as captured graphs may hold their address."""
    key = (make, arguments, device)
    tensor = _made.get(key)
    if tensor is None:
        with torch.inference_mode(False):  # it outlives the inference_mode that may be on now
            tensor = make(*arguments, dtype=torch.int32, device=device)
        # What is made while a graph is captured has its values in replays alone.
        if not (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            _made[key] = tensor
    return tensor


def _operator(run: Callable) -> Callable:
    return inference_operator(run.__name__.replace("run", "paged_flash_attn3"), run)


dense = _operator(run_dense)
padded = _operator(run_padded)
packed = _operator(run_packed)
paged = _operator(run_paged)
