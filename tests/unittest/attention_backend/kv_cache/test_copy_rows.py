"""Rows of K and V copied by index: how chunks are written, and how what they overwrite is set aside and put back."""

import copy
from pathlib import Path

import pytest
import torch

from attention_backend.kv_cache.rows import LayerRows, copy_rows
from tests.unittest.attention_backend.interpreted import interpreted


def rand(*shape, dtype=torch.bfloat16, device="cpu"):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


def sources_of(kind, batch, count, heads, head_dim, device):
    if kind == "projection":  # k beside v in one product
        wide = rand(batch, count, 2, heads, head_dim, device=device)
        return wide[:, :, 0], wide[:, :, 1]
    return tuple(rand(batch, heads, count + i, head_dim, device=device).transpose(1, 2)[:, :count] for i in range(2))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("kind", ["projection", "heads first"])
@pytest.mark.parametrize("heads, head_dim", [(12, 128), (3, 72), (1, 8)])
def test_rows_go_where_the_index_says_and_nowhere_else(device, batch, kind, heads, head_dim):
    count, total = 77, 200
    k, v = (rand(batch, total, heads, head_dim + i, device=device)[..., :head_dim].contiguous() for i in range(2))
    order = torch.randperm(total, generator=torch.Generator().manual_seed(0)).to(device)
    sources = sources_of(kind, batch, count, heads, head_dim, device)
    expected = [x.clone() for x in (k, v)]
    for x, source in zip(expected, sources, strict=True):
        x[:, order[:count]] = source
    copy_rows(k, v, order[:count], *sources)
    assert torch.equal(k, expected[0]) and torch.equal(v, expected[1])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    "heads, head_dim, dtype", [(12, 128, torch.bfloat16), (3, 72, torch.float32), (1, 5, torch.bfloat16)]
)
def test_rows_of_all_layers_are_set_aside(device, heads, head_dim, dtype):
    rows, other = (LayerRows(3, (50, 4, heads, head_dim), dtype, torch.device(device)) for _ in range(2))
    for i, x in enumerate(x for both in (rows, other) for layer in both.layers for x in layer):
        x.copy_(rand(*x.shape[:-1], head_dim + i, dtype=dtype, device=device)[..., :head_dim])
    for source in (rows, other):
        before, theirs = (x.read([(0, 200)]) for x in (rows, source))
        rows.copy([(7, 60), (100, 3)], source, [(150, 33), (70, 30)])
        before[:, 7:40], before[:, 40:67], before[:, 100:103] = theirs[:, 150:183], theirs[:, 70:97], theirs[:, 97:100]
        assert torch.equal(rows.read([(0, 200)]), before)


@pytest.mark.gpu
def test_rows_are_set_aside_in_one_launch_without_a_copy_between_on_a_device():
    rows = LayerRows(30, (2_000, 16, 4, 128), torch.bfloat16, torch.device("cuda"))
    call = ([(0, 9_000)], rows, [(16_000, 9_000)])
    rows.copy(*call)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        rows.copy(*call)
        torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 10 * 8 * 18_000  # indices alone; a layer's rows are 9 MB each
    assert sum("_layers_kernel" in event.name for event in profile.events()) == 1


@pytest.mark.gpu
def test_a_copy_of_a_cache_s_rows_copies_within_itself():
    rows = LayerRows(2, (4, 4, 1, 8), torch.bfloat16, torch.device("cuda"))
    rows.write([(0, 16)], torch.arange(16, device="cuda").bfloat16().view(1, 16, 1, 1).expand(4, 16, 1, 8))
    other, before = copy.deepcopy(rows), rows.read([(0, 16)])
    other.copy([(0, 2)], other, [(9, 2)])
    assert torch.equal(rows.read([(0, 16)]), before) and other.read([(0, 2)])[:, :, 0, 0].tolist() == [[9, 10]] * 4


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_rows_of_another_kind_are_refused_before_one_is_copied(device):
    rows = LayerRows(2, (4, 4, 1, 8), torch.bfloat16, torch.device(device))
    for layers, shape, dtype in [(1, 8, torch.bfloat16), (2, 4, torch.bfloat16), (2, 8, torch.float16)]:
        other = LayerRows(layers, (4, 4, 1, shape), dtype, torch.device(device))
        for x in (x for layer in other.layers for x in layer):
            x.fill_(1)
        with pytest.raises(ValueError, match=r"are copied to rows of \(2, 16, torch.bfloat16\); they must be alike"):
            rows.copy([(0, 1)], other, [(2, 1)])
    assert not rows.read([(0, 16)]).any()


def test_the_kernels_equal_plain_indexing_bit_for_bit():
    lines = interpreted(Path(__file__).with_name("interpret_copy_rows.py"))
    assert len(lines) == 10
    for line in lines:
        assert line["same"] and line["changed"] == line["copied"], line
