"""The code of the pages runs as it stands, and does what they say."""

import inspect
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib

import diffusers
import pytest
import torch

from attention_backend import AttentionBackendError
from tests.unittest.docs.conftest import ROOT, blocks
from tests.unittest.visual_gen import authors_names
from visual_gen.checkpoint import WeightFiles
from visual_gen.cli import main
from visual_gen.config import load_config
from visual_gen.pipelines import WanPipeline
from visual_gen.runtime.plan import plan

SELF_FORCING = load_config(ROOT / "configs" / "self_forcing_1.3b.yaml")
# What stands in a test for the published sizes.
SMALL_VIDEO = {"height=480, width=832": "height=32, width=48", "dtype=torch.bfloat16": "dtype=torch.float32"}
SMALL_STREAM = ["model={path: self-forcing}", "dtype=float32", "generation.height=32", "generation.width=48",
                "stream.chunks=2"]  # fmt: skip


def test_the_backend_of_the_page_passes_the_pages_own_tests(run_page, make_case, check):
    page = run_page("docs/add_a_backend.md")
    page["test_equals_the_dense_oracle"](make_case, check)
    page["test_what_it_cannot_do_is_refused_with_every_reason"]()


def test_the_backend_of_the_page_keeps_the_contract_in_every_form(run_page, make_case, check):
    run_page("docs/add_a_backend.md")
    forms = ["padded", "packed", "packed_q"]
    for form, causal, host_lens in itertools.product(forms, [False, True], [True, False]):
        for q_lens, kv_lens in (([3, 3, 3], [0, 9, 1]), ([1, 1], [4, 4])):
            case = make_case(form, q_lens, kv_lens, host_lens=host_lens)
            check(case, causal=causal, scale=0.3, backend=case.backend(name="einsum", scale=0.3))
    for form in ("paged", "extent"):
        case = make_case(form, [3, 3], [4, 5])
        backend = case.backend(name="einsum")
        with pytest.raises(AttentionBackendError, match="einsum cannot read"):
            backend.forward(case.q, case.k, case.v, case.metadata)


@torch.inference_mode()
def test_the_model_of_the_page_gives_what_padded_text_gives_row_by_row(run_page):
    page = run_page("docs/add_a_model.md")
    model, encoded = page["model"], page["encoded"]
    assert encoded.text_lens[0] != encoded.text_lens[1] and max(encoded.text_lens) < encoded.hidden.shape[1]
    text = model.project_text(encoded.hidden, encoded.text_lens)
    assert {kv.formulation for kv in text} == {"merge"}

    latents, timestep = torch.randn(2, 8, 2, 3, 3), torch.tensor([900.0, 900.0])
    both = model(latents, timestep, text)
    for row in range(2):  # alone, the zero rows past the text taken as rows like others
        alone = model.project_text(encoded.hidden[[row]], [encoded.hidden.shape[1]])
        assert {kv.formulation for kv in alone} == {"padded"}
        torch.testing.assert_close(model(latents[[row]], timestep[[row]], alone), both[[row]], atol=1e-5, rtol=0)


def test_a_package_with_the_entry_point_of_the_page_is_listed_and_chosen(tmp_path):
    declared = tomllib.loads(blocks("docs/add_a_backend.md", "toml")[0])["project"]["entry-points"]
    ((group, points),) = declared.items()
    info = tmp_path / "my_package-1.0.dist-info"
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "einsum.py").write_text(blocks("docs/add_a_backend.md")[0])
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my_package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items()))
    attention = blocks("docs/add_a_backend.md", "yaml")[0].strip().removeprefix("attention: ")
    settings = ["num_frames=5", "num_inference_steps=1", "height=32", "width=48", "prompt=a red circle"]
    sets = [f"attention={attention}", "device=cpu", *(f"generation.{setting}" for setting in settings)]
    command = [sys.executable, "-m", "visual_gen.cli", "generate", "--config", ROOT / "configs/wan_shapes_t2v.yaml",
               "--output", tmp_path / "v.mp4", *(x for one in sets for x in ("--set", one))]  # fmt: skip
    run = subprocess.run(command, env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"},
                         capture_output=True, text=True)  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("attention: einsum (named in the configuration)") == 2
    assert json.loads((tmp_path / "v.report.json").read_text())["settings"]["attention"]["self"] == "einsum"


