"""`compile`: whole videos through compiled blocks, and how long compiling took."""

import importlib.util
import os
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from tests.unittest.visual_gen.compiling import counted_graphs
from tests.unittest.visual_gen.pipelines.conftest import SMALL, seeded
from visual_gen.pipelines import WanPipeline

PROMPTS = (("a red circle", 0), ("a green star moving up and right", 1), ("", 1))  # of other lengths, and two seeds


@pytest.fixture
def graphs():
    with counted_graphs() as counter:
        yield counter


def load(**settings):
    return WanPipeline.from_pretrained("wan-shapes", progress=False, **settings)


def run(pipe, prompt="a red circle", seed=0, **settings):
    return pipe(prompt, generator=seeded(seed), **{**SMALL, "output_type": "latent", **settings})


def far(found, expected):
    return ((found.frames - expected.frames).norm() / expected.frames.norm()).item()


@pytest.mark.parametrize("cross_kv", ["padded", "packed", "packed_pad_exact"])
def test_one_graph_serves_all_layers_steps_prompts_and_calls(graphs, cross_kv):
    pipe, plain = (load(compile=compile, attention={"cross_kv": cross_kv}) for compile in (True, False))
    for prompt, seed in PROMPTS:
        found = run(pipe, prompt, seed)
        assert far(found, run(plain, prompt, seed)) < 1e-4
        formulation = {"packed_pad_exact": "merge"}.get(cross_kv, cross_kv)
        assert found.record.cross_kv_formulations == [formulation]
        assert graphs.frame_count == 1
    one_row = {"cfg": "sequential"}  # another batch, which both branches share
    assert far(run(pipe, **one_row), run(plain, **one_row)) < 1e-4
    assert graphs.frame_count == 2


def test_compiling_is_told_apart_from_the_steps_of_the_first_call(graphs):
    pipe = load(compile=True)
    records = [run(pipe).record for _ in range(2)]
    assert records[0].stage_seconds["compile"] > 0.05 and records[1].stage_seconds["compile"] == 0
    for record in records:
        assert min(record.step_seconds) > 0
        assert sum(record.step_seconds) <= record.stage_seconds["denoise"]
    # Tracing a block takes far longer than running the tiny forward.
    assert records[0].step_seconds[0] < records[0].stage_seconds["compile"]
    assert run(load()).record.stage_seconds["compile"] == 0


def test_a_lora_has_one_graph_of_its_own_and_its_scale_none(graphs, tmp_path):
    pipe, plain = load(compile=True), load()
    size, generator = pipe.transformer.config.hidden_size, torch.Generator().manual_seed(0)
    state = {}
    for layer in range(pipe.transformer.config.num_layers):
        key = f"diffusion_model.blocks.{layer}.self_attn.q.lora_"
        state[f"{key}down.weight"] = torch.randn(4, size, generator=generator) / 16
        state[f"{key}up.weight"] = torch.randn(size, 4, generator=generator) / 16
    save_file(state, tmp_path / "style.safetensors")
    before = run(pipe)
    for one in (pipe, plain):
        one.load_lora(tmp_path / "style.safetensors")
    for scale in (1.0, 0.5):
        for one in (pipe, plain):
            one.set_lora_scale("style", scale)
        found = run(pipe)
        assert far(found, run(plain)) < 1e-4 < 1e-3 < far(found, before)
        assert graphs.frame_count == 2
    pipe.unload_lora()
    assert torch.equal(run(pipe).frames, before.frames) and graphs.frame_count == 2


def test_text_of_compiled_blocks_is_counted_as_the_buffers_that_hold_it(graphs, monkeypatch):
    needed = {}
    for compile in (True, False):
        pipe = load(compile=compile, attention={"cross_kv": "packed"})
        monkeypatch.setattr(
            "visual_gen.pipelines.wan.check_memory", lambda count, device, key=compile: needed.update({key: count})
        )
        run(pipe)
    config = pipe.transformer.config
    row = 2 * config.hidden_size * config.num_layers * 4
    rows = (needed[True] - needed[False]) / row
    assert rows == 2 * 48 - (4 + 1)  # all, less those of "a red circle" and of "", each with its end token


@pytest.mark.parametrize("compile", ["yes", 1, None])
def test_what_is_neither_true_nor_false_is_refused(compile):
    with pytest.raises(ValueError, match=f"compile is {compile!r}; it must be True or False"):
        load(compile=compile)


def test_a_machine_without_a_compiler_is_told_what_it_lacks(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-c++")
    with pytest.raises(
        ValueError, match="needs a C\\+\\+ compiler, but there is no 'no-such-c\\+\\+' here: install one"
    ):
        load(compile=True)
    with pytest.raises(ValueError, match="needs a C\\+\\+ compiler"):
        WanPipeline.check("wan-shapes", {"compile": True}, {})
    assert load().transformer.blocks_compiled is False


def test_a_torch_in_a_path_with_a_space_is_refused(monkeypatch):
    find_spec = importlib.util.find_spec

    def found(name, *rest):
        return SimpleNamespace(origin="/some where/torch/__init__.py") if name == "torch" else find_spec(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", found)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    with pytest.raises(ValueError, match="path has white space, as /some where/torch/__init__.py has: install it"):
        load(compile=True)


@pytest.mark.filterwarnings("error:Torchinductor does not support code generation for complex")
def test_inductor_gives_the_frames_that_no_compiler_gives():
    """Or says what is missing, where there is no compiler, or torch lies where a compiler does not find it."""
    torch._dynamo.reset()
    has_compiler = shutil.which(os.environ.get("CXX") or "g++") is not None
    if not has_compiler or " " in torch.__file__:
        missing = "a torch whose path has white space" if has_compiler else "needs a C\\+\\+ compiler"
        with pytest.raises(ValueError, match=missing):
            load(compile=True)
        return
    settings = {"num_inference_steps": 1, "num_frames": 1, "guidance_scale": 1.0}
    pipe = load(compile=True)
    found = run(pipe, **settings)
    assert far(found, run(load(), **settings)) < 1e-4
    assert found.record.stage_seconds["compile"] > 0
    assert run(pipe, "a green star", **settings).record.stage_seconds["compile"] == 0
    torch._dynamo.reset()


@pytest.mark.gpu
@pytest.mark.parametrize("cross_kv", ["padded", "packed", "packed_pad_exact"])
def test_on_a_gpu_one_graph_is_within_twice_the_error_of_plain_bf16(cross_kv):
    def make(dtype, compile=False):
        attention = {"cross_kv": cross_kv} | ({} if dtype == torch.bfloat16 else {"self": "sdpa", "cross_text": "sdpa"})
        return load(dtype=dtype, device="cuda", compile=compile, attention=attention)

    exact, plain = make(torch.float32), make(torch.bfloat16)
    with counted_graphs("inductor") as graphs:
        pipe = make(torch.bfloat16, compile=True)
        for prompt, seed in PROMPTS:
            expected, found = run(exact, prompt, seed), run(pipe, prompt, seed)
            assert far(found, expected) <= 2 * far(run(plain, prompt, seed), expected)
            assert len(found.record.step_seconds) == 3 and min(found.record.step_seconds) > 0
            assert graphs.frame_count == 1
        assert found.record.stage_seconds["compile"] == 0
