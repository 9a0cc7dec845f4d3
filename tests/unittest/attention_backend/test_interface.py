"""What every call is checked for, whatever the backend; kernels are stubs."""

import pytest
import torch

from attention_backend import (
    AttentionBackend,
    AttentionBackendError,
    AttentionMetadataState,
    AttentionSpec,
    PackedKV,
    PaddedKV,
    PagedKV,
    select_backend,
)

SPEC = AttentionSpec("self", 2, 16, torch.float32, "cpu")


def tensors(num_seqs=2, q_len=4, kv_len=6, heads=2, head_dim=16, dtype=torch.float32):
    gen = torch.Generator().manual_seed(0)
    q = torch.randn(num_seqs, q_len, heads, head_dim, generator=gen).to(dtype)
    k, v = (torch.randn(num_seqs, kv_len, heads, head_dim, generator=gen).to(dtype) for _ in "kv")
    return q, k, v


class Stub(AttentionBackend):
    """A kernel that returns what it is told to, or raises it."""

    name = "stub"
    result = None

    def attend(self, q, k, v, metadata, *, causal, return_lse):
        result = self.result(q) if callable(self.result) else self.result
        if isinstance(result, Exception):
            raise result
        return result


class StubWithLSE(Stub):
    name = "stub_with_lse"

    @classmethod
    def supports_lse(cls):
        return True


def lse_of(q):
    return torch.zeros(q.shape[0], q.shape[2], q.shape[1])


RETURNS = {
    "a tensor": lambda q: q * 2,
    "(out, None)": lambda q: (q * 2, None),
    "(out, lse)": lambda q: (q * 2, lse_of(q)),
    "[out, lse, extra]": lambda q: [q * 2, lse_of(q), "rng state"],
}


@pytest.mark.parametrize("form", RETURNS)
def test_the_output_is_a_tensor_like_q_whatever_the_kernel_returns(form):
    backend = StubWithLSE(SPEC)
    backend.result = RETURNS[form]
    q, k, v = tensors()
    out = backend.forward(q, k, v)
    assert out.shape == q.shape and torch.equal(out, q * 2)
    if "lse" in form:
        out, lse = backend.forward(q, k, v, return_lse=True)
        assert torch.equal(out, q * 2) and lse.shape == (2, 2, 4)
    else:
        with pytest.raises(RuntimeError, match="stub_with_lse was asked for the LSE and returned none"):
            backend.forward(q, k, v, return_lse=True)


def test_an_output_of_another_shape_is_an_error():
    backend = Stub(SPEC)
    backend.result = lambda q: q.transpose(1, 2)
    wrong = r"stub returned torch.float32 \(2, 2, 4, 16\) for q of torch.float32 \(2, 4, 2, 16\)"
    with pytest.raises(RuntimeError, match=wrong):
        backend.forward(*tensors())
    for bad, found in ((None, "None"), ((), "None"), (torch.zeros(2, 4, 2, 16).double(), "torch.float64")):
        backend.result = lambda q, bad=bad: bad
        with pytest.raises(RuntimeError, match=f"stub returned {found}"):
            backend.forward(*tensors())


def test_out_of_memory_goes_up_and_the_backend_is_used_again():
    backend = Stub(SPEC)
    calls = []

    def first_fails(q):
        calls.append(1)
        return torch.OutOfMemoryError("CUDA out of memory") if len(calls) == 1 else q

    backend.result = first_fails
    q, k, v = tensors()
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        backend.forward(q, k, v)
    assert backend.forward(q, k, v) is q
    assert len(calls) == 2


def test_two_backends_interleaved_do_not_change_each_other(oracle):
    class Doubling(Stub):
        name = "doubling"
        result = staticmethod(lambda q: q * 2)

    sharp = select_backend("sdpa", AttentionSpec("self", 2, 16, torch.float32, "cpu", softmax_scale=1.0))
    soft = select_backend("sdpa", AttentionSpec("self", 2, 16, torch.float32, "cpu", softmax_scale=0.1))
    other = Doubling(SPEC)
    q, k, v = tensors()
    for _ in range(2):
        for backend, scale in ((sharp, 1.0), (other, None), (soft, 0.1)):
            out = backend.forward(q, k, v)
            expected = q[0] * 2 if scale is None else oracle(q[0], k[0], v[0], scale)[0]
            torch.testing.assert_close(out[0].double(), expected.double(), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32, torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float16, torch.bfloat16, torch.float32),
    ],
)
def test_mixed_dtypes_are_an_error_that_names_all_three(dtypes):
    q, k, v = (x.to(dtype) for x, dtype in zip(tensors(), dtypes, strict=True))
    for backend in (Stub(SPEC), select_backend("sdpa", SPEC)):
        with pytest.raises(ValueError, match=", ".join(map(str, dtypes[:2])) + f" and {dtypes[2]}"):
            backend.forward(q, k, v)


