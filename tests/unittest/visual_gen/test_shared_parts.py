"""Checkpoints that take some of their parts from a packaged one."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from visual_gen import checkpoint
from visual_gen.checkpoint import PACKAGED_CHECKPOINTS, CheckpointError, part_path, resolve_folder
from visual_gen.cli import main
from visual_gen.config import load_config
from visual_gen.models.wan import CausalWanTransformer
from visual_gen.pipelines import WanPipeline
from visual_gen.runtime.model import find_model

CONFIG = Path(__file__).parents[3] / "configs" / "wan_shapes_stream.yaml"
SHARED = {"vae": "wan-shapes", "tokenizer": "wan-shapes", "scheduler": "wan-shapes"}


@pytest.fixture
def folder(tmp_path):
    """wan-shapes' own transformer and text encoder; all else is the packaged checkpoint's."""
    whole, folder = resolve_folder("wan-shapes"), tmp_path / "sharing"
    folder.mkdir()
    for part in ("transformer", "text_encoder"):
        (folder / part).symlink_to(whole / part)
    shutil.copy(whole / "model_index.json", folder)
    (folder / "shares.json").write_text(json.dumps(SHARED))
    return folder


def share(folder, **parts) -> None:
    (folder / "shares.json").write_text(json.dumps(SHARED | parts))


def test_parts_lie_where_the_file_says(folder):
    whole = resolve_folder("wan-shapes")
    assert part_path(folder, "vae") == whole / "vae"
    assert part_path(folder, "transformer") == folder / "transformer"
    assert part_path(whole, "vae") == whole / "vae"


def test_a_pipeline_of_shared_parts_makes_the_same_video(folder):
    call = {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 2, "max_sequence_length": 48,
            "output_type": "pt", "progress": False}  # fmt: skip
    videos = [
        WanPipeline.from_pretrained(name, progress=False)(
            "a red circle", generator=torch.Generator().manual_seed(0), **call
        ).frames
        for name in ("wan-shapes", folder)
    ]
    assert torch.equal(*videos)


def test_plan_reads_shared_parts(folder, tmp_path):
    (tmp_path / "c.yaml").write_text(f"model: {{path: {folder}}}")
    model, whole = find_model(load_config(tmp_path / "c.yaml")), resolve_folder("wan-shapes")
    assert model.vae is not None and model.vae.parameters > 1e6
    assert model.tokenizer_file == whole / "tokenizer" / "tokenizer.json"


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"vae": "wan-circles"}, "takes vae from 'wan-circles', which does not ship with this package; 'wan-shapes'"),
        ({"vae": ["wan-shapes"]}, "takes vae from \\['wan-shapes'\\], which does not ship"),
        ({"transformer": "wan-shapes"}, "shares 'transformer'; only text_encoder, tokenizer, vae, scheduler can be"),
        ({"text_encoder": "wan-shapes"}, "has text_encoder itself, and shares.json takes it from 'wan-shapes'"),
    ],
)
def test_what_cannot_be_shared_is_refused(folder, parts, says):
    share(folder, **parts)
    for part in ("vae", "transformer"):
        with pytest.raises(CheckpointError, match=says):
            part_path(folder, part)
    with pytest.raises(CheckpointError, match=says):
        WanPipeline.from_pretrained(folder, progress=False)


def test_a_part_that_its_source_lacks_is_refused(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(checkpoint.PACKAGED_CHECKPOINTS, "wan-empty", tmp_path / "sharing")
    shutil.copytree(folder, tmp_path / "other")
    folder = tmp_path / "other"
    share(folder, vae="wan-empty")
    with pytest.raises(CheckpointError, match="takes vae from 'wan-empty', which has none of its own.*sharing/vae"):
        part_path(folder, "vae")
    monkeypatch.setitem(checkpoint.PACKAGED_CHECKPOINTS, "wan-empty", tmp_path / "gone")
    with pytest.raises(CheckpointError, match="gone is missing: install the package again"):
        part_path(folder, "vae")


@pytest.mark.parametrize("there", [(), ("text_encoder",)])
def test_a_packaged_checkpoint_without_weights_is_told_by_one_message(folder, tmp_path, monkeypatch, capsys, there):
    monkeypatch.setitem(checkpoint.PACKAGED_CHECKPOINTS, "wan-shapes-causal", folder)
    for part in {"transformer", "text_encoder"} - {*there}:
        (folder / part).unlink()
    lacking = ", ".join(part for part in ("transformer", "text_encoder") if part not in there)
    says = (
        f"this version of the package ships without the weights of 'wan-shapes-causal' ({folder} has none of {lacking})"
        ": train it, as examples/wan_shapes does, or name another checkpoint (--set model.path=…)"
    )
    for command in ("stream", "plan", "warmup"):
        assert main([command, "--config", str(CONFIG)]) == 2
        assert capsys.readouterr().err == f"visual-gen: error: {says}\n"
    for load in (CausalWanTransformer.from_pretrained, WanPipeline.from_pretrained):
        with pytest.raises(CheckpointError, match=re.escape(says)):
            load("wan-shapes-causal")


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_damaged_file_is_named(folder, text):
    (folder / "shares.json").write_text(text)
    with pytest.raises(CheckpointError, match="shares.json"):
        part_path(folder, "vae")


def test_a_missing_part_that_nobody_shares_is_named(folder):
    (folder / "shares.json").write_text("{}")
    with pytest.raises(CheckpointError, match="vae/config.json is missing"):
        WanPipeline.from_pretrained(folder, progress=False)


def test_no_packaged_checkpoint_takes_a_part_from_one_that_shares_it_too():
    for name, folder in PACKAGED_CHECKPOINTS.items():
        if (folder / "shares.json").exists():
            for part in json.loads((folder / "shares.json").read_text()):
                assert part_path(folder, part).is_dir(), (name, part)
