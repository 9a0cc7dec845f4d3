"""FlashAttention-3's varlen and paged kernels for SM90, from whichever of their builds is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import ClassVar

from attention_backend.interface import AttentionBackend, AttentionBackendError, AttentionSpec
from attention_backend.kernel_probe import NOT_INSTALLED, device_problem, import_problem, kernel_spec_problems

INSTALL = "pip install vllm (its wheel carries the kernels), or sgl-kernel, or flash-attention's hopper/ from source"
NO_KERNEL_PATH = "this version has no kernel path for FlashAttention-3 yet, whatever is installed; use sdpa"
COMPUTE_MAJORS = (9,)
# The PyPI package fa3-fwd is not among them: it has no paged path.
MODULES = ("flash_attn_interface", "vllm_fa3._vllm_fa3_C", "sgl_kernel.flash_attn")


class PagedFlashAttention3Backend(AttentionBackend):
    """What the kernel family can do; until its kernel path is written, it is always reported as unavailable."""

    name: ClassVar[str] = "paged_flash_attn3"
    capabilities: ClassVar[frozenset[str]] = frozenset({"varlen", "padding_mask", "paged_kv", "lse", "causal"})

    @classmethod
    def unavailable_reason(cls) -> str | None:
        missing = cls._missing()
        return f"{NO_KERNEL_PATH} ({missing})" if missing else NO_KERNEL_PATH

    @classmethod
    def _missing(cls) -> str | None:
        """What would keep the kernels from running here: no build with a paged path, or no device."""
        if not _in_vllm():
            problems = {module: import_problem(module) for module in MODULES}
            if all(problems.values()):
                broken = [problem for problem in problems.values() if not problem.endswith(NOT_INSTALLED)]
                found = "; ".join(broken) or f"none of vllm, {', '.join(MODULES)} is installed"
                return f"{found}; {INSTALL}"
        return device_problem(COMPUTE_MAJORS)

    @classmethod
    def unsupported_reasons(cls, spec: AttentionSpec) -> list[str]:
        reasons = super().unsupported_reasons(spec) + kernel_spec_problems(spec, COMPUTE_MAJORS)
        if spec.head_dim not in range(8, 257, 8):
            reasons.append(f"head_dim is {spec.head_dim}; it takes 8 to 256 in steps of 8")
        return reasons

    def attend(self, q, k, v, metadata, *, causal: bool, return_lse: bool):
        raise AttentionBackendError(NO_KERNEL_PATH)


def _in_vllm() -> bool:
    """Looks for vllm's extension file: importing vllm only to ask would patch torch for the whole process."""
    try:
        spec = importlib.util.find_spec("vllm")
    except ValueError:  # a module without a spec in sys.modules
        return False
    folders = spec.submodule_search_locations if spec else None
    return any(next(Path(f).glob("vllm_flash_attn/_vllm_fa3_C*"), None) for f in folders or ())