def test_devices_that_differ_are_named():
    q, k, v = tensors()
    with pytest.raises(ValueError, match="cpu, cpu and meta"):
        Stub(SPEC).forward(q, k, v.to("meta"))


INT32 = {"dtype": torch.int32}
LENS = torch.tensor([3, 6], **INT32)
STARTS = torch.tensor([0, 3, 9], **INT32)
TABLE = torch.zeros(2, 2, **INT32)
LONG = torch.tensor([3, 6])


@pytest.mark.parametrize(
    "change, metadata, message",
    [
        ({"q": (2, 4, 3, 16)}, None, r"q has shape \(2, 4, 3, 16\); expected \[B, Sq, H, D\] with H, D = \(2, 16\)"),
        ({"q": (4, 2, 16)}, None, r"q has shape \(4, 2, 16\); expected \[B, Sq, H, D\]"),
        ({"k": (2, 6, 2, 8)}, None, r"k has shape \(2, 6, 2, 8\); expected \[B, Skv, Hkv, D\]"),
        ({"k": (2, 5, 2, 16)}, None, r"k has shape \(2, 5, 2, 16\) and v \(2, 6, 2, 16\)"),
        ({"q": (3, 4, 2, 16)}, None, "q has batch 3 and k, v have 2"),
        ({}, PaddedKV(LENS, 7), "max_seqlen_kv is 7 but k, v have only 6 rows"),
        ({}, PaddedKV(LONG, 6), r"seqused_kv is torch.int64 \(2,\) on cpu; expected torch.int32 \(2,\)"),
        ({}, PaddedKV(LENS[:1], 6), r"seqused_kv is torch.int32 \(1,\)"),
        ({}, PaddedKV(LENS.to("meta"), 6), r"seqused_kv is torch.int32 \(2,\) on meta"),
        ({}, PaddedKV(LENS, 5, (3, 6)), r"kv_lens is \(3, 6\); expected 2 lengths between 0 and 5"),
        ({}, PackedKV(STARTS, 6, None), r"k has shape \(2, 6, 2, 16\); expected \[total_kv, Hkv, D\]"),
        ({"k": (8, 2, 16), "v": (8, 2, 16)}, PackedKV(STARTS, 6, (3, 6)), "kv_lens sum to 9 but k, v have only 8 rows"),
        ({"k": (9, 2, 16), "v": (9, 2, 16), "q": (3, 4, 2, 16)}, PackedKV(STARTS, 6, None), "q has batch 3 but"),
        (
            {"k": (9, 2, 16), "v": (9, 2, 16), "q": (7, 2, 16)},
            PackedKV(STARTS, 6, (3, 6), STARTS, 6, (3, 6)),
            "q_lens sum to 9 but q has 7 rows",
        ),
        (
            {"k": (9, 2, 16), "v": (9, 2, 16), "q": (9, 2, 16)},
            PackedKV(STARTS, 6, None, STARTS),
            "cu_seqlens_q is given without max_seqlen_q",
        ),
        ({}, PagedKV(TABLE, LENS, 4, 8), "block_size is 4 but the pools have blocks of 6 tokens"),
        ({}, PagedKV(TABLE, LENS, 6, 13), "max_seqlen_kv is 13 but a block table of width 2"),
        ({}, PagedKV(TABLE.long(), LENS, 6, 12), "block_table is torch.int64"),
        ({}, PagedKV(TABLE, LENS, 6, 12, max_block_id=2), "the block table names block 2 of a pool of 2 blocks"),
        ({}, PaddedKV(LENS, 6, (-1, 3)), r"kv_lens is \(-1, 3\); expected 2 lengths between 0 and 6"),
        ({}, PaddedKV(LENS, 6, (3, 7)), r"kv_lens is \(3, 7\); expected 2 lengths between 0 and 6"),
        ({}, {"seqused_kv": LENS}, "metadata is a dict; it must be one of PackedKV, PaddedKV"),
    ],
)
def test_calls_that_contradict_themselves_are_refused_with_the_values(change, metadata, message):
    q, k, v = tensors()
    args = {"q": q, "k": k, "v": v} | {name: torch.zeros(shape) for name, shape in change.items()}
    with pytest.raises(ValueError, match=message):
        select_backend("sdpa", SPEC).forward(**args, metadata=metadata)


