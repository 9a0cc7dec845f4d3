"""The operator that writes and attends: its fake, its mutations, one graph for everything, and what it refuses."""

import importlib

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from attention_backend import (
    AttentionBackendError,
    AttentionSpec,
    ExtentKV,
    PackedKV,
    PaddedKV,
    PagedKV,
    select_backend,
)
from attention_backend.kv_cache import CachedAttention, KVCacheError, LayerKV, attend
from attention_backend.sdpa import SDPABackend

READS = ["extent", "block_table", "staged"]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def block(attend):
    """What surrounds a cached attention in a model: something before and after, and no layer index."""

    def run(q, k, v, layer):
        return attend(q * 1.0, k * 1.0, v * 1.0, layer) + 0.0

    return run


@pytest.mark.parametrize("read", READS)
def test_one_graph_serves_all_layers_sessions_windows_denoise_and_commit(harness, read):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block(harness.attend), backend=counter, fullgraph=True)
    cache = harness.cache(read=read, max_frames=4, poison=float("nan"))
    filling, sliding = harness.open(cache, recent_frames=None, capacity_frames=4), harness.open(cache, recent_frames=2)
    for _ in range(4):  # forwards of one row, of two sessions, of which one slides
        for stream in (filling, sliding):
            harness.step(cache, [stream], attend=compiled)
    assert counter.frame_count == 1
    branches = [harness.open(cache, sink_frames=1, recent_frames=2) for _ in range(3)]
    for _ in range(4):
        harness.step(cache, branches, attend=compiled)
    assert counter.frame_count <= 2, "another number of rows is once more, with shapes left open"


def test_k_and_v_must_be_allocated_apart(harness):
    """A compiled call would copy one of two halves of a tensor, from its start to the length of the whole."""
    both = torch.zeros(2, 400, 16, 2, 8)
    state = harness.cache().attention_metadata_state
    metadata = state.extent_kv("self", [16], [24], 6400, "cpu", max_seqlen_kv=24, q_lens=[24])
    with pytest.raises(KVCacheError, match="share one storage, at offsets 0 and 102400 of it: allocate each by itself"):
        LayerKV(both[0], both[1], torch.arange(16, 40), metadata)
    LayerKV(both[0], both[1].clone(), torch.arange(16, 40), metadata)


FORMS = ["extent", "packed", "paged", "padded"]


def call(form, gen, dtype=torch.float32):
    """Arguments of CachedAttention for two rows of 6 tokens, of 2 heads of 8."""
    q, k, v = (torch.randn(12, 2, 8, generator=gen).to(dtype) for _ in "qkv")
    cu_q, q_side = torch.tensor([0, 6, 12], dtype=torch.int32), {"max_seqlen_q": 6, "q_lens": (6, 6)}
    lens = torch.tensor([10, 8], dtype=torch.int32)
    slots = torch.cat([torch.arange(20, 26), torch.arange(2, 8)])
    if form == "extent":
        shape, metadata = (
            (2, 16, 2, 8),
            ExtentKV(torch.tensor([16, 0, 32], dtype=torch.int32), lens, 16, cu_q, **q_side),
        )
    elif form == "packed":
        ends = torch.tensor([0, 10, 18], dtype=torch.int32)
        shape, slots = (32, 2, 8), torch.cat([torch.arange(4, 10), torch.arange(12, 18)])
        metadata = PackedKV(ends, 16, None, cu_q, **q_side)
    elif form == "paged":
        table = torch.tensor([[2, 3], [0, 1]], dtype=torch.int32)
        shape, metadata = (4, 8, 2, 8), PagedKV(table, lens, 8, 16, cu_q, **q_side)
    else:
        lens = torch.tensor([10, 10], dtype=torch.int32)
        shape, slots, metadata = (2, 16, 2, 8), torch.arange(4, 10), PaddedKV(lens, 16)
    caches = [torch.randn(shape, generator=gen).to(dtype) for _ in "kv"]
    return q, k, v, LayerKV(*caches, slots, metadata)


def operands(q, k, v, layer, backend="sdpa"):
    return q, k, v, *attend._cache_operands(layer), backend, "self", 0.3


