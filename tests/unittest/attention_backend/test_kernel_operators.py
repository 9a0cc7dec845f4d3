"""Operators as torch sees them, and that what runs is what their module has now."""

import pytest
import torch

from attention_backend import flash_attn4_ops, merge, paged_flash_attn3_ops
from attention_backend.kernel_operators import operator
from attention_backend.kv_cache import attend

KERNELS = [getattr(ops, name) for ops in (flash_attn4_ops, paged_flash_attn3_ops) for name in ("dense", "packed")]


def run_double_into(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    out.copy_(2 * x)
    return x + 1


def like_x(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


double_into = operator("test_double_into", run_double_into, like_x, ("out",))


def test_an_operator_mutates_what_it_declares():
    torch.library.opcheck(double_into, (torch.randn(3), torch.zeros(3)))
    x, out = torch.randn(3), torch.zeros(3)
    assert torch.equal(double_into(x, out), x + 1) and torch.equal(out, 2 * x)
    arguments = double_into._schema.arguments
    assert [argument.alias_info is not None and argument.alias_info.is_write for argument in arguments] == [False, True]


def test_what_the_module_has_at_a_call_is_run(monkeypatch):
    before = torch.ops.attention_backend.test_double_into.default
    assert operator("test_double_into", run_double_into, like_x, ("out",)) is before is double_into
    monkeypatch.setitem(globals(), "run_double_into", lambda x, out: x - 1)
    assert torch.equal(double_into(torch.ones(3), torch.zeros(3)), torch.zeros(3))


def test_an_error_comes_through_as_it_is(monkeypatch):
    def refuse(x, out):
        raise error

    error = ValueError("x is 3: make it 4")
    monkeypatch.setitem(globals(), "run_double_into", refuse)
    with pytest.raises(ValueError, match="x is 3: make it 4"):
        double_into(torch.ones(3), torch.zeros(3))


def test_a_compiled_graph_holds_it_as_one_node():
    def call(x, out):
        return double_into(x * 3, out) + out

    x, out = torch.randn(5), torch.zeros(5)
    got = torch.compile(call, backend="aot_eager", fullgraph=True)(x, out)
    assert torch.equal(out, 6 * x) and torch.equal(got, 3 * x + 1 + 6 * x)


@pytest.mark.parametrize(
    "registered",
    [*KERNELS, attend.write_and_attend, attend.norm_rope_write_and_attend, merge.merge_pad_rows_],
    ids=lambda registered: registered.name(),
)
def test_no_operator_goes_through_torchs_python_for_mutated_arguments(registered):
    """torch.library.custom_op has a step of its own there, which takes ten times what a call with 15 arguments does."""
    assert isinstance(registered, torch._ops.OpOverload)
    for key in ("ADInplaceOrView", "AutogradCPU", "AutogradCUDA"):
        assert not torch._C._dispatch_has_kernel_for_dispatch_key(registered.name(), key)
