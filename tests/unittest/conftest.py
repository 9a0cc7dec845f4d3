import pytest

from attention_backend import flash_attn4
from attention_backend import paged_flash_attn3 as flash_attn3
from attention_backend.kernel_probe import device_problem


@pytest.fixture(params=[flash_attn4.FlashAttention4Backend, flash_attn3.PagedFlashAttention3Backend])
def flash_kernel(request):
    """Each flash kernel's name, on the devices that it is for: only those may be missing."""
    majors = {flash_attn4.FlashAttention4Backend: flash_attn4.COMPUTE_MAJORS}
    problem = device_problem(majors.get(request.param, flash_attn3.COMPUTE_MAJORS))
    if problem:
        pytest.skip(problem)
    return request.param.name
