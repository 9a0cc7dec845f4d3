"""How a run goes and ends: callbacks, progress, warnings, the record, and what is an error instead of a video."""

import io
import json
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from visual_gen.pipelines import GenerationError, WanPipeline
from visual_gen.pipelines.cpu_conv import OneDnnConv3d
from visual_gen.pipelines.denoise import check_finite
from visual_gen.runtime.record import STAGES, peak_memory

ROOT = Path(__file__).parents[4]


def test_the_record_says_what_the_run_did(pipe, generate, counted):
    output = generate(["a red circle", ""], seed=[0, 1], negative_prompt="a star", guidance_scale=2.0)
    record = output.record
    assert counted["batches"] == [4, 4, 4]
    assert counted["text_lens"] == [[4, 1, 3, 3]]
    assert record.transformer_forwards == 3
    assert (record.cross_kv, record.cross_kv_formulations) == ("padded", ["padded"])
    assert (record.prompt_tokens, record.negative_prompt_tokens) == ([4, 1], [3, 3])
    assert record.latent_shape == (2, pipe.vae.config.z_dim, 2, 4, 6)
    assert tuple(record.stage_seconds) == STAGES
    assert all(record.stage_seconds[stage] > 0 for stage in ("text", "denoise", "decode"))
    assert record.stage_seconds["image"] == 0
    assert len(record.step_seconds) == len(record.timesteps) == 3
    assert 0 < sum(record.step_seconds) <= record.stage_seconds["denoise"]
    assert record.peak_memory_kind == "rss" and record.peak_memory_bytes > 50 * 2**20
    for role in ("self", "cross_text"):
        assert record.attention[role]["backend"] == pipe.transformer.attention_choices[role].name
        assert record.attention[role]["why"]
    assert (record.scheduler, record.flow_shift, record.device, record.dtype) == ("unipc", 3.0, "cpu", "float32")
    json.dumps(asdict(record))


def test_loading_counts_in_the_first_call_alone():
    pipe = WanPipeline.from_pretrained("wan-shapes", progress=False)
    settings = {"height": 32, "width": 32, "num_frames": 1, "num_inference_steps": 1, "progress": False}
    loads = [pipe("a", **settings).record.stage_seconds["load"] for _ in range(2)]
    assert loads[0] > 0 and loads[1] == 0


def test_peak_memory_is_the_processs_own_and_not_that_of_its_parent():
    code = "from visual_gen.runtime.machine import peak_rss_bytes\nprint(peak_rss_bytes())"
    held = b"x" * (600 * 2**20)  # touched, unlike zeros
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert 2**20 < int(child.stdout) < 200 * 2**20
    assert peak_memory(torch.device("cpu"))[0] > len(held)


def test_step_times_are_of_the_steps(generate):
    def slow_second_step(pipe, step, timestep, tensors):
        time.sleep(0.3 if step == 1 else 0)

    seconds = generate(callback_on_step_end=slow_second_step).record.step_seconds
    assert seconds[1] > 0.3 and max(seconds[0], seconds[2]) < 0.3


def test_the_callback_sees_each_step_and_may_replace_the_latents(pipe, generate):
    seen = []

    def replace(pipeline, step, timestep, tensors):
        seen.append((pipeline, step, float(timestep), tensors.keys()))
        return {"latents": torch.zeros_like(tensors["latents"])} if step == 2 else None

    output = generate(output_type="latent", callback_on_step_end=replace)
    assert seen == [(pipe, i, timestep, {"latents"}) for i, timestep in enumerate(output.record.timesteps)]
    assert not output.frames.any()


def test_latents_of_another_shape_from_the_callback_are_refused(generate):
    with pytest.raises(ValueError, match=r"callback_on_step_end gave latents \[1\]; .* shape \[1, 8, 2, 4, 6\]"):
        generate(callback_on_step_end=lambda *_: {"latents": torch.zeros(1)})


@pytest.mark.parametrize(
    "given, said",
    [
        (False, "gave bool; it must give None or {'latents'"),
        (torch.zeros(1), "gave Tensor; it must give None"),
        ({"latent": 1}, "gave a dict with 'latent'; it must give None"),
        ({"latents": None}, "gave latents None; they must be a tensor"),
        ({"latents": torch.zeros(1, 8, 2, 4, 6, device="meta")}, "gave latents on meta; they must stay on cpu"),
    ],
)
def test_a_callback_gives_none_or_latents_and_nothing_else(generate, given, said):
    with pytest.raises(ValueError, match=re.escape(f"callback_on_step_end {said}")):
        generate(callback_on_step_end=lambda *_: given)


