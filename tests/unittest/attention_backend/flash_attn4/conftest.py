"""A device for the gpu tests of FA4, and cases that its kernels share: head_dim 128 in bf16."""

import pytest
import torch

from attention_backend import flash_attn4
from attention_backend.kernel_probe import device_problem


@pytest.fixture
def fa4_device():
    problem = device_problem(flash_attn4.COMPUTE_MAJORS)
    if problem:
        pytest.skip(problem)


@pytest.fixture
def make_gpu_case(make_case):
    """A case whose slots beyond the lengths hold 1e4, in K and in V."""

    def make(form, q_lens, kv_lens, *, block_size=0, heads=4, **options):
        paged = {"block_size": block_size} if block_size else {}
        return make_case(
            form,
            q_lens,
            kv_lens,
            heads=heads,
            head_dim=128,
            dtype=torch.bfloat16,
            device="cuda",
            poison=1e4,
            **paged,
            **options,
        )

    return make
