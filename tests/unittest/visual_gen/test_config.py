from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from visual_gen.config import ConfigError, Override, RunConfig, load_config
from visual_gen.device import find_device

CONFIGS = sorted((Path(__file__).parents[3] / "configs").glob("*.yaml"))
MINIMAL = "model: {path: wan-shapes}\n"


@pytest.fixture
def load(tmp_path):
    """Loads a text as a configuration file run.yaml."""

    def load(text: str, *overrides: str | Override) -> RunConfig:
        file = tmp_path / "run.yaml"
        file.write_text(text)
        return load_config(file, overrides)

    return load


def error_of(load, text: str, *overrides: str | Override) -> str:
    with pytest.raises(ConfigError) as caught:
        load(text, *overrides)
    return str(caught.value)


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_every_shipped_config_loads(file):
    assert load_config(file).model.path


@pytest.mark.parametrize("size", ["1.3b", "14b"])
def test_a_recipe_for_a_kernel_changes_nothing_but_kernels_and_device(size):
    folder = CONFIGS[0].parent
    plain, fa4 = (load_config(folder / f"wan2.1_t2v_{size}{suffix}.yaml") for suffix in ("", "_fa4"))
    assert fa4.model_copy(update={"attention": plain.attention, "device": plain.device}) == plain
    assert (fa4.attention.self, fa4.attention.cross_text, fa4.device) == ("flash_attn4", "flash_attn4", "cuda")
    assert fa4.attention.cross_kv == "packed_pad_exact"


def test_defaults_fill_what_the_file_leaves_out(load):
    config = load(MINIMAL)
    assert config.attention.self == "auto"
    assert config.attention.cross_kv == "padded"
    assert config.generation.prompts == ()


def test_an_unknown_key_names_file_line_path_and_near_match(load):
    error = error_of(load, MINIMAL + "generation:\n  hight: 96\n")
    assert "run.yaml:3: generation.hight: unknown key; did you mean height? (generation has prompt" in error


def test_a_key_in_the_wrong_section_is_led_to_the_right_one(load):
    assert "num_frame: unknown key; did you mean generation.num_frames?" in error_of(load, MINIMAL + "num_frame: 17\n")


def test_an_unknown_key_without_a_near_match_lists_what_there_is(load):
    error = error_of(load, MINIMAL + "zzz: 1\n")
    assert "did you mean" not in error
    known = "model, dtype, device, offload, compile, attention, generation, output, causal, lora, stream"
    assert f"(the top level has {known})" in error


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("generation.num_inference_steps", "0", "wants 1 or more"),
        ("generation.num_inference_steps", "2.5", "wants a whole number"),
        ("generation.guidance_scale", "-1", "wants 0 or more"),
        ("generation.guidance_scale", ".nan", "wants a finite number"),
        ("generation.guidance_scale", ".inf", "wants a finite number"),
        ("generation.height", "0", "wants 1 or more"),
        ("generation.width", "true", "wants a whole number"),
        ("generation.height", "'96'", "wants a whole number"),
        ("generation.num_frames", "-17", "wants 1 or more"),
        ("generation.fps", "0", "wants 1 or more"),
        ("generation.seed", "-1", "wants 0 or more"),
        ("generation.seed", "9223372036854775808", "wants less than 9223372036854775808"),
        ("generation.flow_shift", "0", "wants more than 0"),
        ("generation.max_sequence_length", "0", "wants 1 or more"),
        ("generation.prompt", "[a, 1]", "wants a text, or a list of at least one text"),
        ("generation.prompt", "[]", "wants a text, or a list of at least one text"),
        ("generation.negative_prompt", "1", "wants a text"),
        ("generation.scheduler", "ddim", "wants 'unipc' or 'euler'"),
        ("generation.cfg", "both", "wants 'batched' or 'sequential'"),
        ("attention.cross_kv", "dense", "wants 'padded', 'packed' or 'packed_pad_exact'"),
        ("attention.self", "''", "wants a text that is not empty"),
        ("dtype", "fp8", "wants 'float32', 'bfloat16' or 'float16'"),
        ("device", "tpu", "wants 'auto', 'cpu', 'cuda' or 'cuda:N'"),
        ("device", "cuda:-1", "wants 'auto', 'cpu', 'cuda' or 'cuda:N'"),
        ("output.crf", "52", "wants 51 or less"),
        ("output.report", "1", "wants true or false"),
        ("output.report_frames", "0", "wants 1 or more"),
        ("output.path", "''", "wants a text that is not empty"),
        ("model.path", "3", "wants a text"),
        ("output", "3", "wants a section"),
    ],
)
def test_a_bad_value_is_refused_from_file_and_override_alike(load, key, value, wanted):
    section, _, leaf = key.rpartition(".")
    text = f"{section}:\n  {leaf}: {value}\n" if section else f"{leaf}: {value}\n"
    text += "" if section == "model" else MINIMAL
    from_file, from_override = error_of(load, text), error_of(load, MINIMAL, f"{key}={value}")
    assert f"run.yaml:{2 if section else 1}: {key} = " in from_file
    assert f"--set {key}={value}: {key} = " in from_override
    assert wanted in from_file
    assert wanted in from_override


