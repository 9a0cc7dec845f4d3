"""What WanPipeline computes, against diffusers' WanPipeline and against itself."""

import json

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from diffusers import WanPipeline as DiffusersWanPipeline
from diffusers.utils import logging as diffusers_logging

from visual_gen.checkpoint import resolve_folder
from visual_gen.pipelines import WanPipeline

SMALL = {"height": 32, "width": 48, "num_frames": 5, "num_inference_steps": 3, "max_sequence_length": 48}
RED, GREEN = "a red circle moving left on a black background", "a green star"
LONG = "a big yellow square moving slowly up and right over a plain navy background , smooth motion"


@pytest.fixture(scope="module")
def theirs():
    diffusers_logging.disable_progress_bar()
    pipe = DiffusersWanPipeline.from_pretrained(resolve_folder("wan-shapes"), dtype=torch.float32)
    diffusers_logging.enable_progress_bar()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def seeded(*seeds):
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    return generators[0] if len(generators) == 1 else generators


def run(pipe, prompt, *seeds, **settings):
    quiet = {"progress": False} if isinstance(pipe, WanPipeline) else {}
    return pipe(prompt, generator=seeded(*seeds), **{**SMALL, **settings}, **quiet)


@pytest.mark.parametrize("scheduler", ["unipc", "euler"])
@pytest.mark.parametrize(
    "prompt, seeds, settings",
    [
        (RED, [0], {}),
        (RED, [1], {"negative_prompt": GREEN, "cfg": "sequential"}),
        (RED, [2], {"guidance_scale": 1.0}),
        ([RED, LONG], [3, 4], {"negative_prompt": ["", RED], "max_sequence_length": 64}),
        ("  a red\n circle &amp;amp; a ring ", [5], {"guidance_scale": 0.0}),
        ("", [6], {"num_frames": 1, "num_inference_steps": 1}),
        (LONG, [7], {"max_sequence_length": 6}),
    ],
    ids=["plain", "negative", "guidance-1", "two-prompts", "cleaned", "empty-one-frame-one-step", "cut"],
)
def test_frames_are_those_of_diffusers(pipe, euler_pipe, theirs, scheduler, prompt, seeds, settings, monkeypatch):
    config = theirs.scheduler.config
    if scheduler == "euler":
        reference = FlowMatchEulerDiscreteScheduler.from_config(config, shift=config.flow_shift)
    else:
        reference = UniPCMultistepScheduler.from_config(config)
    monkeypatch.setattr(theirs, "scheduler", reference)
    kept = {"ours": [], "theirs": []}

    def keep(whose):
        return lambda pipe, step, timestep, tensors: kept[whose].append(tensors["latents"].clone()) or {}

    pipeline = euler_pipe if scheduler == "euler" else pipe
    ours = run(pipeline, prompt, *seeds, callback_on_step_end=keep("ours"), **settings)
    settings = {key: value for key, value in settings.items() if key != "cfg"}
    expected = run(theirs, prompt, *seeds, callback_on_step_end=keep("theirs"), **settings).frames
    assert ours.record.scheduler == scheduler
    assert len(kept["ours"]) == len(kept["theirs"]) == settings.get("num_inference_steps", 3)
    for latents, expected_latents in zip(kept["ours"], kept["theirs"], strict=True):
        assert (latents - expected_latents).abs().max() <= 1e-3 * expected_latents.std()
    assert ours.frames.shape == expected.shape and ours.frames.dtype == expected.dtype
    assert np.abs(ours.frames - expected).max() <= 2e-4


def test_frames_are_those_of_diffusers_at_the_size_it_was_trained_for(pipe, theirs):
    recommended = json.loads((resolve_folder("wan-shapes") / "recommended.json").read_text())
    height, width = recommended["sizes"][0]
    settings = {
        "height": height,
        "width": width,
        "num_frames": min(recommended["num_frames"]),
        "num_inference_steps": 4,
        "guidance_scale": 4.0,
        "max_sequence_length": recommended["max_sequence_length"][0],
    }
    ours = run(pipe, RED, 0, **settings)
    assert ours.record.warnings == []
    assert np.abs(ours.frames - run(theirs, RED, 0, **settings).frames).max() <= 2e-4


