"""FlashAttention-3's varlen and paged kernels for SM90, from whichever of their builds is installed."""

from __future__ import annotations

from typing import ClassVar

from attention_backend import paged_flash_attn3_ops as ops
from attention_backend.interface import AttentionBackend, AttentionSpec
from attention_backend.kernel_probe import device_problem, kernel_spec_problems
from attention_backend.metadata import ExtentKV, PackedKV, PaddedKV
from attention_backend.paged_flash_attn3_builds import find_build

INSTALL = "pip install vllm (its wheel carries the kernels), or sgl-kernel, or flash-attention's hopper/ from source"
COMPUTE_MAJORS = (9,)


class PagedFlashAttention3Backend(AttentionBackend):
    """bf16 and fp16, inference only. Rows of K and V past a length must be finite: the kernel multiplies them by zero.

    That holds for padded rows, packed rows and extents up to the end of the last key tile (at most 192 rows),
    which are loaded by whole tiles. Pages are read row by row: in them, rows past a length may hold anything.
    """

    name: ClassVar[str] = "paged_flash_attn3"
    capabilities: ClassVar[frozenset[str]] = frozenset(
        {"varlen", "padding_mask", "paged_kv", "extent_kv", "lse", "causal"}
    )
    preferred_block_size: ClassVar[int] = 128

    @classmethod
    def unavailable_reason(cls) -> str | None:
        build, problem = find_build()
        if build is None:
            return f"{problem}; {INSTALL}"
        return device_problem(COMPUTE_MAJORS)

    @classmethod
    def kernels_from(cls) -> str | None:
        build, _ = find_build()
        return build and build.name

    @classmethod
    def unsupported_reasons(cls, spec: AttentionSpec) -> list[str]:
        reasons = super().unsupported_reasons(spec) + kernel_spec_problems(spec, COMPUTE_MAJORS)
        if spec.head_dim not in range(8, 257, 8):
            reasons.append(f"head_dim is {spec.head_dim}; it takes 8 to 256 in steps of 8")
        return reasons

    def attend(self, q, k, v, metadata, *, causal: bool, return_lse: bool):
        call = (self.spec.softmax_scale, causal, return_lse)
        if metadata is None:
            out, lse = ops.dense(q, k, v, *call)
        elif isinstance(metadata, PaddedKV):
            out, lse = ops.padded(q, k, v, metadata.seqused_kv, *call)
        else:
            q_side = (metadata.max_seqlen_kv, metadata.cu_seqlens_q, metadata.max_seqlen_q)
            if isinstance(metadata, PackedKV):
                out, lse = ops.packed(q, k, v, metadata.cu_seqlens_kv, None, *q_side, *call)
            elif isinstance(metadata, ExtentKV):
                out, lse = ops.packed(q, k, v, metadata.starts_kv, metadata.seqused_kv, *q_side, *call)
            else:
                out, lse = ops.paged(q, k, v, metadata.block_table, metadata.seqused_kv, *q_side, *call)
        return out, lse if return_lse else None