@pytest.mark.parametrize("scheduler", ["unipc", "euler"])
def test_a_call_from_a_callback_changes_neither_video(scheduler, request):
    pipe = request.getfixturevalue("pipe" if scheduler == "unipc" else "euler_pipe")

    def generate(steps, **settings):
        generator = torch.Generator().manual_seed(steps)
        sizes = {"height": 32, "width": 48, "num_frames": 5, "num_inference_steps": steps, "progress": False}
        return pipe("a star", generator=generator, **sizes, **settings).frames

    alone, inner = {steps: generate(steps) for steps in (3, 4)}, []
    outer = generate(4, callback_on_step_end=lambda pipe, step, *_: inner.append(generate(3)) if step == 1 else None)
    assert np.array_equal(outer, alone[4]) and np.array_equal(inner[0], alone[3])


def test_threads_share_a_pipeline(generate):
    alone = [generate(seed=seed, num_inference_steps=2 + seed).frames for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(generate, seed=seed % 4, num_inference_steps=2 + seed % 4) for seed in range(12)]
    for i, call in enumerate(calls):
        assert np.abs(call.result().frames - alone[i % 4]).max() < 1e-4


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_broken_latents_are_an_error_that_names_step_and_prompt(generate, value):
    calls = []

    def spoil(pipe, step, timestep, tensors):
        calls.append(step)
        if step == 1:
            tensors["latents"][1, 0, 0, 0, 0] = value

    with pytest.raises(
        GenerationError, match=r"denoising step 2 of 3 \(timestep \d+\) gave NaN .* prompt\(s\) 1:"
    ) as error:
        generate(["a", "a"], seed=[0, 1], callback_on_step_end=spoil)
    assert error.value.step == 2
    assert calls == [0, 1]  # on the CPU it ends there


def test_flags_that_stayed_on_a_device_name_the_first_step_and_its_prompts():
    flags = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
    with pytest.raises(GenerationError, match=r"denoising step 2 of 3 \(timestep 500\) .* prompt\(s\) 1, 2:"):
        check_finite(flags, [1000.0, 500.0, 10.0])
    check_finite(flags[:1], [1000.0])


@pytest.mark.gpu
@pytest.mark.parametrize("scheduler", ["unipc", "euler"])
def test_no_step_waits_for_the_gpu(scheduler):
    pipe = WanPipeline.from_pretrained(
        "wan-shapes", dtype=torch.bfloat16, device="cuda", scheduler=scheduler, progress=False
    )
    settings = {"height": 96, "width": 96, "num_frames": 17, "num_inference_steps": 4, "progress": False}
    pipe("a red circle", **settings)  # kernels and tables are made

    def strict_from_here(pipe, step, *_):
        torch.cuda.set_sync_debug_mode("error" if step < 3 else "default")

    try:
        record = pipe("a red circle", callback_on_step_end=strict_from_here, **settings).record
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert record.peak_memory_kind == "cuda" and len(record.step_seconds) == 4 and min(record.step_seconds) > 0


def test_broken_weights_are_found_at_the_first_step(pipe, generate, monkeypatch):
    monkeypatch.setattr(pipe.transformer, "forward", lambda x, t, **_: torch.full_like(x, float("nan")))
    with pytest.raises(GenerationError, match="denoising step 1 of 3"):
        generate()


@pytest.mark.parametrize(
    "pixels, said",
    [
        (lambda video: torch.full_like(video, -1.0), r"prompt 0: frame\(s\) 0 to 4 of 5 are of one colour"),
        (lambda video: video.index_fill(2, torch.tensor([3]), 0.5), r"step 3, .* frame\(s\) 3 of 5 are of one colour"),
        (lambda video: video.index_fill(2, torch.tensor([0, 2]), float("nan")), r"frame\(s\) 0, 2 of 5 hold NaN"),
        (lambda video: video[..., :24], "frames×height×width are 5×32×24, not 5×32×48: the VAE is not"),
    ],
    ids=["constant-video", "constant-frame", "nan-frames", "other-size"],
)
def test_frames_that_are_no_picture_are_an_error_that_keeps_the_latents(pipe, generate, monkeypatch, pixels, said):
    decode = pipe.vae.decode
    monkeypatch.setattr(pipe.vae, "decode", lambda z, return_dict: (pixels(decode(z, return_dict=False)[0]),))
    with pytest.raises(GenerationError, match=said) as error:
        generate()
    assert error.value.step == 3
    assert torch.equal(error.value.latents, generate(output_type="latent").frames)


