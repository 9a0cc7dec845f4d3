"""The evaluation on the packaged checkpoint, in its quick form, and what it does when scores fall short."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from examples.wan_shapes.evaluate import Evaluation, evaluate, main
from examples.wan_shapes.measure import real_clip, shown
from examples.wan_shapes.sheets import contact_sheet


class Drawn:
    """Stands for a pipeline that draws what the prompt list says, or the next prompt's clip if `shifted`."""

    def __init__(self, prompts, shifted: bool = False) -> None:
        answers = prompts[1:] + prompts[:1] if shifted else prompts
        self.answers = {row.prompt: answer for row, answer in zip(prompts, answers, strict=True)}
        self.drawn = []

    def __call__(self, *, prompt, height, width, num_frames, **_):
        self.drawn += prompt
        clips = [shown(real_clip(self.answers[text], num_frames, height, width)).numpy() for text in prompt]
        return type("Output", (), {"frames": np.stack(clips)})


def test_the_packaged_checkpoint_follows_eight_prompts(tmp_path):
    assert main(["--quick", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "scores.json").read_text())
    assert report["scores"]["quick"]["colour"] >= 87 and all(check["passed"] for check in report["checks"])
    assert (tmp_path / "sheet_quick.png").exists()


@pytest.mark.parametrize("shifted", [False, True])
def test_scores_follow_what_the_pipeline_shows(shifted, tmp_path):
    evaluation = Evaluation(folder=tmp_path, pipeline=None)
    evaluation.pipeline = Drawn(evaluation.prompts("seen"), shifted)
    evaluate(evaluation, ["seen"], tmp_path)
    assert evaluation.passed() is not shifted
    assert (evaluation.scores["seen"]["all"] == 100.0) is not shifted
    assert bool(evaluation.wrong) is shifted
    assert (tmp_path / "sheet_mistakes.png").exists() is shifted


def test_a_contact_sheet_has_a_row_for_each_clip(tmp_path):
    contact_sheet([torch.rand(9, 32, 48, 3)] * 3, ["a", "b", "c"], tmp_path / "sheet.png", columns=4)
    assert Image.open(tmp_path / "sheet.png").size == (4 * 50, 3 * 48)
    with pytest.raises(ValueError, match="as many labels"):
        contact_sheet([torch.rand(9, 32, 48, 3)], [], tmp_path / "none.png")


def test_a_clip_is_made_once_unless_it_is_wanted_again(tmp_path):
    evaluation = Evaluation(folder=tmp_path, pipeline=None)
    prompts = evaluation.prompts("seen")[:3]
    evaluation.pipeline = drawn = Drawn(prompts)
    first = evaluation.generate(prompts[:2], num_frames=17)
    both = evaluation.generate(prompts, num_frames=17)
    assert drawn.drawn == [row.prompt for row in prompts]
    torch.testing.assert_close(both[:2], first, atol=0, rtol=0)
    evaluation.generate(prompts[:1], num_frames=17, again=True)
    evaluation.generate(prompts[:1], num_frames=17, guidance_scale=1.0)
    assert drawn.drawn[3:] == [prompts[0].prompt] * 2
