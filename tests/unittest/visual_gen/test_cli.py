import errno
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import visual_gen.pipelines
from attention_backend import CAPABILITIES, selection
from visual_gen.cli import main
from visual_gen.config import load_config
from visual_gen.models.wan import WAN_PRESETS
from visual_gen.runtime.model import find_model
from visual_gen.runtime.record import RunRecord
from visual_gen.version import __version__

CONFIGS = Path(__file__).parents[3] / "configs"
SHAPES = str(CONFIGS / "wan_shapes_t2v.yaml")


class StubPipeline:
    """Stands in for WanPipeline: notes what it was asked, and makes noise of the size asked for."""

    loaded: dict
    called: dict
    bad_clips: dict[int, str] = {}
    recommended = {"label": "experimental: only shapes"}
    transformer = SimpleNamespace(attention_choices={"self": SimpleNamespace(name="sdpa", why="auto, " + 99 * "long ")})

    @staticmethod
    def check(path, settings, call):
        pass

    @classmethod
    def from_pretrained(cls, path, **settings):
        cls.loaded = {"path": path, **settings}
        return cls()

    def __call__(self, **settings):
        type(self).called = settings
        shape = (len(settings["prompt"]), settings["num_frames"], settings["height"], settings["width"], 3)
        frames = np.random.default_rng(0).random(shape, dtype=np.float32)
        record = RunRecord(prompt_tokens=[3] * shape[0], step_seconds=[0.1], device="cpu", bad_clips=self.bad_clips)
        output = SimpleNamespace(frames=frames, record=record)
        if self.bad_clips:
            error = visual_gen.pipelines.GenerationError(f"clips {self.bad_clips}", step=3)
            error.output = output
            raise error
        return output


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
    elsewhere = "model.path=nowhere/wan"  # of which nothing is known yet; wan-shapes takes no backend for images
    names = [elsewhere, f"attention.{key}=sdpa", "attention.cross_kv=packed_pad_exact"]
    assert generate(*(text for name in names for text in ("--set", name))) == 0
    assert getattr(stub.loaded["attention"], key) == "sdpa"
    assert stub.loaded["attention"].cross_kv == "packed_pad_exact"


