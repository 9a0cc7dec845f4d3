"""SDPA on a CUDA device: the fused kernels and their LSE, no host sync, CUDA graphs, bounded memory."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention_backend import AttentionSpec, PaddedKV, sdpa, select_backend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FORMS = ["dense", "padded", "packed", "packed_q", "paged", "paged_q", "extent", "extent_q"]


@pytest.fixture
def check_low_precision(oracle):
    """The error against fp64 is at most twice that of the plain computation in the same dtype (or one rounding)."""

    def run(case, *, causal=False, scale=None, backend=None):
        backend = backend or case.backend(scale=scale)
        scale = backend.spec.softmax_scale
        out, lse = backend.forward(case.q, case.k, case.v, case.metadata, causal=causal, return_lse=True)
        alone = backend.forward(case.q, case.k, case.v, case.metadata, causal=causal)
        assert out.shape == alone.shape == case.q.shape and lse.dtype == torch.float32
        for b, ((q, k, v), (out_b, lse_b), alone_b) in enumerate(
            zip(case.sequences, case.split(out, lse), case.split(alone), strict=True)
        ):
            expected, expected_lse = oracle(q, k, v, scale, causal)
            torch.testing.assert_close(lse_b.double(), expected_lse, atol=1e-3, rtol=0)
            if not q.numel():
                continue
            limit = 2 * (_plain(q, k, v, scale, causal) - expected).abs().max()
            limit = max(limit, torch.finfo(q.dtype).eps * expected.abs().max())
            for what, got in (("with LSE", out_b), ("without LSE", alone_b)):
                error = (got.double() - expected).abs().max()
                assert error <= limit, f"sequence {b} {what}: off by {error}, limit {limit}"

    return run


def _plain(q, k, v, scale, causal):
    """The formula in the dtype of its inputs, rounding after every operation."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], dim=0) for x in (k, v))
    scores = (q @ k.transpose(1, 2)) * scale
    if causal:
        visible = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).tril(k.shape[1] - q.shape[1])
        scores = scores.masked_fill(~visible, -torch.inf)
    return (scores.softmax(-1).nan_to_num(0.0) @ v).transpose(0, 1)


