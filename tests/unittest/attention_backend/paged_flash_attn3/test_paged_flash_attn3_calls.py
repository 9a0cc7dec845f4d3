"""What reaches each build of FlashAttention-3 and what comes back, with stand-ins on the CPU in the builds' place."""

import importlib

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from attention_backend import AttentionBackendError, AttentionMetadataState
from attention_backend import paged_flash_attn3_ops as ops

FORMS = ["dense", "padded", "packed", "packed_q", "extent", "extent_q", "paged", "paged_q"]
Q_LENS, KV_LENS = [6, 6, 6], [8, 3, 0]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def case_of(make_case, form, **options):
    options = {"heads": 4, "kv_heads": 2, "poison": 1e4, **options}
    q_lens = [6, 2, 9] if form.endswith("_q") else Q_LENS
    return make_case(form, q_lens, [8, 8, 8] if form == "dense" else KV_LENS, **options)


@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_every_family_through_every_build(make_case, check, build, backend_for, form, causal, scale):
    case = case_of(make_case, form)
    _, lse = check(case, causal=causal, scale=scale, backend=backend_for(case, scale))
    assert lse.is_contiguous()


@pytest.mark.parametrize("form", FORMS)
def test_arguments_of_a_call(make_case, build, kernel, backend_for, form):
    """Nothing is copied, lengths are the metadata's own tensors, and padded Q's starts are made once for a shape."""
    case = case_of(make_case, form)
    backend = backend_for(case)
    for _ in range(2):
        backend.forward(case.q, case.k, case.v, case.metadata)
    first, call = kernel.calls
    for name in ("q", "k", "v"):
        assert call[name].data_ptr() == getattr(case, name).data_ptr()
    metadata, given = case.metadata, {name for name, value in call.items() if value is not None}
    if form == "dense":
        assert given & {"cu_seqlens_k", "page_table"} == set()
        if build.dense is None:
            assert call["seqused_k"].tolist() == [8, 8, 8] and call["seqused_k"] is first["seqused_k"]
        else:
            assert given & {"cu_seqlens_q", "seqused_k"} == set()
            return
    elif form == "padded":
        assert call["seqused_k"] is metadata.seqused_kv and given & {"cu_seqlens_k", "page_table"} == set()
    elif form.startswith("packed"):
        assert call["cu_seqlens_k"] is metadata.cu_seqlens_kv and call["seqused_k"] is None
    elif form.startswith("extent"):
        assert call["cu_seqlens_k"] is metadata.starts_kv and call["seqused_k"] is metadata.seqused_kv
    else:
        assert call["page_table"] is metadata.block_table and call["seqused_k"] is metadata.seqused_kv
    if form.startswith(("packed", "extent")):
        assert call["max_seqlen_k"] == metadata.max_seqlen_kv
    if form.startswith("paged"):
        assert call["max_seqlen_k"] == (metadata.max_seqlen_kv if build.name == "vllm" else None)
    if form.endswith("_q"):
        assert call["cu_seqlens_q"] is metadata.cu_seqlens_q and call["max_seqlen_q"] == metadata.max_seqlen_q
    else:
        assert call["cu_seqlens_q"] is first["cu_seqlens_q"] and call["cu_seqlens_q"].tolist() == [0, 6, 12, 18]
        assert call["max_seqlen_q"] == 6


@pytest.mark.parametrize("form", ["packed", "packed_q", "extent", "padded", "dense"])
def test_without_any_row_of_k(make_case, build, kernel, check, backend_for, form):
    """The builds write +inf into the LSE there."""
    q_lens = [6, 2] if form.endswith("_q") else [6, 6]
    case = make_case(form, q_lens, [0, 0], heads=4, kv_heads=2, padding=0)
    out, lse = check(case, backend=backend_for(case))
    assert not kernel.calls and (out == 0).all() and (lse == -torch.inf).all()


def test_no_queries(make_case, build, kernel, backend_for):
    case = make_case("packed", [0, 0], [3, 5], heads=4)
    out, lse = backend_for(case).forward(case.q, case.k, case.v, case.metadata, return_lse=True)
    assert out.shape == case.q.shape and lse.shape == (2, 4, 0) and not kernel.calls


VIEWS = {
    "fused QKV": (lambda x: torch.stack([x, x, x], dim=2)[:, :, 1], False),
    "heads outside": (lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), False),
    "last stride 2": (lambda x: torch.stack([x, x], dim=-1).flatten(-2)[..., ::2], True),
    "address off by one element": (lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x), True),
    "rows of 18": (lambda x: torch.nn.functional.pad(x, (0, 2))[..., :16], True),
    "one sequence for all": (lambda x: x[:1].expand_as(x), True),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_are_copied_only_where_the_kernels_could_not_load_them(make_case, kernel, stand_in, backend_for, name):
    stand_in("vllm")
    view, copied = VIEWS[name]
    case = case_of(make_case, "padded")
    k, v = view(case.k), view(case.v)
    backend = backend_for(case)
    got = backend.forward(case.q, k, v, case.metadata)
    assert (kernel.calls[0]["k"].data_ptr() != k.data_ptr()) == copied
    assert torch.equal(got, backend.forward(case.q, k.contiguous(), v.contiguous(), case.metadata))


