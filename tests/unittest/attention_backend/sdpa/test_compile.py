"""torch.compile(fullgraph=True) over a module that holds a backend: one graph a layout."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from attention_backend import AttentionMetadataState


class Block(torch.nn.Module):
    def __init__(self, backend, heads, head_dim):
        super().__init__()
        self.backend = backend
        self.to_q = torch.nn.Linear(8, heads * head_dim)
        self.heads = heads

    def forward(self, x, k, v, metadata=None, causal=False, return_lse=False):
        q = self.to_q(x).unflatten(-1, (self.heads, -1))
        return self.backend.forward(q, k, v, metadata, causal=causal, return_lse=return_lse)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("causal, return_lse", [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("form", ["dense", "padded", "packed", "paged"])
def test_fullgraph_and_no_recompile_for_the_same_layout(make_case, form, compiler, return_lse, causal):
    case = make_case(form, [6, 6, 6], [9, 9, 9] if form == "dense" else [4, 4, 9], heads=4, kv_heads=2)
    block = Block(case.backend(), 4, 16).requires_grad_(False)
    counter = CompileCounterWithBackend(compiler)
    compiled = torch.compile(block, backend=counter, fullgraph=True)
    for step in range(3):
        x = torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(step))
        got = compiled(x, case.k, case.v, case.metadata, causal, return_lse)
        expected = block(x, case.k, case.v, case.metadata, causal, return_lse)
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=0)
    assert counter.frame_count == 1


def test_lengths_that_only_the_device_knows_share_one_graph(make_case, check):
    """Graph mode: fixed capacity and bound; the lengths are values in a tensor."""
    counter = CompileCounterWithBackend("eager")
    compiled = None
    for kv_lens in ([4, 4, 9], [9, 1, 0], [2, 9, 3]):
        case = make_case("padded", [6, 6, 6], kv_lens, host_lens=False)
        if compiled is None:
            backend = case.backend()
            compiled = torch.compile(backend.forward, backend=counter, fullgraph=True)
        got = compiled(case.q, case.k, case.v, case.metadata)
        torch.testing.assert_close(got, backend.forward(case.q, case.k, case.v, case.metadata), atol=1e-6, rtol=0)
        check(case)
    assert counter.frame_count == 1


def test_gradients_through_a_compiled_block(make_case):
    case = make_case("packed", [6, 6], [4, 9], dtype=torch.float32, poison=0.0)
    block = Block(case.backend(needs={"grad"}), 3, 16)
    x = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))
    block(x, case.k, case.v, case.metadata).sin().sum().backward()
    expected, block.to_q.weight.grad = block.to_q.weight.grad, None
    torch.compile(block, backend="aot_eager", fullgraph=True)(x, case.k, case.v, case.metadata).sin().sum().backward()
    torch.testing.assert_close(block.to_q.weight.grad, expected, atol=1e-5, rtol=1e-5)


def test_metadata_of_the_state_in_a_compiled_block_does_not_recompile_on_a_hit(make_case):
    state = AttentionMetadataState()
    counter = CompileCounterWithBackend("eager")
    case = make_case("packed", [6, 6], [4, 9])
    compiled = torch.compile(case.backend().forward, backend=counter, fullgraph=True)
    for _ in range(3):
        compiled(case.q, case.k, case.v, state.packed_kv("cross_text", [4, 9], "cpu"))
    assert counter.frame_count == 1 and state.hits == 2