def test_bf16_is_no_further_from_fp32_than_diffusers_own(pipe):
    """By the geometric mean over eight seeds: a single clip may be twice as far for either, whoever rounds."""
    prompts, seeds = [RED] * 8, range(8)
    exact = run(pipe, prompts, *seeds, output_type="latent").frames
    ours = WanPipeline.from_pretrained("wan-shapes", dtype=torch.bfloat16, progress=False)
    folder = resolve_folder("wan-shapes")
    reference = DiffusersWanPipeline.from_pretrained(folder, dtype=torch.bfloat16)
    reference.set_progress_bar_config(disable=True)
    error, their_error = (
        (run(each, prompts, *seeds, output_type="latent").frames - exact).square().flatten(1).mean(1)
        for each in (ours, reference)
    )
    assert ours.dtype == ours.vae.dtype == torch.bfloat16
    assert (error / their_error).log().mean().exp() <= 1.2


@pytest.mark.parametrize("output_type, shape", [("np", (2, 5, 32, 48, 3)), ("pt", (2, 5, 3, 32, 48))])
def test_output_types_are_those_of_diffusers(pipe, theirs, output_type, shape):
    ours = run(pipe, [RED, GREEN], 0, 1, output_type=output_type).frames
    expected = run(theirs, [RED, GREEN], 0, 1, output_type=output_type).frames
    assert type(ours) is type(expected) and ours.shape == expected.shape == shape
    assert ours.min() >= 0 and ours.max() <= 1


def test_pictures_and_latents_come_out_as_from_diffusers(pipe, theirs):
    pictures = run(pipe, RED, 0, output_type="pil").frames
    expected = run(theirs, RED, 0, output_type="pil").frames
    assert [len(clip) for clip in pictures] == [len(clip) for clip in expected] == [5]
    assert np.abs(np.asarray(pictures[0][3], dtype=int) - np.asarray(expected[0][3], dtype=int)).max() <= 1
    latents = run(pipe, RED, 0, output_type="latent").frames
    assert (latents - run(theirs, RED, 0, output_type="latent").frames).abs().max() < 1e-3
    assert not latents.is_inference()  # so that it can be trained on


def test_batched_and_sequential_guidance_give_the_same_latents(pipe, counted):
    settings = {"negative_prompt": "blue", "output_type": "latent"}
    batched = run(pipe, [RED, LONG], 0, 1, cfg="batched", **settings)
    assert counted["batches"] == [4] * 3
    assert len(counted["text_lens"]) == 1 and len(counted["text_lens"][0]) == 4
    sequential = run(pipe, [RED, LONG], 0, 1, cfg="sequential", **settings)
    assert counted["batches"][3:] == [2] * 6
    assert [len(lens) for lens in counted["text_lens"][1:]] == [2, 2]
    assert (batched.frames - sequential.frames).abs().max() < 1e-4
    assert (batched.record.transformer_forwards, sequential.record.transformer_forwards) == (3, 6)


@pytest.mark.parametrize("guidance_scale, batches", [(0.0, [1, 1, 1]), (1.0, [1, 1, 1]), (1.5, [2, 2, 2])])
def test_guidance_up_to_one_runs_no_second_branch(pipe, counted, guidance_scale, batches):
    output = run(pipe, RED, 0, guidance_scale=guidance_scale, negative_prompt=GREEN, output_type="latent")
    assert counted["batches"] == batches
    assert len(counted["text_lens"]) == 1
    warned = [warning for warning in output.record.warnings if "negative_prompt has no effect" in warning]
    assert len(warned) == (guidance_scale <= 1)
    assert (output.record.negative_prompt_tokens == []) == (guidance_scale <= 1)


def test_the_negative_prompt_changes_the_video(pipe):
    plain = run(pipe, RED, 0, output_type="latent").frames
    steered = run(pipe, RED, 0, negative_prompt=GREEN, output_type="latent").frames
    assert (plain - steered).abs().max() > 0.1


