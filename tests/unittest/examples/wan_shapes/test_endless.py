"""Worlds that wrap: what is drawn there, what changes on the way, how it is read and scored."""

import json
import random

import pytest
import torch

from examples.wan_shapes.captions import MOTIONS
from examples.wan_shapes.causal_measure import MEASURES, frames_of, real_endless
from examples.wan_shapes.clips import draw
from examples.wan_shapes.combinations import ENDING_MOTIONS, held_out_combinations, load_prompts
from examples.wan_shapes.endless import (
    EndlessClip,
    EndlessKind,
    captions,
    chunk_frames,
    draw_endless,
    endless_clip_for,
    plain_endless_clip,
    random_endless_clip,
)
from examples.wan_shapes.evaluate_causal import CausalEvaluation
from examples.wan_shapes.scorecard import run_measures
from examples.wan_shapes.scores import read_clip, right_share
from visual_gen.config import CausalConfig

STARTS = [chunk_frames(chunk, 3).start for chunk in range(6)]


def random_clips(count: int, **kind) -> list[EndlessClip]:
    rng = random.Random(0)
    return [random_endless_clip(rng, EndlessKind(**kind), 69, 96, 96, STARTS[1:], held_out_combinations())
            for _ in range(count)]


def test_chunks_of_latents_are_these_frames():
    assert [chunk_frames(chunk, 3) for chunk in (0, 1, 2)] == [slice(0, 9), slice(9, 21), slice(21, 33)]
    assert chunk_frames(0, 1) == slice(0, 1) and chunk_frames(49, 3).stop == 1 + 4 * 149


