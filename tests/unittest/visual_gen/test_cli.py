import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import visual_gen.pipelines
from visual_gen.cli import main
from visual_gen.commands.generate import NOT_YET
from visual_gen.models.wan import WAN_PRESETS
from visual_gen.runtime.record import RunRecord
from visual_gen.version import __version__

CONFIGS = Path(__file__).parents[3] / "configs"
SHAPES = str(CONFIGS / "wan_shapes_t2v.yaml")


class StubPipeline:
    """Stands in for WanPipeline: notes what it was asked, and makes noise of the size asked for."""

    loaded: dict
    called: dict

    @classmethod
    def from_pretrained(cls, path, **settings):
        cls.loaded = {"path": path, **settings}
        return cls()

    def __call__(self, **settings):
        type(self).called = settings
        shape = (len(settings["prompt"]), settings["num_frames"], settings["height"], settings["width"], 3)
        frames = np.random.default_rng(0).random(shape, dtype=np.float32)
        record = RunRecord(prompt_tokens=[3] * shape[0], step_seconds=[0.1], device="cpu")
        return SimpleNamespace(frames=frames, record=record)


@pytest.fixture
def stub(monkeypatch):
    monkeypatch.setattr(visual_gen.pipelines, "WanPipeline", StubPipeline)
    return StubPipeline


@pytest.fixture
def generate(stub, tmp_path):
    """Runs `visual-gen generate` on the stub with a small size and returns the exit code."""

    def generate(*arguments: str, config: str = SHAPES) -> int:
        small = ["--set", "generation.num_frames=5", "--set", "generation.height=32", "--set", "generation.width=48"]
        output = [] if "--output" in arguments else ["--output", str(tmp_path / "out.mp4")]
        prompt = [] if "--prompt" in arguments else ["--prompt", "a red circle"]
        return main(["generate", "--config", config, *small, *output, *prompt, *arguments])

    return generate


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_one_prompt_gives_a_video_and_its_report(generate, tmp_path, capsys):
    assert generate() == 0
    assert names(tmp_path) == ["out.mp4", "out.report.html", "out.report.json"]
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / name) for name in
                                                    ("out.mp4", "out.report.json", "out.report.html")]  # fmt: skip
    report = json.loads((tmp_path / "out.report.json").read_text())
    assert report["clips"][0]["prompt"] == "a red circle"
    assert report["seconds"]["stages"]["write"] > 0


def test_several_prompts_give_numbered_videos_one_report_and_a_seed_each(generate, stub, tmp_path):
    assert generate("--prompt", "a", "--prompt", "", "--seed", "5") == 0
    assert names(tmp_path) == ["out-0.mp4", "out-1.mp4", "out.report.html", "out.report.json"]
    assert stub.called["prompt"] == ["a", ""]
    assert [generator.initial_seed() for generator in stub.called["generator"]] == [5, 6]
    assert {generator.device.type for generator in stub.called["generator"]} == {"cpu"}


@pytest.mark.parametrize(
    ("setting", "name", "value"),
    [
        ("generation.negative_prompt=blur", "negative_prompt", "blur"),
        ("generation.height=64", "height", 64),
        ("generation.width=64", "width", 64),
        ("generation.num_frames=9", "num_frames", 9),
        ("generation.num_inference_steps=7", "num_inference_steps", 7),
        ("generation.guidance_scale=1.5", "guidance_scale", 1.5),
        ("generation.max_sequence_length=48", "max_sequence_length", 48),
        ("generation.cfg=sequential", "cfg", "sequential"),
    ],
)
def test_a_generation_key_reaches_the_call(generate, stub, setting, name, value):
    assert generate() == 0
    assert stub.called[name] != value
    assert generate("--set", setting) == 0
    assert stub.called[name] == value


@pytest.mark.parametrize(
    ("setting", "name", "value"),
    [
        ("model.path=elsewhere", "path", "elsewhere"),
        ("dtype=bfloat16", "dtype", torch.bfloat16),
        ("generation.scheduler=euler", "scheduler", "euler"),
        ("generation.flow_shift=7", "flow_shift", 7.0),
    ],
)
def test_a_model_key_reaches_the_loading(generate, stub, setting, name, value):
    assert generate() == 0
    assert stub.loaded[name] != value
    assert generate("--set", setting) == 0
    assert stub.loaded[name] == value


