"""Scores of gigabytes are never held: a fused kernel, or chunks."""

import resource

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from attention_backend import AttentionSpec, reference, sdpa, select_backend

SEQLEN, HEADS, HEAD_DIM = 8300, 4, 8  # 1.1 GB of fp32 scores
BOUND_BYTES = 160 * 2**20


class _LargestTensor(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, torch.Tensor):
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return result


def _peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.fixture
def no_fused_kernel(monkeypatch):
    monkeypatch.setattr(sdpa, "_fused_with_lse", lambda *args: (None, None))
    with sdpa_kernel(SDPBackend.MATH):
        yield


def _inputs(kv_heads=HEADS, seqlen=SEQLEN):
    gen = torch.Generator().manual_seed(0)
    q = torch.randn(1, seqlen, HEADS, HEAD_DIM, generator=gen)
    k, v = (torch.randn(1, seqlen, kv_heads, HEAD_DIM, generator=gen) for _ in "kv")
    spec = AttentionSpec("self", HEADS, HEAD_DIM, torch.float32, "cpu", num_kv_heads=kv_heads)
    return select_backend("sdpa", spec), q, k, v


def _assert_rows_right(oracle, q, k, v, out, causal):
    for end in (1, 64, SEQLEN):  # the oracle on a few rows: with causal, the last of them sees `end` keys
        rows = slice(max(0, end - 3), end)
        keys = slice(0, end if causal else None)
        expected, _ = oracle(q[0, rows], k[0, keys], v[0, keys], HEAD_DIM**-0.5, causal)
        torch.testing.assert_close(out[0, rows].double(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("causal, return_lse, kv_heads", [(False, False, 4), (True, True, 2)])
def test_peak_memory_is_bounded_without_fused_kernels(oracle, no_fused_kernel, causal, return_lse, kv_heads):
    backend, q, k, v = _inputs(kv_heads)
    before = _peak_bytes()
    with torch.no_grad(), _LargestTensor() as largest:
        result = backend.forward(q, k, v, causal=causal, return_lse=return_lse)
    assert largest.bytes <= reference.SCORE_BYTES_PER_CHUNK
    assert _peak_bytes() - before < BOUND_BYTES
    _assert_rows_right(oracle, q, k, v, result[0] if return_lse else result, causal)


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_large_scores_go_to_a_fused_kernel_if_there_is_one(oracle, monkeypatch, kv_heads, return_lse):
    monkeypatch.setattr(sdpa, "chunked_attention", None)  # calling it would raise
    backend, q, k, v = _inputs(kv_heads)
    result = backend.forward(q, k, v, return_lse=return_lse)
    _assert_rows_right(oracle, q, k, v, result[0] if return_lse else result, causal=False)


def test_a_mask_of_gigabytes_is_not_made(monkeypatch):
    """Causal with more keys than queries needs a mask [Sq, Skv]; above the limit the chunks make it piece by piece."""
    monkeypatch.setattr(sdpa, "MATH_SCORES_BYTES_LIMIT", 2**20)
    monkeypatch.setattr(reference, "SCORE_BYTES_PER_CHUNK", 2**19)
    backend, q, k, v = _inputs(seqlen=1000)
    with torch.no_grad(), _LargestTensor() as largest:
        backend.forward(q[:, 300:], k, v, causal=True)
    assert largest.bytes < 2**20


@pytest.mark.parametrize("chunk_bytes", [1, 700, 5000, 2**20])
@pytest.mark.parametrize("form", ["dense", "padded", "packed_q", "paged"])
def test_chunks_of_any_size_give_the_same(make_case, check, no_fused_kernel, monkeypatch, form, chunk_bytes):
    monkeypatch.setattr(reference, "SCORE_BYTES_PER_CHUNK", chunk_bytes)
    monkeypatch.setattr(sdpa, "MATH_SCORES_BYTES_LIMIT", 0)
    lens = [13, 13] if form == "dense" else [13, 5]
    for host_lens in (True, False):
        case = make_case(form, [9, 9], lens, heads=6, kv_heads=2, host_lens=host_lens)
        for causal in (False, True):
            check(case, causal=causal)


def test_gradients_through_many_chunks(oracle, no_fused_kernel, monkeypatch):
    monkeypatch.setattr(reference, "SCORE_BYTES_PER_CHUNK", 1000)
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 11, 4, 8, dtype=torch.float64, generator=gen).requires_grad_() for _ in "qkv")
    backend = select_backend("sdpa", AttentionSpec("self", 4, 8, torch.float64, "cpu"))
    out, lse = backend.forward(q, k, v, causal=True, return_lse=True)
    expected, expected_lse = oracle(q[0], k[0], v[0], 8**-0.5, causal=True)
    got = torch.autograd.grad(out.sin().sum() + lse.sum(), (q, k, v))
    wanted = torch.autograd.grad(expected.sin().sum() + expected_lse.sum(), (q, k, v))
    torch.testing.assert_close(got, wanted, atol=1e-10, rtol=0)


def test_compiled_without_a_fused_kernel_is_an_error_not_the_math_kernel(monkeypatch):
    monkeypatch.setattr(sdpa, "MATH_SCORES_BYTES_LIMIT", 1000)
    backend, q, k, v = _inputs(seqlen=32)
    compiled = torch.compile(lambda q: backend.forward(q, k, v), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(q), backend.forward(q, k, v))
    torch._dynamo.reset()
    wide = q.expand(1, 32, HEADS, HEAD_DIM)
    monkeypatch.setattr(sdpa, "FUSED", [SDPBackend.CUDNN_ATTENTION])  # none for this device
    with pytest.raises(RuntimeError, match="[Nn]o (viable|available) (backend|kernel)"):
        torch.compile(lambda q: backend.forward(q, k, v), backend="eager", fullgraph=True)(wide)
    torch._dynamo.reset()