def test_a_build_that_returns_no_lse_is_told(make_case, stand_in, kernel, backend_for):
    build = stand_in("upstream")
    function = build.varlen._function
    build.varlen._function = lambda return_attn_probs, **given: function(return_attn_probs=False, **given)
    case = case_of(make_case, "packed")
    backend = backend_for(case)
    backend.forward(case.q, case.k, case.v, case.metadata)
    with pytest.raises(RuntimeError, match="flash_attn_interface was asked for the LSE and returned none"):
        backend.forward(case.q, case.k, case.v, case.metadata, return_lse=True)


def test_gradients_are_refused_rather_than_cut_off(make_case, build, kernel, backend_for):
    case = case_of(make_case, "extent")
    with pytest.raises(AttentionBackendError, match="inference-only and k require grad"):
        backend_for(case).forward(case.q, case.k.requires_grad_(), case.v, case.metadata)
    assert not kernel.calls


def operator_arguments(monkeypatch, backend, case, **options):
    """What the backend calls an operator with, by taking the operator's place."""
    seen = []
    with monkeypatch.context() as patch:
        for name in ("dense", "padded", "packed", "paged"):
            operator = getattr(ops, name)
            patch.setattr(ops, name, lambda *args, op=operator: seen.append((op, args)) or op(*args))
        backend.forward(case.q, case.k, case.v, case.metadata, **options)
    (call,) = seen
    return call


@pytest.mark.parametrize("causal, return_lse", [(False, False), (True, True)])
@pytest.mark.parametrize("form", FORMS)
def test_operators_keep_torchs_contract(make_case, monkeypatch, stand_in, backend_for, form, causal, return_lse):
    """Schema, fake against real shapes, dtypes and strides, and tracing with dynamic shapes."""
    stand_in("vllm")
    case = case_of(make_case, form)
    case.q = case.q.transpose(0, 1).contiguous().transpose(0, 1)  # the output is contiguous all the same
    operator, args = operator_arguments(
        monkeypatch, backend_for(case), case, causal=causal, return_lse=return_lse
    )  # fmt: skip
    # The oracle's order of additions differs between a traced and a plain call.
    torch.library.opcheck(operator, args, atol=1e-5, rtol=0)


@pytest.mark.parametrize("form", ["packed", "extent", "paged"])
def test_a_call_compiles_fullgraph_once_for_all_lengths(stand_in, backend_for, make_case, form):
    """Entries of the model's state, host lengths and all, over buffers of fixed size."""
    stand_in("vllm")
    state, rows, gen = AttentionMetadataState(), 24, torch.Generator().manual_seed(0)
    k, v = (torch.randn(*((6, 4) if form == "paged" else (rows,)), 2, 16, generator=gen) for _ in "kv")
    q = torch.randn(2, 6, 4, 16, generator=gen)
    backend = backend_for(make_case("packed", [6, 6], [1, 1], heads=4, kv_heads=2))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(backend.forward, backend=counter, fullgraph=True)
    for lens in ([12, 5], [7, 5], [3, 1], [12, 12], [0, 4]):
        if form == "packed":
            metadata = state.packed_kv("self", lens, "cpu", max_seqlen_kv=12)
        elif form == "extent":
            metadata = state.extent_kv("self", [12, 0], lens, rows, "cpu", max_seqlen_kv=12)
        else:
            metadata = state.paged_kv("self", [[3, 1, 4], [5, 2, 0]], lens, 4, "cpu")
        got = compiled(q, k, v, metadata, return_lse=True)
        torch.testing.assert_close(got, backend.forward(q, k, v, metadata, return_lse=True), atol=1e-5, rtol=0)
    assert counter.frame_count == 1


def test_operators_survive_a_reload_of_their_module(make_case, check, stand_in, backend_for):
    build = stand_in("sgl")
    case = case_of(make_case, "packed")
    backend = backend_for(case)
    try:
        importlib.reload(ops)
        ops.find_build = lambda: (build, None)
        check(case, backend=backend)
        compiled = torch.compile(backend.forward, backend="aot_eager", fullgraph=True)
        got = compiled(case.q, case.k, case.v, case.metadata)
        torch.testing.assert_close(got, backend.forward(case.q, case.k, case.v, case.metadata), atol=1e-5, rtol=0)
    finally:
        importlib.reload(ops)
