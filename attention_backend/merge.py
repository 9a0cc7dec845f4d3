"""Merging attention results over disjoint sets of keys by their log-sum-exp."""

from __future__ import annotations

from itertools import groupby

import torch

from attention_backend.kernel_operators import register_operator
from attention_backend.metadata import PackedPadKV


def merge_attention(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention over the union of two disjoint sets of keys.

    out_a, out_b [B, Sq, H, D] with lse [B, H, Sq], or [total_q, H, D] with lse [H, total_q]; lse in natural log,
    fp32 (fp64 beside fp64 results). Returns (out, lse) in the same shapes; the weights are computed in the lse's dtype.
    A row without keys on one side takes the other's result; without keys on both it gives 0 and -inf.
    Raises ValueError if shapes or dtypes differ.
    """
    if out_a.shape != out_b.shape or lse_a.shape != lse_b.shape or out_a.dtype != out_b.dtype:
        raise ValueError(
            f"results to merge differ: out {tuple(out_a.shape)} {out_a.dtype} and {tuple(out_b.shape)} {out_b.dtype}, "
            f"lse {tuple(lse_a.shape)} and {tuple(lse_b.shape)}"
        )
    if (*lse_a.shape[:-2], lse_a.shape[-1], lse_a.shape[-2]) != tuple(out_a.shape[:-1]):
        raise ValueError(
            f"lse has shape {tuple(lse_a.shape)} for out of shape {tuple(out_a.shape)}; expected [..., H, S] for "
            "[..., S, H, D]"
        )
    return _interpolate(out_a, out_b, lse_a, lse_b), torch.logaddexp(lse_a, lse_b)


def merge_pad_rows(
    q: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    k_pad: torch.Tensor,
    v_pad: torch.Tensor,
    pads: PackedPadKV,
    softmax_scale: float,
) -> torch.Tensor:
    """Adds to attention over packed real rows what the pad rows left out of the packing would have added.

    All pad rows are one key and one value, so n of them act as one key whose score is scale · (q · k_pad) + log n.
    q, out [B, Sq, H, D]; lse [B, H, Sq] of `out`; k_pad, v_pad [Hkv, D]. Returns [B, Sq, H, D]; sequences without
    pads come back untouched. `out` may be overwritten if no gradients are wanted.
    """
    call = (k_pad, v_pad, pads.log_pad_lens, softmax_scale)
    # Attention saves its output for the backward pass, so what gradients go through is not overwritten.
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, out, k_pad, v_pad)):
        return merged_pad_rows(q, out, lse, *call)
    # A graph, compiled or captured, that had read pad_lens would serve one layout alone.
    # Compiling comes first: dynamo cannot trace the question whether a stream is capturing.
    one_layout = torch.compiler.is_compiling() or (out.is_cuda and torch.cuda.is_current_stream_capturing())
    if pads.pad_lens is None or one_layout:
        merge_pad_rows_(q, out, lse, *call)
        return out
    for rows in _runs_with_pads(pads.pad_lens):
        merge_pad_rows_(q[rows], out[rows], lse[rows], k_pad, v_pad, pads.log_pad_lens[rows], softmax_scale)
    return out


def merged_pad_rows(
    q: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    k_pad: torch.Tensor,
    v_pad: torch.Tensor,
    log_pad_lens: torch.Tensor,
    softmax_scale: float,
) -> torch.Tensor:
    """merge_pad_rows in plain tensor operations, several passes over the output; differentiable. Returns a new out."""
    groups = q.shape[2] // k_pad.shape[0]
    k_pad, v_pad = (x.repeat_interleave(groups, dim=0) for x in (k_pad, v_pad))
    k_pad, v_pad = k_pad.to(lse.dtype), v_pad.to(lse.dtype)  # cast while they are small
    rows = []
    # One sequence at a time: vectorised functions round by an element's place in the tensor, and a sequence's bits
    # must not depend on how many of its neighbours have pads.
    for q_b, out_b, lse_b, log_pad_len in zip(q, out, lse, log_pad_lens.to(lse.dtype), strict=True):
        score = torch.einsum("shd,hd->hs", q_b.to(lse.dtype), k_pad) * softmax_scale
        rows.append(_interpolate(out_b, v_pad.expand(out_b.shape), lse_b, score + log_pad_len))
    return torch.stack(rows)


def run_merge_pad_rows_(
    q: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    k_pad: torch.Tensor,
    v_pad: torch.Tensor,
    log_pad_lens: torch.Tensor,
    softmax_scale: float,
) -> None:
    """merge_pad_rows into `out`, without gradients: one fused pass on CUDA."""
    if out.is_cuda and lse.dtype == torch.float32:
        from attention_backend.merge_pad_rows_triton import launch

        with torch.cuda.device_of(out):  # triton launches on the current device, whatever the tensors are on
            launch(q, out, lse, k_pad, v_pad, log_pad_lens, softmax_scale)
    else:
        out.copy_(merged_pad_rows(q, out, lse, k_pad, v_pad, log_pad_lens, softmax_scale))


def no_result(*args) -> None:
    return None


merge_pad_rows_ = register_operator("merge_pad_rows_", run_merge_pad_rows_, no_result, ("out",))


def _runs_with_pads(pad_lens: tuple[int, ...]) -> list[slice]:
    """Neighbouring sequences that have pads, so that the others are not even launched for."""
    runs, first = [], 0
    for has_pads, run in groupby(pad_lens, key=bool):
        count = len(list(run))
        if has_pads:
            runs.append(slice(first, first + count))
        first += count
    return runs


def _interpolate(out_a: torch.Tensor, out_b: torch.Tensor, lse_a: torch.Tensor, lse_b: torch.Tensor) -> torch.Tensor:
    """(1 - w) a + w b with w = exp(lse_b) / (exp(lse_a) + exp(lse_b)), the share of b's keys; a where b has none."""
    # -inf minus -inf is NaN; a row without keys on either side holds zeros in both.
    share = torch.sigmoid((lse_b - lse_a).masked_fill(torch.isneginf(lse_b), -torch.inf))
    share = share.transpose(-1, -2).unsqueeze(-1)
    return torch.lerp(out_a.to(share.dtype), out_b.to(share.dtype), share).to(out_a.dtype)
