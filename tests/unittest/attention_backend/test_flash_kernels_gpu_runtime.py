"""The flash kernels as a model runs them: no host sync, CUDA graphs, torch.compile, and fakes that tell the truth."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from attention_backend import AttentionMetadataState, AttentionSpec, PackedKV, PaddedKV, select_backend

pytestmark = pytest.mark.gpu

DEVICE, DTYPE, HEAD_DIM = "cuda", torch.bfloat16, 128
FORMS = [("dense", 0), ("padded", 0), ("packed", 0), ("packed_q", 0), ("paged", 128), ("paged", 104), ("paged_q", 104)]
FORMS += [("extent", 0), ("extent_q", 0)]


@pytest.mark.parametrize("form, block_size", FORMS)
def test_fakes_have_the_shapes_dtypes_and_strides_of_the_kernel(flash_kernel, make_gpu_case, form, block_size):
    q_lens, kv_lens = ([300, 150], [140, 9]) if form.endswith("_q") else ([150] * 2, [140, 140])
    case = make_gpu_case(form, q_lens, kv_lens, block_size=block_size)
    backend = case.backend(name=flash_kernel)
    real = backend.forward(case.q, case.k, case.v, case.metadata, return_lse=True)
    with FakeTensorMode() as mode:
        q, k, v = (mode.from_tensor(x) for x in (case.q, case.k, case.v))
        metadata = case.metadata
        if metadata is not None:
            metadata = type(metadata)(**tree_map_only(torch.Tensor, mode.from_tensor, dict(vars(metadata))))
        fake = backend.forward(q, k, v, metadata, return_lse=True)
    for ours, kernels in zip(fake, real, strict=True):
        assert (ours.shape, ours.dtype, ours.stride()) == (kernels.shape, kernels.dtype, kernels.stride())


def test_a_step_with_a_new_layout_waits_for_nothing(flash_kernel, make_gpu_case):
    """Lengths to the device, packed and padded and paged calls, with the kernels compiled before."""
    cases = [make_gpu_case(form, [150] * 2, [140, 9], block_size=size) for form, size in FORMS[1:3] + FORMS[4:6]]
    backend = cases[0].backend(name=flash_kernel)
    state = AttentionMetadataState()

    def step(lens):
        for case in cases:
            backend.forward(case.q, case.k, case.v, case.metadata, return_lse=True)
        padded, packed = cases[:2]
        for case, metadata in (
            (padded, state.padded_kv("cross_text", lens, padded.k.shape[1], DEVICE)),
            (packed, state.packed_kv("cross_text", lens, DEVICE)),
        ):
            backend.forward(case.q, case.k, case.v, metadata, return_lse=True)

    step([140, 9])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step([7, 0])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (state.builds, state.device_copies) == (4, 4)


@pytest.mark.parametrize("form", ["padded", "packed"])
def test_a_captured_graph_follows_lengths_rewritten_in_place(flash_kernel, form):
    capacity, num_heads = 512, 4
    gen = torch.Generator(DEVICE).manual_seed(0)

    def rand(*shape):
        return torch.randn(*shape, num_heads, HEAD_DIM, generator=gen, device=DEVICE, dtype=DTYPE)

    q, state = rand(2, 300), AttentionMetadataState()
    k, v = (rand(2, capacity) if form == "padded" else rand(2 * capacity) for _ in "kv")
    backend = select_backend(flash_kernel, AttentionSpec("cross_text", num_heads, HEAD_DIM, DTYPE, DEVICE))

    def entry(lens):
        if form == "padded":
            return state.padded_kv("cross_text", lens, capacity, DEVICE)
        return state.packed_kv("cross_text", lens, DEVICE, max_seqlen_kv=capacity)

    def lengths_of(metadata):
        return metadata.seqused_kv if form == "padded" else metadata.cu_seqlens_kv

    own = lengths_of(entry([512, 126])).clone()
    metadata = PaddedKV(own, capacity) if form == "padded" else PackedKV(own, capacity, None)
    backend.forward(q, k, v, metadata, return_lse=True)  # compiles the kernel, which a capture must not do
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = backend.forward(q, k, v, metadata, return_lse=True)
    seen = []
    for lens in ([512, 126], [300, 126], [120, 1], [0, 512], [512, 126]):
        current = entry(lens)
        own.copy_(lengths_of(current))
        graph.replay()
        expected, expected_lse = backend.forward(q, k, v, current, return_lse=True)
        assert torch.equal(out, expected) and torch.equal(lse, expected_lse), lens
        seen.append(out.clone())
    assert torch.equal(seen[0], seen[-1]) and not torch.equal(seen[0], seen[1])


class Block(torch.nn.Module):
    def __init__(self, backend):
        super().__init__()
        self.backend, self.heads = backend, backend.spec.num_heads
        inner = self.heads * backend.spec.head_dim
        self.to_q, self.to_out = torch.nn.Linear(64, inner), torch.nn.Linear(inner, 64)

    def forward(self, x, k, v, metadata):
        q = self.to_q(x).unflatten(-1, (self.heads, -1))
        out, lse = self.backend.forward(q, k, v, metadata, return_lse=True)
        return x + self.to_out(out.flatten(2)), lse


@pytest.mark.parametrize("form", ["padded", "packed"])
def test_a_block_compiles_fullgraph_once_for_three_text_lengths(flash_kernel, form):
    torch._dynamo.reset()
    capacity, state = 512, AttentionMetadataState()
    backend = select_backend(flash_kernel, AttentionSpec("cross_text", 4, HEAD_DIM, DTYPE, DEVICE))
    torch.manual_seed(0)
    block = Block(backend).to(DEVICE, DTYPE).requires_grad_(False)
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(block, backend=counter, fullgraph=True)
    x = torch.randn(2, 300, 64, device=DEVICE, dtype=DTYPE)
    rows = (2, capacity) if form == "padded" else (2 * capacity,)
    k, v = (torch.randn(*rows, 4, HEAD_DIM, device=DEVICE, dtype=DTYPE) for _ in "kv")
    for lens in ([512, 126], [300, 126], [120, 1]):
        if form == "padded":
            metadata = state.padded_kv("cross_text", lens, capacity, DEVICE)
        else:
            metadata = state.packed_kv("cross_text", lens, DEVICE, max_seqlen_kv=capacity)
        got, got_lse = compiled(x, k, v, metadata)
        expected, expected_lse = block(x, k, v, metadata)
        torch.testing.assert_close(got, expected, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(got_lse, expected_lse, atol=2e-2, rtol=0)
    assert counter.frame_count == 1
