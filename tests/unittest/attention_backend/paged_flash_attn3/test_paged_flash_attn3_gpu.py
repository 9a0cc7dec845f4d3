"""FA3 on a device, beyond what all flash kernels are tested for in test_flash_kernels_gpu.py."""

import pytest
import torch

from attention_backend import AttentionMetadataState, AttentionSpec, select_backend
from attention_backend.paged_flash_attn3_builds import find_build

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("flash_kernel"),
    pytest.mark.parametrize("flash_kernel", ["paged_flash_attn3"], indirect=True),
]

NAME, DEVICE = "paged_flash_attn3", "cuda"
FRAME_TOKENS, HISTORIES = 1560, (21, 9, 3, 15)  # a causal Wan's latent frames at 480p


def test_selection_names_the_build_that_is_here():
    build, problem = find_build()
    assert problem is None
    backend = select_backend(NAME, AttentionSpec("self", 12, 128, torch.bfloat16, DEVICE))
    assert backend.selection.why.endswith(f"kernels from {build.name}")


@pytest.mark.parametrize("block_size", [16, 104, 128, 1560])
@pytest.mark.parametrize("form", ["paged", "paged_q"])
def test_slots_of_pages_past_a_length_may_hold_nan(make_gpu_case, check_gpu_case, form, block_size):
    q_lens = [300, 20, 150] if form == "paged_q" else [300] * 3
    case = make_gpu_case(form, q_lens, [500, 5, 129], block_size=block_size, poison=float("nan"))
    check_gpu_case(NAME, case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [8, 40, 64, 72, 96, 128, 192, 256])
def test_head_sizes_and_dtypes(make_gpu_case, check_gpu_case, head_dim, dtype):
    for form in ("dense", "packed", "extent", "paged"):
        kv_lens = [333, 333] if form == "dense" else [333, 10]
        case = make_gpu_case(form, [200, 200], kv_lens, head_dim=head_dim, dtype=dtype, kv_heads=2)
        check_gpu_case(NAME, case)


@pytest.mark.parametrize("form", ["packed_q", "extent", "extent_q", "paged_q"])
def test_causal_in_the_forms_that_only_a_cache_uses(make_gpu_case, check_gpu_case, form):
    q_lens = [300, 20, 150] if form.endswith("_q") else [150] * 3
    case = make_gpu_case(form, q_lens, [500, 5, 129], heads=8, kv_heads=2)
    _, lse = check_gpu_case(NAME, case, causal=True)
    assert torch.isneginf(lse).any(), "the second sequence has more queries than keys"


@pytest.mark.parametrize("q_frames", [(3, 3, 3, 3), (3, 1, 3, 2)])
def test_a_causal_chunk_of_four_sessions_at_1_3b(check_sequence, q_frames):
    """Extents in another order than the sessions and unaligned, packed K/V, and pages: one result, and the oracle's."""
    heads, head_dim, scale = 12, 128, 128**-0.5
    gen = torch.Generator(DEVICE).manual_seed(0)
    kv_lens, q_lens = ([n * FRAME_TOKENS for n in frames] for frames in (HISTORIES, q_frames))
    q, k, v = (
        torch.randn(sum(lens), heads, head_dim, generator=gen, device=DEVICE, dtype=torch.bfloat16)
        for lens in (q_lens, kv_lens, kv_lens)
    )
    state, backend = AttentionMetadataState(), select_backend(NAME, AttentionSpec("self", heads, 128, q.dtype, DEVICE))
    bound = {"max_seqlen_kv": 21 * FRAME_TOKENS, "q_lens": q_lens}
    out, lse = backend.forward(q, k, v, state.packed_kv("self", kv_lens, DEVICE, **bound), return_lse=True)

    gap, starts, rows = 176, [0] * 4, 3
    for b in (2, 0, 3, 1):
        starts[b], rows = rows, rows + kv_lens[b] + gap
    flat = torch.zeros(2, rows, heads, head_dim, device=DEVICE, dtype=q.dtype)
    for b, (start, keys, values) in enumerate(zip(starts, k.split(kv_lens), v.split(kv_lens), strict=True)):
        flat[0, start : start + kv_lens[b]], flat[1, start : start + kv_lens[b]] = keys, values
    extents = state.extent_kv("self", starts, kv_lens, rows, DEVICE, **bound)
    assert torch.equal(backend.forward(q, *flat, extents), out)

    pool = torch.zeros(2, 1 + sum(kv_lens) // 104, 104, heads, head_dim, device=DEVICE, dtype=q.dtype)
    pool[0, 1:], pool[1, 1:] = k.unflatten(0, (-1, 104)), v.unflatten(0, (-1, 104))
    tables, first = [], 1
    for n in kv_lens:
        used = n // 104
        tables.append([*range(first, first + used), *[0] * (21 * 15 - used)])
        first += used
    paged = state.paged_kv("self", tables, kv_lens, 104, DEVICE, q_lens=q_lens)
    paged_out = backend.forward(q, *pool, paged)

    begin_q, begin_kv = 0, 0
    for b, (m, n) in enumerate(zip(q_lens, kv_lens, strict=True)):
        rows_q, rows_kv = slice(begin_q, begin_q + m), slice(begin_kv, begin_kv + n)
        for head in range(0, heads, 4):  # the oracle's scores in fp64 would not fit for all heads
            some = slice(head, head + 4)
            sequence = (q[rows_q, some][:512], k[rows_kv, some], v[rows_kv, some], scale, False)
            for what, result in (("packed", out), ("paged", paged_out)):
                check_sequence(f"{what} {b}", *sequence, result[rows_q, some][:512], lse[some, rows_q][:, :512])
        begin_q, begin_kv = begin_q + m, begin_kv + n


def test_a_captured_graph_follows_extents_and_tables_rewritten_in_place():
    heads, head_dim, block_size, blocks = 4, 128, 104, 40
    gen = torch.Generator(DEVICE).manual_seed(0)

    def rand(*shape):
        return torch.randn(*shape, heads, head_dim, generator=gen, device=DEVICE, dtype=torch.bfloat16)

    q, pools = rand(2, 300), (rand(blocks, block_size), rand(blocks, block_size))
    flat = tuple(x.flatten(0, 1) for x in pools)
    state, bound = AttentionMetadataState(), 8 * block_size
    backend = select_backend(NAME, AttentionSpec("self", heads, head_dim, torch.bfloat16, DEVICE))

    def entries(seed, lens):
        table = torch.randperm(blocks, generator=torch.Generator().manual_seed(seed))[:16].view(2, 8).tolist()
        starts = [17 * seed, 2000 + seed]
        extents = state.extent_kv("self", starts, lens, len(flat[0]), DEVICE, max_seqlen_kv=bound)
        return extents, state.paged_kv("self", table, lens, block_size, DEVICE)

    def run(extents, paged):
        return backend.forward(q, *flat, extents), backend.forward(q, *pools, paged)

    own = [type(m)(**{**vars(m), **{name: x.clone() for name, x in tensors(m)}}) for m in entries(0, [bound, 5])]
    run(*own)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = run(*own)
    for seed, lens in enumerate(([bound, 5], [700, 333], [1, 0], [bound, bound])):
        current = entries(seed, lens)
        for mine, theirs in zip(own, current, strict=True):
            for (_, x), (_, y) in zip(tensors(mine), tensors(theirs), strict=True):
                x.copy_(y)
        graph.replay()
        for got, expected in zip(outs, run(*current), strict=True):
            assert torch.equal(got, expected), lens


def tensors(metadata):
    return [(name, x) for name, x in vars(metadata).items() if isinstance(x, torch.Tensor)]
