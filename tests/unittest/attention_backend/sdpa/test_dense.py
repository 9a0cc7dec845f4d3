"""Dense SDPA: values, LSE, causal alignment, GQA, dtypes, strides and gradients."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attention_backend import AttentionSpec, select_backend

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seqlen", [1, 63, 64, 65, 127, 128, 129, 192, 256])
def test_lengths_around_tile_sizes(make_case, check, seqlen, dtype, causal):
    check(make_case("dense", [seqlen] * 2, [seqlen] * 2, dtype=dtype), causal=causal, tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize("q_len", [1, 2, 5, 16])
@pytest.mark.parametrize("kv_len", [0, 1, 2, 5, 16, 33])
def test_causal_aligns_bottom_right(make_case, check, q_len, kv_len):
    out, lse = check(make_case("dense", [q_len] * 2, [kv_len] * 2, heads=4, kv_heads=2), causal=True)
    blind = max(0, q_len - kv_len)
    assert out[:, :blind].eq(0).all()
    assert torch.isneginf(lse[:, :, :blind]).all() and lse[:, :, blind:].isfinite().all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads, kv_heads", [(8, 8), (8, 2), (6, 1), (5, 5)])
@pytest.mark.parametrize("head_dim", [8, 20, 72, 80, 100, 256, 320])
def test_heads_and_head_dims(make_case, check, heads, kv_heads, head_dim, causal):
    check(make_case("dense", [9] * 2, [13] * 2, heads=heads, kv_heads=kv_heads, head_dim=head_dim), causal=causal)


def test_heads_that_do_not_divide_are_refused_with_both_numbers():
    with pytest.raises(ValueError, match="num_heads 6 is not a multiple of num_kv_heads 4"):
        AttentionSpec("self", 6, 64, torch.float32, "cpu", num_kv_heads=4)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [0.5, 1.0, 1e-3])
def test_softmax_scale(make_case, check, scale, causal):
    check(make_case("dense", [7] * 2, [7] * 2), scale=scale, causal=causal)
    check(make_case("dense", [7] * 2, [12] * 2), scale=scale, causal=causal)


@pytest.mark.parametrize("form", ["dense", "padded", "packed", "packed_q", "paged"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_error_is_at_most_twice_that_of_the_plain_computation(make_case, oracle, dtype, causal, form):
    case = make_case(form, [96] * 2, [96] * 2, head_dim=64, dtype=dtype)
    out, lse = case.backend().forward(case.q, case.k, case.v, case.metadata, causal=causal, return_lse=True)
    assert lse.dtype == torch.float32
    for (q, k, v), (out_b, lse_b) in zip(case.sequences, case.split(out, lse), strict=True):
        expected, expected_lse = oracle(q, k, v, 64**-0.5, causal)
        scores = q.transpose(0, 1) @ k.transpose(0, 1).transpose(1, 2) * 64**-0.5
        if causal:
            scores = scores.masked_fill(torch.ones(96, 96).tril() == 0, -torch.inf)
        plain = (scores.softmax(-1) @ v.transpose(0, 1)).transpose(0, 1)
        assert (out_b - expected).abs().max() <= 2 * (plain - expected).abs().max()
        assert (lse_b - expected_lse).abs().max() < 1e-4  # in fp32; the kernels approximate exp a little for these


class _Copies(TorchDispatchMode):
    """Shapes of the tensors that are copied under it."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.clone, torch.ops.aten.copy_, torch.ops.aten._to_copy):
            self.shapes.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


def _fused_qkv(x):
    return torch.cat([x, x, x], dim=-1).unflatten(-1, (3, x.shape[-1]))[..., 1, :]


