"""The kernel that normalises and turns Q and K, and writes K and V into a cache, against fp64."""

from pathlib import Path

import pytest
import torch

from attention_backend import AttentionBackendError, AttentionSpec, select_backend
from attention_backend.kv_cache import CachedAttention, KVCacheError, LayerKV, attend
from tests.unittest.attention_backend.interpreted import interpreted
from tests.unittest.attention_backend.kv_cache.test_attend import FORMS, call
from tests.unittest.attention_backend.qk_norm_rope_oracle import inputs, oracle, units


def test_the_kernel_is_as_good_as_its_rounding():
    lines = interpreted(Path(__file__).with_name("interpret_qk_norm_rope.py"))
    assert len(lines) == 7
    for line in lines:
        bound = 2 if line["case"].startswith(("bf16", "one")) else 1  # the interpreter cuts bf16 off, devices round
        assert line["worst"] <= bound and line["v_same"] and line["written"], line


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("heads, head_dim", [(12, 128), (40, 128), (3, 72), (1, 2)])
@pytest.mark.parametrize("norm, rotary_rows", [(True, 311), (True, 0), (False, 622), (False, 0)])
def test_on_a_device(dtype, heads, head_dim, norm, rotary_rows):
    from attention_backend.qk_norm_rope_triton import norm_rope

    qkv, weight, rotary = inputs(dtype, 622, heads, head_dim, norm, rotary_rows, "cuda")
    expected = oracle(qkv, weight, rotary, 1e-6)
    wide = torch.randn(622, 5, heads, head_dim, device="cuda").to(dtype)
    wide[:, :3] = qkv
    turned = None if weight is None else weight.t().contiguous().t()
    for x, w in ((qkv, weight), (wide[:, :3], turned), (qkv.transpose(2, 3).contiguous().transpose(2, 3), weight)):
        found = norm_rope(x, w, rotary, 1e-6)
        assert max(units(y, z) for y, z in zip(found, expected, strict=True)) <= 1


@pytest.fixture
def projection():
    """qkv, weight, rotary and a CachedAttention for `call`'s rows: 12 tokens, 2 heads of 8."""

    def make(device, dtype=torch.float32):
        cached = CachedAttention(select_backend("sdpa", AttentionSpec("self", 2, 8, dtype, device)))
        return *inputs(dtype, 12, 2, 8, True, 6, device), cached

    return make


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_one_projection_gives_the_bits_of_its_parts(projection, form, dtype):
    from attention_backend.qk_norm_rope_triton import norm_rope

    layers = [to(call(form, torch.Generator().manual_seed(1), dtype)[3], "cuda") for _ in range(2)]
    qkv, weight, rotary, cached = projection("cuda", dtype)
    out = cached.from_qkv(qkv, weight, rotary, 1e-6, layers[0])
    expected = cached(*norm_rope(qkv, weight, rotary, 1e-6), qkv[:, 2], layers[1])
    assert torch.equal(out, expected)
    for one, other in zip(*((layer.k, layer.v) for layer in layers), strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_the_operator_is_what_it_declares(projection, form):
    layer = to(call(form, torch.Generator().manual_seed(1))[3], "cuda")
    qkv, weight, rotary, cached = projection("cuda")
    operands = (qkv, weight, rotary, 1e-6, *attend._cache_operands(layer), *cached._call)
    torch.library.opcheck(attend.norm_rope_write_and_attend, operands)
    compiled = torch.compile(lambda *args: cached.from_qkv(*args, 1e-6, layer), fullgraph=True)
    assert torch.equal(compiled(qkv, weight, rotary), cached.from_qkv(qkv, weight, rotary, 1e-6, layer))


@pytest.mark.gpu
def test_nothing_is_written_for_what_does_not_fit(projection):
    layer = to(call("extent", torch.Generator().manual_seed(1))[3], "cuda")
    qkv, weight, rotary, cached = projection("cuda")
    before = layer.k.clone(), layer.v.clone()
    for arguments, message in [
        ((qkv[:, :2], weight, rotary), r"qkv has shape \(12, 2, 2, 8\); expected \[total_q, 3, H, D\]"),
        ((qkv[:9], weight, rotary[:3]), "9 tokens but the batch was made for 12"),
        ((qkv.bfloat16(), weight, rotary), "must be one dtype"),
        ((qkv, weight[:1], rotary), r"norm_weight has shape \(1, 16\); expected"),
        ((qkv, weight, rotary[:5]), r"shape \(5, 4, 2\) for 12 tokens and head_dim 8; expected float32"),
        ((qkv, weight, rotary.double()), "rotary is torch.float64"),
        ((qkv, weight, rotary[:0]), r"shape \(0, 4, 2\)"),
        ((qkv, weight.cpu(), rotary), "norm_weight is on cpu, qkv on cuda:0"),
        ((qkv, weight, rotary.cpu()), "rotary is on cpu, qkv on cuda:0"),
    ]:
        with pytest.raises(KVCacheError, match=message):
            cached.from_qkv(*arguments, 1e-6, layer)
    for trained in [(qkv.clone().requires_grad_(), weight), (qkv, weight.clone().requires_grad_())]:
        with pytest.raises(AttentionBackendError, match="inference-only"):
            cached.from_qkv(*trained, rotary, 1e-6, layer)
    assert torch.equal(layer.k, before[0]) and torch.equal(layer.v, before[1])


@pytest.mark.parametrize("shape", [(4, 2, 2), (4, 4), (3, 4, 2), (4, 3, 2, 1), (0, 4, 2)])
def test_rotary_rows_that_a_kernel_would_misread_are_refused(shape):
    head_dim = 5 if shape == (4, 2, 2) else 8  # odd: rows would have a number less than a head
    with pytest.raises(KVCacheError, match=f"for 4 tokens and head_dim {head_dim}; expected float32"):
        attend._check_rotary_rows(torch.zeros(shape), 4, head_dim)
    attend._check_rotary_rows(torch.zeros(2, 4, 2), 4, 8)


def test_one_projection_needs_a_device(projection):
    *arguments, cached = projection("cpu")
    with pytest.raises(KVCacheError, match="qkv is on cpu and slots are a Tensor; .* call this object with q, k and v"):
        cached.from_qkv(*arguments, 1e-6, call("extent", torch.Generator().manual_seed(1))[3])


def to(layer, device):
    """The layer with all of its tensors there."""
    metadata = type(layer.metadata)(**{
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in vars(layer.metadata).items()
    })
    return LayerKV(*(x.to(device) for x in (layer.k, layer.v, layer.slots)), metadata)
