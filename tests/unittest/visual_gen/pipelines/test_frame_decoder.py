"""Decoding chunk by chunk against diffusers' decoding of the whole video."""

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan

from visual_gen.pipelines import GenerationError, frame_stream
from visual_gen.pipelines.cpu_conv import OneDnnConv3d
from visual_gen.pipelines.frame_stream import FrameDecoder

CHANNELS, FRAMES = 4, 6


def tiny_vae(**changes) -> AutoencoderKLWan:
    torch.manual_seed(0)
    settings = {
        "base_dim": 4, "z_dim": CHANNELS, "dim_mult": [1, 2, 2, 2], "num_res_blocks": 1,
        "latents_mean": [0.1, -0.2, 0.3, 0.0], "latents_std": [1.5, 0.7, 1.0, 2.0],
    }  # fmt: skip
    return AutoencoderKLWan(**(settings | changes)).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def vae():
    return tiny_vae()


def latents(seed: int = 0, frames: int = FRAMES, size: tuple[int, int] = (2, 3)) -> torch.Tensor:
    return torch.randn(CHANNELS, frames, *size, generator=torch.Generator().manual_seed(seed))


def whole(vae: AutoencoderKLWan, z: torch.Tensor) -> torch.Tensor:
    """[3, n, H, W] in -1..1 of all latents at once, by diffusers in the same convolutions."""
    mean, std = (torch.tensor(v).view(1, -1, 1, 1, 1) for v in (vae.config.latents_mean, vae.config.latents_std))
    with OneDnnConv3d():
        return vae.decode(z[None] * std + mean, return_dict=False)[0][0]


def pixels(video: torch.Tensor) -> np.ndarray:
    return ((video / 2 + 0.5) * 255).round().to(torch.uint8).permute(1, 2, 3, 0).numpy()


@pytest.fixture
def floats(monkeypatch):
    """The decoders' values before they become bytes, one video for each chunk that was decoded."""
    seen = []
    decoded = FrameDecoder._decoded

    def noting(self, z):
        video, remembered = decoded(self, z)
        seen.append(video)
        return video, remembered

    monkeypatch.setattr(FrameDecoder, "_decoded", noting)
    return seen


@pytest.mark.parametrize("sizes", [[6], [1] * 6, [3, 3], [1, 3, 2], [2, 4]])
def test_chunks_of_any_size_give_the_whole_video(vae, floats, sizes):
    z, decoder = latents(), FrameDecoder(vae)
    frames = [decoder.decode(chunk) for chunk in z.split(sizes, dim=1)]
    assert [len(chunk) for chunk in frames] == [4 * size - 3 * (i == 0) for i, size in enumerate(sizes)]
    expected = whole(vae, z)
    assert (torch.cat(floats, dim=1) - expected).abs().max() <= 1e-6
    assert all(chunk.dtype == np.uint8 for chunk in frames)
    assert np.abs(np.concatenate(frames).astype(int) - pixels(expected)).max() <= 1
    assert decoder.latent_frames == FRAMES


