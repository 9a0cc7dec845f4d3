"""KV caches: what earlier chunks leave for later ones, and how a chunk's forward writes and reads it.

One stream, with a window of 3 sink frames and the last 9, the chunk of 3 being computed counted in:

    attend = CachedAttention(select_backend("auto", spec))
    cache = PagedKVCache(num_layers, num_kv_heads, head_dim, frame_tokens, memory_bytes=8 << 30,
                         backend=attend.backend, dtype=torch.bfloat16, device="cuda")
    with cache.open_session(sink_frames=3, recent_frames=9, max_chunk_frames=3) as session:
        with session.begin(3) as chunk:              # aborts on an exception, and if left uncommitted
            for _ in range(5):                       # denoising forwards, then the clean one: the same call
                batch = cache.batch([chunk])         # chunks of any sessions together
                for i in range(num_layers):
                    out = attend(q, k, v, batch.layer(i))    # q, k, v [total_q, H, D]: writes k, v, then attends
            chunk.commit()

On a CUDA device attend.from_qkv takes one projection of q, k and v instead, and normalises and turns q and k in the
pass that writes. A session forks (the blocks are held together until one of the two writes), rolls back, goes to host
memory and back (snapshot, PagedKVCache.restore_session), and computes its window anew (recompute), for a prompt that
changed.
"""

from attention_backend.kv_cache.attend import CachedAttention
from attention_backend.kv_cache.batch import KVBatch, LayerKV
from attention_backend.kv_cache.chunk import Chunk, RecomputedWindow
from attention_backend.kv_cache.contiguous import ContiguousKVCache
from attention_backend.kv_cache.errors import KVCacheError, OutOfBlocks
from attention_backend.kv_cache.geometry import SessionGeometry
from attention_backend.kv_cache.paged import PagedKVCache
from attention_backend.kv_cache.reads import PagedBatch, StaticBatch
from attention_backend.kv_cache.session import Session
from attention_backend.kv_cache.snapshot import SessionSnapshot

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
    "RecomputedWindow",
    "Session",
    "SessionGeometry",
    "SessionSnapshot",
    "StaticBatch",
]
