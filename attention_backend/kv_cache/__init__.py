"""KV caches: what earlier chunks leave for later ones, and how a chunk's forward writes and reads it."""

from attention_backend.kv_cache.attend import CachedAttention
from attention_backend.kv_cache.batch import KVBatch, LayerKV
from attention_backend.kv_cache.contiguous import ContiguousKVCache
from attention_backend.kv_cache.errors import KVCacheError, OutOfBlocks
from attention_backend.kv_cache.geometry import SessionGeometry
from attention_backend.kv_cache.paged import PagedKVCache
from attention_backend.kv_cache.reads import PagedBatch, StaticBatch
from attention_backend.kv_cache.session import Chunk, Session

__all__ = [
    "CachedAttention",
    "Chunk",
    "ContiguousKVCache",
    "KVBatch",
    "KVCacheError",
    "LayerKV",
    "OutOfBlocks",
    "PagedBatch",
    "PagedKVCache",
    "Session",
    "SessionGeometry",
    "StaticBatch",
]
