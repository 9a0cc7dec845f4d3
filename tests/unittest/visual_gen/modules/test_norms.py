"""Elementwise work in fp32: the bits of fp32 copies without the copies."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from visual_gen import Attention
from visual_gen.modules.norms import add_gated, inverse_rms, modulated_layer_norm
from visual_gen.modules.qk_norm_rope import norm_and_rope
from visual_gen.modules.rope import RotaryTable, apply_rotary

ROWS, TOKENS, DIM = 2, 5, 24


class Casts(TorchDispatchMode):
    """Counts tensors like x that were copied to another dtype."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.to, torch.ops.aten._to_copy) and out.numel() >= ROWS * TOKENS * DIM:
            self.count += out.dtype != args[0].dtype
        return out


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def inputs(request):
    """x and update of a bf16 model, gate and scale fp32, one for each row as beside other timesteps."""
    torch.manual_seed(0)
    x, update = (torch.randn(ROWS, TOKENS, DIM, device=request.param).bfloat16() for _ in range(2))
    return x, update, *(torch.randn(ROWS, 1, DIM, device=request.param) for _ in range(2))


def test_a_gated_sum_is_rounded_once_and_copies_nothing(inputs):
    x, update, gate, _ = inputs
    with torch.inference_mode(), Casts() as casts:
        out = add_gated(x, update, gate)
    assert casts.count == 0 and out.dtype == torch.bfloat16
    expected = torch.addcmul(x.float(), update.float(), gate).bfloat16()
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    with torch.enable_grad():  # another way to the same bits, as out= has no gradients
        torch.testing.assert_close(add_gated(x, update, gate.requires_grad_()).detach(), expected, rtol=0, atol=0)


def test_a_modulated_norm_copies_only_what_the_norm_reads(inputs):
    x, _, shift, scale = inputs
    with torch.inference_mode(), Casts() as casts:
        out = modulated_layer_norm(x, scale, shift, 1e-6)
    assert casts.count == 1
    expected = torch.addcmul(shift, F.layer_norm(x.float(), (DIM,), eps=1e-6), 1 + scale).bfloat16()
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_normed_and_turned_q_and_k_are_rounded_once(inputs, dtype):
    x, device = inputs[0].to(dtype), inputs[0].device
    site = Attention(DIM, 2, DIM // 2, role="self").to(device=device, dtype=dtype).requires_grad_(False)
    site.qk_norm_weight.uniform_(0.5, 1.5)
    rotary = RotaryTable(DIM // 2, 8).grid(1, 1, TOKENS, device)
    with torch.inference_mode():
        q, k, _ = norm_and_rope(site.project_qkv(x), site.qk_norm_weight, rotary, site.eps)
        rows = site.to_qkv(x).double().chunk(3, dim=-1)
    for i, found in enumerate((q, k)):
        normed = rows[i] * torch.rsqrt(rows[i].square().mean(-1, keepdim=True) + site.eps) * site.qk_norm_weight[i]
        pairs = torch.view_as_complex(normed.unflatten(-1, (2, -1, 2)).contiguous()) * rotary
        expected = torch.view_as_real(pairs).flatten(-2)
        # Half the distance to the next number, and what fp32 loses before that.
        half = 0 if dtype == torch.float32 else 2.0**-8
        torch.testing.assert_close(found.double(), expected, rtol=half, atol=2e-6)


def test_an_inverse_rms_is_finite_for_zeros_and_has_gradients():
    x = torch.zeros(2, 4, requires_grad=True)
    out = inverse_rms(x, 1e-4)
    torch.testing.assert_close(out, torch.full((2, 1), 100.0))
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert gradient.isfinite().all()


def test_a_rotary_of_another_shape_is_refused(inputs):
    device = inputs[0].device
    qkv, rotary = torch.randn(ROWS, TOKENS, 3, 2, 12, device=device), RotaryTable(12, 8).grid(1, 1, TOKENS, device)
    each = torch.stack([rotary, rotary.conj()])
    with torch.no_grad():
        for good in (rotary, rotary[None], torch.view_as_real(rotary), rotary.conj(), each, torch.view_as_real(each)):
            plain = apply_rotary(qkv[:, :, 0], good.resolve_conj())
            torch.testing.assert_close(norm_and_rope(qkv, None, good, 1e-6)[0], plain, rtol=0, atol=1e-5)
        for wrong in (
            rotary[1:], rotary[:1], rotary.expand(-1, 2, -1), each[:, :1], torch.cat([rotary, rotary]), each[[0, 1, 1]],
            rotary[..., :3], rotary[..., :1], torch.view_as_real(rotary)[..., :1], rotary[:, 0], rotary.real,
            torch.ones(TOKENS, 1, 6, 2, dtype=torch.int64, device=device),
        ):  # fmt: skip
            with pytest.raises(ValueError, match=rf"rotary is .* for {ROWS} rows of {TOKENS} tokens and head_dim 12;"):
                norm_and_rope(qkv, None, wrong, 1e-6)
        with pytest.raises(ValueError, match="rotary is a tuple; it must be complex"):
            norm_and_rope(qkv, None, (rotary, rotary), 1e-6)


@pytest.mark.parametrize("trained", ["qkv", "weight", "rotary"])
def test_gradients_reach_whatever_wants_them(inputs, trained):
    device = inputs[0].device
    given = {
        "qkv": torch.randn(ROWS, TOKENS, 3, 2, 12, device=device), "weight": torch.rand(2, 24, device=device),
        "rotary": RotaryTable(12, 8).grid(1, 1, TOKENS, device),
    }  # fmt: skip
    given[trained].requires_grad_()
    q, k, _ = norm_and_rope(*given.values(), 1e-6)
    (q.sum() + k.square().sum()).backward()
    assert given[trained].grad.abs().sum() > 0


def test_forward_mode_gradients_are_not_lost(inputs):
    from torch.autograd import forward_ad

    device = inputs[0].device
    qkv, tangent = torch.randn(2, ROWS, TOKENS, 3, 2, 12, device=device)
    weight = torch.rand(2, 24, device=device)
    with torch.no_grad(), forward_ad.dual_level():
        q, k, _ = norm_and_rope(forward_ad.make_dual(qkv, tangent), weight, None, 1e-6)
        assert all(forward_ad.unpack_dual(x).tangent is not None for x in (q, k))
