"""The contiguous cache against dense attention over everything committed so far, on the CPU through SDPA."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from attention_backend import AttentionMetadataState, AttentionSpec, PaddedKV, select_backend
from attention_backend.kv_cache import CachedAttention, ContiguousKVCache, KVCacheError

LAYERS, FRAME_TOKENS, FRAMES, CHUNKS, HEADS, KV_HEADS, HEAD_DIM = 2, 6, 3, 7, 4, 2, 16
CHUNK_TOKENS = FRAMES * FRAME_TOKENS


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make_cache(rows, *, capacity_frames=FRAMES * CHUNKS, poisoned=True, state=None):
    cache = ContiguousKVCache(
        LAYERS, rows, capacity_frames, FRAME_TOKENS, KV_HEADS, HEAD_DIM, torch.float32, "cpu", state
    )
    if poisoned:
        for layer in buffers(cache):
            for x in layer:
                x.fill_(float("nan"))
    return cache


def buffers(cache):
    return cache._layers


def attention(backend="sdpa"):
    return CachedAttention(
        select_backend(backend, AttentionSpec("self", HEADS, HEAD_DIM, torch.float32, "cpu", num_kv_heads=KV_HEADS))
    )


def inputs(rows, seed, tokens=CHUNK_TOKENS):
    """q, k, v of each layer, [rows * tokens, H, D]."""
    gen = torch.Generator().manual_seed(seed)
    heads = (HEADS, KV_HEADS, KV_HEADS)
    return [[torch.randn(rows * tokens, h, HEAD_DIM, generator=gen) for h in heads] for _ in range(LAYERS)]


def forward(attend, batch, layers):
    return [attend(q, k, v, batch.layer(i)) for i, (q, k, v) in enumerate(layers)]


def check_against(oracle, rows, outs, layers, history):
    """outs of one forward; history[layer]: (k, v) [rows, tokens so far, Hkv, D]. Returns history with this chunk."""
    longer = []
    for out, (q, k, v), (past_k, past_v) in zip(outs, layers, history, strict=True):
        q, out = (x.unflatten(0, (rows, -1)) for x in (q, out))
        keys, values = (
            torch.cat([past, new.unflatten(0, (rows, -1))], dim=1) for past, new in ((past_k, k), (past_v, v))
        )
        for b in range(rows):
            expected, _ = oracle(q[b], keys[b], values[b], HEAD_DIM**-0.5)
            torch.testing.assert_close(out[b].double(), expected, atol=1e-5, rtol=0)
        longer.append((keys, values))
    return longer


def no_history(rows):
    return [tuple(torch.empty(rows, 0, KV_HEADS, HEAD_DIM) for _ in "kv") for _ in range(LAYERS)]


@pytest.mark.parametrize("rows", [1, 2])
def test_every_forward_of_seven_chunks_equals_dense(oracle, rows):
    cache, attend, history = make_cache(rows), attention(), no_history(rows)
    for chunk_index in range(CHUNKS):
        with cache.begin(FRAMES) as chunk:
            assert (chunk.frame_start, chunk.frames) == (chunk_index * FRAMES, FRAMES)
            for step in range(3):  # two denoising forwards over the same place, then the clean one
                layers = inputs(rows, 100 * chunk_index + step)
                longer = check_against(oracle, rows, forward(attend, cache.batch(chunk), layers), layers, history)
            chunk.commit()
        history = longer
        assert cache.frames == (chunk_index + 1) * FRAMES
    for (k, v), (all_k, all_v) in zip(buffers(cache), history, strict=True):
        assert torch.equal(k, all_k) and torch.equal(v, all_v)


def test_chunks_of_unequal_lengths_follow_one_another(oracle):
    """A first chunk of one frame, as in image-to-video, then others."""
    cache, attend, history = make_cache(2, capacity_frames=8), attention(), no_history(2)
    for seed, frames in enumerate((1, 3, 2)):
        chunk = cache.begin(frames)
        layers = inputs(2, seed, frames * FRAME_TOKENS)
        history = check_against(oracle, 2, forward(attend, cache.batch(chunk), layers), layers, history)
        chunk.commit()
    assert buffers(cache)[0][0][:, 6 * FRAME_TOKENS :].isnan().all(), "slots that no chunk owns were written"


@pytest.mark.parametrize("rows", [1, 2])
def test_index_and_slices_give_the_same_bits(rows):
    """Outputs and cache, over 7 chunks."""
    caches = {indexed: make_cache(rows) for indexed in (True, False)}
    attend, outs = attention(), {}
    for seed in range(CHUNKS):
        for indexed, cache in caches.items():
            chunk = cache.begin(FRAMES)
            batch = cache.batch(chunk, indexed=indexed)
            assert isinstance(batch.layer(0).slots, torch.Tensor if indexed else slice)
            outs[indexed] = forward(attend, batch, inputs(rows, seed))
            chunk.commit()
        for indexed, sliced in zip(outs[True], outs[False], strict=True):
            assert torch.equal(indexed, sliced)
    for indexed, sliced in zip(buffers(caches[True]), buffers(caches[False]), strict=True):
        assert torch.equal(indexed[0], sliced[0]) and torch.equal(indexed[1], sliced[1])


def test_the_whole_buffer_is_read_with_the_used_length_on_the_device():
    state = AttentionMetadataState()
    cache = make_cache(2, state=state)
    for chunk_index in range(3):
        chunk = cache.begin(FRAMES)
        for _ in range(3):
            batch = cache.batch(chunk)
            first, last = batch.layer(0), batch.layer(LAYERS - 1)
            assert first.metadata is last.metadata and first.slots is last.slots
        assert batch is cache.batch([chunk]), "a chunk alone and in a list are the same"
        metadata, used = first.metadata, (chunk_index + 1) * CHUNK_TOKENS
        assert isinstance(metadata, PaddedKV) and metadata.seqused_kv.tolist() == [used, used]
        assert metadata.max_seqlen_kv == first.k.shape[1] == CHUNKS * CHUNK_TOKENS
        assert first.slots.tolist() == list(range(used - CHUNK_TOKENS, used))
        assert (batch.read, batch.num_rows, batch.frames) == ("contiguous", 2, (FRAMES, FRAMES))
        assert batch.frame_starts == (chunk.frame_start,) * 2 and batch.q_lens == (CHUNK_TOKENS,) * 2
        chunk.commit()
        assert (state.builds, state.device_copies) == (chunk_index + 1,) * 2, "one copy for a chunk, not for a forward"


def test_a_graphs_key_tells_shapes_apart_and_not_lengths():
    cache, signatures = make_cache(1), []
    for frames in (FRAMES, FRAMES, 1):
        chunk = cache.begin(frames)
        signatures.append(cache.batch(chunk).signature())
        chunk.commit()
    assert signatures[0] == signatures[1] != signatures[2]


def test_one_compiled_graph_serves_all_chunks_and_layers():
    attend = attention()

    def block(q, k, v, layer):
        return q + attend(q * 2, k, v, layer)

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, backend=counter, fullgraph=True)
    caches = [make_cache(2, state=AttentionMetadataState()) for _ in "ab"]
    for seed in range(CHUNKS):
        chunks = [cache.begin(FRAMES) for cache in caches]
        for step in range(2):
            batches = [cache.batch(chunk) for cache, chunk in zip(caches, chunks, strict=True)]
            for i, qkv in enumerate(inputs(2, 10 * seed + step)):
                got, expected = compiled(*qkv, batches[0].layer(i)), block(*qkv, batches[1].layer(i))
                assert torch.equal(got, expected)
        for chunk in chunks:
            chunk.commit()
    assert counter.frame_count == 1
    for ours, plain in zip(*map(buffers, caches), strict=True):
        assert torch.equal(ours[0], plain[0]) and torch.equal(ours[1], plain[1])


def test_an_eighth_chunk_is_refused_before_anything_is_written():
    cache = make_cache(1)
    for _ in range(CHUNKS):
        chunk = cache.begin(FRAMES)
        cache.batch(chunk)
        chunk.commit()
    with pytest.raises(KVCacheError, match="21 frames are committed and 3 more exceed capacity_frames 21.*Paged"):
        cache.begin(FRAMES)
    with pytest.raises(KVCacheError, match="and 1 more exceed"):
        cache.begin(1)
    assert cache.frames == FRAMES * CHUNKS and buffers(cache)[0][0].isnan().all()


def test_rows_on_different_timelines_are_sent_to_the_paged_cache():
    cache = make_cache(2)
    with pytest.raises(KVCacheError, match=r"\[3, 1\].*one timeline.*PagedKVCache"):
        cache.begin([3, 1])
    own, others = cache.begin(1), make_cache(2).begin(2)
    with pytest.raises(KVCacheError, match="2 chunks in one batch.*PagedKVCache"):
        cache.batch([own, others])
    with pytest.raises(KVCacheError, match="another cache's"):
        cache.batch(others)


@pytest.mark.parametrize("way", ["abort", "exception", "leaving"])
def test_an_aborted_chunk_leaves_nothing_and_the_retry_equals_a_clean_run(way):
    """K and V of the failed chunk are not finite in layer 0; layer 1 was never reached."""
    caches = [make_cache(2, poisoned=False) for _ in "ab"]
    attend = attention()
    for cache in caches:
        chunk = cache.begin(FRAMES)
        forward(attend, cache.batch(chunk), inputs(2, 0))
        chunk.commit()
    failing = caches[0]
    before = [tuple(x.clone() for x in layer) for layer in buffers(failing)]
    (q, k, v), _ = inputs(2, 1)
    try:
        with failing.begin(FRAMES) as chunk:
            attend(q, k * float("nan"), v * float("nan"), failing.batch(chunk).layer(0))
            if way == "exception":
                raise KeyboardInterrupt
            if way == "abort":
                chunk.abort()
    except KeyboardInterrupt:
        assert way == "exception"
    for layer, kept in zip(buffers(failing), before, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(layer, kept, strict=True))
    assert failing.frames == FRAMES
    outs = []
    for cache in caches:
        with cache.begin(FRAMES) as chunk:
            outs.append(forward(attend, cache.batch(chunk), inputs(2, 2)))
            chunk.commit()
    assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))


def test_failed_rows_are_told_from_the_output():
    cache, attend = make_cache(3), attention()
    batch = cache.batch(cache.begin(FRAMES))
    q, k, v = inputs(3, 0)[0]
    v[CHUNK_TOKENS + 1, 0, 0] = float("nan")
    assert batch.failed_rows(attend(q, k, v, batch.layer(0))) == [1]


def test_an_order_of_calls_that_cannot_be_right():
    cache = make_cache(1)
    chunk = cache.begin(FRAMES)
    with pytest.raises(KVCacheError, match=r"commit\(\) of a chunk with no forward"):
        chunk.commit()
    batch = cache.batch(chunk)
    with pytest.raises(KVCacheError, match="a chunk of 3 frames is open"):
        cache.begin(1)
    for index in (-1, LAYERS):
        with pytest.raises(KVCacheError, match=f"layer {index} of a cache of {LAYERS} layers"):
            batch.layer(index)
    chunk.commit()
    for end in (chunk.commit, chunk.abort):
        with pytest.raises(KVCacheError, match="frames 0 to 2 is already over"):
            end()
    assert cache.frames == FRAMES
    with pytest.raises(KVCacheError, match="chunk is over"):
        batch.layer(0)
    with pytest.raises(KVCacheError, match="chunk is over"):
        cache.batch(chunk)


@pytest.mark.parametrize("frames", [0, -1, 1.0, True, None])
def test_a_chunk_needs_a_number_of_frames(frames):
    with pytest.raises(KVCacheError, match="frames is"):
        make_cache(1).begin(frames)


@pytest.mark.parametrize(
    "position, name", [(0, "num_layers"), (1, "batch"), (2, "capacity_frames"), (3, "frame_tokens")]
)
def test_sizes_below_one_are_refused(position, name):
    sizes = [LAYERS, 1, 2, FRAME_TOKENS, KV_HEADS, HEAD_DIM]
    sizes[position] = 0
    with pytest.raises(KVCacheError, match=f"{name} is 0"):
        ContiguousKVCache(*sizes, torch.float32, "cpu")
