"""What the torch operators round inference-only kernels have in common: results, fakes and registration.

Each returns (out, lse): out is contiguous and shaped like q; lse is fp32, natural log, [B, H, Sq], or [H, total_q] for
packed Q, and has no elements where return_lse is False, because an operator always returns the same number of tensors.
"""

from __future__ import annotations

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


def inference_operator(name: str, run: Callable) -> torch.library.CustomOpDef:
    """`run` as attention_backend::`name`, with a fake; q is its first argument and return_lse the last of all."""
    operator = torch.library.custom_op(f"attention_backend::{name}", run, mutates_args=())
    operator.register_fake(_shapes)
    return operator


def _shapes(q: torch.Tensor, *rest) -> tuple[torch.Tensor, torch.Tensor]:
    out = q.new_empty(q.shape)
    return out, q.new_empty(lse_shape(q), dtype=torch.float32) if rest[-1] else no_lse(q)
