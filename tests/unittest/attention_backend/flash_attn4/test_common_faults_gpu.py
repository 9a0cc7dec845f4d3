"""Faults that attention layers have shipped, tried on FA4: stale lengths, masks on queries, staging reused early.

What needs no device (selection, refusals, return values) is tested on the CPU beside this.
"""

import pytest
import torch

from attention_backend import AttentionBackendError, AttentionMetadataState, AttentionSpec, PaddedKV, select_backend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("flash_kernel"),
    pytest.mark.parametrize("flash_kernel", ["flash_attn4"], indirect=True),
]

DEVICE, DTYPE, HEADS, HEAD_DIM = "cuda", torch.bfloat16, 4, 128


@pytest.fixture
def backend():
    return select_backend("flash_attn4", AttentionSpec("cross_text", HEADS, HEAD_DIM, DTYPE, DEVICE))


@pytest.fixture
def near(oracle):
    """Compares out [B, Sq, H, D] and lse with the dense result over each sequence's own keys."""

    def check(out, lse, q, keys, values):
        for b, (k, v) in enumerate(zip(keys, values, strict=True)):
            expected, expected_lse = oracle(q[b], k, v, q.shape[-1] ** -0.5)
            torch.testing.assert_close(out[b].double(), expected, atol=2e-2, rtol=2e-2)
            torch.testing.assert_close(lse[b].double(), expected_lse, atol=1e-3, rtol=0)

    return check


def rand(*shape, seed=0):
    gen = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(*shape, HEADS, HEAD_DIM, generator=gen, device=DEVICE, dtype=DTYPE)


def test_key_lengths_leave_every_query_row_alone(backend, near):
    """16 queries over 8 keys of which [8, 3] are used, with 1e4 behind them."""
    q, k, v = rand(2, 16), rand(2, 8, seed=1), rand(2, 8, seed=2)
    k[1, 3:], v[1, 3:] = 1e4, 1e4
    metadata = AttentionMetadataState().padded_kv("cross_text", [8, 3], 8, DEVICE)
    out, lse = backend.forward(q, k, v, metadata, return_lse=True)
    near(out, lse, q, [k[0], k[1, :3]], [v[0], v[1, :3]])


@pytest.mark.parametrize("form", ["padded", "packed"])
def test_results_follow_lengths_that_change_and_change_back(backend, near, form):
    state, lens = AttentionMetadataState(), [5, 7]
    q, k, v = rand(2, 32), rand(2, 8, seed=1), rand(2, 8, seed=2)
    for new in ([5, 7], [7, 5], [5, 7], [0, 8], [5, 7]):
        lens[:] = new  # in place: the list is the same object
        keys, values = ([x[b, :n] for b, n in enumerate(lens)] for x in (k, v))
        if form == "padded":
            result = backend.forward(q, k, v, state.padded_kv("cross_text", lens, 8, DEVICE), return_lse=True)
        else:
            packed = state.packed_kv("cross_text", lens, DEVICE, max_seqlen_kv=8)
            result = backend.forward(q, torch.cat(keys), torch.cat(values), packed, return_lse=True)
        near(*result, q, keys, values)
    assert (state.builds, state.hits, state.device_copies) == (3, 2, 3)


def test_a_lengths_tensor_at_the_address_of_a_freed_one_is_no_stale_hit(backend, near):
    q, k, v = rand(2, 32), rand(2, 8, seed=1), rand(2, 8, seed=2)
    addresses, layouts = set(), [[5, 7], [7, 5], [1, 8], [8, 0]] * 5
    for lens in layouts:
        metadata = PaddedKV(torch.tensor(lens, dtype=torch.int32, device=DEVICE), 8)
        addresses.add(metadata.seqused_kv.data_ptr())
        result = backend.forward(q, k, v, metadata, return_lse=True)
        near(*result, q, [k[b, :n] for b, n in enumerate(lens)], [v[b, :n] for b, n in enumerate(lens)])
        del metadata
    assert len(addresses) < len(layouts), "the allocator handed no address out again, so this shows nothing"


def test_staging_is_not_reused_before_its_copy_is_done():
    """The device is kept busy, so that all copies are still to come when the last layout is staged."""
    state = AttentionMetadataState(max_entries=256)
    layouts = [[1 + i, 2 * i, 3 * i % 512] for i in range(200)]
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    entries = [state.padded_kv("cross_text", lens, 512, DEVICE) for lens in layouts]
    assert [entry.seqused_kv.tolist() for entry in entries] == layouts


@pytest.mark.parametrize("head_dim", [64, 72, 80, 96, 256])
def test_other_head_sizes(near, head_dim):
    backend = select_backend("flash_attn4", AttentionSpec("self", HEADS, head_dim, DTYPE, DEVICE))
    q, k, v = (torch.randn(2, n, HEADS, head_dim, device=DEVICE, dtype=DTYPE) for n in (200, 150, 150))
    near(*backend.forward(q, k, v, return_lse=True), q, k, v)


@pytest.mark.parametrize("head_dim", [100, 320])
def test_head_sizes_that_the_kernel_lacks_are_refused_when_the_backend_is_made(head_dim):
    with pytest.raises(AttentionBackendError, match=f"head_dim is {head_dim}; it takes 8 to"):
        select_backend("flash_attn4", AttentionSpec("self", HEADS, head_dim, DTYPE, DEVICE))


def test_dtypes_that_differ_are_named(backend):
    q, k, v = rand(2, 16), rand(2, 16), rand(2, 16).half()
    with pytest.raises(ValueError, match="bfloat16, torch.bfloat16 and torch.float16"):
        backend.forward(q, k, v)
    with pytest.raises(AttentionBackendError, match="dtype is torch.float32"):
        select_backend("flash_attn4", AttentionSpec("self", HEADS, HEAD_DIM, torch.float32, DEVICE))


def test_running_out_of_memory_goes_up_and_the_next_call_works(backend, near):
    q, k, v = rand(1, 64), rand(1, 64, seed=1), rand(1, 64, seed=2)
    rows = 1 + 2 * torch.cuda.get_device_properties(DEVICE).total_memory // q.nbytes
    with pytest.raises(torch.OutOfMemoryError):
        backend.forward(*(x.expand(rows, -1, -1, -1) for x in (q, k, v)))
    near(*backend.forward(q, k, v, return_lse=True), q, k, v)
