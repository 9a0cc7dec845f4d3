"""KV caches: what earlier chunks leave for later ones, and how a chunk's forward writes and reads it."""

from attention_backend.kv_cache.attend import CachedAttention
from attention_backend.kv_cache.batch import KVBatch, LayerKV
from attention_backend.kv_cache.contiguous import ContiguousKVCache
from attention_backend.kv_cache.errors import KVCacheError, OutOfBlocks

__all__ = ["CachedAttention", "ContiguousKVCache", "KVBatch", "KVCacheError", "LayerKV", "OutOfBlocks"]
