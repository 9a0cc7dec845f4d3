"""What the KV cache of a causal stream takes, from its settings alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from attention_backend import AttentionBackend
from attention_backend.kv_cache import SessionGeometry
from attention_backend.kv_cache.checks import possible_reads
from attention_backend.kv_cache.geometry import GUARD_ROWS
from attention_backend.kv_cache.sizes import choose_block_size, row_bytes
from visual_gen.config import CausalConfig
from visual_gen.models.wan import WanConfig

# Committed chunks that a stream keeps takeable back beside those that its user may: the last one is committed before it
# is known whether it is finite.
UNREAD_CHUNKS = 1

# Texts of a stream that an engine has room for where its user does not say: the two branches' and one to switch to.
TEXT_SLOTS = 3


@dataclass(frozen=True)
class StreamSize:
    """What one stream takes: blocks of block_size tokens, and rows of the staging buffer, both in all layers. read: the
    one that it is read by while its blocks are one run."""

    geometry: SessionGeometry
    block_size: int
    read: str
    num_blocks: int
    staging_tokens: int

    def num_bytes(self, config: WanConfig, dtype: torch.dtype) -> int:
        tokens = self.num_blocks * self.block_size + self.staging_tokens
        return tokens * row_bytes(config.num_layers, config.num_attention_heads, config.attention_head_dim, dtype)


def stream_size(
    settings: CausalConfig,
    frame_tokens: int,
    backend: AttentionBackend | type[AttentionBackend],
    *,
    branches: int = 1,
    rollback_chunks: int = 0,
    action_capacity: int = 0,
) -> StreamSize:
    """Of a stream read through `backend`. frame_tokens: tokens of a latent frame; branches: of guidance;
    rollback_chunks: how many committed chunks it can take back; action_capacity: its most forward-only tokens.
    ValueError if the backend cannot read as the settings say."""
    geometry = SessionGeometry(
        frame_tokens=frame_tokens,
        sink_frames=settings.sink_frames,
        recent_frames=settings.recent_frames,
        branches=branches,
        max_chunk_frames=settings.max_chunk_frames,
        rollback_chunks=rollback_chunks,
        action_capacity=action_capacity,
    )
    size = settings.block_size
    size = choose_block_size(backend, frame_tokens) if size == "auto" else size
    staging = geometry.capacity_tokens + GUARD_ROWS
    read = possible_reads(backend, settings.read, staging)[0]
    blocks = geometry.branch_blocks(size, run=read == "extent") + geometry.journal_blocks(size)
    return StreamSize(geometry, size, read, branches * blocks, branches * staging if read == "staged" else 0)


def pad_size(
    settings: CausalConfig, stream: StreamSize, backend: AttentionBackend | type[AttentionBackend]
) -> StreamSize:
    """Of a row that fills a forward beside streams of that size: it sees its own chunk alone. Staged, each row has the
    room of the largest."""
    alone = settings.model_copy(update={"sink_frames": 0, "recent_frames": settings.max_chunk_frames})
    pad = stream_size(alone, stream.geometry.frame_tokens, backend)
    return replace(pad, staging_tokens=stream.staging_tokens // stream.geometry.branches)
