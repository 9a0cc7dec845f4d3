"""The contiguous cache on a device: both flash kernels against the oracle, one CUDA graph for all chunks, no syncs."""

import pytest
import torch

from attention_backend import AttentionSpec, PaddedKV, select_backend
from attention_backend.kv_cache import CachedAttention, ContiguousKVCache, LayerKV

pytestmark = pytest.mark.gpu

LAYERS, ROWS, HEADS, HEAD_DIM, FRAME_TOKENS, FRAMES, CHUNKS = 2, 2, 4, 128, 60, 3, 4
CHUNK_TOKENS = FRAMES * FRAME_TOKENS
SCALE = HEAD_DIM**-0.5


@pytest.fixture
def attend(flash_kernel):
    return CachedAttention(select_backend(flash_kernel, AttentionSpec("self", HEADS, HEAD_DIM, torch.bfloat16, "cuda")))


@pytest.fixture
def cache():
    return ContiguousKVCache(
        LAYERS, ROWS, FRAMES * CHUNKS, FRAME_TOKENS, HEADS, HEAD_DIM, torch.bfloat16, "cuda"
    )  # fmt: skip


def inputs(seed):
    gen = torch.Generator("cuda").manual_seed(seed)
    shape = (3, ROWS * CHUNK_TOKENS, HEADS, HEAD_DIM)
    return torch.randn(shape, generator=gen, device="cuda", dtype=torch.bfloat16).unbind()


def forward(attend, batch, seed):
    return [attend(*inputs(10 * seed + i), batch.layer(i)) for i in range(LAYERS)]


def test_every_chunk_equals_the_oracle(attend, cache, check_sequence):
    history = [[[] for _ in range(ROWS)] for _ in range(LAYERS)]
    for seed in range(CHUNKS):
        with cache.begin(FRAMES) as chunk:
            batch = cache.batch(chunk)
            forward(attend, batch, seed + 50)  # a denoising forward, which the next overwrites
            outs = forward(attend, batch, seed)
            chunk.commit()
        for i, out in enumerate(outs):
            parts = zip(out.split(CHUNK_TOKENS), *(x.split(CHUNK_TOKENS) for x in inputs(10 * seed + i)), strict=True)
            for b, (out_b, q, k, v) in enumerate(parts):
                history[i][b].append((k, v))
                keys, values = (torch.cat(x) for x in zip(*history[i][b], strict=True))
                check_sequence(f"chunk {seed} layer {i} row {b}", q, keys, values, SCALE, False, out_b)


def test_index_and_slices_give_the_same_bits(attend, cache):
    other = ContiguousKVCache(LAYERS, ROWS, FRAMES * CHUNKS, FRAME_TOKENS, HEADS, HEAD_DIM, torch.bfloat16, "cuda")
    for seed in range(CHUNKS):
        outs = []
        for each, indexed in ((cache, True), (other, False)):
            with each.begin(FRAMES) as chunk:
                outs.append(forward(attend, each.batch(chunk, indexed=indexed), seed))
                chunk.commit()
        assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True)), seed


def test_one_captured_graph_serves_all_chunks(attend, cache):
    """It owns a slot index and lengths into which each chunk's are copied before a replay."""
    other = ContiguousKVCache(LAYERS, ROWS, FRAMES * CHUNKS, FRAME_TOKENS, HEADS, HEAD_DIM, torch.bfloat16, "cuda")
    own_inputs = [[x.clone() for x in inputs(i)] for i in range(LAYERS)]
    with cache.begin(FRAMES) as chunk:
        first = [cache.batch(chunk).layer(i) for i in range(LAYERS)]
        slots, lens = first[0].slots.clone(), first[0].metadata.seqused_kv.clone()
        metadata = PaddedKV(lens, first[0].metadata.max_seqlen_kv)
        own = [LayerKV(layer.k, layer.v, slots, metadata) for layer in first]
        for layer, qkv in zip(own, own_inputs, strict=True):
            attend(*qkv, layer)  # compiles the kernel, which a capture must not do
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = [attend(*qkv, layer) for layer, qkv in zip(own, own_inputs, strict=True)]
    for seed in range(CHUNKS):
        with cache.begin(FRAMES) as chunk, other.begin(FRAMES) as plain:
            layer = cache.batch(chunk).layer(0)
            slots.copy_(layer.slots)
            lens.copy_(layer.metadata.seqused_kv)
            for i, qkv in enumerate(own_inputs):
                for x, new in zip(qkv, inputs(10 * seed + i), strict=True):
                    x.copy_(new)
            graph.replay()
            expected = forward(attend, other.batch(plain), seed)
            assert all(torch.equal(a, b) for a, b in zip(outs, expected, strict=True)), seed
            chunk.commit()
            plain.commit()


def test_a_chunk_waits_for_nothing(attend, cache):
    def chunk(seed):
        with cache.begin(FRAMES) as chunk:
            forward(attend, cache.batch(chunk), seed)
            forward(attend, cache.batch(chunk), seed + 1)
            chunk.commit()

    chunk(0)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        chunk(2)
        with cache.begin(FRAMES) as aborted:
            forward(attend, cache.batch(aborted), 4)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert cache.frames == 2 * FRAMES
