"""Finds a build of FlashAttention-3 with a paged path, and calls it by one set of argument names.

Several packages carry the same kernels behind functions that differ in names, order, defaults and returns, between
versions too. So nothing of a signature is assumed: it is read (from a Python function, or from an operator's schema),
arguments go by name, what a build adds is left at its default, and a build that lacks what is needed is passed over
with the argument's name.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attention_backend.kernel_probe import NOT_INSTALLED, import_problem

# Our name of an argument → the builds' names, the first that a function has. Functions for caches have both k_cache
# and k, and k are then new rows to append.
ALIASES = {
    "k": ("k_cache", "k"),
    "v": ("v_cache", "v"),
    "seqused_k": ("seqused_k", "cache_seqlens"),
    "page_table": ("page_table", "block_table"),
    "causal": ("is_causal", "causal"),
    "return_lse": ("return_softmax_lse", "return_attn_probs"),
}
VLLM_NAMESPACE = "_vllm_fa3_C"  # of the operators that vLLM's extension registers, wherever its file lies
COMMON = ("q", "k", "v", "softmax_scale", "causal")
DENSE = (*COMMON, "num_splits")
VARLEN = (*COMMON, "num_splits", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "seqused_k")
CACHE = (*COMMON, "num_splits", "cu_seqlens_q", "max_seqlen_q", "seqused_k", "page_table")
# Given wherever a function has them: num_splits 0 (auto) would make a sequence's result depend on who shares its batch.
PINNED = {"num_splits": 1, "window_size": (-1, -1), "window_size_left": -1, "window_size_right": -1}
# Given only where a function has no default.
NEUTRAL = {
    "softcap": 0.0,
    "attention_chunk": 0,
    "is_rotary_interleaved": True,
    "rotary_interleaved": True,
    "sm_margin": 0,
    "cp_world_size": 1,
    "cp_rank": 0,
}


@dataclass(frozen=True)
class Argument:
    name: str
    required: bool
    nullable: bool  # None means that it is not used


class BuildError(Exception):
    """A build lacks what is needed of it; the message names it."""


class KernelFunction:
    """One function of a build, called by our argument names. `result` is whatever the build returns."""

    def __init__(self, function: Callable, label: str, needed: tuple[str, ...]) -> None:
        arguments = signature_of(function)
        known = {a.name for a in arguments}
        self._function, self._names = function, {}
        for ours in (*needed, "max_seqlen_k", "return_lse"):
            aliases = ALIASES.get(ours, (ours,))
            theirs = next((name for name in aliases if name in known), None)
            if theirs is not None:
                self._names[ours] = theirs
            elif ours in needed:
                raise BuildError(f"{label} has no argument {' or '.join(aliases)}")
        self._always: dict[str, Any] = {}
        for a in arguments:
            if a.name in PINNED:
                self._always[a.name] = PINNED[a.name]
            elif a.required and a.name in NEUTRAL:
                self._always[a.name] = NEUTRAL[a.name]
            elif a.required and (a.nullable or a.name in self._names.values()):
                self._always[a.name] = None  # unless the call gives it
            elif a.required:
                raise BuildError(f"{label} asks for an argument {a.name}, which is not known")

    def takes(self, name: str) -> bool:
        return name in self._names

    def __call__(self, *, return_lse: bool, **given) -> Any:
        if self.takes("return_lse"):
            given["return_lse"] = return_lse
        arguments = {self._names[ours]: value for ours, value in given.items()}
        return self._function(**(self._always | arguments))


@dataclass(frozen=True)
class Build:
    """varlen reads packed K/V, and extents; cache reads padded K/V and pages; dense is None where it is missing."""

    name: str
    varlen: KernelFunction
    cache: KernelFunction
    dense: KernelFunction | None


def signature_of(function: Callable) -> list[Argument]:
    """The named arguments: a torch operator's from its schema, a Python function's from inspect."""
    if isinstance(function, torch._ops.OpOverload):
        return [
            Argument(a.name, not a.has_default_value(), isinstance(a.type, torch.OptionalType))
            for a in function._schema.arguments
        ]
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    # Without types to read, a Python argument without a default counts as one that must be known.
    return [
        Argument(p.name, p.default is p.empty, nullable=False)
        for p in inspect.signature(function).parameters.values()
        if p.kind in named
    ]


def from_functions(module: Any, name: str) -> Build:
    """Upstream's hopper/ and sgl-kernel: public functions in a module."""

    def function(attribute: str, needed: tuple[str, ...]) -> KernelFunction:
        if not hasattr(module, attribute):
            raise BuildError(f"{name} has no function {attribute}")
        return KernelFunction(getattr(module, attribute), f"{name}.{attribute}", needed)

    try:
        dense = function("flash_attn_func", DENSE)
    except BuildError:
        dense = None  # the others can do it
    return Build(name, function("flash_attn_varlen_func", VARLEN), function("flash_attn_with_kvcache", CACHE), dense)


def from_operator(namespace: str, name: str) -> Build:
    """vLLM's extension: one operator for everything but plain dense calls, which it was not compiled for."""
    try:
        operator = getattr(torch.ops, namespace).fwd.default
    except AttributeError:
        raise BuildError(f"{name} registers no operator torch.ops.{namespace}.fwd") from None
    label = f"{name}: torch.ops.{namespace}.fwd"
    return Build(name, KernelFunction(operator, label, VARLEN), KernelFunction(operator, label, CACHE), None)


def _import(module: str) -> Any:
    problem = import_problem(module)
    if problem:
        raise BuildError(problem)
    return importlib.import_module(module)


def _from_vllm() -> Build:
    """From vllm's extension file alone: importing vllm would patch torch for the whole process."""
    try:
        spec = importlib.util.find_spec("vllm")
    except ValueError:  # a module without a spec in sys.modules
        spec = None
    folders = (spec.submodule_search_locations if spec else None) or ()
    file = next((f for folder in folders for f in Path(folder).glob("vllm_flash_attn/_vllm_fa3_C*.so")), None)
    if file is None:
        what = "vllm is here without its vllm_flash_attn/_vllm_fa3_C" if folders else f"vllm {NOT_INSTALLED}"
        raise BuildError(what)
    try:
        torch.ops.load_library(str(file))
    except Exception as error:  # built for another torch or CUDA
        raise BuildError(f"loading vllm's {file.name} fails: {type(error).__name__}: {error}") from error
    return from_operator(VLLM_NAMESPACE, "vllm")


def _from_bare_extension() -> Build:
    _import("vllm_fa3._vllm_fa3_C")
    return from_operator(VLLM_NAMESPACE, "vllm_fa3")


# The PyPI package fa3-fwd is not among them: it has no paged path.
FINDERS: dict[str, Callable[[], Build]] = {
    "flash_attn_interface": lambda: from_functions(_import("flash_attn_interface"), "flash_attn_interface"),
    "vllm": _from_vllm,
    "vllm_fa3": _from_bare_extension,
    "sgl_kernel": lambda: from_functions(_import("sgl_kernel.flash_attn"), "sgl_kernel.flash_attn"),
}


@functools.cache
def find_build() -> tuple[Build | None, str | None]:
    """The first build that has all that is needed, or why there is none. Looked for once per process."""
    problems = []
    for find in FINDERS.values():
        try:
            return find(), None
        except BuildError as error:
            problems.append(str(error))
    broken = [problem for problem in problems if not problem.endswith(NOT_INSTALLED)]
    return None, "; ".join(broken) or f"none of {', '.join(FINDERS)} is installed"
