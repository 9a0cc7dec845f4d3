"""`visual-gen generate` on members of the family, from images on disk to a video and its report."""

import json
from pathlib import Path

import pytest

from visual_gen.cli import main

CONFIGS = Path(__file__).parents[5] / "configs"
SMALL = {"height": 32, "width": 64, "num_frames": 5, "num_inference_steps": 3, "max_sequence_length": 24}


@pytest.mark.parametrize(
    "name, config, images",
    [
        ("flf2v", "wan2.1_flf2v_14b_720p", ["first", "last"]),
        ("i2v_a14b", "wan2.2_i2v_a14b", ["first"]),
        ("ti2v_5b", "wan2.2_ti2v_5b", ["first"]),
    ],
)
def test_a_video_starts_with_the_image(member, pictures, tmp_path, name, config, images):
    for image in images:
        getattr(pictures, image).save(tmp_path / f"{image}.png")
    settings = {f"generation.{key}": value for key, value in SMALL.items()}
    settings |= {"model.path": member(name), "model.preset": "null", "dtype": "float32", "device": "cpu"}
    arguments = [text for key, value in settings.items() for text in ("--set", f"{key}={value}")]
    for option, image in zip(("--image", "--last-image"), images, strict=False):
        arguments += [option, str(tmp_path / f"{image}.png")]
    output = ["--prompt", "a red circle", "--output", str(tmp_path / "a.mp4")]
    assert main(["generate", "--config", str(CONFIGS / f"{config}.yaml"), *arguments, *output]) == 0
    assert (tmp_path / "a.mp4").stat().st_size > 1000
    report = json.loads((tmp_path / "a.report.json").read_text())
    assert report["settings"]["generation"]["image"] == str(tmp_path / "first.png")
    assert set(report["run"]["expert_steps"]) == ({0, 1} if name == "i2v_a14b" else set())
    assert report["seconds"]["stages"]["image"] > 0
    assert any("stretched" in warning for warning in report["warnings"])


def test_an_image_that_is_not_there_is_bad_input_before_anything_is_written(member, tmp_path, capsys):
    arguments = ["--set", f"model.path={member('i2v')}", "--set", "model.preset=null", "--set", "dtype=float32"]
    output = ["--prompt", "a", "--output", str(tmp_path / "a.mp4")]
    config = ["--config", str(CONFIGS / "wan2.1_i2v_14b_480p.yaml")]
    for options, said in (["--image", "none.png"], "'none.png': there is no such file"), ([], "image is missing"):
        assert main(["generate", *config, *arguments, *options, *output]) == 2
        assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
