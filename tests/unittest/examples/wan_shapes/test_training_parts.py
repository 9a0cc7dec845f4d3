"""The training forwards compute what diffusers' classes compute, and the optimiser what its paper says."""

from dataclasses import replace

import pytest
import torch

from examples.wan_shapes.captions import make_tokenizer
from examples.wan_shapes.latents_stage import tokenise
from examples.wan_shapes.models import make_text_encoder, make_transformer, make_vae
from examples.wan_shapes.muon import Muon, orthogonalise
from examples.wan_shapes.settings import TOY, Settings
from examples.wan_shapes.training_forward import TrainingForward, encode_text, padding_bias
from examples.wan_shapes.transformer_stage import first_round, learning_rate_at
from examples.wan_shapes.whole_sequence_vae import decode, encode, run_whole_sequences


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("text_length", [64, 512])
def test_training_forward_is_the_pipelines_forward_at_that_padding(text_length):
    transformer, text_encoder = make_transformer(TOY), make_text_encoder(TOY).eval()
    torch.nn.init.normal_(transformer.proj_out.weight, std=0.05)
    latents, timestep = torch.randn(2, 8, 3, 4, 6), torch.tensor([800.0, 20.0])
    ids = tokenise(make_tokenizer(), ["a red circle moving right on a navy background", ""], 48).long()
    with torch.no_grad():
        text, lens = encode_text(text_encoder, ids)
        padded = torch.nn.functional.pad(text, (0, 0, 0, text_length - 48))
        expected = transformer(latents, timestep, padded, return_dict=False)[0]
        bias = padding_bias(lens, torch.full((2,), text_length), 48, torch.float32)
        got = TrainingForward(transformer, torch.float32)(latents, timestep, text, bias)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_padding_matters_so_that_the_bias_is_needed():
    bias = padding_bias(torch.tensor([9]), torch.tensor([512]), 48, torch.float32)[0, 0, 0]
    assert bias[:9].abs().max() == 0
    assert torch.exp(bias[9:]).sum() == pytest.approx(512 - 9, rel=1e-5)


@pytest.mark.parametrize("frames", [1, 5, 9])
def test_whole_sequence_vae_is_the_cached_one(frames):
    vae = make_vae(TOY).eval()
    for parameter in vae.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    clip = torch.rand(1, 3, frames, 16, 32) * 2 - 1
    with torch.no_grad():
        expected = vae.encode(clip).latent_dist.mean
        expected_frames = vae.decode(expected).sample
        for fast_norm in (False, True):
            run_whole_sequences(vae, fast_norm=fast_norm)
            mean, _ = encode(vae, clip)
            torch.testing.assert_close(mean, expected, atol=2e-5, rtol=1e-4)
            torch.testing.assert_close(decode(vae, mean).clamp(-1, 1), expected_frames, atol=2e-5, rtol=1e-4)


def test_orthogonalise_brings_singular_values_near_one():
    values = torch.linalg.svdvals(orthogonalise(torch.randn(3, 16, 40)))
    assert values.min() > 0.6 and values.max() < 1.3


def test_muon_walks_down_and_reads_the_learning_rate_at_every_step():
    weight = torch.nn.Parameter(torch.randn(8, 4, 3, 1, 1))
    rate = torch.tensor(0.05)
    muon = Muon([weight], rate)
    before = float(weight.detach().square().sum())
    for _ in range(60):
        weight.grad = 2 * weight.detach()
        muon.step()
    assert float(weight.detach().square().sum()) < 0.5 * before
    rate.fill_(0)
    held = weight.detach().clone()
    muon.step()
    torch.testing.assert_close(weight.detach(), held)


def test_learning_rate_rises_holds_and_ends_at_zero():
    plan = replace(first_round(Settings()), steps=1000, warmup_steps=10, decay_share=0.4, learning_rate=1.0)
    assert learning_rate_at(plan, 0) == pytest.approx(0.1)
    assert learning_rate_at(plan, 300) == learning_rate_at(plan, 599) == 1.0
    assert learning_rate_at(plan, 800) == pytest.approx(0.5)
    assert learning_rate_at(plan, 1000) == 0.0
    # What is learned before the decay does not depend on how many steps there will be.
    assert learning_rate_at(replace(plan, steps=2000), 599) == learning_rate_at(plan, 599)


def test_a_caption_too_long_for_its_slots_is_refused():
    with pytest.raises(ValueError, match="more than the 8 text slots"):
        tokenise(make_tokenizer(), ["a red circle moving up and to the right on a navy background"], 8)
