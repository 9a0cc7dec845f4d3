"""Where noise is drawn."""

import pytest
import torch

from visual_gen.pipelines.latents import draw_noise

SHAPE = (4, 3, 5, 6)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_noise_is_drawn_where_the_generator_is_whatever_the_device(device):
    ours, other = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    noise, expected = draw_noise(SHAPE, ours, torch.device(device)), torch.randn(SHAPE, generator=other)
    assert (noise.device.type, noise.dtype, noise.shape) == (device, torch.float32, SHAPE)
    assert torch.equal(ours.get_state(), other.get_state())
    assert device == "meta" or torch.equal(noise, expected)


def test_without_a_generator_noise_is_the_devices_own():
    state = torch.get_rng_state()
    draw_noise(SHAPE, None, torch.device("meta"))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    noise = draw_noise(SHAPE, None, torch.device("cpu"))
    torch.manual_seed(2)
    assert torch.equal(noise, torch.randn(SHAPE))


@pytest.mark.gpu
def test_noise_of_a_cpu_generator_reaches_a_gpu_without_a_wait():
    draw_noise(SHAPE, torch.Generator(), torch.device("cuda"))  # pinned memory is got on first use
    torch.cuda.synchronize()
    generator = torch.Generator().manual_seed(5)
    torch.cuda.set_sync_debug_mode("error")
    try:
        made = [draw_noise(SHAPE, generator, torch.device("cuda")) for _ in range(20)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    generator.manual_seed(5)
    for noise in made:
        assert torch.equal(noise.cpu(), torch.randn(SHAPE, generator=generator))
