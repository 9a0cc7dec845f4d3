"""Torch operators of this package: how one is registered, and what those round inference-only kernels have in common.

A kernel's operator returns (out, lse): out is contiguous and shaped like q; lse is fp32, natural log, [B, H, Sq], or
[H, total_q] for packed Q, and has no elements where return_lse is False, because an operator always returns the same
number of tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch


def out_and_lse(q: torch.Tensor, result, return_lse: bool, package: str) -> tuple[torch.Tensor, torch.Tensor]:
    """An operator's results from a kernel's: versions of `package` return out, (out, None) or (out, lse, ...)."""
    out, lse = (result[0], result[1]) if isinstance(result, tuple | list) else (result, None)
    if not return_lse:
        return out, no_lse(q)
    if lse is None:
        raise RuntimeError(f"{package} was asked for the LSE and returned none; use return_lse=False or sdpa")
    return out, lse


def no_lse(q: torch.Tensor) -> torch.Tensor:
    return q.new_empty(0, dtype=torch.float32)


def lse_shape(q: torch.Tensor) -> tuple[int, ...]:
    return (q.shape[1], q.shape[0]) if q.ndim == 3 else (q.shape[0], q.shape[2], q.shape[1])


def inference_operator(name: str, run: Callable) -> torch._ops.OpOverload:
    """`run` as attention_backend::`name`, with a fake; q is its first argument and return_lse the last of all."""
    return operator(name, run, kernel_shapes)


def kernel_shapes(q: torch.Tensor, *rest) -> tuple[torch.Tensor, torch.Tensor]:
    out = q.new_empty(q.shape)
    return out, q.new_empty(lse_shape(q), dtype=torch.float32) if rest[-1] else no_lse(q)


def operator(name: str, run: Callable, fake: Callable, mutates_args: tuple[str, ...] = ()) -> torch._ops.OpOverload:
    """`run` as attention_backend::`name` on every device, without gradients: its callers refuse tensors that want some.

    run, fake: functions that their module has under their own names; what it has there at a call is run, so that a
    module may be loaded again. Registered by hand, as torch.library.custom_op takes 25 µs of the host's for each call,
    and 115 where arguments are mutated, against 9 (torch 2.13): more than the kernels of a small forward.
    """
    if not hasattr(torch.ops.attention_backend, name):
        qualified = f"attention_backend::{name}"
        schema = torch.library.infer_schema(run, mutates_args=mutates_args)
        torch.library.define(qualified, schema, tags=torch.Tag.pt2_compliant_tag)
        torch.library.impl(qualified, "default", _by_name(run))
        torch.library.register_fake(qualified, _by_name(fake))
    return getattr(torch.ops.attention_backend, name).default


def _by_name(function: Callable) -> Callable:
    module, name = function.__module__, function.__name__

    @torch.compiler.disable
    def call(*args):
        return getattr(sys.modules[module], name)(*args)

    return call
