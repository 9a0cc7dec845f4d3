"""What reaches the kernel package and what comes back, with a stand-in on the CPU in the package's place."""

import importlib

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from attention_backend import AttentionBackendError, AttentionMetadataState, AttentionSpec
from attention_backend import flash_attn4_ops as ops
from attention_backend.flash_attn4 import FlashAttention4Backend

FORMS = ["dense", "padded", "packed", "packed_q", "paged", "paged_q", "extent", "extent_q"]
Q_LENS, KV_LENS = [6, 6, 6], [8, 3, 0]


class OnCPU(FlashAttention4Backend):
    """The backend as it is, without what it says of devices and dtypes."""

    unavailable_reason = classmethod(lambda cls: None)
    unsupported_reasons = classmethod(lambda cls, spec: [])


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def backend_for(case, scale=None):
    spec = AttentionSpec(
        "self",
        case.q.shape[-2],
        case.q.shape[-1],
        case.q.dtype,
        case.q.device,
        num_kv_heads=case.k.shape[-2],
        softmax_scale=scale,
    )
    return OnCPU(spec)


def case_of(make_case, form, **options):
    options = {"heads": 4, "kv_heads": 2, "poison": 1e4, **options}
    return make_case(form, Q_LENS, [8, 8, 8] if form == "dense" else KV_LENS, **options)


@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_every_family_hands_its_lengths_scale_and_mask_to_the_kernel(make_case, check, kernel, form, causal, scale):
    case = case_of(make_case, form)
    check(case, causal=causal, scale=scale, backend=backend_for(case, scale))


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_arguments_that_make_a_row_independent_and_keep_padded_q_persistent(make_case, kernel, form, return_lse):
    case = case_of(make_case, form)
    backend_for(case).forward(case.q, case.k, case.v, case.metadata, return_lse=return_lse)
    (call,) = kernel.calls
    assert call["num_splits"] == 1 and call["return_lse"] is return_lse and call["causal"] is False
    for name in ("q", "k", "v"):
        assert call[name].data_ptr() == getattr(case, name).data_ptr()
    if form == "dense":
        return
    metadata = case.metadata
    assert call["max_seqlen_k"] == metadata.max_seqlen_kv
    if form.endswith("_q"):
        assert call["cu_seqlens_q"].data_ptr() == metadata.cu_seqlens_q.data_ptr()
        assert call["max_seqlen_q"] == metadata.max_seqlen_q
    else:
        assert call["cu_seqlens_q"] is None and call["max_seqlen_q"] is None
    given = {name for name in ("cu_seqlens_k", "seqused_k", "page_table") if call[name] is not None}
    wanted = {
        "padded": {"seqused_k"},
        "packed": {"cu_seqlens_k", "seqused_k"},
        "packed_q": {"cu_seqlens_k"},
        "paged": {"page_table", "seqused_k"},
        "extent": {"cu_seqlens_k", "seqused_k"},
    }
    assert given == wanted.get(form, wanted[form.removesuffix("_q")])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "result", [lambda out, lse: out, lambda out, lse: (out, None), lambda out, lse: [out, lse, None]]
)
def test_returns_of_other_package_versions(make_case, kernel, form, result):
    case = case_of(make_case, form)
    backend = backend_for(case)
    expected, expected_lse = backend.forward(case.q, case.k, case.v, case.metadata, return_lse=True)
    kernel.result = result
    out = backend.forward(case.q, case.k, case.v, case.metadata)
    assert out.shape == case.q.shape and torch.equal(out, expected)
    if isinstance(result(0, 1), list):
        out, lse = backend.forward(case.q, case.k, case.v, case.metadata, return_lse=True)
        assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    else:
        with pytest.raises(RuntimeError, match="asked for the LSE and returned none"):
            backend.forward(case.q, case.k, case.v, case.metadata, return_lse=True)


def test_views_of_a_fused_projection_reach_the_kernel_as_they_are(kernel):
    qkv = torch.randn(2, 5, 3, 4, 16)
    views = qkv.unbind(2)
    OnCPU(AttentionSpec("self", 4, 16, torch.float32, "cpu")).forward(*views)
    for name, view in zip("qkv", views, strict=True):
        got = kernel.calls[0][name]
        assert got.data_ptr() == view.data_ptr() and got.stride() == view.stride()