def test_all_problems_are_told_at_once(load):
    error = error_of(load, MINIMAL + "generation:\n  height: 0\n  cfg: both\n  seeds: 1\n")
    assert len(error.splitlines()) == 3


def test_a_missing_model_path_is_named(load):
    assert "run.yaml: model: is missing and has no default" in error_of(load, "dtype: float32\n")
    assert "run.yaml:1: model.path: is missing and has no default" in error_of(load, "model: {preset: x}\n")


def test_overrides_replace_the_file_in_their_order(load):
    text = MINIMAL + "generation: {seed: 1}\n"
    config = load(text, "generation.seed=2", "generation.seed=3", "attention.self=sdpa", "generation.flow_shift=")
    assert (config.generation.seed, config.attention.self, config.generation.flow_shift) == (3, "sdpa", None)


def test_an_override_reads_its_value_as_yaml(load):
    config = load(MINIMAL, "generation.prompt=[a ball, a star]", "output.report=false", "model={path: elsewhere}")
    assert config.generation.prompts == ("a ball", "a star")
    assert config.output.report is False
    assert config.model.path == "elsewhere"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("generation.sed=3", "--set generation.sed=3: generation.sed: unknown key; did you mean seed?"),
        ("generations.seed=3", "generations: unknown key; did you mean generation?"),
        ("generation.seed.x=3", "generation.seed.x: generation.seed is a value, not a section"),
        ("generation.seed", "wants key=value, for example generation.seed=7"),
        ("=3", "wants key=value"),
        ("generation..seed=3", "wants key=value"),
        ("generation.seed=[1", "the value is not YAML"),
        ("generation={seed: x}", "--set generation={seed: x}: generation.seed = 'x': wants a whole number"),
    ],
)
def test_a_bad_override_names_itself(load, override, said):
    assert said in error_of(load, MINIMAL + "generation: {seed: 1}\n", override)


def test_an_override_object_is_taken_as_it_is_and_names_its_origin(load):
    config = load(MINIMAL, Override("generation.prompt", "a: b [", "--prompt"))
    assert config.generation.prompts == ("a: b [",)
    assert error_of(load, MINIMAL, Override("generation.seed", -1, "--seed")).startswith("--seed: generation.seed = -1")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty; wants a mapping"),
        ("- 1\n", "holds [1]; wants a mapping"),
        ("a: [1\nb: 2\n", "run.yaml:2: is not YAML"),
        ("model: {path: a}\nmodel: {path: b}\n", "run.yaml:2: model: stands twice (first on line 1)"),
        ("model:\n  path: a\n  path: b\n", "run.yaml:3: model.path: stands twice (first on line 2)"),
        ("model: !!python/object:os.system {}\n", "is not YAML"),
        ("model: {path: 2020-99-99}\n", "is not YAML"),
        ("model: &a {path: *a}\n", "model.path = {"),
        ("1: 2\n", "1: unknown key"),
    ],
)
def test_a_file_that_is_no_mapping_of_settings_is_refused(load, text, said):
    assert said in error_of(load, text)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.yaml: no such configuration file"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="is a folder"):
        load_config(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"model: {path: \xe9}\n")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        load_config(tmp_path / "latin.yaml")


def test_settings_cannot_be_changed_afterwards(load):
    with pytest.raises(ValidationError):
        load(MINIMAL).generation.seed = 3


def test_each_prompt_has_its_own_seed(load):
    generation = load(MINIMAL, "generation.prompt=[a, b, c]", "generation.seed=7").generation
    assert generation.seeds == (7, 8, 9)


def test_dtype_becomes_torchs(load):
    assert load(MINIMAL, "dtype=bfloat16").torch_dtype() is torch.bfloat16


def test_the_cpu_has_one_name():
    assert find_device("cpu:0") == torch.device("cpu")


def test_auto_takes_cuda_only_where_it_is(load, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert load(MINIMAL).torch_device() == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert load(MINIMAL).torch_device() == torch.device("cuda")
    assert load(MINIMAL, "device=cpu").torch_device() == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"device is 'cuda:1'; .* sees 1 CUDA device"):
        load(MINIMAL, "device=cuda:1").torch_device()


def test_cuda_that_is_absent_is_an_error_not_a_cpu_run(load, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="sees no CUDA device here: use 'cpu' or 'auto'"):
        load(MINIMAL, "device=cuda").torch_device()