def test_a_prompt_is_bit_equal_in_any_batch_of_the_same_shape(pipe):
    frames = run(pipe, [RED, GREEN, LONG], 0, 1, 2).frames
    other = run(pipe, [LONG, GREEN, ""], 7, 1, 8).frames
    assert np.array_equal(frames[1], other[1])
    moved = run(pipe, [GREEN, RED, LONG], 1, 0, 2).frames
    assert np.abs(moved[[1, 0, 2]] - frames).max() <= 2e-4
    alone = run(pipe, GREEN, 1).frames
    assert np.abs(alone[0] - frames[1]).max() <= 2e-4


def test_one_run_after_another_gives_the_same_bits(pipe):
    first = run(pipe, RED, 0)
    run(pipe, GREEN, 1, num_inference_steps=2, height=48)
    assert np.array_equal(run(pipe, RED, 0).frames, first.frames)


def test_given_latents_are_what_the_seed_would_draw(pipe):
    drawn = run(pipe, RED, 5, output_type="latent").frames
    noise = torch.randn(drawn.shape, generator=seeded(5))
    given = pipe(RED, latents=noise, output_type="latent", progress=False, **SMALL)
    assert torch.equal(given.frames, drawn)
    both = pipe(RED, latents=noise, generator=seeded(5), output_type="latent", progress=False, **SMALL)
    assert torch.equal(noise, torch.randn(drawn.shape, generator=seeded(5)))  # left as it was
    assert any("generator has no effect" in warning for warning in both.record.warnings)


def test_flow_shift_overrides_the_folders(theirs):
    shifted = WanPipeline.from_pretrained("wan-shapes", flow_shift=5.0, progress=False)
    output = run(shifted, RED, 0)
    assert output.record.flow_shift == 5.0
    reference = UniPCMultistepScheduler.from_config(theirs.scheduler.config, flow_shift=5.0)
    reference.set_timesteps(SMALL["num_inference_steps"])
    assert output.record.timesteps == reference.timesteps.tolist()


@pytest.mark.parametrize("cross_kv", ["padded", "packed", "packed_pad_exact"])
def test_cross_modes_build_each_layout_once_for_a_whole_run(cross_kv):
    sizes = {"height": 96, "width": 96, "num_frames": 17, "output_type": "latent"}  # as the checkpoint was trained
    exact = run(WanPipeline.from_pretrained("wan-shapes", progress=False), RED, 0, **sizes).frames
    pipe = WanPipeline.from_pretrained("wan-shapes", attention={"cross_kv": cross_kv}, progress=False)
    output = run(pipe, RED, 0, **sizes)
    difference = (output.frames - exact).norm() / exact.norm()
    assert (difference > 1e-3) if cross_kv == "packed" else (difference < 1e-5)
    assert output.record.cross_kv == cross_kv
    assert output.record.cross_kv_formulations == ["merge" if cross_kv == "packed_pad_exact" else cross_kv]
    assert output.record.attention.keys() == {"self", "cross_text"}
    counts = output.record.metadata
    assert counts["builds"] == counts["device_copies"] == (cross_kv != "padded")
    assert run(pipe, RED, 1, **sizes).record.metadata["builds"] == 0  # the layout is known by then


@pytest.mark.gpu
def test_pad_exact_in_bf16_on_a_gpu_is_within_twice_the_error_of_padded():
    """With text of 512 rows, as Wan's own, so that a backend that can repeat a key does."""

    def latents(dtype, **attention):
        pipe = WanPipeline.from_pretrained(
            "wan-shapes", dtype=dtype, device="cuda", attention=attention, progress=False
        )
        return run(pipe, RED, 0, output_type="latent", max_sequence_length=512)

    exact = latents(torch.float32, self="sdpa", cross_text="sdpa").frames
    error = {}
    for mode in ("padded", "packed_pad_exact", "packed"):
        output = latents(torch.bfloat16, cross_kv=mode)
        error[mode] = ((output.frames - exact).norm() / exact.norm()).item()
        if mode == "packed_pad_exact":
            repeats = output.record.attention["cross_text"]["backend"] == "flash_attn4"
            assert output.record.cross_kv_formulations == ["repeated_key" if repeats else "merge"]
    assert error["packed_pad_exact"] <= 2 * error["padded"] < error["packed"], error
