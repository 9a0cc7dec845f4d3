"""Merging by log-sum-exp: any split of the keys, empty sides, and the pad rows of Wan's text."""

from pathlib import Path

import pytest
import torch

from attention_backend import AttentionMetadataState, AttentionSpec, merge_attention, merge_pad_rows, select_backend
from attention_backend.merge import merge_pad_rows_
from tests.unittest.attention_backend.interpreted import interpreted

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


def make(heads=4, kv_heads=2, q_len=5, kv_len=9, dtype=torch.float32, num_seqs=2, head_dim=16):
    gen = torch.Generator().manual_seed(0)
    q = torch.randn(num_seqs, q_len, heads, head_dim, generator=gen, dtype=torch.float64).to(dtype)
    k, v = (
        torch.randn(num_seqs, kv_len, kv_heads, head_dim, generator=gen, dtype=torch.float64).to(dtype) for _ in "kv"
    )
    spec = AttentionSpec("self", heads, head_dim, dtype, "cpu", num_kv_heads=kv_heads, needs={"lse"})
    return select_backend("sdpa", spec), q, k, v


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (4, 2), (3, 1)])
def test_a_split_of_the_keys_at_any_boundary_merges_to_the_whole(oracle, heads, kv_heads, dtype):
    backend, q, k, v = make(heads, kv_heads, dtype=dtype)
    for boundary in range(10):
        a = backend.forward(q, k[:, :boundary], v[:, :boundary], return_lse=True)
        b = backend.forward(q, k[:, boundary:], v[:, boundary:], return_lse=True)
        for first, second in ((a, b), (b, a)):
            out, lse = merge_attention(*first, *second)
            assert out.dtype == dtype and lse.dtype == dtype
            for i in range(2):
                expected, expected_lse = oracle(q[i], k[i], v[i], 0.25)
                torch.testing.assert_close(out[i].double(), expected, atol=TOLERANCE[dtype], rtol=0)
                torch.testing.assert_close(lse[i].double(), expected_lse, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_the_scale_of_the_backend_is_the_scale_of_the_merge(oracle, scale):
    _, q, k, v = make()
    spec = AttentionSpec("self", 4, 16, torch.float32, "cpu", num_kv_heads=2, softmax_scale=scale)
    backend = select_backend("sdpa", spec)
    parts = [backend.forward(q, k[:, s], v[:, s], return_lse=True) for s in (slice(0, 4), slice(4, 9))]
    out, _ = merge_attention(*parts[0], *parts[1])
    torch.testing.assert_close(out[0].double(), oracle(q[0], k[0], v[0], scale)[0], atol=1e-5, rtol=0)


def test_packed_results_merge(make_case, oracle):
    first = make_case("packed_q", [3, 0, 5], [4, 2, 0], heads=4, kv_heads=2, seed=1)
    second = make_case("packed_q", [3, 0, 5], [0, 6, 7], heads=4, kv_heads=2, seed=2)
    results = [
        case.backend().forward(first.q, case.k, case.v, case.metadata, return_lse=True) for case in (first, second)
    ]
    out, lse = merge_attention(*results[0], *results[1])
    merged = first.split(out, lse)
    for (out_b, lse_b), (q, k1, v1), (_, k2, v2) in zip(merged, first.sequences, second.sequences, strict=True):
        expected, expected_lse = oracle(q, torch.cat([k1, k2]), torch.cat([v1, v2]), 0.25)
        torch.testing.assert_close(out_b.double(), expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(lse_b.double(), expected_lse, atol=1e-5, rtol=0)


def test_rows_without_keys_on_one_or_both_sides():
    out_a, out_b = torch.full((1, 4, 1, 2), 3.0), torch.full((1, 4, 1, 2), 5.0)
    inf = float("inf")
    lse_a = torch.tensor([[[1.0, -inf, 1.0, -inf]]])
    lse_b = torch.tensor([[[-inf, 1.0, 1.0, -inf]]])
    out_a[:, 1], out_a[:, 3], out_b[:, 0], out_b[:, 3] = 0.0, 0.0, 0.0, 0.0
    out, lse = merge_attention(out_a, lse_a, out_b, lse_b)
    assert out[0, :, 0, 0].tolist() == [3.0, 5.0, 4.0, 0.0]
    torch.testing.assert_close(lse[0, 0], torch.tensor([1.0, 1.0, 1.6931472, -inf]))


def test_scores_far_apart_neither_overflow_nor_vanish():
    out_a, out_b = torch.full((1, 2, 1, 2), 3.0), torch.full((1, 2, 1, 2), 5.0)
    out, lse = merge_attention(out_a, torch.tensor([[[2e4, -2e4]]]), out_b, torch.tensor([[[-2e4, 2e4]]]))
    assert out[0, :, 0, 0].tolist() == [3.0, 5.0] and lse.tolist() == [[[2e4, 2e4]]]


def test_low_precision_results_are_merged_in_fp32():
    _, q, k, v = make(dtype=torch.bfloat16)
    out = q.clone()
    lse = torch.zeros(2, 4, 5)
    merged, merged_lse = merge_attention(out, lse, out, lse)
    assert merged.dtype == torch.bfloat16 and merged_lse.dtype == torch.float32
    assert torch.equal(merged, out)
    torch.testing.assert_close(merged_lse, torch.full_like(lse, 0.6931472))


def test_gradients_pass_through_a_merge_with_empty_sides():
    backend, q, k, v = make(dtype=torch.float64)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    # Causal with more rows than keys: the first rows of each side see nothing.
    a = backend.forward(q, k[:, :2], v[:, :2], causal=True, return_lse=True)
    b = backend.forward(q, k[:, 5:9], v[:, 5:9], causal=True, return_lse=True)
    out, _ = merge_attention(*a, *b)
    out.sin().sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"out_b": torch.zeros(2, 5, 4, 8)}, "results to merge differ"),
        ({"lse_b": torch.zeros(2, 4, 6)}, "results to merge differ"),
        ({"out_b": torch.zeros(2, 5, 4, 16, dtype=torch.bfloat16)}, "torch.bfloat16"),
        ({"lse_a": torch.zeros(2, 5, 4), "lse_b": torch.zeros(2, 5, 4)}, r"lse has shape \(2, 5, 4\) for out of shape"),
    ],
)
def test_results_that_do_not_fit_are_refused(change, message):
    fitting = {
        name: torch.zeros(2, 5, 4, 16) if name.startswith("out") else torch.zeros(2, 4, 5)
        for name in ("out_a", "lse_a", "out_b", "lse_b")
    }
    with pytest.raises(ValueError, match=message):
        merge_attention(**(fitting | change))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (6, 2)])