def test_gradients_are_refused_rather_than_cut_off(make_case, kernel):
    case = case_of(make_case, "dense")
    with pytest.raises(AttentionBackendError, match="inference-only and k require grad"):
        backend_for(case).forward(case.q, case.k.requires_grad_(), case.v)
    assert not kernel.calls


def test_an_error_of_the_kernel_goes_up_and_the_next_call_uses_it_again(make_case, kernel):
    case = case_of(make_case, "packed")
    backend = backend_for(case)

    def fail(out, lse):
        raise torch.OutOfMemoryError("out of memory")

    kernel.result, works = fail, kernel.result
    with pytest.raises(torch.OutOfMemoryError):
        backend.forward(case.q, case.k, case.v, case.metadata)
    kernel.result = works
    assert backend.forward(case.q, case.k, case.v, case.metadata).isfinite().all()
    assert len(kernel.calls) == 2


def operator_arguments(case, causal, return_lse):
    """What the backend calls an operator with, by taking the operator's place."""
    seen = []
    names = ("dense", "padded", "packed", "paged")
    originals = {name: getattr(ops, name) for name in names}
    try:
        for name in names:
            setattr(ops, name, lambda *args, op=originals[name]: seen.append((op, args)) or op(*args))
        backend_for(case).forward(case.q, case.k, case.v, case.metadata, causal=causal, return_lse=return_lse)
    finally:
        for name in names:
            setattr(ops, name, originals[name])
    (call,) = seen
    return call


@pytest.mark.parametrize("causal, return_lse", [(False, False), (True, True)])
@pytest.mark.parametrize("form", FORMS)
def test_operators_keep_torchs_contract(make_case, kernel, form, causal, return_lse):
    """Schema, fake against real shapes, dtypes and strides, and tracing with dynamic shapes."""
    case = case_of(make_case, form)
    case.q = case.q.transpose(0, 1).contiguous().transpose(0, 1)  # the output is contiguous all the same
    operator, args = operator_arguments(case, causal, return_lse)
    # The oracle's order of additions differs between a traced and a plain call.
    torch.library.opcheck(operator, args, atol=1e-5, rtol=0)


class Block(torch.nn.Module):
    """Cross-attention as a transformer block has it: projections, the backend, a residual."""

    def __init__(self, backend, heads, head_dim):
        super().__init__()
        self.backend, self.heads = backend, heads
        self.to_q = torch.nn.Linear(8, heads * head_dim)
        self.to_out = torch.nn.Linear(heads * head_dim, 8)

    def forward(self, x, k, v, metadata, return_lse):
        q = self.to_q(x).unflatten(-1, (self.heads, -1))
        result = self.backend.forward(q, k, v, metadata, return_lse=return_lse)
        out, lse = result if return_lse else (result, None)
        return x + self.to_out(out.flatten(2)), lse


TEXT_LAYOUTS = [[12, 5], [7, 5], [3, 1], [12, 12], [0, 4]]


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("form, rows", [("padded", (2, 12)), ("packed", (24,))])
def test_a_block_compiles_fullgraph_once_for_all_text_lengths(kernel, form, rows, return_lse):
    """Entries of the model's state, host lengths and all; packed K/V in a buffer of fixed capacity."""
    heads, head_dim, state = 2, 16, AttentionMetadataState()
    block = Block(OnCPU(AttentionSpec("cross_text", heads, head_dim, torch.float32, "cpu")), heads, head_dim)
    block.requires_grad_(False)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, backend=counter, fullgraph=True)
    for seed, lens in enumerate(TEXT_LAYOUTS):
        gen = torch.Generator().manual_seed(seed)
        x = torch.randn(2, 6, 8, generator=gen)
        k, v = (torch.randn(*rows, heads, head_dim, generator=gen) for _ in "kv")
        if form == "padded":
            metadata = state.padded_kv("cross_text", lens, 12, "cpu")
        else:
            metadata = state.packed_kv("cross_text", lens, "cpu", max_seqlen_kv=12)
        got = compiled(x, k, v, metadata, return_lse)
        expected = block(x, k, v, metadata, return_lse)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
    assert counter.frame_count == 1
    assert len(kernel.calls) == 2 * len(TEXT_LAYOUTS)


