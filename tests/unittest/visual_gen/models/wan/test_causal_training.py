"""Training under block-causal masks: the same numbers as a rollout over a cache, with gradients."""

import pytest
import torch

from visual_gen.models.wan import CausalWanTransformer, WanTransformer
from visual_gen.modules.block_causal import ChunkWindow, diffusion_forcing_mask, teacher_forcing_mask

C, (H, W), S = 4, (4, 6), 6


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
@pytest.mark.parametrize("name", ["unlimited", "window"])
def test_teacher_forcing_gives_the_recorded_outputs_of_self_forcing(recordings, tmp_path, name):
    recording = recordings[name]
    config, tensors = recording.config, recording.tensors
    torch.save({"generator": recording.weights}, tmp_path / "file.pt")
    model = CausalWanTransformer.from_pickle(tmp_path / "file.pt", recording.wan)
    chunks, sink, window = range(config["num_chunks"]), config["sink_frames"], config["window_frames"]
    rule = ChunkWindow(config["frames_per_chunk"], None, sink, None if window < 0 else window - sink)
    frames = config["frames_per_chunk"] * len(chunks)
    mask = teacher_forcing_mask(rule, frames, config["tokens_per_frame"], "cpu")
    text = model.project_text(tensors["text"], config["text_lens"])
    *steps, commit = range(len(config["timesteps"]))
    clean = torch.cat([tensors[f"in.{i}.{commit}"] for i in chunks], dim=2)
    for step in steps[1:3]:
        noisy, expected = (torch.cat([tensors[f"{side}.{i}.{step}"] for i in chunks], dim=2) for side in ("in", "out"))
        timestep = torch.full((len(noisy),), config["timesteps"][step])
        out = model.forward_masked(noisy, timestep, block_mask=mask, text_kv=text, clean=clean)
        assert (out - expected).abs().max() < 1e-4 * expected.abs().max()


@torch.no_grad()
def test_diffusion_forcing_is_a_cache_that_keeps_each_frame_at_its_timestep(make_model, make_text, make_contiguous):
    model = make_model()
    text, latents = make_text(model, (5, 3)), noise(2, C, 5, H, W)
    timesteps = torch.tensor([[900.5, 900.5, 10, 10, 400], [1, 1, 700, 700, 3.25]])
    mask = diffusion_forcing_mask(ChunkWindow(2), 5, S, "cpu")
    found = model.forward_masked(latents, timesteps, block_mask=mask, text_kv=text)
    cache, outs = make_contiguous(model, 2, 5), []
    for start, n in ((0, 2), (2, 2), (4, 1)):
        part = slice(start, start + n)
        with cache.begin(n) as chunk:
            outs.append(model(latents[:, :, part], timesteps[:, part], kv=cache.batch(chunk), text_kv=text))
            chunk.commit()
    torch.testing.assert_close(found, torch.cat(outs, dim=2), rtol=0, atol=1e-5)


def test_gradients_reach_every_weight_and_both_videos(make_model, make_text):
    model = make_model(trainable=True)
    clean, noisy = (noise(2, C, 4, H, W, seed=i).requires_grad_() for i in range(2))
    mask = teacher_forcing_mask(ChunkWindow(2), 4, S, "cpu")
    text = make_text(model, (5, 3))
    out = model.forward_masked(noisy, noise(2, 4).abs() * 500, block_mask=mask, text_kv=text, clean=clean)
    out.square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0] == []
    assert noisy.grad.abs().sum() > 0
    by_frame = clean.grad.abs().sum((0, 1, 3, 4))
    assert (by_frame[:2] > 0).all() and (by_frame[2:] == 0).all()  # no noisy chunk sees the last clean one


def test_gradients_are_those_of_a_dense_computation(make_model, make_text, masked_forward):
    causal, plain = make_model(trainable=True), make_model(trainable=True, model_class=WanTransformer)
    plain.load_state_dict(causal.state_dict())
    latents, timesteps = noise(2, C, 5, H, W), noise(2, 5, seed=1).abs() * 500
    chunk_of = torch.tensor([0, 0, 1, 1, 2])
    mask = diffusion_forcing_mask(ChunkWindow(2), 5, S, "cpu")
    found = causal.forward_masked(latents, timesteps, block_mask=mask, text_kv=make_text(causal, (5, 3)))
    visible = chunk_of[:, None] >= chunk_of
    expected = masked_forward(plain, latents, timesteps, make_text(plain, (5, 3)), visible)
    for out in (found, expected):
        out.square().mean().backward()
    largest = max(p.grad.abs().max() for p in plain.parameters())
    for name, parameter in plain.named_parameters():
        other = causal.get_parameter(name)
        torch.testing.assert_close(other.grad, parameter.grad, rtol=1e-4, atol=1e-6 * float(largest), msg=name)


@torch.no_grad()
def test_shapes_that_do_not_fit_are_refused(make_model, make_text):
    model = make_model()
    text, latents = make_text(model, (5,)), noise(1, C, 4, H, W)
    mask = diffusion_forcing_mask(ChunkWindow(2), 4, S, "cpu")
    with pytest.raises(ValueError, match="block_mask is for 24 tokens; clean and hidden_states have 48"):
        model.forward_masked(latents, torch.zeros(1), block_mask=mask, text_kv=text, clean=latents)
    with pytest.raises(ValueError, match=r"clean has shape \(1, 4, 2, 4, 6\)"):
        model.forward_masked(latents, torch.zeros(1), block_mask=mask, text_kv=text, clean=latents[:, :, :2])
    with pytest.raises(ValueError, match=r"timestep has shape \(3,\)"):
        model.forward_masked(latents, torch.zeros(3), block_mask=mask, text_kv=text)
    with pytest.raises(ValueError, match="text_kv has 2 rows, hidden_states 1"):
        model.forward_masked(latents, torch.zeros(1), block_mask=mask, text_kv=make_text(model, (5, 3)))
