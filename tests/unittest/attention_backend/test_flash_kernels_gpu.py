"""The flash kernels on a device: every family, boundary and zero lengths, grouped heads, views, splits of the keys.

In FA4 each new combination of form, mask and LSE compiles a kernel (seconds), so the tests share a few: head_dim 128,
with LSE unless said otherwise.
"""

import functools

import pytest
import torch

from attention_backend import (
    AttentionBackendError,
    AttentionMetadataState,
    AttentionSpec,
    merge_attention,
    merge_pad_rows,
    select_backend,
)

pytestmark = pytest.mark.gpu

DEVICE, DTYPE, HEAD_DIM = "cuda", torch.bfloat16, 128
# Blocks of 128 tokens are FA4's key tile and are read by TMA; all others are read by cp.async.
FORMS = [("dense", 0), ("padded", 0), ("packed", 0), ("packed_q", 0), ("paged", 128), ("paged", 104), ("paged_q", 104)]
FORMS += [("extent", 0), ("extent_q", 0)]
BOUNDARIES = [1, 63, 64, 65, 127, 128, 129, 192, 256, 0, 300]


def boundary_case(make_gpu_case, form, block_size, **options):
    """Every boundary length as a key length, and as a query length where Q is packed."""
    if form == "dense":
        return make_gpu_case(form, [256] * 2, [300] * 2, **options)
    q_lens = [300, *BOUNDARIES[:-1]] if form.endswith("_q") else [256] * len(BOUNDARIES)
    return make_gpu_case(form, q_lens, BOUNDARIES, block_size=block_size, **options)


@pytest.fixture
def check_case(check_gpu_case, flash_kernel):
    return functools.partial(check_gpu_case, flash_kernel)


@pytest.mark.parametrize("form, block_size", FORMS)
def test_every_family_at_boundary_lengths(make_gpu_case, check_case, form, block_size):
    _, lse = check_case(boundary_case(make_gpu_case, form, block_size))
    assert lse.dtype == torch.float32 and lse.is_contiguous()


@pytest.mark.parametrize("form, block_size", [row for row in FORMS if row != ("paged", 128)])
def test_every_family_without_lse(make_gpu_case, check_case, form, block_size):
    check_case(boundary_case(make_gpu_case, form, block_size), return_lse=False)


@pytest.mark.parametrize("form, block_size", [("dense", 0), ("padded", 0), ("packed_q", 0), ("paged", 104)])
def test_causal_aligns_bottom_right_with_grouped_heads(make_gpu_case, check_case, form, block_size):
    """Queries outnumber the keys of most sequences: their first rows see none, and give 0 and -inf."""
    out, lse = check_case(boundary_case(make_gpu_case, form, block_size, heads=8, kv_heads=2), causal=True)
    blind = torch.isneginf(lse)
    assert out.transpose(-3, -2)[blind].eq(0).all()
    assert form == "dense" or blind.any()


def test_three_query_heads_to_a_group(make_gpu_case, check_case):
    check_case(make_gpu_case("packed", [200] * 2, [130, 7], heads=6, kv_heads=2))


@pytest.mark.parametrize("seqlen", BOUNDARIES[:9])
def test_dense_at_boundary_lengths(make_gpu_case, check_case, seqlen):
    check_case(make_gpu_case("dense", [seqlen] * 2, [seqlen] * 2))


@pytest.mark.parametrize("form, block_size", FORMS[:6])
def test_softmax_scale(make_gpu_case, check_case, form, block_size):
    case = make_gpu_case(form, [150] * 2, [140] * 2 if form == "dense" else [140, 9], block_size=block_size)
    check_case(case, scale=0.02)
    check_case(case, scale=0.5)