def test_packed_rows_without_a_fixed_buffer_compile_at_most_twice(kernel):
    """The row count of K/V changes with the lengths: torch makes it dynamic when it sees the second."""
    state, backend = AttentionMetadataState(), OnCPU(AttentionSpec("cross_text", 2, 16, torch.float32, "cpu"))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(backend.forward, backend=counter, fullgraph=True)
    q = torch.randn(2, 6, 2, 16)
    for lens in TEXT_LAYOUTS:
        k, v = (torch.randn(sum(lens), 2, 16) for _ in "kv")
        metadata = state.packed_kv("cross_text", lens, "cpu")
        torch.testing.assert_close(compiled(q, k, v, metadata), backend.forward(q, k, v, metadata), atol=1e-5, rtol=0)
    assert counter.frame_count == 2


@pytest.mark.parametrize("form", ["packed_q", "paged_q", "extent_q"])
def test_packed_q_and_pages_compile_at_most_twice_for_all_lengths(make_case, kernel, form):
    """Rows of K/V, pages and table widths differ in number: once as they are, then dynamic."""
    counter, compiled = CompileCounterWithBackend("aot_eager"), None
    for kv_lens in ([4, 4, 9], [9, 1, 7], [2, 9, 6], [30, 0, 17]):
        case = make_case(form, [3, 9, 6], kv_lens, poison=1e4)
        backend = backend_for(case)
        compiled = compiled or torch.compile(backend.forward, backend=counter, fullgraph=True)
        got = compiled(case.q, case.k, case.v, case.metadata)
        expected = backend.forward(case.q, case.k, case.v, case.metadata)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
    assert counter.frame_count <= 2


def test_operators_survive_a_reload_of_their_module(make_case, kernel, check):
    case = case_of(make_case, "packed")
    backend = backend_for(case)
    try:
        for _ in range(2):
            importlib.reload(ops)
            ops.kernel_package = lambda: kernel
            check(case, backend=backend)
            compiled = torch.compile(backend.forward, backend="aot_eager", fullgraph=True)
            got = compiled(case.q, case.k, case.v, case.metadata)
            torch.testing.assert_close(got, backend.forward(case.q, case.k, case.v, case.metadata), atol=1e-5, rtol=0)
    finally:
        importlib.reload(ops)


REPEATED_LENS = [[12, 5], [7, 5], [3, 1], [11, 12], [0, 4]]


def pad_exact_call(lens, padded_len=12, heads=2, head_dim=16):
    """q, packed rows with one pad row after each shorter sequence, and the padded rows that they stand for."""
    gen = torch.Generator().manual_seed(sum(lens))
    q = torch.randn(len(lens), 6, heads, head_dim, generator=gen)
    padded = torch.randn(2, len(lens), padded_len, heads, head_dim, generator=gen)
    for b, n in enumerate(lens):
        padded[:, b, n:] = torch.randn(2, 1, heads, head_dim, generator=gen)
    k, v = (torch.cat([x[b, : min(n + 1, padded_len)] for b, n in enumerate(lens)]) for x in padded)
    return q, k, v, padded


@pytest.mark.parametrize("lens", REPEATED_LENS)
def test_a_repeated_last_key_stands_for_all_pad_rows(kernel, oracle, lens):
    q, k, v, padded = pad_exact_call(lens)
    backend = OnCPU(AttentionSpec("cross_text", 2, 16, torch.float32, "cpu", softmax_scale=0.5))
    pads = AttentionMetadataState().packed_pad_kv("cross_text", lens, 12, "cpu", formulation="repeated_key")
    out, lse = backend.forward(q, k, v, pads.packed, return_lse=True)
    for b in range(2):
        expected, expected_lse = oracle(q[b], padded[0, b], padded[1, b], 0.5)
        torch.testing.assert_close(out[b].double(), expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(lse[b].double(), expected_lse, atol=1e-5, rtol=0)
    torch.library.opcheck(ops.packed, (q, k, v, pads.packed.cu_seqlens_kv, None, 12, None, None, 12, 0.5, False, True))


def test_only_a_repeated_key_touches_the_scores(make_case, kernel):
    case = case_of(make_case, "packed")
    backend_for(case).forward(case.q, case.k, case.v, case.metadata)
    assert kernel.calls[0]["score_mod"] is None
