"""Torch operators of this package: how one is registered, and what those round inference-only kernels have in common.

A kernel's operator returns (out, lse): out is contiguous and shaped like q; lse is fp32, natural log, [B, H, Sq], or
[H, total_q] for packed Q, and has no elements where return_lse is False, because an operator always returns the same
number of tensors.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable

import torch

_registered: dict[str, tuple[str, str, str]] = {}  # by an operator's name: its function's module, name and schema


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


def inference_operator(name: str, run: Callable) -> Callable:
    """`run` as attention_backend::`name`, with a fake; q is its first argument and return_lse the last of all."""
    return register_operator(name, run, kernel_shapes)


def kernel_shapes(q: torch.Tensor, *rest) -> tuple[torch.Tensor, torch.Tensor]:
    out = q.new_empty(q.shape)
    return out, q.new_empty(lse_shape(q), dtype=torch.float32) if rest[-1] else no_lse(q)


def register_operator(name: str, run: Callable, fake: Callable, mutates_args: tuple[str, ...] = ()) -> Callable:
    """`run` as the operator attention_backend::`name` on every device; it records no gradients.

    run, fake: functions that their module has under their own names; what it has there at a call is run, so that a
    module may be loaded again. What run returns is new tensors. Registered by hand, as torch.library.custom_op takes 25
    µs of the host's for each call, and 115 where some of 15 arguments are mutated, against 7 (torch 2.13): more than
    the kernels of a small forward. Raises ValueError for a function that its module has not, and for another function
    or signature than the name was registered with.
    """
    for function in (run, fake):
        if getattr(sys.modules[function.__module__], function.__name__, None) is not function:
            raise ValueError(
                f"{function.__qualname__} is not what {function.__module__} has under that name: define it there"
            )
    schema = torch.library.infer_schema(run, mutates_args=mutates_args)
    own = (run.__module__, run.__name__, schema)
    known = _registered.setdefault(name, own)
    if known != own:
        raise ValueError(
            f"attention_backend::{name} is {' '.join(known)}; it cannot be {' '.join(own)} too: take another name, or, "
            "if a signature was edited, start Python anew"
        )
    if not hasattr(torch.ops.attention_backend, name):
        qualified = f"attention_backend::{name}"
        parameters = list(inspect.signature(run).parameters)
        torch.library.define(qualified, schema, tags=torch.Tag.pt2_compliant_tag)
        torch.library.impl(qualified, "default", _kernel(run, [parameters.index(each) for each in mutates_args]))
        torch.library.register_fake(qualified, _by_name(fake))
    return getattr(torch.ops.attention_backend, name).default


def _kernel(run: Callable, mutated: list[int]) -> Callable:
    run = _by_name(run)

    def without_gradients(*args):
        # Kernels write past torch, and what was saved for a backward pass must not change unseen.
        written = [args[i] for i in mutated if not args[i].is_inference()]
        if written:
            torch.autograd.graph.increment_version(written)
        if not torch.is_grad_enabled():
            return run(*args)
        with torch.no_grad():
            return run(*args)

    untraced: list[Callable] = []  # made at the first call, as that imports dynamo

    def kernel(*args):
        # In a frame that it gave up on, dynamo looks into what is called there, and would trace a kernel's own steps.
        if not untraced:
            untraced.append(torch.compiler.disable(without_gradients))
        return untraced[0](*args)

    return kernel


def _by_name(function: Callable) -> Callable:
    module, name = function.__module__, function.__name__
    return lambda *args: getattr(sys.modules[module], name)(*args)
