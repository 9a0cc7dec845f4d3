"""Key lengths, packed and paged K/V: every form, with the lengths on the host or only on the device."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from attention_backend import (
    AttentionMetadataState,
    AttentionSpec,
    ExtentKV,
    PackedKV,
    PaddedKV,
    PagedKV,
    sdpa,
    select_backend,
)

FORMS = ["padded", "packed", "packed_q", "paged", "paged_q", "extent", "extent_q"]
LAYOUTS = {
    "unequal": ([16, 16], [8, 3]),
    "equal runs": ([4, 4, 4, 4, 4], [7, 7, 2, 7, 7]),
    "one key": ([5, 5], [1, 1]),
    "zero in the middle": ([3, 3, 3], [4, 0, 9]),
    "zero at both ends": ([3, 3, 3], [0, 6, 0]),
    "all zero": ([3, 3], [0, 0]),
    "long": ([65, 65], [129, 64]),
}
RAGGED_Q = {
    "unequal q": ([1, 6, 3], [5, 2, 8]),
    "q of zero": ([4, 0, 2], [3, 5, 2]),
    "pairs alike": ([2, 2, 5, 5], [7, 7, 7, 1]),
    "all q zero but one": ([0, 0, 7], [0, 4, 4]),
}
ALL = [(form, name, *layout) for form in FORMS for name, layout in LAYOUTS.items()]
ALL += [(form, name, *layout) for form in ("packed_q", "paged_q", "extent_q") for name, layout in RAGGED_Q.items()]


@pytest.fixture(params=[True, False], ids=["host_lens", "device_lens"])
def host_lens(request):
    return request.param


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("form, name, q_lens, kv_lens", ALL, ids=[f"{form}-{name}" for form, name, *_ in ALL])
def test_equals_attention_per_sequence(make_case, check, form, name, q_lens, kv_lens, host_lens, causal):
    case = make_case(form, q_lens, kv_lens, heads=4, kv_heads=2, host_lens=host_lens)
    out, lse = check(case, causal=causal)
    for (out_b, lse_b), n in zip(case.split(out, lse), kv_lens, strict=True):
        if n == 0:
            assert out_b.eq(0).all() and torch.isneginf(lse_b).all()


@pytest.mark.parametrize("poison", [1e4, float("nan"), float("inf")])
@pytest.mark.parametrize("form", FORMS)
def test_rows_past_a_length_never_reach_the_result(make_case, check, form, poison, host_lens):
    case = make_case(form, [16, 16], [8, 3], poison=poison, host_lens=host_lens)
    out, lse = check(case)
    clean = make_case(form, [16, 16], [8, 3], poison=0.0, host_lens=host_lens)
    expected = clean.backend().forward(clean.q, clean.k, clean.v, clean.metadata, return_lse=True)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


@pytest.mark.parametrize("scale", [0.5, 1e-3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_softmax_scale(make_case, check, form, scale, causal, host_lens):
    check(make_case(form, [6, 6], [8, 3], host_lens=host_lens), scale=scale, causal=causal)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seqlen", [1, 63, 64, 65, 127, 128, 129, 192, 256])
def test_lengths_around_tile_sizes(make_case, check, seqlen, form, host_lens):
    check(make_case(form, [seqlen] * 2, [seqlen, seqlen // 2], host_lens=host_lens))


@pytest.mark.parametrize("form", FORMS)
def test_each_row_of_a_batch_equals_its_own_run(make_case, form):
    """CFG: a prompt of one token beside one of 60 words."""
    case = make_case(form, [40, 40], [1, 77], head_dim=32)
    out = case.split(case.backend().forward(case.q, case.k, case.v, case.metadata))
    for (q, k, v), got in zip(case.sequences, out, strict=True):
        alone = case.backend().forward(q[None], k[None], v[None])[0]
        torch.testing.assert_close(got, alone, atol=1e-6, rtol=0)


@pytest.mark.parametrize("form", ["padded", "packed"])
def test_result_follows_lengths_that_change_and_change_back(oracle, form):
    """The same tensors under [5, 7], [7, 5] and back, from one state and from a list changed in place."""
    state, lens = AttentionMetadataState(), [5, 7]
    gen = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 2, 16, generator=gen)
    rows = torch.randn(24 if form == "padded" else 12, 2, 16, generator=gen)
    for step in range(3):
        if step:
            lens.reverse()
        if form == "padded":
            kv, metadata = rows.view(2, 12, 2, 16), state.padded_kv("cross_text", lens, 12, "cpu")
            parts = [kv[b, :n] for b, n in enumerate(lens)]
        else:
            kv, metadata = rows, state.packed_kv("cross_text", lens, "cpu")
            parts = kv.split(lens)
        backend = select_backend("sdpa", AttentionSpec("cross_text", 2, 16, torch.float32, "cpu"))
        out = backend.forward(q, kv, kv, metadata)
        for b in range(2):
            expected, _ = oracle(q[b], parts[b], parts[b], 0.25)
            torch.testing.assert_close(out[b].double(), expected, atol=1e-5, rtol=0)
    assert (state.builds, state.hits) == (2, 1)


def test_a_length_tensor_at_a_reused_address_gives_no_stale_result(make_case, check):
    addresses = set()
    for step in range(20):
        case = make_case("padded", [3, 3], [1 + step % 5, 6], host_lens=False)
        addresses.add(case.metadata.seqused_kv.data_ptr())
        check(case)
        del case
    assert len(addresses) < 20, "no address was used again, so this run showed nothing"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_no_value_is_read_from_the_device(make_case, form, return_lse, causal, host_lens):
    """Fake tensors have no values: whatever would wait for the device raises."""
    case = make_case(form, [6, 6, 6], [8, 3, 0], heads=4, kv_heads=2, host_lens=host_lens)
    backend = case.backend()
    with FakeTensorMode() as mode:
        metadata = type(case.metadata)(**tree_map_only(torch.Tensor, mode.from_tensor, vars(case.metadata)))
        q, k, v = (mode.from_tensor(x) for x in (case.q, case.k, case.v))
        result = backend.forward(q, k, v, metadata, causal=causal, return_lse=return_lse)
    assert (result[0] if return_lse else result).shape == case.q.shape


def test_rows_of_a_fixed_capacity_beyond_all_sequences_give_zero(make_case, oracle):
    """Graph mode: packed Q and K/V live in buffers larger than what the sequences of this step use."""
    case = make_case("packed_q", [3, 2], [4, 5], host_lens=False)
    q = torch.cat([case.q, torch.full((4, 3, 16), float("nan"))])
    out, lse = case.backend().forward(q, case.k, case.v, case.metadata, return_lse=True)
    assert out[5:].eq(0).all() and torch.isneginf(lse[:, 5:]).all()
    for (qs, ks, vs), (out_b, lse_b) in zip(case.sequences, case.split(out[:5], lse[:, :5]), strict=True):
        expected, expected_lse = oracle(qs, ks, vs, 0.25)
        torch.testing.assert_close(out_b.double(), expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(lse_b.double(), expected_lse, atol=1e-5, rtol=0)


def test_a_looser_bound_changes_nothing(make_case, check):
    """In graph mode max_seqlen is a constant above every length."""
    for form in ("packed", "packed_q"):
        case = make_case(form, [6, 6], [8, 3], host_lens=False)
        bounds = {"max_seqlen_kv": 20} | ({"max_seqlen_q": 9} if form == "packed_q" else {})
        case.metadata = PackedKV(**(vars(case.metadata) | bounds))
        check(case)
        check(case, causal=True)


layouts = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 20)), min_size=1, max_size=5)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(layouts, st.sampled_from(FORMS), st.booleans(), st.booleans(), st.sampled_from([(1, 1), (4, 2), (3, 1)]))
def test_any_layout(make_case, check, layout, form, causal, host_lens, heads):
    q_lens, kv_lens = zip(*layout, strict=True)
    if not form.endswith("_q"):
        q_lens = (q_lens[0],) * len(kv_lens)
    case = make_case(form, q_lens, kv_lens, heads=heads[0], kv_heads=heads[1], head_dim=8, host_lens=host_lens)
    assert isinstance(case.metadata, PaddedKV | PackedKV | PagedKV | ExtentKV)
    check(case, causal=causal)


@pytest.mark.parametrize("form", ["extent", "extent_q"])
def test_extents_with_known_lengths_are_read_in_place(make_case, monkeypatch, form):
    case = make_case(form, [6, 6], [8, 8])
    seen = []
    attend = sdpa._attend
    monkeypatch.setattr(
        sdpa, "_attend", lambda q, k, v, *rest, **kw: seen.append((k, v)) or attend(q, k, v, *rest, **kw)
    )
    case.backend().forward(case.q, case.k, case.v, case.metadata)
    for (k, v), start in zip(seen, case.metadata.starts, strict=True):
        assert k.data_ptr() == case.k[start].data_ptr() and v.data_ptr() == case.v[start].data_ptr()


@pytest.mark.parametrize("form", ["extent", "extent_q"])
def test_extents_may_be_shared_and_have_gradients(make_case, oracle, form):
    case = make_case(form, [6, 6], [8, 5], poison=0.0)
    first, number_of_rows = case.metadata.starts[0], len(case.k)
    starts = torch.tensor([first, first, number_of_rows], dtype=torch.int32)
    case.metadata = ExtentKV(**(vars(case.metadata) | {"starts_kv": starts, "starts": (first, first)}))
    q0, k0, v0 = case.sequences[0]
    case.sequences[1] = (case.sequences[1][0], k0[:5], v0[:5])
    case.k.requires_grad_()
    out = case.backend(needs={"grad"}).forward(case.q, case.k, case.v, case.metadata)
    (grad,) = torch.autograd.grad(out.sin().sum(), case.k)
    leaf = k0.double().requires_grad_()
    expected = [oracle(q, leaf[: len(k)], v, 0.25)[0] for q, k, v in case.sequences]
    (wanted,) = torch.autograd.grad(sum(x.sin().sum() for x in expected), leaf)
    for got, want in zip(case.split(out), expected, strict=True):
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=0)
    torch.testing.assert_close(grad[first : first + 8].double(), wanted, atol=1e-5, rtol=0)