@pytest.mark.parametrize("form, block_size", FORMS[1:])
def test_no_keys_at_all_gives_zeros_and_minus_inf(make_gpu_case, check_case, form, block_size):
    q_lens = [150, 3] if form.endswith("_q") else [150] * 2
    out, lse = check_case(make_gpu_case(form, q_lens, [0, 0], block_size=block_size))
    assert out.eq(0).all() and torch.isneginf(lse).all()


@pytest.mark.parametrize("form", ["dense", "padded", "packed", "packed_q", "paged", "merge", "repeated_key"])
def test_720p_queries_over_a_long_and_a_short_prompt(flash_kernel, check_sequence, form):
    """Wan 14B at 720p: 75 600 queries, 40 heads, 500 and 5 text rows; the last two with pad rows up to 512."""
    num_heads, num_queries, kv_lens, capacity, block_size = 40, 75600, [500, 5], 512, 128
    gen, state = torch.Generator(DEVICE).manual_seed(0), AttentionMetadataState()

    def rand(*shape):
        return torch.randn(*shape, num_heads, HEAD_DIM, generator=gen, device=DEVICE, dtype=DTYPE)

    q, pad, lse = rand(2, num_queries), rand(2), None
    keys, values = ([rand(n) for n in ([capacity] * 2 if form == "dense" else kv_lens)] for _ in "kv")
    backend = select_backend(flash_kernel, AttentionSpec("cross_text", num_heads, HEAD_DIM, DTYPE, DEVICE))
    k, v = torch.cat(keys), torch.cat(values)
    if form in ("merge", "repeated_key"):
        pads = state.packed_pad_kv("cross_text", kv_lens, capacity, DEVICE, formulation=form)
        rows = [[torch.cat([x, p.expand(capacity - len(x), -1, -1)]) for x in xs]
                for xs, p in zip((keys, values), pad, strict=True)]  # fmt: skip
        if form == "merge":
            out, packed_lse = backend.forward(q, k, v, pads.packed, return_lse=True)
            out = merge_pad_rows(q, out, packed_lse, *pad, pads, backend.spec.softmax_scale)
        else:
            k, v = (torch.cat([x[: n + 1] for x, n in zip(xs, kv_lens, strict=True)]) for xs in rows)
            if not backend.supports_repeated_last_key():
                with pytest.raises(AttentionBackendError, match="last_key_repeats_to"):
                    backend.forward(q, k, v, pads.packed)
                return
            out = backend.forward(q, k, v, pads.packed)
        keys, values = rows
    elif form == "packed_q":
        metadata = state.packed_kv("cross_text", kv_lens, DEVICE, q_lens=[num_queries] * 2)
        out, lse = backend.forward(q.flatten(0, 1), k, v, metadata, return_lse=True)
        out, lse = out.view_as(q), lse.unflatten(1, (2, num_queries)).transpose(0, 1)
    else:
        if form == "dense":
            k, v, metadata = torch.stack(keys), torch.stack(values), None
        elif form == "padded":
            k, v = (torch.stack([torch.cat([x, rand(capacity - len(x))]) for x in xs]) for xs in (keys, values))
            metadata = state.padded_kv("cross_text", kv_lens, capacity, DEVICE)
        elif form == "packed":
            metadata = state.packed_kv("cross_text", kv_lens, DEVICE)
        else:
            tables = [[3, 5, 1, 2], [4, 0, 0, 0]]
            k, v = rand(2, 6, block_size)
            for pool, xs in ((k, keys), (v, values)):
                for table, x in zip(tables, xs, strict=True):
                    for block, part in zip(table, x.split(block_size), strict=False):
                        pool[block, : len(part)] = part
            metadata = state.paged_kv("cross_text", tables, kv_lens, block_size, DEVICE)
        out, lse = backend.forward(q, k, v, metadata, return_lse=True)
    for b in range(2):
        for head in range(0, num_heads, 4):  # the oracle's scores in fp64 would not fit for all heads
            some = slice(head, head + 4)
            part = (x[:, some] for x in (q[b], keys[b], values[b]))
            lse_b, scale = None if lse is None else lse[b, some], backend.spec.softmax_scale
            check_sequence(f"sequence {b} heads {some}", *part, scale, False, out[b][:, some], lse_b)


