"""FlashAttention-4 (`flash_attn.cute`) for SM90 and SM100."""

from __future__ import annotations

import os
from typing import ClassVar

import torch

from attention_backend import flash_attn4_ops as ops
from attention_backend.interface import AttentionBackend, AttentionSpec
from attention_backend.kernel_probe import device_problem, import_problem, kernel_spec_problems
from attention_backend.metadata import ExtentKV, PackedKV, PaddedKV

INSTALL = "pip install 'visual-gen[fa4]'"
COMPUTE_MAJORS = (9, 10)
CACHE_SWITCH = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"  # an environment variable that the package reads when imported


class FlashAttention4Backend(AttentionBackend):
    """bf16 and fp16, inference only. Rows of K and V past a length must be finite: the kernel multiplies them by zero.

    That holds for rows behind padded and packed sequences and extents, up to the end of the last key tile, and for
    block pools of blocks of 128, which are loaded by whole tiles; what the values are does not matter.
    """

    name: ClassVar[str] = "flash_attn4"
    capabilities: ClassVar[frozenset[str]] = frozenset(
        {"varlen", "padding_mask", "paged_kv", "extent_kv", "lse", "causal", "repeated_last_key"}
    )
    compiles_kernels: ClassVar[bool] = True

    preferred_block_size: ClassVar[int] = 128  # the key tile: the one size that is read by TMA

    @classmethod
    def unavailable_reason(cls) -> str | None:
        problem = import_problem("flash_attn.cute")
        if problem:
            return f"{problem}; {INSTALL}"
        return device_problem(COMPUTE_MAJORS)

    @classmethod
    def kernel_cache_problem(cls) -> str | None:
        if os.environ.get(CACHE_SWITCH) == "1":
            return None
        return (
            f"{cls.name} keeps compiled kernels in memory only: set {CACHE_SWITCH}=1, for this process and for those "
            "that are to find them, to keep them on disk"
        )

    @classmethod
    def unsupported_reasons(cls, spec: AttentionSpec) -> list[str]:
        reasons = super().unsupported_reasons(spec) + kernel_spec_problems(spec, COMPUTE_MAJORS)
        major = 9
        if spec.device.type == "cuda" and torch.cuda.is_available():
            major = torch.cuda.get_device_capability(spec.device)[0]
        head_dims, limit = [*range(8, 257, 8)], "8 to 256 in steps of 8"
        if major == 10:
            head_dims, limit = [*range(8, 129, 8), 256], "8 to 128 in steps of 8, or 256, on SM100"
        if spec.head_dim not in head_dims:
            reasons.append(f"head_dim is {spec.head_dim}; it takes {limit}")
        return reasons

    def attend(self, q, k, v, metadata, *, causal: bool, return_lse: bool):
        call = (self.spec.softmax_scale, causal, return_lse)
        if metadata is None:
            out, lse = ops.dense(q, k, v, *call)
        elif isinstance(metadata, PaddedKV):
            out, lse = ops.padded(q, k, v, metadata.seqused_kv, metadata.max_seqlen_kv, *call)
        else:
            q_side = (metadata.max_seqlen_kv, metadata.cu_seqlens_q, metadata.max_seqlen_q)
            if isinstance(metadata, PackedKV):
                keys = (metadata.cu_seqlens_kv, metadata.seqused_kv)
                out, lse = ops.packed(q, k, v, *keys, *q_side, metadata.last_key_repeats_to, *call)
            elif isinstance(metadata, ExtentKV):
                out, lse = ops.packed(q, k, v, metadata.starts_kv, metadata.seqused_kv, *q_side, None, *call)
            else:
                out, lse = ops.paged(q, k, v, metadata.block_table, metadata.seqused_kv, *q_side, *call)
        return out, lse if return_lse else None