def test_the_device_reaches_the_loading(generate, stub, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("visual_gen.runtime.memory.available_bytes", lambda device: None)
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
        (["--set", "generatoin.height=96"], "--set generatoin.height=96: generatoin: unknown key"),
        (["--output", "~nosuchuser/x.mp4"], "~nosuchuser/x.mp4: "),
        (["--output", "a" * 245 + ".mp4"], ".report.json (File name too long)"),
        (["--output", "\udcff.mp4"], "--output: output.path = '\\udcff.mp4': wants whole characters"),
        (["--prompt", "a\udcff"], "--prompt: generation.prompt = ['a\\udcff']: wants whole characters"),
        (["--set", 'generation.negative_prompt="\\ud800"'], "generation.negative_prompt = '\\ud800': wants whole"),
        (["--seed", "-1"], "--seed: generation.seed = -1: wants 0 or more"),
        (["--output", "out.avi"], "output.path = 'out.avi': wants a name that ends in .mp4"),
        (["--output", "/proc/none/out.mp4"], "cannot write /proc/none/out.mp4"),
        (["--set", "generation.fps=0.5"], "generation.fps = 0.5: wants 1 or more"),
        (["--set", "generation.fps=241"], "generation.fps = 241: wants 240 or less"),
        (["--set", "model.preset=wan2.1-t2v-14"], "did you mean 'wan2.1-t2v-14b'?"),
        (["--set", "model.preset=wan2.2-ti2v-5b"], "num_layers 30 against 8 in the folder"),
        (["--image", "a.png"], "image is given, but this checkpoint makes videos from text alone"),
        (["--set", "generation.image=[]"], "generation.image = []: wants the name of a file, or a list of them"),
        (["--set", "offload=all"], "offload = 'all': wants 'none' or 'experts'"),
        (["--set", "offload=experts"], "offload = 'experts': is for a pair of transformers"),
        (["--set", "lora=[{path: a, transformer: transformer_2}]"], "lora.transformer = 'transformer_2': is for"),
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


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("generation.height=90", "height is 90; it must be a multiple of 16"),
        ("generation.num_frames=6", "num_frames is 6"),
        ("attention.self=FA9", "no attention backend 'FA9'"),
        ("attention.cross_text=flash_attn4", "backend 'flash_attn4' cannot serve cross_text"),
        ("attention.cross_image=sdpa", "this model has no image inputs"),
        ("device=cuda:77", "device is 'cuda:77'"),
        ("model.path=nowhere", "checkpoint folder 'nowhere' not found"),
        ("model.path=~nosuchuser/x", "checkpoint folder '~nosuchuser/x' not found"),
        ("generation.max_sequence_length=4097", "max_sequence_length is 4097; it must be at most 4096"),
        ("generation.num_inference_steps=1001", "num_inference_steps is 1001; it must be at most 1000"),
    ],
)
def test_what_the_model_cannot_serve_is_bad_input_before_any_weights(tmp_path, monkeypatch, capsys, setting, said):
    monkeypatch.setattr("visual_gen.checkpoint.WeightFiles.open", lambda *_, **__: pytest.fail("weights were opened"))
    output = ["--output", str(tmp_path / "a.mp4"), "--set", "device=cpu"]
    assert main(["generate", "--config", SHAPES, "--prompt", "a", *output, "--set", setting]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert len(err.splitlines()) == 1


def test_a_text_length_below_the_special_tokens_is_bad_input_before_any_weights(tmp_path, monkeypatch, capsys):
    from visual_gen.pipelines import opening

    def two_end_tokens(*_, load=opening.open_tokenizer):
        tokenizer = load(*_)
        return lambda text, **settings: {key: value + value[-1:] for key, value in tokenizer(text, **settings).items()}

    monkeypatch.setattr(opening, "open_tokenizer", two_end_tokens)
    monkeypatch.setattr("visual_gen.checkpoint.WeightFiles.open", lambda *_, **__: pytest.fail("weights were opened"))
    short = ["--set", "generation.max_sequence_length=1", "--output", str(tmp_path / "a.mp4")]
    assert main(["generate", "--config", SHAPES, "--prompt", "a", *short]) == 2
    assert "special tokens alone take 2" in capsys.readouterr().err


def test_a_refused_run_leaves_no_folder(tmp_path, capsys):
    output = ["--output", str(tmp_path / "new" / "deep" / "v.mp4"), "--set", "generation.height=90"]
    assert main(["generate", "--config", SHAPES, "--prompt", "a", *output]) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_does_not_fit_with_its_weights_is_refused(generate, stub, monkeypatch, capsys):
    stub.loaded = None
    monkeypatch.setattr("visual_gen.runtime.memory.available_bytes", lambda device: 2**20)
    assert generate("--set", "device=cpu") == 2
    err = capsys.readouterr().err
    assert "with the weights of this request needs about" in err and "cpu has 1 MiB left" in err and "plan" in err
    assert stub.loaded is None


def test_a_report_that_cannot_be_written_is_bad_input_before_anything_loads(generate, stub, tmp_path, capsys):
    stub.loaded = None
    (tmp_path / "out.report.html").mkdir()
    assert generate() == 2
    assert "out.report.html: is a folder, not a file" in capsys.readouterr().err
    assert stub.loaded is None
    assert generate("--set", "output.report=false") == 0


def test_the_good_clips_of_a_run_are_written_and_the_bad_ones_named(generate, stub, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(stub, "bad_clips", {1: "frame(s) 2 of 5 are of one colour"})
    assert generate("--prompt", "a", "--prompt", "b", "--prompt", "c") == 1
    assert names(tmp_path) == ["out-0.mp4", "out-2.mp4", "out.report.html", "out.report.json"]
    captured = capsys.readouterr()
    assert "GenerationError: clips {1: 'frame(s) 2 of 5 are of one colour'}" in captured.err
    assert captured.out.splitlines() == [str(tmp_path / name) for name in
                                         ("out-0.mp4", "out-2.mp4", "out.report.json", "out.report.html")]  # fmt: skip
    clips = json.loads((tmp_path / "out.report.json").read_text())["clips"]
    assert [clip["file"] for clip in clips] == ["out-0.mp4", None, "out-2.mp4"]
    assert clips[1]["fault"] == "frame(s) 2 of 5 are of one colour"
    assert "no video written" in (tmp_path / "out.report.html").read_text()


def test_a_run_without_a_good_clip_writes_nothing(generate, stub, tmp_path, monkeypatch):
    monkeypatch.setattr(stub, "bad_clips", {0: "flat"})
    assert generate() == 1
    assert names(tmp_path) == []


def test_a_disk_that_fills_up_is_a_failed_run_and_no_bad_input(generate, tmp_path, monkeypatch, capsys):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("visual_gen.runtime.video.write_video", full)
    assert generate() == 1
    assert "out.mp4 failed: No space left on device" in capsys.readouterr().err


@pytest.mark.parametrize("report", ["true", "false"])
def test_backends_and_the_kind_of_checkpoint_are_said_before_the_run(generate, stub, monkeypatch, capsys, report):
    monkeypatch.setattr(stub, "__call__", lambda self, **_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert generate("--set", f"output.report={report}") == 130
    label, backend, _ = capsys.readouterr().err.splitlines()
    assert label == "visual-gen: wan-shapes: experimental: only shapes"
    assert backend.startswith("visual-gen: self attention: sdpa (auto, long long")
    assert backend.endswith(" …)") and len(backend) < 220


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
    ("setting", "name", "value"),
    [
        ("generation.guidance_scale_2=1.5", "guidance_scale_2", 1.5),
        ("generation.image=a.png", "image", "a.png"),
        ("generation.last_image=a.png", "last_image", "a.png"),
        ("generation.boundary_ratio=0.5", "boundary_ratio", 0.5),
        ("offload=experts", "offload", "experts"),
        ("compile=true", "compile", True),
    ],
)
def test_a_key_of_other_members_of_the_family_reaches_the_pipeline(generate, stub, setting, name, value):
    elsewhere = ["--set", "model.path=nowhere/wan"]  # a Hub id, of which nothing is known before it is fetched
    assert generate(*elsewhere) == 0
    assert (stub.loaded | stub.called)[name] in (None, "none", False)
    assert generate(*elsewhere, "--set", setting) == 0
    assert (stub.loaded | stub.called)[name] == value


@pytest.mark.parametrize(
    ("preset", "images", "said"),
    [
        ("wan2.1-i2v-14b", [], "image is missing"),
        ("wan2.1-flf2v-14b", ["--image", "a.png"], "last_image is missing"),
        ("wan2.1-t2v-14b", ["--image", "a.png"], "image is given, but this checkpoint makes videos from text alone"),
        ("wan2.1-t2v-14b", ["--set", "generation.guidance_scale_2=3"], "guidance_scale_2 = 3.0: is for a pair"),
        ("wan2.2-ti2v-5b", ["--last-image", "a.png"], "last_image is given, but this checkpoint takes none"),
    ],
)
def test_images_that_a_preset_does_not_take_or_misses_are_told_before_anything_is_fetched(
    generate, stub, capsys, preset, images, said
):
    stub.loaded = None
    assert generate("--set", "model.path=nowhere/wan", "--set", f"model.preset={preset}", *images) == 2
    assert said in capsys.readouterr().err
    assert stub.loaded is None


@pytest.mark.parametrize("preset", WAN_PRESETS)
def test_every_preset_generates(generate, stub, preset, monkeypatch):
    monkeypatch.setattr("visual_gen.runtime.memory.available_bytes", lambda device: None)
    task = find_model(load_config(SHAPES, ["model.path=nowhere/wan", f"model.preset={preset}"])).task
    images = [("--image", task.image), ("--last-image", task.last_image)]
    given = [text for option, need in images if need == "required" for text in (option, "a.png")]
    size = ["--set", "generation.width=64"]  # which TI2V divides too
    assert generate("--set", "model.path=nowhere/wan", "--set", f"model.preset={preset}", *size, *given) == 0
    assert (stub.called["image"], stub.called["last_image"]) == tuple(
        "a.png" if need == "required" else None for _, need in images
    )


def test_one_image_is_for_all_prompts_and_several_for_one_each(generate, stub):
    prompts = ["--set", "model.path=nowhere/wan", "--prompt", "a", "--prompt", "b"]
    assert generate(*prompts, "--image", "x.png") == 0
    assert stub.called["image"] == "x.png"
    assert generate(*prompts, "--image", "x.png", "--image", "y.png") == 0
    assert stub.called["image"] == ("x.png", "y.png")


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
        assert set(row["capabilities"]) == CAPABILITIES
        assert row["entry_point_problem"] is None


def test_each_backend_has_a_row_and_no_name_is_shortened_in_80_columns(capsys, monkeypatch, register_narrowed):
    monkeypatch.setenv("COLUMNS", "80")
    for name in ("einsum", "a_backend_with_a_long_name"):
        register_narrowed(name, {"grad", "lse"})
    assert main(["backends"]) == 0
    lines = capsys.readouterr().out.splitlines()
    table = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]
    assert max(len(line) for line in lines if line[:1] in "┏│├└") == 80
    cells = ["".join(row[0] for row in table), "".join(row[2] + " " for row in table)]
    for name in ("flash_attn4", "paged_flash_attn3", "sdpa", "einsum", "a_backend_with_a_long_name"):
        assert name in cells[0]
    assert all(name in cells[1] for name in CAPABILITIES) and "…" not in "".join(lines)
    assert "grad, lse not: causal, extent_kv" in cells[1]


def test_a_broken_entry_point_is_told_though_its_module_registered_the_backend(capsys, monkeypatch, register_narrowed):
    def load():
        register_narrowed("foreign", {"lse"})
        raise AttributeError("module 'foreign_package' has no attribute 'Backend'")

    point = SimpleNamespace(name="foreign", value="foreign_package:Backend", load=load)
    monkeypatch.setattr(selection, "_classes", dict(selection.backend_classes()))
    monkeypatch.setattr(selection, "_broken_entry_points", {})
    monkeypatch.setattr(selection, "entry_points", lambda group: [point])
    monkeypatch.setattr(selection, "_entry_points_read", False)
    assert main(["backends"]) == 0
    said = "foreign: entry point foreign_package:Backend failed: AttributeError: module 'foreign_package' has no"
    assert said in capsys.readouterr().out
    assert main(["backends", "--json"]) == 0
    [row] = [row for row in json.loads(capsys.readouterr().out) if row["name"] == "foreign"]
    assert row["available"] and row["entry_point_problem"].startswith("entry point foreign_package:Backend failed")


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


def test_only_commands_that_take_pictures_offer_them(capsys):
    for command in ("generate", "plan", "warmup", "stream"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert ("image" in capsys.readouterr().out) == (command != "stream")
    with pytest.raises(SystemExit):
        main(["stream", "--config", SHAPES, "--image", "a.png"])
    assert "unrecognized arguments: --image" in capsys.readouterr().err


def test_plan_loads_neither_diffusers_nor_transformers():
    code = (
        "import sys\n"
        "from visual_gen.cli import main\n"
        f"assert main(['plan', '--config', {SHAPES!r}, '--prompt', 'a red circle', '--json']) == 0\n"
        "print(sorted({'diffusers', 'transformers', 'matplotlib'} & sys.modules.keys()), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "[]"


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
