"""The reader of clips: right on every drawn clip, at chance on shuffled prompts, loud about what it cannot read."""

import random

import pytest
import torch

from examples.wan_shapes.clips import clip_for, draw
from examples.wan_shapes.combinations import Prompt, load_prompts
from examples.wan_shapes.measure import real_clip, shown
from examples.wan_shapes.scores import chance_share, mistakes, read_clip, right_share


def read_real(prompts, **size):
    return [read_clip(shown(real_clip(prompt, **size))) for prompt in prompts]


@pytest.mark.parametrize("name", ["seen", "held_out"])
def test_real_clips_are_read_right_and_shuffled_prompts_by_chance(name):
    prompts = load_prompts(name)
    readings = read_real(prompts)
    assert set(right_share(readings, prompts).values()) == {100.0}
    assert mistakes(readings, prompts) == []
    shuffled = random.Random(0).sample(prompts, len(prompts))
    for attribute, chance in chance_share(prompts).items():
        assert right_share(readings, shuffled)[attribute] == pytest.approx(chance, abs=15)


@pytest.mark.parametrize("size", [(17, 96, 96), (33, 96, 160), (49, 128, 128)])
def test_real_clips_are_read_right_at_every_size(size):
    prompts = load_prompts("held_out")[::4]
    readings = read_real(prompts, num_frames=size[0], height=size[1], width=size[2])
    assert right_share(readings, prompts)["all"] == 100.0


def test_a_wrong_clip_is_named_with_what_was_read():
    prompt = Prompt("a red circle moving left", "red", "circle", "left", "black", 7)
    frames = draw([clip_for(random.Random(0), "blue", "square", "right", "black", 33, 96, 96)])
    (line,) = mistakes([read_clip(shown(frames))], [prompt])
    assert "colour blue, shape square, motion right" in line and "seed 7" in line and "background" not in line


def test_what_a_prompt_leaves_open_is_not_scored():
    prompt = Prompt("a circle", None, "circle", None, "black", 0)
    frames = draw([clip_for(random.Random(0), "pink", "circle", "down", "black", 33, 96, 96)])
    assert right_share([read_clip(shown(frames))], [prompt]) == {"shape": 100.0, "background": 100.0, "all": 100.0}


def test_an_empty_clip_shows_nothing():
    reading = read_clip(torch.full((9, 32, 32, 3), 0.5))
    assert (reading.shape, reading.colour, reading.background) == ("none", "none", "gray")


def test_blurred_shapes_overlap_their_template_less():
    sharp = shown(real_clip(load_prompts("spinning")[0]))
    smeared = torch.stack([sharp[max(0, i - 12) : i + 1].mean(0) for i in range(len(sharp))])
    assert read_clip(smeared).template_iou < 0.97 * read_clip(sharp).template_iou


def test_bad_frames_are_refused():
    with pytest.raises(ValueError, match="expected frames"):
        read_clip(torch.zeros(3, 9, 32, 32))
    with pytest.raises(ValueError, match="not finite"):
        read_clip(torch.full((9, 32, 32, 3), float("nan")))
    with pytest.raises(ValueError, match="1 readings for 64 prompts"):
        right_share([read_clip(torch.zeros(9, 32, 32, 3))], load_prompts("seen"))