STRIDES = {
    "contiguous": (lambda x: x.clone(), 0),
    "view of a fused QKV": (_fused_qkv, 0),
    "transposed from [B, H, S, D]": (lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), 0),
    "batch expanded with stride 0": (lambda x: x[:1].expand_as(x), 0),
    "last stride 2": (lambda x: x.repeat_interleave(2, dim=-1)[..., ::2], 3),
}


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("name", STRIDES)
def test_strides_are_right_and_copied_only_where_the_last_is_not_one(make_case, oracle, name, return_lse):
    strided, num_copies = STRIDES[name]
    case = make_case("dense", [12] * 2, [12] * 2, heads=4, kv_heads=2)
    q, k, v = (strided(x) for x in (case.q, case.k, case.v))
    backend = case.backend()
    with torch.no_grad(), _Copies() as copies:
        result = backend.forward(q, k, v, return_lse=return_lse)
    assert len(copies.shapes) == num_copies, f"{name}: copied {copies.shapes}"
    out = result[0] if return_lse else result
    for b in range(2):
        torch.testing.assert_close(out[b].double(), oracle(q[b], k[b], v[b], 0.25)[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("form", ["padded", "packed", "packed_q", "paged"])
def test_strides_with_metadata(make_case, check, form):
    case = make_case(form, [6, 6, 6], [5, 9, 2], heads=4, kv_heads=2)
    case.k, case.v = (x.repeat_interleave(2, dim=-1)[..., ::2] for x in (case.k, case.v))
    case.q = _fused_qkv(case.q)
    check(case)


FORMS = ["dense", "padded", "packed", "packed_q", "paged", "paged_q", "extent", "extent_q"]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("host_lens", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_gradients_reach_q_k_v_through_out_and_lse(make_case, oracle, form, host_lens, return_lse, causal):
    kv_lens = [9, 9, 9] if form == "dense" else [9, 4, 4]
    case = make_case(form, [6, 6, 6], kv_lens, heads=4, kv_heads=2, dtype=torch.float64, host_lens=host_lens)
    leaves = [x.clone().requires_grad_() for x in (case.q, case.k, case.v)]
    result = case.backend(needs={"grad"}).forward(*leaves, case.metadata, causal=causal, return_lse=return_lse)
    out, lse = result if return_lse else (result, None)

    sequences = [tuple(x.clone().requires_grad_() for x in sequence) for sequence in case.sequences]
    expected = [oracle(*sequence, 0.25, causal) for sequence in sequences]
    loss = sum(out_b.pow(2).sum() for out_b in case.split(out))
    expected_loss = sum(out_b.pow(2).sum() for out_b, _ in expected)
    if return_lse:
        # Rows that see nothing have LSE -inf, and no gradient.
        loss = loss + sum(x[x.isfinite()].sin().sum() for _, x in case.split(out, lse))
        expected_loss = expected_loss + sum(x[x.isfinite()].sin().sum() for _, x in expected)
    torch.testing.assert_close(loss, expected_loss, atol=1e-10, rtol=1e-10)
    loss.backward()
    expected_loss.backward()

    for name, leaf, wanted in zip("qkv", leaves, zip(*sequences, strict=True), strict=True):
        # The forms place rows differently; the gradients of the real rows are the same numbers, all others are 0.
        got, wanted = leaf.grad.flatten(), torch.cat([x.grad.flatten() for x in wanted]).nan_to_num(0.0)
        got, wanted = (x[x != 0].sort().values for x in (got, wanted))
        torch.testing.assert_close(got, wanted, atol=1e-9, rtol=1e-9, msg=lambda m, name=name: f"grad of {name}: {m}")


def test_unit_batch_and_zero_rows(make_case, check):
    check(make_case("dense", [1], [1], heads=1, head_dim=1))
    case = make_case("dense", [3], [5])
    empty = case.backend().forward(case.q[:, :0], case.k, case.v, return_lse=True)
    assert empty[0].shape == (1, 0, 3, 16) and empty[1].shape == (1, 3, 0)


def test_dtypes_that_no_kernel_takes_are_refused_at_construction():
    with pytest.raises(ValueError, match="dtype is torch.int8; it takes torch.float32, torch.float64"):
        select_backend("sdpa", AttentionSpec("self", 2, 16, torch.int8, "cpu"))