@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("kv_lens", [[1, 511], [512, 126], [0, 3], [300, 300], [512, 512]])
def test_packed_rows_and_counted_pads_equal_512_padded_rows(oracle, kv_lens, scale, heads, kv_heads, dtype):
    """Wan attends to 512 text rows of which all but the real ones are one vector; dropping those differs."""
    gen = torch.Generator().manual_seed(0)
    tail = (kv_heads, 16)
    q = torch.randn(2, 7, heads, 16, generator=gen, dtype=dtype)
    k, v = (torch.randn(2, 512, *tail, generator=gen, dtype=dtype) for _ in "kv")
    k_pad, v_pad = (torch.randn(*tail, generator=gen, dtype=dtype) for _ in "kv")
    for b, n in enumerate(kv_lens):
        k[b, n:], v[b, n:] = k_pad, v_pad
    spec = AttentionSpec("cross_text", heads, 16, dtype, "cpu", num_kv_heads=kv_heads, softmax_scale=scale)
    backend = select_backend("sdpa", spec)
    # The oracle, and not the same kernel on padded rows: torch's own fp32 error over 512 keys is up to 3e-5 here.
    padded = torch.stack([oracle(q[b], k[b], v[b], backend.spec.softmax_scale)[0] for b in range(2)])

    pads = AttentionMetadataState().packed_pad_kv("cross_text", kv_lens, 512, "cpu")
    packed = [torch.cat([x[b, :n] for b, n in enumerate(kv_lens)]) for x in (k, v)]
    out, lse = backend.forward(q, *packed, pads.packed, return_lse=True)
    if min(kv_lens) < 512:
        assert (out - padded).abs().max() > 1e-2, "dropping the pads changes the result"
    merged = merge_pad_rows(q, out, lse, k_pad, v_pad, pads, backend.spec.softmax_scale)
    torch.testing.assert_close(merged.double(), padded, atol=TOLERANCE[dtype], rtol=0)
    if dtype == torch.float64:
        torch.testing.assert_close(merged, backend.forward(q, k, v), atol=1e-12, rtol=0)