@pytest.mark.parametrize("flash_kernel", ["flash_attn4"], indirect=True)
@pytest.mark.parametrize("block_size", [16, 64, 104])
@pytest.mark.parametrize("form", ["paged", "paged_q"])
def test_slots_past_a_length_may_hold_nan_in_pages_of_any_size_but_the_key_tiles(
    make_gpu_case, check_case, form, block_size
):
    """FA3 tolerates it in pages of any size: see its own tests."""
    q_lens = [300, 20, 150] if form == "paged_q" else [300] * 3
    check_case(make_gpu_case(form, q_lens, [500, 5, 129], block_size=block_size, poison=float("nan")))


VIEWS = {
    "fused QKV": lambda x: torch.stack([torch.zeros_like(x), x, torch.ones_like(x)], dim=2)[:, :, 1],
    "heads outside": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "one sequence for all": lambda x: x[:1].expand_as(x),
    "last stride 2": lambda x: torch.stack([x, torch.zeros_like(x)], dim=-1).flatten(-2)[..., ::2],
    "address off by one element": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x),
    "rows of 130": lambda x: torch.nn.functional.pad(x, (0, 2))[..., :HEAD_DIM],
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_give_what_their_copies_give_and_are_copied_only_where_they_must(flash_kernel, make_gpu_case, name):
    case = make_gpu_case("dense", [4096] * 2, [4096] * 2)
    backend = case.backend(name=flash_kernel)
    views = [VIEWS[name](x) for x in (case.q, case.k, case.v)]
    expected = backend.forward(*(x.contiguous() for x in views))
    backend.forward(*views)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = backend.forward(*views)
    grown = torch.cuda.max_memory_allocated() - before
    torch.testing.assert_close(out, expected, atol=torch.finfo(DTYPE).eps * expected.abs().max().item(), rtol=0)
    # FA3 gets Q as packed Q, and nothing with a stride of 0.
    as_they_are = {"flash_attn4": ["fused QKV", "heads outside", "one sequence for all"]}
    if name in as_they_are.get(flash_kernel, ["fused QKV"]):
        assert grown < 1.5 * out.nbytes, f"{grown} bytes for an output of {out.nbytes}"


@pytest.mark.parametrize("form, block_size", FORMS[1:])
def test_a_sequence_of_a_batch_equals_its_own_run_bit_for_bit(flash_kernel, make_gpu_case, form, block_size):
    q_lens = [300, 200, 150] if form.endswith("_q") else [300] * 3
    case = make_gpu_case(form, q_lens, [500, 5, 129], block_size=block_size)
    backend = case.backend(name=flash_kernel)
    together = case.split(*backend.forward(case.q, case.k, case.v, case.metadata, return_lse=True))
    for b, (out_b, lse_b) in enumerate(together):
        own = case.alone(b)
        out, lse = own.split(*backend.forward(own.q, own.k, own.v, own.metadata, return_lse=True))[0]
        assert torch.equal(out, out_b) and torch.equal(lse, lse_b), f"sequence {b}"


@pytest.mark.parametrize("split", [1, 127, 128, 250])
def test_keys_split_in_two_merge_into_the_whole(flash_kernel, make_gpu_case, check_sequence, split):
    case = make_gpu_case("dense", [200] * 2, [300] * 2)
    backend = case.backend(name=flash_kernel)
    parts = [
        backend.forward(case.q, case.k[:, rows], case.v[:, rows], return_lse=True)
        for rows in (slice(None, split), slice(split, None))
    ]
    out, lse = merge_attention(*parts[0], *parts[1])
    for b, (q, k, v) in enumerate(case.sequences):
        check_sequence(f"sequence {b}", q, k, v, backend.spec.softmax_scale, False, out[b], lse[b])