def test_the_table_of_checkpoints_says_what_plan_says():
    rows = re.findall(r"`(wan\S+)` \| (\d+) \|", (ROOT / "docs/tasks.md").read_text())
    assert len(rows) == 8
    for name, gib in rows:
        config = load_config(ROOT / "configs" / f"{name}.yaml")
        assert config.dtype == "bfloat16"
        assert abs(plan(config).memory_bytes["total"] / 2**30 - int(gib)) < 1, name


def test_the_arguments_that_the_page_calls_the_same_have_diffusers_defaults():
    text = (ROOT / "docs/migration.md").read_text()
    listed = re.search(r"with the same defaults: (.*?)\.\n", text, re.DOTALL)[1]
    names = re.findall(r"`(\w+)`", listed)
    ours, *theirs = (
        {name: parameter.default for name, parameter in inspect.signature(cls.__call__).parameters.items()}
        for cls in (WanPipeline, diffusers.WanPipeline, diffusers.WanImageToVideoPipeline)
    )
    assert len(names) == 14
    for name in names:
        found = next(defaults[name] for defaults in theirs if name in defaults)
        assert ours[name] == found or inspect.Parameter.empty in (ours[name], found)  # needed in one of the two


def test_the_migration_page_runs_from_the_distilled_file_to_frames(run_page, make_checkpoint, tmp_path, capsys):
    made = make_checkpoint("t2v")
    state = {f"model.{authors_names.transformer(name)}": x for name, x in
             WeightFiles.open(made.diffusers / "transformer").tensors()}  # fmt: skip
    (tmp_path / "checkpoints").mkdir()
    torch.save({"generator_ema": state}, tmp_path / "checkpoints" / "self_forcing_dmd.pt")
    (tmp_path / "wan_models").mkdir()
    (tmp_path / "wan_models" / "Wan2.1-T2V-1.3B").symlink_to(made.authors)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    (tmp_path / "prompts.txt").write_text("a red circle\na green star\n")

    commands = [shlex.split(line) for line in blocks("docs/migration.md", "")[0].split("\n") if line]
    assert [command[:2] for command in commands] == [["visual-gen", x] for x in ("convert", "plan", "stream")]
    for command in commands:
        small = [] if command[1] == "convert" else [x for one in SMALL_STREAM for x in ("--set", one)]
        assert main([*command[1:], *small]) == 0
    out = capsys.readouterr().out
    assert "streams that fit beside the weights" in out
    assert len(list((tmp_path / "outputs").glob("self_forcing*.mp4"))) == 2

    page = run_page("docs/migration.md", SMALL_VIDEO)
    assert len(page["frames"]) == 1 + 4 * (7 * 3 - 1) and page["frames"][0].shape == (32, 48, 3)
    assert page["engine"].causal == SELF_FORCING.causal


def test_the_steps_of_the_recipe_are_those_that_self_forcing_warps_to():
    # Its scheduler: 1000 levels from 1 down without the last, moved by its shift; a step s is entry 1000 - s.
    levels = torch.linspace(1, 0, 1001, dtype=torch.float64)[:-1]
    timesteps = 1000 * 5.0 * levels / (1 + 4.0 * levels)
    expected = timesteps[1000 - torch.tensor([1000, 750, 500, 250])]
    torch.testing.assert_close(torch.tensor(SELF_FORCING.causal.timesteps, dtype=torch.float64), expected)


def test_the_readmes_code_runs(run_page, capsys):
    run_page("README.md")
    assert "[8, 3, 12, 12]" in capsys.readouterr().out