def test_what_leaves_the_frame_comes_back_on_the_other_side():
    clip = endless_clip_for(random.Random(1), "red", "square", "right", "black", 141, 64, 64)
    (shape,) = clip.first.shapes
    assert shape.x + 140 * shape.x_per_frame > 1.5  # out of the frame, which is 1 wide
    frames = draw_endless([clip])[0]
    area = (frames[0] > 0).float().sum((1, 2))
    assert (area - area.mean()).abs().max() < 0.1 * area.mean()
    period = round(1 / shape.x_per_frame)
    assert (frames[:, 0] - frames[:, period]).abs().mean() < 0.05 < (frames[:, 0] - frames[:, period // 2]).abs().mean()


def test_a_change_begins_at_its_frame_where_the_first_shape_is():
    for clip in random_clips(40, switched=1.0, two_shapes=0.0):
        before, after = clip.first.shapes[0], clip.then.shapes[0]
        assert clip.switch_frame in STARTS[1:]
        assert after.middle(clip.switch_frame) == pytest.approx(before.middle(clip.switch_frame), abs=1e-6)
        assert after.turn + after.radians_per_frame * clip.switch_frame == pytest.approx(0, abs=1e-9)
        assert (before.shape, before.colour, before.motion) != (after.shape, after.colour, after.motion)
    first, then = draw([clip.first])[0], draw([clip.then])[0]
    frames = draw_endless([random_clips(1)[0], clip])[1]
    assert torch.equal(frames[:, : clip.switch_frame], first[:, : clip.switch_frame])
    assert torch.equal(frames[:, clip.switch_frame :], then[:, clip.switch_frame :])


def test_clips_are_as_varied_as_their_kind_says():
    clips = random_clips(300, spinning=0.5, switched=0.3)
    shapes = [shape for clip in clips for part in (clip.first, clip.then) if part for shape in part.shapes]
    assert {shape.motion for shape in shapes} == set(MOTIONS) - set(ENDING_MOTIONS)
    assert not held_out_combinations() & {(shape.colour, shape.shape, shape.motion) for shape in shapes}
    assert 0.4 < sum(shape.motion == "spinning" for shape in shapes) / len(shapes) < 0.65
    assert 60 < sum(clip.then is not None for clip in clips) < 120
    assert all((captions(random.Random(0), clip)[1] == "") is (clip.then is None) for clip in clips)


def test_a_plain_clip_is_one_ordinary_shape_on_black_without_end():
    plain = [plain_endless_clip(random.Random(seed), 69, 96, 96, held_out_combinations()) for seed in range(100)]
    assert {(clip.first.background, clip.first.wraps, clip.then) for clip in plain} == {("black", True, None)}
    shapes = [shape for clip in plain for shape in clip.first.shapes]
    assert len(shapes) == 100 and {(shape.size, shape.speed) for shape in shapes} == {(None, None)}
    assert {shape.motion for shape in shapes} == set(MOTIONS) - set(ENDING_MOTIONS)
    assert not held_out_combinations() & {(shape.colour, shape.shape, shape.motion) for shape in shapes}


def test_clips_that_wrap_and_clips_that_do_not_are_not_drawn_together():
    clip = random_clips(1)[0].first
    with pytest.raises(ValueError, match="one size"):
        draw([clip, random_clips(1)[0].first.__class__(clip.shapes, "black", (0, 0, 0), 69, 96, 96)])


def test_drawn_worlds_are_read_right_in_every_part_and_shuffled_ones_are_not():
    prompts = load_prompts("endless")[::4]
    clips = [real_endless(prompt, 105) for prompt in prompts]
    for part in (slice(0, 33), slice(33, 69), slice(69, 105)):
        readings = [read_clip(clip[part], wraps=True) for clip in clips]
        assert right_share(readings, prompts)["all"] == 100.0
    shuffled = right_share(readings, prompts[1:] + prompts[:1])
    assert shuffled["colour"] < 40 and shuffled["motion"] < 40
    # Without following shapes over the border, some are read wrong.
    assert right_share([read_clip(clip[33:69]) for clip in clips], prompts)["all"] < 100.0


def test_every_switch_changes_colour_shape_and_motion():
    pairs = list(zip(load_prompts("endless"), load_prompts("switched"), strict=True))
    assert len(pairs) == 64 and len({before.seed for before, _ in pairs}) == 64
    for before, after in pairs:
        for name in ("colour", "shape", "motion"):
            assert getattr(before, name) != getattr(after, name)
        assert after.motion not in ENDING_MOTIONS and before.motion not in ENDING_MOTIONS
        assert (after.colour, after.shape, after.motion) not in held_out_combinations()


class Drawing(CausalEvaluation):
    """An evaluation whose videos are drawn as prompted, or, from chunk `wrong_from` on, as something else is."""

    def __init__(self, wrong_from: int | None = None, switch_late: int = 0, max_prompts: int = 4) -> None:
        stream = CausalConfig(frames_per_chunk=3, recent_frames=12)
        super().__init__(transformer=None, text_encoder=None, tokenizer=None, vae=None, stream=stream,
                         guidance_scale=1.0, max_prompts=max_prompts)
        self.wrong_from, self.switch_late, self.asked = wrong_from, switch_late, []

    def generate(self, prompts, num_chunks, *, switched=None, switch_at=0, label=""):
        self.asked.append((len(prompts), num_chunks))
        frames, later = frames_of(self, 0, num_chunks).stop, switched
        start = None if later is None else frames_of(self, switch_at + self.switch_late, 1).start
        if self.wrong_from is not None:
            later, start = prompts[1:] + prompts[:1], frames_of(self, self.wrong_from, 1).start
        clips = [real_endless(prompt, frames, 64) for prompt in prompts]
        if later is None:
            return clips
        return [torch.cat([clip[:start], real_endless(prompt, frames, 64)[start:]])
                for clip, prompt in zip(clips, later, strict=True)]


def scored(evaluation, *names):
    code = run_measures(evaluation, MEASURES, names, {}, None)
    return code, {check["name"]: check["passed"] for check in evaluation.checks}


def test_quarters_are_scored_each_for_itself(tmp_path):
    assert scored(Drawing(), "quarters")[0] == 0
    evaluation = Drawing(wrong_from=6)
    assert run_measures(evaluation, MEASURES, ["quarters"], {"stream": "so"}, tmp_path) == 1
    for quarter, passed in enumerate((True, True, False, False), start=1):
        names = [check for check in evaluation.checks if check["name"].startswith(f"quarter {quarter}: ")]
        assert len(names) == 3 and {check["passed"] for check in names} == {passed}
    report = json.loads((tmp_path / "scores.json").read_text())
    assert report["stream"] == "so" and report["scores"]["quarter 1"]["all"] == 100.0 and report["mistakes"]
    assert (tmp_path / "sheet_quarters.png").exists() and (tmp_path / "sheet_mistakes.png").exists()


@pytest.mark.parametrize(("late", "passed"), [(0, True), (1, True), (3, False)])
def test_a_switch_must_show_from_the_second_chunk_on(late, passed):
    evaluation = Drawing(switch_late=late)
    assert scored(evaluation, "switches")[1] == {"after the switch: colour, shape and motion": passed}


def test_the_long_run_is_read_at_its_end():
    evaluation = Drawing(wrong_from=48, max_prompts=2)
    code, passed = scored(evaluation, "long")
    assert code == 1 and evaluation.asked == [(2, 50)] and not passed["chunk 50: colour"]
    assert scored(Drawing(max_prompts=1), "long")[0] == 0
