"""The command line on the checkpoint that ships, judged by what its mp4 files show."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from visual_gen.cli import main

CONFIG = Path(__file__).parents[3] / "configs" / "wan_shapes_t2v.yaml"
# RGB in 0..1 of the words that the checkpoint was trained on.
COLORS = {
    "red": (0.90, 0.10, 0.10),
    "green": (0.10, 0.70, 0.20),
    "blue": (0.15, 0.30, 0.95),
    "yellow": (0.98, 0.90, 0.10),
    "orange": (1.00, 0.55, 0.05),
    "purple": (0.60, 0.15, 0.80),
    "cyan": (0.10, 0.85, 0.90),
    "pink": (1.00, 0.50, 0.75),
}
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
# Every colour once and every direction twice.
CLIPS = [
    ("red", "circle", "left", "navy"),
    ("green", "square", "right", "black"),
    ("blue", "star", "up", "white"),
    ("yellow", "triangle", "down", "gray"),
    ("orange", "cross", "right", "navy"),
    ("purple", "circle", "down", "white"),
    ("cyan", "square", "left", "black"),
    ("pink", "star", "up", "gray"),
]
SEED = 0


def color_and_direction(frames: np.ndarray) -> tuple[str | None, str | None]:
    """What moves in frames uint8 [F, H, W, 3]: the nearest colour word and the nearest direction; None if nothing."""
    clip = frames.astype(np.float64) / 255
    border = np.concatenate([clip[:, 0], clip[:, -1], clip[:, :, 0], clip[:, :, -1]], axis=1)
    background = np.median(border.reshape(-1, 3), axis=0)
    mask = np.linalg.norm(clip - background, axis=-1) > 0.25
    if mask.sum(axis=(1, 2)).min() < 20:
        return None, None
    color = np.median(clip[mask], axis=0)
    nearest = min(COLORS, key=lambda name: np.linalg.norm(color - COLORS[name]))
    centers = np.array([np.argwhere(frame).mean(axis=0) for frame in mask])
    dy, dx = centers[-4:].mean(axis=0) - centers[:4].mean(axis=0)
    if math.hypot(dx, dy) < 3:
        return nearest, None
    return nearest, max(DIRECTIONS, key=lambda name: DIRECTIONS[name][0] * dx + DIRECTIONS[name][1] * dy)


def decode(path: Path) -> np.ndarray:
    import av

    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def drawn(color: str, direction: str) -> np.ndarray:
    """A square of one colour that crosses half of a dark clip."""
    frames = np.full((17, 96, 96, 3), 12, np.uint8)
    dx, dy = DIRECTIONS[direction]
    for i in range(17):
        x, y = 36 + dx * (i - 8) * 3, 36 + dy * (i - 8) * 3
        frames[i, y : y + 24, x : x + 24] = np.array(COLORS[color]) * 255
    return frames


@pytest.mark.parametrize("color", COLORS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_judge_sees_what_was_drawn(color, direction):
    assert color_and_direction(drawn(color, direction)) == (color, direction)


def test_the_judge_sees_nothing_in_an_empty_or_still_clip():
    assert color_and_direction(np.full((17, 96, 96, 3), 12, np.uint8)) == (None, None)
    assert color_and_direction(drawn("red", "left")[:1].repeat(17, axis=0)) == ("red", None)


def test_eight_prompts_give_eight_clips_of_their_colour_and_direction(tmp_path):
    prompts = [f"a {color} {shape} moving {direction} on a {bg} background" for color, shape, direction, bg in CLIPS]
    arguments = ["generate", "--config", str(CONFIG), "--output", str(tmp_path / "clip.mp4"), "--seed", str(SEED)]
    for prompt in prompts:
        arguments += ["--prompt", prompt.replace("a orange", "an orange")]
    for setting in ("num_frames=17", "num_inference_steps=10", "height=96", "width=96"):
        arguments += ["--set", f"generation.{setting}"]
    assert main(arguments) == 0

    clips = [decode(tmp_path / f"clip-{i}.mp4") for i in range(8)]
    assert {clip.shape for clip in clips} == {(17, 96, 96, 3)}
    assert [color_and_direction(clip) for clip in clips] == [(color, direction) for color, _, direction, _ in CLIPS]

    report = json.loads((tmp_path / "clip.report.json").read_text())
    assert [clip["seed"] for clip in report["clips"]] == list(range(SEED, SEED + 8))
    assert len(report["seconds"]["steps"]) == report["run"]["transformer_forwards"] == 10
    assert {choice["backend"] for choice in report["attention"].values()} == {"sdpa"}
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [f"clip-{i}.mp4" for i in range(8)] + ["clip.report.html", "clip.report.json"]
    )