def test_what_a_backend_cannot_honour_is_an_error_never_dropped():
    backend = Stub(SPEC)
    backend.result = lambda q: q
    q, k, v = tensors()
    state = AttentionMetadataState()
    for metadata, what in (
        (state.padded_kv("self", [3, 6], 6, "cpu"), "key lengths"),
        (state.packed_kv("self", [3, 6], "cpu"), "packed K/V"),
        (state.paged_kv("self", [[0], [0]], [3, 6], 6, "cpu"), "a block table"),
    ):
        with pytest.raises(AttentionBackendError, match=f"stub cannot read {what}"):
            backend.forward(q, k, v, metadata)
    with pytest.raises(AttentionBackendError, match="stub has no causal attention"):
        backend.forward(q, k, v, causal=True)
    with pytest.raises(AttentionBackendError, match="stub returns no LSE"):
        backend.forward(q, k, v, return_lse=True)
    with pytest.raises(TypeError, match="attn_mask"):
        backend.forward(q, k, v, attn_mask=None)


def test_an_inference_only_kernel_refuses_gradients_and_names_the_way_out():
    backend = Stub(SPEC)
    backend.result = lambda q: q
    q, k, v = tensors()
    with pytest.raises(AttentionBackendError, match="stub is inference-only and q, v require grad.*sdpa"):
        backend.forward(q.requires_grad_(), k, v.requires_grad_())
    with torch.no_grad():
        assert backend.forward(q, k, v) is q


def test_construction_lists_every_reason():
    class Missing(Stub):
        name = "missing"

        @classmethod
        def unavailable_reason(cls):
            return "not installed; pip install it"

    spec = AttentionSpec("self", 2, 16, torch.float32, "cpu", causal=True, needs={"varlen", "lse", "grad"})
    with pytest.raises(AttentionBackendError) as error:
        Missing(spec)
    for reason in ("not installed; pip install it", "varlen", "lse", "grad", "causal"):
        assert reason in str(error.value)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"role": "cross"}, "role is 'cross'; it must be one of self, cross_text, cross_image"),
        ({"num_heads": 0}, "num_heads is 0"),
        ({"head_dim": -8}, "head_dim is -8"),
        ({"num_kv_heads": 0}, "num_kv_heads is 0"),
        ({"num_heads": "2"}, "num_heads is '2'"),
        ({"num_heads": True}, "num_heads is True"),
        ({"softmax_scale": 0.0}, "softmax_scale is 0.0; it must be finite and above 0"),
        ({"softmax_scale": float("nan")}, "softmax_scale is nan"),
        ({"softmax_scale": "1"}, "softmax_scale is '1'"),
        ({"needs": {"alibi"}}, r"needs has \['alibi'\]; known needs are"),
    ],
)
def test_impossible_specs_are_refused(change, message):
    fields = {"role": "self", "num_heads": 2, "head_dim": 16, "dtype": torch.float32, "device": "cpu"}
    with pytest.raises(ValueError, match=message):
        AttentionSpec(**(fields | change))


def test_a_last_key_that_counts_several_times_is_never_counted_once():
    q, k, v = tensors()
    cu = torch.tensor([0, 6, 12], dtype=torch.int32)
    call = (q, k.flatten(0, 1), v.flatten(0, 1))
    with pytest.raises(AttentionBackendError, match="sdpa cannot count a sequence's last key several times"):
        select_backend("sdpa", SPEC).forward(*call, PackedKV(cu, 6, (6, 6), last_key_repeats_to=8))
    with pytest.raises(ValueError, match="last_key_repeats_to is 5, below max_seqlen_kv 6"):
        PackedKV(cu, 6, (6, 6), last_key_repeats_to=5).check(q, call[1])
