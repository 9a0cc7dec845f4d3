"""Operators as torch sees them, and that what runs is what their module has now."""

import subprocess
import sys

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from attention_backend import flash_attn4_ops, merge, paged_flash_attn3_ops
from attention_backend.kernel_operators import register_operator
from attention_backend.kv_cache import attend

FAMILIES = ("dense", "padded", "packed", "paged")
KERNELS = [getattr(ops, name) for ops in (flash_attn4_ops, paged_flash_attn3_ops) for name in FAMILIES]
OPERATORS = [*KERNELS, attend.write_and_attend, attend.norm_rope_write_and_attend, merge.merge_pad_rows_]


def run_double_into(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    out.copy_(2 * x)
    return x + 1


def like_x(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def run_other(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return x + 2


double_into = register_operator("test_double_into", run_double_into, like_x, ("out",))


def test_an_operator_mutates_what_it_declares():
    torch.library.opcheck(double_into, (torch.randn(3), torch.zeros(3)))
    x, out = torch.randn(3), torch.zeros(3)
    assert torch.equal(double_into(x, out), x + 1) and torch.equal(out, 2 * x)
    assert str(double_into._schema).endswith("(Tensor x, Tensor(a1!) out) -> Tensor")


def test_what_the_module_has_at_a_call_is_run(monkeypatch):
    assert register_operator("test_double_into", run_double_into, like_x, ("out",)) is double_into
    monkeypatch.setitem(globals(), "run_double_into", lambda x, out: x - 1)
    assert torch.equal(double_into(torch.ones(3), torch.zeros(3)), torch.zeros(3))
    monkeypatch.setitem(globals(), "like_x", lambda x, out: x.new_empty(7))
    assert double_into(torch.ones(3, device="meta"), torch.zeros(3, device="meta")).shape == (7,)


def test_a_name_has_one_function_and_one_signature():
    with pytest.raises(ValueError, match="test_double_into is .* run_double_into .* cannot be .* run_other"):
        register_operator("test_double_into", run_other, like_x, ("out",))
    with pytest.raises(ValueError, match="start Python anew"):
        register_operator("test_double_into", run_double_into, like_x)
    assert torch.equal(double_into(torch.ones(3), torch.zeros(3)), torch.full((3,), 2.0))


def test_a_function_inside_another_is_refused():
    def inner(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    with pytest.raises(ValueError, match=r"inner is not what .* has under that name"):
        register_operator("test_inner", inner, like_x)
    assert not hasattr(torch.ops.attention_backend, "test_inner")


def test_an_error_comes_through_as_it_is(monkeypatch):
    error = ValueError("x is 3: make it 4")

    def refuse(x, out):
        raise error

    monkeypatch.setitem(globals(), "run_double_into", refuse)
    with pytest.raises(ValueError, match="x is 3: make it 4"):
        double_into(torch.ones(3), torch.zeros(3))


def test_a_compiled_graph_holds_it_as_one_node():
    def call(x, out):
        return double_into(x * 3, out) + out

    x, out = torch.randn(5), torch.zeros(5)
    got = torch.compile(call, backend="aot_eager", fullgraph=True)(x, out)
    assert torch.equal(out, 6 * x) and torch.equal(got, 3 * x + 1 + 6 * x)


def test_dynamo_does_not_look_into_a_kernel(monkeypatch):
    """In a frame that it gave up on it looks into what is called there, and would trace the kernel's own steps."""
    traced = []

    def watched(x, out):
        traced.append(torch.compiler.is_compiling())
        return (x * 2).sin()

    def frame(x, out):
        try:
            torch._dynamo.graph_break()
            return double_into(x, out)
        finally:
            pass

    monkeypatch.setitem(globals(), "run_double_into", watched)
    counter = CompileCounterWithBackend("eager")
    out = torch.compile(frame, backend=counter)(torch.ones(3), torch.zeros(3))
    assert torch.equal(out, torch.full((3,), 2.0).sin()) and traced == [False]
    nodes = [str(node.target) for graph in counter.graphs for node in graph.graph.nodes]
    assert not any("sin" in node for node in nodes), nodes


def test_no_gradients_are_recorded():
    x, out = torch.randn(3, requires_grad=True), torch.zeros(3)
    double_into(x, out)
    assert not out.requires_grad and out.grad_fn is None and torch.equal(out, 2 * x.detach())


def test_what_was_saved_for_a_backward_pass_is_not_overwritten_unseen(monkeypatch):
    """A kernel writes past torch, which therefore has to be told."""

    def past_torch(x, out):
        out.numpy()[:] = 7
        return x + 1

    monkeypatch.setitem(globals(), "run_double_into", past_torch)
    weight, out = torch.ones(3, requires_grad=True), torch.full((3,), 6.0)
    loss = (weight * out).sum()
    with torch.no_grad():
        double_into(torch.ones(3), out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():
        out = torch.zeros(3)
        double_into(torch.ones(3), out)
    assert torch.equal(out, torch.full((3,), 7.0))


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name())
def test_no_operator_goes_through_torchs_python(operator):
    """torch.library.custom_op has steps of its own there, which take ten times what a call with 15 arguments does."""
    for key in ("ADInplaceOrView", "Autograd"):
        assert not torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key)
    assert torch.Tag.pt2_compliant_tag in operator.tags


def test_the_package_is_imported_without_the_compiler():
    code = "import sys, torch\nbefore = set(sys.modules)\nimport attention_backend, attention_backend.kv_cache\n"
    code += "print(sorted(name for name in set(sys.modules) - before if name.startswith(('torch._dynamo', 'triton'))))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