@pytest.mark.parametrize("form", FORMS)
def test_schema_fake_and_mutations_are_as_declared(form):
    torch.library.opcheck(attend.write_and_attend, operands(*call(form, torch.Generator().manual_seed(0))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("form", FORMS)
def test_writes_go_to_their_slots_and_nowhere_else(form, dtype):
    q, k, v, layer = call(form, torch.Generator().manual_seed(1), dtype)
    cached = CachedAttention(select_backend("sdpa", AttentionSpec("self", 2, 8, dtype, "cpu")))
    before = layer.k.clone(), layer.v.clone()
    cached(q, k, v, layer)
    for now, was, new in zip((layer.k, layer.v), before, (k, v), strict=True):
        if form == "padded":
            was[:, layer.slots] = new.view(2, 6, 2, 8)
        else:
            was.view(-1, 2, 8)[layer.slots] = new
        assert torch.equal(now, was)


@pytest.mark.parametrize("view", ["fused", "odd offset", "heads outside", "last stride 2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_views_are_written_as_their_copies_are(view, dtype):
    views = {
        "fused": lambda x: torch.stack([x, x + 1, x], dim=1)[:, 0],
        "odd offset": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x),
        "heads outside": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        "last stride 2": lambda x: torch.stack([x, x + 1], dim=-1).flatten(-2)[..., ::2],
    }
    cached = CachedAttention(select_backend("sdpa", AttentionSpec("self", 2, 8, dtype, "cpu")))
    results = []
    for change in (lambda x: x, views[view]):
        q, k, v, layer = call("extent", torch.Generator().manual_seed(2), dtype)
        out = cached(q, change(k), change(v), layer)  # q is not written; a kernel may round it by its alignment
        results.append((out, layer.k, layer.v))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_caches_made_in_any_mode_are_written_in_any_other(make_harness, oracle, mode):
    harness = make_harness()
    with torch.inference_mode():
        cache = harness.cache(staging_tokens=600)
        stream = harness.open(cache, recent_frames=2)
        harness.step(cache, [stream])
    with mode():
        harness.step(cache, [stream])
    harness.step(cache, [stream])


def test_what_does_not_fit_is_refused_before_anything_is_written(harness):
    cache = harness.cache()
    chunk = harness.open(cache, recent_frames=2).session.begin(1)
    layer = cache.batch([chunk]).layer(0)
    q, k, v = harness.inputs(24)[0]
    before = harness.contents(cache)
    for change, message in [
        (
            {"k": k.bfloat16(), "v": v.bfloat16()},
            "torch.float32, torch.bfloat16, torch.bfloat16, the cache torch.float32",
        ),
        ({"q": q[:20], "k": k[:20], "v": v[:20]}, "q has 20 tokens but the batch was made for 24"),
        ({"q": q[:, :2]}, r"q has shape \(24, 2, 8\).*H, D = \(4, 8\)"),
        ({"q": q.repeat(1, 2, 1)}, r"q has shape \(24, 8, 8\)"),
        ({"q": q[..., :4]}, r"q has shape \(24, 4, 4\)"),
        ({"q": q[:, None]}, r"q has shape \(24, 1, 4, 8\)"),
        ({"k": k[:20], "v": v[:20]}, "q's total_q and the cache's Hkv, D"),
        ({"k": k[:, :1], "v": v[:, :1]}, r"the cache's Hkv, D = \(2, 8\)"),
        ({"v": v[:, :1]}, "expected k and v"),
        ({"layer": LayerKV(layer.k, layer.v.transpose(0, 1), layer.slots, layer.metadata)}, "make them contiguous"),
        ({"k": k.clone().requires_grad_()}, "inference-only"),
    ]:
        arguments = {"q": q, "k": k, "v": v, "layer": layer} | change
        with pytest.raises(ValueError, match=message):
            harness.attend(**arguments)
    assert harness.same(before, harness.contents(cache))


def test_a_block_table_beyond_the_pool_is_refused_before_anything_is_written(harness):
    state = harness.cache().attention_metadata_state
    k, v = (torch.zeros(3, 16, 2, 8) for _ in "kv")
    metadata = state.paged_kv("self", [[1, 3]], [24], 16, "cpu", q_lens=[24])
    (q, new_k, new_v), _ = harness.inputs(24)
    with pytest.raises(KVCacheError, match="names block 3 of a pool of 3 blocks"):
        harness.attend(q, new_k, new_v, LayerKV(k, v, torch.arange(16, 40), metadata))
    assert k.eq(0).all() and v.eq(0).all()


def test_a_backend_must_be_registered_under_its_name():
    class Other(SDPABackend):
        pass

    with pytest.raises(AttentionBackendError, match="'sdpa' is a .*Other, which is not registered under that name"):
        CachedAttention(Other(AttentionSpec("self", 2, 8, torch.float32, "cpu")))


def test_the_backends_scale_and_role_reach_the_kernel(oracle):
    q, k, v, layer = call("extent", torch.Generator().manual_seed(3))
    backend = select_backend("sdpa", AttentionSpec("cross_text", 2, 8, torch.float32, "cpu", softmax_scale=0.05))
    out = CachedAttention(backend)(q, k, v, layer)
    for rows, start, n in ((slice(0, 6), 16, 10), (slice(6, 12), 0, 8)):
        keys, values = (x.view(-1, 2, 8)[start : start + n] for x in (layer.k, layer.v))
        torch.testing.assert_close(out[rows].double(), oracle(q[rows], keys, values, 0.05)[0], atol=1e-5, rtol=0)


def test_the_operator_survives_a_reload_and_callers_from_before_it(harness):
    cache = harness.cache()
    stream = harness.open(cache, recent_frames=2)
    for _ in range(2):
        importlib.reload(attend)
        harness.step(cache, [stream])
        compiled = torch.compile(block(attend.CachedAttention(harness.backend)), backend="aot_eager", fullgraph=True)
        harness.step(cache, [stream], attend=compiled)


@pytest.mark.parametrize("form", FORMS)
def test_a_backend_must_return_a_tensor_of_its_own(monkeypatch, form):
    """A compiled graph goes on with what it gave away, and would write into both."""
    monkeypatch.setattr(SDPABackend, "attend", lambda self, q, *args, **options: q)
    q, k, v, layer = call(form, torch.Generator().manual_seed(3))
    cached = CachedAttention(select_backend("sdpa", AttentionSpec("self", 2, 8, torch.float32, "cpu")))
    with pytest.raises(RuntimeError, match="sdpa returned a tensor that it was given"):
        cached(q, k, v, layer)


@pytest.mark.parametrize("read", READS)
def test_a_static_batch_follows_what_is_copied_into_it(harness, read):
    """What a CUDA graph does: the same tensors for another chunk, another length and another session."""
    cache = harness.cache(read=read, max_frames=4, poison=float("nan"))
    first, other = harness.open(cache, recent_frames=4), harness.open(cache, sink_frames=1, recent_frames=2)
    static, addresses = None, set()
    for step in range(7):
        stream = other if step % 3 == 1 else first
        chunk = stream.session.begin(1)
        batch = cache.batch([chunk])
        static = static or batch.static()
        batch.copy_into(static)
        layer = static.layer(0)
        tensors = [layer.slots, *(x for x in vars(layer.metadata).values() if isinstance(x, torch.Tensor))]
        addresses.add(tuple(x.data_ptr() for x in tensors))
        assert static.signature() == batch.signature() and static.frame_starts == (chunk.frame_start,)
        forward = harness.forward(cache, [chunk])
        again = [harness.attend(*qkv, static.layer(i)) for i, qkv in enumerate(forward.inputs)]
        assert all(torch.equal(a, b) for a, b in zip(forward.outs, again, strict=True))
        assert static.layer(0).metadata.kv_lens is None, "lengths of another chunk must not be read"
        harness.check([stream], forward)
        harness.commit([stream], forward)
    assert len(addresses) == 1
    two = cache.batch([first.session.begin(1), other.session.begin(1)])
    with pytest.raises(KVCacheError, match="the graph is for .* capture another"):
        two.copy_into(static)
    elsewhere = harness.cache(read=read, max_frames=4)
    chunk = harness.open(elsewhere, recent_frames=2).session.begin(1)
    with pytest.raises(KVCacheError, match="another cache's tensors"):
        elsewhere.batch([chunk]).copy_into(static)
