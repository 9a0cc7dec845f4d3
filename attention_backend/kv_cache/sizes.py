"""How large blocks are, and how many sessions fit into memory: arithmetic that needs no cache."""

from __future__ import annotations

import torch

from attention_backend.interface import AttentionBackend
from attention_backend.kv_cache.errors import KVCacheError
from attention_backend.kv_cache.free_runs import FreeRuns
from attention_backend.kv_cache.geometry import SessionGeometry
from attention_backend.kv_cache.pool import place_session


def choose_block_size(backend: AttentionBackend | type[AttentionBackend], frame_tokens: int) -> int:
    """The backend's preference, or, where frames are shorter, the smallest power of two that holds one."""
    return min(backend.preferred_block_size, 1 << (frame_tokens - 1).bit_length())


def row_bytes(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one token: K and V of all layers."""
    return 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize


def blocks_in_memory(memory_bytes: int, staging_tokens: int, block_size: int, bytes_per_row: int) -> int:
    """Blocks, the null block included, that a budget holds beside the staging buffer; KVCacheError if not even two."""
    num_blocks = (memory_bytes - staging_tokens * bytes_per_row) // (block_size * bytes_per_row)
    if num_blocks < 2:
        raise KVCacheError(
            f"memory_bytes is {memory_bytes}; {staging_tokens} staging rows and two blocks of {block_size} tokens take "
            f"{(staging_tokens + 2 * block_size) * bytes_per_row}"
        )
    return num_blocks


def sessions_that_fit(
    free: FreeRuns, geometry: SessionGeometry, block_size: int, *, runs: bool, scattered: bool
) -> int:
    """How many sessions can be opened one after another in the free blocks, which stay as they are."""
    free, count = free.copy(), 0
    while place_session(free, geometry, block_size, runs=runs, scattered=scattered) is not None:
        count += 1
    return count