def _lens(form, q_len):
    kv_lens = [77, 77, 77] if form == "dense" else [130, 1, 0, 45]
    if form.endswith("_q"):
        return [q_len, 1, 0, 64], kv_lens
    return [q_len] * len(kv_lens), kv_lens


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("host_lens", [True, False])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("heads, kv_heads, head_dim", [(4, 4, 64), (4, 2, 128), (3, 1, 72), (2, 2, 20), (2, 2, 320)])
def test_fp32(make_case, check, form, host_lens, causal, heads, kv_heads, head_dim):
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    for q_len in (33, 77):  # the LSE of the efficient kernel comes in rows padded to a multiple of 32
        case = make_case(form, *_lens(form, q_len), **shape, device="cuda", host_lens=host_lens)
        check(case, causal=causal, tolerance=3e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("host_lens", [True, False])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads, kv_heads, head_dim", [(4, 4, 64), (4, 2, 128), (3, 1, 72), (2, 2, 20), (2, 2, 320)])
def test_low_precision(make_case, check_low_precision, dtype, form, host_lens, causal, heads, kv_heads, head_dim):
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    for q_len in (33, 77):
        case = make_case(form, *_lens(form, q_len), **shape, dtype=dtype, device="cuda", host_lens=host_lens)
        check_low_precision(case, causal=causal)


def test_fp64(make_case, check):
    for form in FORMS:
        case = make_case(form, *_lens(form, 33), heads=4, kv_heads=2, dtype=torch.float64, device="cuda")
        check(case, tolerance=1e-12)
        check(case, causal=True, tolerance=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_softmax_scale(make_case, check, check_low_precision, form, dtype):
    case = make_case(form, *_lens(form, 40), head_dim=64, dtype=dtype, device="cuda")
    for scale in (0.5, 1e-3):
        if dtype == torch.float32:
            check(case, scale=scale, tolerance=1e-4)
        else:
            check_low_precision(case, scale=scale)


@pytest.mark.parametrize("seqlen", [1, 63, 64, 65, 127, 128, 129, 192, 256])
def test_lengths_around_tile_sizes(make_case, check_low_precision, seqlen):
    for form in FORMS:
        lens = [seqlen, seqlen if form == "dense" else seqlen // 2]
        case = make_case(form, [seqlen] * 2, lens, head_dim=64, dtype=torch.bfloat16, device="cuda")
        check_low_precision(case)
        check_low_precision(case, causal=True)


@pytest.mark.parametrize("strided", ["fused QKV", "transposed", "expanded", "last stride 2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strides(make_case, check, check_low_precision, dtype, strided):
    case = make_case("dense", [33] * 2, [33] * 2, heads=4, kv_heads=2, head_dim=64, dtype=dtype, device="cuda")
    change = {
        "fused QKV": lambda x: torch.cat([x, x, x], dim=-1).unflatten(-1, (3, 64))[..., 1, :],
        "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        "expanded": lambda x: x[:1].expand_as(x),
        "last stride 2": lambda x: x.repeat_interleave(2, dim=-1)[..., ::2],
    }[strided]
    case.q, case.k, case.v = (change(x) for x in (case.q, case.k, case.v))
    case.sequences = list(zip(case.q, case.k, case.v, strict=True))
    if dtype == torch.float32:
        check(case, tolerance=3e-5)
    else:
        check_low_precision(case)


@pytest.mark.parametrize("host_lens", [True, False])
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_no_call_waits_for_the_device(make_case, form, dtype, return_lse, host_lens):
    case = make_case(form, *_lens(form, 33), head_dim=64, dtype=dtype, device="cuda", host_lens=host_lens)
    backend = case.backend()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for causal in (False, True):
            backend.forward(case.q, case.k, case.v, case.metadata, causal=causal, return_lse=return_lse)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_captured_graph_follows_lengths_rewritten_in_place(make_case, oracle):
    case = make_case("padded", [33] * 3, [60, 9, 40], head_dim=64, device="cuda", host_lens=False, poison=0.0)
    case.k.normal_(), case.v.normal_()
    metadata = PaddedKV(case.metadata.seqused_kv.clone(), case.metadata.max_seqlen_kv, None)
    backend = case.backend()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        backend.forward(case.q, case.k, case.v, metadata)  # warm up what must not happen under capture
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.forward(case.q, case.k, case.v, metadata)
    for kv_lens in ([60, 9, 40], [1, 63, 0], [63, 63, 63]):
        metadata.seqused_kv.copy_(torch.tensor(kv_lens, dtype=torch.int32))
        graph.replay()
        for b, n in enumerate(kv_lens):
            expected, _ = oracle(case.q[b], case.k[b, :n], case.v[b, :n], 64**-0.5)
            torch.testing.assert_close(out[b].double(), expected, atol=3e-5, rtol=0)


def _peak_of_a_large_call(dtype, heads, kv_heads, return_lse, seqlen=16384):
    q = torch.randn(1, seqlen, heads, 64, device="cuda", dtype=dtype)
    k, v = (torch.randn(1, seqlen, kv_heads, 64, device="cuda", dtype=dtype) for _ in "kv")
    backend = select_backend("sdpa", AttentionSpec("self", heads, 64, dtype, "cuda", num_kv_heads=kv_heads))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        result = backend.forward(q, k, v, return_lse=return_lse)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, q, k, v, result[0] if return_lse else result


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    "dtype, heads, kv_heads", [(torch.bfloat16, 8, 2), (torch.float32, 4, 4), (torch.float32, 4, 2)]
)
def test_peak_memory_is_bounded(oracle, monkeypatch, dtype, heads, kv_heads, fused, return_lse):
    """Scores would be 4 to 8 GB; a fused kernel is taken if allowed, grouped heads or not, else chunks."""
    if fused:
        monkeypatch.setattr(sdpa, "chunked_attention", None)
        peak_bytes, q, k, v, out = _peak_of_a_large_call(dtype, heads, kv_heads, return_lse)
    else:
        monkeypatch.setattr(sdpa, "_fused_with_lse", lambda *args: (None, None))
        with sdpa_kernel(SDPBackend.MATH):
            peak_bytes, q, k, v, out = _peak_of_a_large_call(dtype, heads, kv_heads, return_lse)
    assert peak_bytes < 256 * 2**20
    rows = slice(1000, 1010)
    expected, _ = oracle(q[0, rows], k[0], v[0], 64**-0.5)
    torch.testing.assert_close(out[0, rows].double(), expected, atol=2e-3 if dtype == torch.bfloat16 else 3e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fullgraph(make_case, check, check_low_precision, monkeypatch, dtype):
    """Against the oracle, not the eager result: a graph must not read lengths, so another kernel serves it."""
    torch._dynamo.reset()
    for form in ("dense", "packed"):
        case = make_case(form, *_lens(form, 33), heads=4, kv_heads=2, head_dim=64, dtype=dtype, device="cuda")
        backend = case.backend()
        compiled = torch.compile(backend.forward, backend="eager", fullgraph=True)
        monkeypatch.setattr(backend, "forward", compiled)
        if dtype == torch.float32:
            check(case, tolerance=3e-5, backend=backend)
        else:
            check_low_precision(case, backend=backend)
    torch._dynamo.reset()


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("form", ["dense", "packed", "paged"])
def test_gradients(make_case, oracle, form, return_lse):
    lens = [40, 40] if form == "dense" else [40, 17]
    case = make_case(form, [33] * 2, lens, heads=4, kv_heads=2, head_dim=64, device="cuda", poison=0.0)
    q = case.q.clone().requires_grad_()
    backend = case.backend(needs={"grad"})
    result = backend.forward(q, case.k, case.v, case.metadata, return_lse=return_lse)
    loss = result[0].sin().sum() + result[1].sin().sum() if return_lse else result.sin().sum()
    (got,) = torch.autograd.grad(loss, q)
    for b, (q_b, k_b, v_b) in enumerate(case.sequences):
        leaf = q_b.double().requires_grad_()
        out, lse = oracle(leaf, k_b, v_b, 64**-0.5)
        (wanted,) = torch.autograd.grad(out.sin().sum() + (lse.sin().sum() if return_lse else 0), leaf)
        torch.testing.assert_close(got[b].double(), wanted, atol=1e-4, rtol=0)
