"""What a paged cache refuses of a backend and of a forward, and the reads that are left."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attention_backend.interface import AttentionBackend
from attention_backend.kv_cache.errors import KVCacheError
from attention_backend.kv_cache.reads import Row

READS = ("extent", "block_table", "staged")


def check_backend(
    backend: AttentionBackend, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    spec = backend.spec
    ours, its = (num_kv_heads, head_dim, dtype), (spec.num_kv_heads, spec.head_dim, spec.dtype)
    if ours != its or device.type != spec.device.type:
        raise KVCacheError(
            f"the cache is for {num_kv_heads} key/value heads of {head_dim}, {dtype} on {device}, and the backend "
            f"{backend.name} was selected for {its[0]} of {its[1]}, {its[2]} on {spec.device}; they must agree"
        )


def possible_reads(
    backend: AttentionBackend | type[AttentionBackend], read: str, staging_tokens: int
) -> tuple[str, ...]:
    """Reads in the order in which they are taken; KVCacheError if there is none."""
    if read not in ("auto", *READS):
        raise KVCacheError(f"read is {read!r}; it must be one of auto, {', '.join(READS)}")
    varlen = backend.supports_extent_kv() or backend.supports_varlen()
    reasons = {
        "extent": None if backend.supports_extent_kv() else f"{backend.name} reads no extents",
        "block_table": None if backend.supports_paged_kv() else f"{backend.name} reads no block tables",
        "staged": None
        if staging_tokens and varlen
        else f"staging_tokens is {staging_tokens}"
        if varlen
        else f"{backend.name} reads no packed sequences",
    }
    if read != "auto":
        if reasons[read]:
            raise KVCacheError(f"read is {read!r} but {reasons[read]}; read='auto' takes what there is")
        return (read,)
    possible = tuple(name for name, reason in reasons.items() if reason is None)
    if not possible:
        raise KVCacheError(f"no way to read a paged cache: {'; '.join(reasons.values())}; give staging_tokens")
    return possible


def check_frame_causal(rows: Sequence[Row]) -> None:
    for row in rows:
        chunk, geometry = row.chunk, row.chunk.geometry
        if row.extra_tokens:
            raise KVCacheError(f"frame_causal with {row.extra_tokens} extra tokens; they belong to no frame: give none")
        if chunk.frames > 1 and geometry.overwriting(chunk.frame_start, chunk.frames)[1]:
            raise KVCacheError(
                f"frame_causal over frames {chunk.frame_start} to {chunk.frame_start + chunk.frames - 1}, some of "
                f"which take the place of frames that earlier ones see in a window of {geometry.window_frames}; begin "
                "chunks of one frame"
            )