@pytest.mark.parametrize("key", ["self", "cross_text", "cross_image"])
def test_a_backend_name_reaches_the_loading(generate, stub, key):
    assert generate("--set", f"attention.{key}=sdpa", "--set", "attention.cross_kv=packed_pad_exact") == 0
    assert getattr(stub.loaded["attention"], key) == "sdpa"
    assert stub.loaded["attention"].cross_kv == "packed_pad_exact"


def test_the_device_reaches_the_loading(generate, stub, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for setting, device in (("auto", "cuda"), ("cpu", "cpu"), ("cuda:0", "cuda:0")):
        assert generate("--set", f"device={setting}") == 0
        assert stub.loaded["device"] == torch.device(device)


def test_fps_and_crf_reach_the_video(generate, tmp_path):
    sizes = []
    for crf in (1, 40):
        assert generate("--set", "generation.fps=12", "--set", f"output.crf={crf}") == 0
        sizes.append((tmp_path / "out.mp4").stat().st_size)
    assert sizes[1] < sizes[0]
    import av

    with av.open(str(tmp_path / "out.mp4")) as container:
        assert container.streams.video[0].average_rate == 12


def test_no_report_if_none_is_wanted(generate, tmp_path):
    assert generate("--set", "output.report=false") == 0
    assert names(tmp_path) == ["out.mp4"]


def test_the_output_and_the_prompt_may_come_from_the_file(stub, tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text(
        f"model: {{path: wan-shapes}}\noutput: {{path: {tmp_path}/there/x.mp4, report: false}}\n"
        "generation: {prompt: from the file, num_frames: 5, height: 32, width: 48}\n"
    )
    assert main(["generate", "--config", str(config)]) == 0
    assert stub.called["prompt"] == ["from the file"]
    assert names(tmp_path / "there") == ["x.mp4"]


def test_an_existing_output_is_replaced(generate, tmp_path):
    (tmp_path / "out.mp4").write_bytes(b"old")
    assert generate() == 0
    assert (tmp_path / "out.mp4").read_bytes() != b"old"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set", "generation.num_inference_steps=0"], "generation.num_inference_steps = 0: wants 1 or more"),
        (["--set", "generation.guidance_scale=-1"], "generation.guidance_scale = -1: wants 0 or more"),
        (["--set", "generation.hight=96"], "generation.hight: unknown key; did you mean height?"),
        (["--seed", "-1"], "--seed: generation.seed = -1: wants 0 or more"),
        (["--output", "out.avi"], "output.path = 'out.avi': wants a name that ends in .mp4"),
        (["--output", "/proc/none/out.mp4"], "cannot write /proc/none/out.mp4"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2_before_anything_loads(generate, stub, capsys, arguments, said):
    stub.loaded = None
    assert generate(*arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("visual-gen: error: ")
    assert said in err
    assert len(err.splitlines()) == 1
    assert stub.loaded is None


def test_a_missing_prompt_or_file_is_said(stub, capsys, tmp_path):
    assert main(["generate", "--config", SHAPES]) == 2
    assert "there is no prompt; give --prompt TEXT" in capsys.readouterr().err
    assert main(["generate", "--config", str(tmp_path / "none.yaml"), "--prompt", "a"]) == 2
    assert "none.yaml: no such configuration file" in capsys.readouterr().err


def test_a_traceback_is_shown_with_debug_only(generate, capsys):
    assert generate("--seed", "-1", "--debug") == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_failed_run_is_exit_code_1_and_names_its_error(generate, stub, monkeypatch, capsys):
    def fail(self, **settings):
        raise visual_gen.pipelines.GenerationError("latents are NaN after step 3", step=3)

    monkeypatch.setattr(stub, "__call__", fail)
    assert generate() == 1
    err = capsys.readouterr().err
    assert "visual-gen: error: GenerationError: latents are NaN after step 3" in err
    assert "Traceback" not in err


def test_an_interrupted_run_is_exit_code_130_and_leaves_nothing(generate, stub, monkeypatch, tmp_path):
    def interrupt(self, **settings):
        raise KeyboardInterrupt

    monkeypatch.setattr(stub, "__call__", interrupt)
    assert generate() == 130
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    "name", ["wan2.1_i2v_14b_480p", "wan2.1_i2v_14b_720p", "wan2.2_t2v_a14b", "wan2.2_ti2v_5b"]
)
def test_models_that_cannot_generate_yet_say_what_is_missing(stub, capsys, tmp_path, name):
    stub.loaded = None
    config = str(CONFIGS / f"{name}.yaml")
    assert main(["generate", "--config", config, "--prompt", "a", "--output", str(tmp_path / "a.mp4")]) == 2
    assert "cannot generate yet" in capsys.readouterr().err
    assert stub.loaded is None
    assert main(["plan", "--config", config]) == 0


def test_every_preset_either_generates_or_says_what_is_missing():
    assert set(WAN_PRESETS) - NOT_YET.keys() == {"wan2.1-t2v-1.3b", "wan2.1-t2v-14b"}


def test_a_model_that_is_not_here_is_bad_input(tmp_path, capsys):
    config = str(CONFIGS / "wan2.1_t2v_1.3b.yaml")
    assert main(["generate", "--config", config, "--prompt", "a", "--output", str(tmp_path / "a.mp4")]) == 2
    err = capsys.readouterr().err
    assert "'Wan-AI/Wan2.1-T2V-1.3B-Diffusers' not found" in err
    assert "Traceback" not in err


def test_backends_are_listed_with_reasons_and_capabilities(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["backends"]) == 0
    table = capsys.readouterr().out
    for text in ("sdpa", "flash_attn4", "paged_flash_attn3", "varlen", "paged_kv", "padding_mask", "torch 2."):
        assert text in table
    assert main(["backends", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == ["flash_attn4", "paged_flash_attn3", "sdpa"]
    assert rows["sdpa"]["available"]
    assert rows["sdpa"]["versions"]["torch"] == torch.__version__
    assert rows["sdpa"]["preferred_layout"] == "HND"
    for row in rows.values():
        assert row["available"] == (row["reason"] is None)
        assert set(row["capabilities"]) == {"varlen", "lse", "paged_kv", "causal", "padding_mask"}


def test_plan_prints_tables_or_json(capsys):
    arguments = ["plan", "--config", str(CONFIGS / "wan2.1_t2v_14b.yaml"), "--text-lens", "300", "126"]
    assert main(arguments) == 0
    table = capsys.readouterr().out
    for text in ("14,288,491,584", "75,600", "packed_pad_exact", "weights", "activations", "300, 126"):
        assert text in table
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["parameters"], found["tokens"], found["text_lens"]) == (14_288_491_584, 75_600, [300, 126])


def test_plan_takes_its_model_from_the_preset_key(capsys):
    parameters = []
    for preset in ("wan2.1-t2v-1.3b", "wan2.1-t2v-14b"):
        config = str(CONFIGS / "wan2.1_t2v_14b.yaml")
        assert main(["plan", "--config", config, "--json", "--set", f"model.preset={preset}"]) == 0
        parameters.append(json.loads(capsys.readouterr().out)["parameters"])
    assert parameters == [1_418_996_800, 14_288_491_584]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["generate"], "the following arguments are required: --config"),
        (["generate", "--config", SHAPES, "--seed", "x"], "argument --seed: invalid int value: 'x'"),
        (["gen"], "invalid choice: 'gen'"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_code_2(arguments, said, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    err = capsys.readouterr().err
    assert caught.value.code == 2
    assert said in err
    assert len(err.splitlines()) == 1


def test_help_and_version_load_no_torch():
    code = (
        "import sys\n"
        "from visual_gen.cli import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "finally:\n    print('torch' in sys.modules)\n"
    )
    for arguments, said in (["--version"], f"visual-gen {__version__}"), (["generate", "--help"], "--config FILE"):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert said in done.stdout
        assert done.stdout.splitlines()[-1] == "False"