@pytest.mark.parametrize("changes", [
    {"temperal_downsample": [True, False, True]},
    {"is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12, "scale_factor_spatial": 16},
], ids=["other-levels", "wan-2.2"])  # fmt: skip
def test_other_vaes(floats, changes):
    other, z = tiny_vae(**changes), latents()
    decoder = FrameDecoder(other)
    for chunk in z.split([3, 2, 1], dim=1):
        decoder.decode(chunk)
    assert (torch.cat(floats, dim=1) - whole(other, z)).abs().max() <= 1e-6


def test_decoders_that_share_a_vae_take_turns(vae):
    a, b = FrameDecoder(vae), FrameDecoder(vae)
    za, zb = latents(1), latents(2)
    frames = [(a.decode(x), b.decode(y)) for x, y in zip(za.split(2, dim=1), zb.split(2, dim=1), strict=True)]
    for z, turn in ((za, 0), (zb, 1)):
        np.testing.assert_array_equal(np.concatenate([pair[turn] for pair in frames]), FrameDecoder(vae).decode(z))


def test_the_vae_itself_may_decode_in_between(vae):
    z, decoder = latents(), FrameDecoder(vae)
    first = decoder.decode(z[:, :3])
    whole(vae, latents(5))
    np.testing.assert_array_equal(np.concatenate([first, decoder.decode(z[:, 3:])]), FrameDecoder(vae).decode(z))


def test_a_fork_goes_on_by_itself(vae):
    z, other, decoder = latents(1), latents(2), FrameDecoder(vae)
    decoder.decode(z[:, :4])
    fork = decoder.fork()
    diverged = fork.decode(other[:, 4:])
    rest = decoder.decode(z[:, 4:])
    np.testing.assert_array_equal(rest, FrameDecoder(vae).decode(z)[13:])
    mixed = torch.cat([z[:, :4], other[:, 4:]], dim=1)
    np.testing.assert_array_equal(diverged, FrameDecoder(vae).decode(mixed)[13:])
    assert fork.latent_frames == decoder.latent_frames == FRAMES


def test_what_is_remembered_does_not_grow(vae):
    decoder, sizes = FrameDecoder(vae), []
    for chunk in latents(frames=6).split(2, dim=1):
        decoder.decode(chunk)
        sizes.append(sum(kept.numel() for kept in decoder._remembered if isinstance(kept, torch.Tensor)))
    assert len(set(sizes[1:])) == 1


def test_a_fault_leaves_the_decoder_as_it_was(vae, monkeypatch):
    z, decoder = latents(), FrameDecoder(vae)
    first = decoder.decode(z[:, :3])
    with pytest.raises(GenerationError, match=r"latent frames from 3 on: frame\(s\) 0 to 7 of 8 hold NaN"):
        decoder.decode(torch.full_like(z[:, 3:5], float("nan")))

    def fail(*args, **kwargs):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:  # in the convolutions of the second frame
        conv, calls = frame_stream.WanCausalConv3d.forward, []
        patch.setattr(frame_stream.WanCausalConv3d, "forward",
                      lambda *a: calls.append(0) or (fail() if len(calls) > 30 else conv(*a)))  # fmt: skip
        with pytest.raises(RuntimeError, match="out of memory"):
            decoder.decode(z[:, 3:])
    np.testing.assert_array_equal(np.concatenate([first, decoder.decode(z[:, 3:])]), FrameDecoder(vae).decode(z))


def test_a_chunk_of_one_colour_is_an_error_and_one_frame_of_it_is_not(monkeypatch):
    flat = tiny_vae()
    torch.nn.init.zeros_(flat.decoder.conv_out.weight)
    with pytest.raises(GenerationError, match="from 0 on: .*0 to 4 of 5 are of one colour"):
        FrameDecoder(flat).decode(latents(frames=2))
    monkeypatch.setattr(frame_stream, "unusable_frames", lambda video: ([], [0, 2]))
    assert len(FrameDecoder(flat).decode(latents(frames=2))) == 5


@pytest.mark.parametrize("shape", [(4, 6), (CHANNELS, 3, 4), (3, 2, 4, 6), (2, CHANNELS, 1, 4, 6), (CHANNELS, 0, 4, 6)])
def test_other_shapes_are_refused(vae, shape):
    with pytest.raises(ValueError, match=rf"shape \({shape[0]}, {shape[1]}.*\[4, F, h, w\]"):
        FrameDecoder(vae).decode(torch.zeros(shape))


def test_a_stream_keeps_its_size(vae):
    decoder = FrameDecoder(vae)
    decoder.decode(latents(frames=1))
    with pytest.raises(ValueError, match="3×2; this stream's are 2×3"):
        decoder.decode(latents(frames=1, size=(3, 2)))


def test_fp32_convolutions_on_the_cpu_are_onednns(vae, monkeypatch):
    called = []
    conv = torch.mkldnn_convolution
    monkeypatch.setattr(torch, "mkldnn_convolution", lambda *args: called.append(1) or conv(*args))
    FrameDecoder(vae).decode(latents(frames=1))
    assert called


@pytest.mark.gpu
def test_on_a_gpu_too(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # what is compared with is fp32
    vae, z = tiny_vae().cuda(), latents()
    decoder = FrameDecoder(vae)
    frames = np.concatenate([decoder.decode(chunk.cuda()) for chunk in z.split(2, dim=1)])
    assert np.abs(frames.astype(int) - pixels(whole(vae.cpu(), z))).max() <= 1