def test_gradients_pass_through_the_merge_of_pad_rows():
    backend, q, k, v = make(heads=2, kv_heads=2, dtype=torch.float64)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    k_pad, v_pad = k[0, 8], v[0, 8]
    pads = AttentionMetadataState().packed_pad_kv("cross_text", [3, 5], 9, "cpu")
    rows = [torch.cat([x[0, :3], x[1, :5]]) for x in (k, v)]
    out, lse = backend.forward(q, *rows, pads.packed, return_lse=True)
    got = torch.autograd.grad(merge_pad_rows(q, out, lse, k_pad, v_pad, pads, 0.25).sin().sum(), (q, k, v))
    padded = [
        torch.stack([torch.cat([x[b, :n], p.expand(9 - n, 2, 16)]) for b, n in enumerate((3, 5))])
        for x, p in ((k, k_pad), (v, v_pad))
    ]
    wanted = torch.autograd.grad(backend.forward(q, *padded).sin().sum(), (q, k, v))
    torch.testing.assert_close(got, wanted, atol=1e-10, rtol=0)


def pad_call(kv_lens, padded_len=12, dtype=torch.float32):
    """Arguments of merge_pad_rows for random results, with the pads of kv_lens."""
    gen = torch.Generator().manual_seed(0)
    q, out = (torch.randn(len(kv_lens), 5, 4, 16, generator=gen).to(dtype) for _ in "qo")
    lse = torch.randn(len(kv_lens), 4, 5, generator=gen)
    k_pad, v_pad = (torch.randn(2, 16, generator=gen).to(dtype) for _ in "kv")
    pads = AttentionMetadataState().packed_pad_kv("cross_text", kv_lens, padded_len, "cpu")
    return q, out, lse, k_pad, v_pad, pads


def test_sequences_without_pads_are_neither_launched_for_nor_touched(monkeypatch):
    launched = []
    original = merge_pad_rows_
    monkeypatch.setattr(
        "attention_backend.merge.merge_pad_rows_", lambda q, *args: launched.append(len(q)) or original(q, *args)
    )
    q, out, lse, k_pad, v_pad, pads = pad_call([3, 4, 12, 5, 12, 12, 0])
    before = out.clone()
    assert merge_pad_rows(q, out, lse, k_pad, v_pad, pads, 0.25) is out
    assert launched == [2, 1, 1]
    changed = [not torch.equal(a, b) for a, b in zip(out, before, strict=True)]
    assert changed == [n < 12 for n in (3, 4, 12, 5, 12, 12, 0)]
    launched.clear()
    q, out, lse, k_pad, v_pad, pads = pad_call([12, 12])
    assert torch.equal(merge_pad_rows(q, out.clone(), lse, k_pad, v_pad, pads, 0.25), out) and not launched


def test_the_operator_keeps_torchs_contract():
    q, out, lse, k_pad, v_pad, pads = pad_call([3, 12])
    torch.library.opcheck(merge_pad_rows_, (q, out, lse, k_pad, v_pad, pads.log_pad_lens, 0.25))


def test_one_compiled_graph_merges_every_layout():
    """A graph that had read pad_lens would be compiled again for each; full rows and rows of pads alone included."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    def step(q, out, lse, k_pad, v_pad, pads):
        return merge_pad_rows(q, out * 1, lse, k_pad, v_pad, pads, 0.25)

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    for lens in ([3, 12], [12, 7], [12, 12], [0, 1]):
        call = pad_call(lens)
        torch.testing.assert_close(compiled(*call), step(*call), atol=1e-6, rtol=0)
    assert len(graphs) == 1
    torch._dynamo.reset()


def test_the_fused_pass_equals_attention_over_all_rows():
    lines = interpreted(Path(__file__).with_name("interpret_merge_pad_rows.py"))
    assert len(lines) == 9
    for line in lines:
        assert line["error"] <= max(1e-5, 2 * line["plain_error"]) and line["untouched"], line