@pytest.mark.parametrize("output_type", ["np", "pt", "pil"])
@pytest.mark.parametrize("value", [0.5, float("nan")])
def test_one_bad_clip_loses_none_of_the_others(pipe, generate, monkeypatch, output_type, value):
    prompts, seeds = ["a red circle", "a star", "a ring"], [0, 1, 2]
    expected = generate(prompts, seeds, output_type=output_type).frames
    decode, calls = pipe.vae.decode, []

    def spoil_second(z, return_dict):
        calls.append(z)
        video = decode(z, return_dict=False)[0]
        return (video.index_fill(2, torch.tensor([3]), value) if len(calls) == 2 else video,)

    monkeypatch.setattr(pipe.vae, "decode", spoil_second)
    with pytest.raises(GenerationError, match=r"1 of 3 clip\(s\), .* prompt 1: frame\(s\) 3 of 5") as error:
        generate(prompts, seeds, output_type=output_type)
    output = error.value.output
    assert len(calls) == len(output.frames) == 3
    assert list(output.record.bad_clips) == [1]
    for row in (0, 2):
        for frame, same in zip(output.frames[row], expected[row], strict=True):
            assert np.array_equal(np.asarray(frame), np.asarray(same))
    assert all(np.isfinite(np.asarray(frame)).all() for frame in output.frames[1])


@pytest.mark.parametrize("stage", ["denoise", "decode"])
def test_ctrl_c_leaves_a_pipeline_that_works(pipe, generate, monkeypatch, stage):
    expected = generate().frames

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        if stage == "decode":
            patch.setattr(pipe.vae.decoder.conv_out, "forward", interrupt)
            generate()
        else:
            generate(callback_on_step_end=lambda pipe, step, *_: interrupt() if step == 1 else None)
    assert not any(isinstance(cached, torch.Tensor) for cached in pipe.vae._feat_map)
    assert np.array_equal(generate().frames, expected)


def test_progress_names_the_stages_and_counts_the_steps(generate, monkeypatch):
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    monkeypatch.setattr("visual_gen.pipelines.progress.Console", lambda stderr: console)
    generate(progress=True)
    shown = screen.getvalue()
    assert all(stage in shown for stage in ("text", "denoise", "decode"))
    assert "3/3" in shown


def test_no_progress_writes_nothing(generate, capsys):
    generate("a red circle")
    captured = capsys.readouterr()
    assert captured.out == "" and "denoise" not in captured.err


def test_sizes_that_the_checkpoint_was_not_made_for_are_warned_about(pipe, generate, caplog):
    warnings = generate("a", max_sequence_length=8).record.warnings
    for part in ("height x width 32x48 is none", "num_frames 5 is none", "max_sequence_length 8 is outside"):
        assert sum(part in warning for warning in warnings) == 1
    assert set(warnings) <= set(caplog.messages)


def test_the_record_has_what_the_checkpoint_calls_itself(generate):
    record = generate("a red circle").record
    assert record.checkpoint_label.startswith("demo checkpoint")
    assert not any("experimental" in warning for warning in record.warnings)


def test_a_checkpoint_without_recommendations_warns_of_no_size(pipe, generate, monkeypatch):
    monkeypatch.setattr(pipe, "recommended", {})
    assert generate("a", max_sequence_length=8).record.warnings == []


def test_small_convolutions_of_the_vae_run_in_onednn_and_change_nothing(pipe):
    latents = torch.randn(1, pipe.vae.config.z_dim, 2, 4, 6, generator=torch.Generator().manual_seed(0))

    def decode():
        with torch.inference_mode(), torch.profiler.profile() as profile:
            video = pipe.vae.decode(latents, return_dict=False)[0]
        return video, {event.key for event in profile.key_averages()}

    expected, ops = decode()
    assert "aten::slow_conv3d_forward" in ops
    with OneDnnConv3d():
        video, ops = decode()
    assert "aten::slow_conv3d_forward" not in ops and "aten::mkldnn_convolution" in ops
    assert (video - expected).abs().max() < 1e-4


def test_a_torch_without_the_undocumented_operator_decodes_as_well(generate, monkeypatch):
    expected = generate().frames
    monkeypatch.delattr(torch, "mkldnn_convolution")
    assert np.abs(generate().frames - expected).max() < 1e-4
