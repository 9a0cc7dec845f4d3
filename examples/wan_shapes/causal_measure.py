"""The parts of the causal evaluation: each takes an `evaluate_causal.CausalEvaluation` and returns rows to show.

Thresholds are those that the checkpoint must reach; percentages are of prompts.
"""

import random
from collections.abc import Sequence

from torch import Tensor

from .combinations import Prompt
from .endless import chunk_frames, draw_endless, endless_clip_for
from .measure import shape_overlap, shown
from .scorecard import Rows
from .scores import Reading, read_clip, right_share

QUARTERS, QUARTER_CHUNKS = 4, 3
LONG_CHUNKS, LONG_PROMPTS = 50, 33
SWITCH_AT, SWITCH_CHUNKS = 4, 8
NEEDED = {"colour": 98, "motion": 98, "shape": 90}
SHEET_ROWS = 16


def frames_of(evaluation, first: int, count: int) -> slice:
    """The frames of `count` chunks from chunk `first` on."""
    per_chunk = evaluation.stream.frames_per_chunk
    return slice(chunk_frames(first, per_chunk).start, chunk_frames(first + count - 1, per_chunk).stop)


def real_endless(prompt: Prompt, num_frames: int, size: int = 96) -> Tensor:
    """Drawn frames [F, H, W, 3] in 0..1 of what the prompt says, in a world that wraps."""
    what = (prompt.colour, prompt.shape, prompt.motion, prompt.background)
    return shown(draw_endless([endless_clip_for(random.Random(prompt.seed), *what, num_frames, size, size)]))


def _read(
    evaluation, clips: Sequence[Tensor], prompts: Sequence[Prompt], first: int, count: int, name: str
) -> list[Reading]:
    """What so many chunks of the clips show; notes the scores under `name`."""
    part = frames_of(evaluation, first, count)
    cut = [clip[part] for clip in clips]
    readings = [read_clip(clip, wraps=True) for clip in cut]
    evaluation.note_mistakes(readings, prompts, cut, f"{name}: ")
    overlap = round(shape_overlap(readings, prompts), 3)
    evaluation.scores[name] = right_share(readings, prompts) | {"template_iou": overlap}
    return readings


def _adherence(evaluation, clips, prompts, first: int, count: int, name: str, needed: dict[str, int] = NEEDED) -> None:
    share = right_share(_read(evaluation, clips, prompts, first, count, name), prompts)
    for attribute, at_least in needed.items():
        evaluation.check(f"{name}: {attribute}", share[attribute], at_least=at_least)


def _rows(prompts: Sequence[Prompt], clips: Sequence[Tensor]) -> Rows:
    return [(prompt.prompt, clip) for prompt, clip in list(zip(prompts, clips, strict=True))[:SHEET_ROWS]]


def controls(evaluation) -> Rows:
    """Drawn clips of worlds that wrap must all be read right, in every quarter."""
    prompts = evaluation.prompts("endless")
    clips = [real_endless(prompt, frames_of(evaluation, 0, QUARTERS * QUARTER_CHUNKS).stop) for prompt in prompts]
    for quarter in range(QUARTERS):
        name = f"drawn clips, quarter {quarter + 1}"
        _adherence(evaluation, clips, prompts, quarter * QUARTER_CHUNKS, QUARTER_CHUNKS, name, {"all": 100})
    return []


def quarters(evaluation) -> Rows:
    """Twelve chunks of 64 prompts, each quarter read for itself."""
    prompts = evaluation.prompts("endless")
    clips = evaluation.generate(prompts, QUARTERS * QUARTER_CHUNKS, label="12 chunks")
    for quarter in range(QUARTERS):
        _adherence(evaluation, clips, prompts, quarter * QUARTER_CHUNKS, QUARTER_CHUNKS, f"quarter {quarter + 1}")
    return _rows(prompts, clips)


def long(evaluation) -> Rows:
    """Fifty chunks, of which the last three are read."""
    prompts = _of_every_motion(evaluation.prompts("endless"), LONG_PROMPTS)
    clips = evaluation.generate(prompts, LONG_CHUNKS, label="50 chunks")
    _adherence(evaluation, clips, prompts, LONG_CHUNKS - QUARTER_CHUNKS, QUARTER_CHUNKS, f"chunk {LONG_CHUNKS}")
    return _rows(prompts, clips)


def _of_every_motion(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """`count` of the prompts, in turn one of every motion."""
    by_motion: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_motion.setdefault(prompt.motion, []).append(prompt)
    rank = {id(prompt): row.index(prompt) for row in by_motion.values() for prompt in row}
    return sorted(prompts, key=lambda prompt: rank[id(prompt)])[:count]


def switches(evaluation) -> Rows:
    """Another prompt after four chunks: read from the second chunk under it on."""
    before, after = evaluation.prompts("endless"), evaluation.prompts("switched")
    clips = evaluation.generate(before, SWITCH_CHUNKS, switched=after, switch_at=SWITCH_AT, label="switches")
    readings = _read(evaluation, clips, after, SWITCH_AT + 1, QUARTER_CHUNKS, "after the switch")
    right = [all(getattr(reading, name) == getattr(prompt, name) for name in NEEDED)
             for reading, prompt in zip(readings, after, strict=True)]
    evaluation.check("after the switch: colour, shape and motion", 100 * sum(right) / len(right), at_least=90)
    return [(f"{one.prompt} → {two.prompt}", clip)
            for one, two, clip in list(zip(before, after, clips, strict=True))[:SHEET_ROWS]]


def quick(evaluation) -> Rows:
    """Six prompts for four chunks, read from the second on, and the control."""
    prompts = _of_every_motion(evaluation.prompts("endless"), 6)
    real = [read_clip(real_endless(prompt, 33), wraps=True) for prompt in prompts]
    evaluation.check("drawn clips, quick", right_share(real, prompts)["all"], at_least=100)
    clips = evaluation.generate(prompts, 4, label="quick")
    _adherence(evaluation, clips, prompts, 1, QUARTER_CHUNKS, "quick", {"colour": 83, "motion": 66, "shape": 66})
    return _rows(prompts, clips)


MEASURES = {measure.__name__: measure for measure in (controls, quarters, long, switches, quick)}
