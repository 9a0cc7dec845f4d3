"""Rows of K and V copied by index: how chunks are written, and how what they overwrite is set aside and put back."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attention_backend.kv_cache.rows import copy_rows


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
    for x in expected:
        x[:, order[:count]] = x[:, order[count : 2 * count]]
    copy_rows(k, v, order[:count], k, v, order[count : 2 * count])
    assert torch.equal(k, expected[0]) and torch.equal(v, expected[1])


@pytest.mark.gpu
def test_rows_are_set_aside_without_a_copy_between_on_a_device():
    k, v = (torch.zeros(1, 60_000, 4, 128, dtype=torch.bfloat16, device="cuda") for _ in "kv")
    index = torch.arange(50_000, device="cuda")
    kept, live = index[:20_000], index[20_000:40_000]
    copy_rows(k, v, kept, k, v, live)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    copy_rows(k, v, kept, k, v, live)
    copy_rows(k, v, kept, k[:, 20_000:40_000], v[:, 20_000:40_000])
    assert torch.cuda.max_memory_allocated() == before


def test_the_kernel_equals_plain_indexing_bit_for_bit():
    """Triton's kernel in its interpreter, in a process of its own: the mode is fixed when triton is imported."""
    script, repository = Path(__file__).with_name("interpret_copy_rows.py"), Path(__file__).parents[4]
    environment = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(repository)}
    child = subprocess.run(
        [sys.executable, str(script)], cwd=repository, env=os.environ | environment, capture_output=True, text=True
    )
    assert child.returncode == 0, child.stderr[-4000:]
    lines = [json.loads(line) for line in child.stdout.splitlines()]
    assert len(lines) == 9
    for line in lines:
        assert line["same"] and line["changed"] == line["copied"], line
