"""Clips that could go on forever: the world wraps round, and what is shown may change on the way.

A causal model makes videos of any length, so what a shape does must have no end: it moves on and comes back on the
other side, bounces, spins or stays. Growing and shrinking have an end and are left out.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from .captions import (
    BACKGROUNDS,
    COLOURS,
    DEFAULT_BACKGROUND,
    DIRECTIONS,
    MOTIONS,
    SHAPES,
    caption,
    visible_combination,
)
from .clips import Clip, MovingShape, draw, random_background, random_shape
from .combinations import ENDING_MOTIONS, Combination

ENDLESS_MOTIONS = tuple(motion for motion in MOTIONS if motion not in ENDING_MOTIONS)
# Speeds are drawn as for a clip of this many frames, where a whole way fits the frame.
PLACED_FOR_FRAMES = 33
# Latent frame 0 stands for one frame of the video, every other for this many.
FRAMES_PER_LATENT = 4


@dataclass(frozen=True)
class EndlessClip:
    """`first` throughout, or up to frame `switch_frame`, where `then` takes over; both are in the clip's own time."""

    first: Clip
    then: Clip | None = None
    switch_frame: int = 0


@dataclass(frozen=True)
class EndlessKind:
    """How often things come up: a shape that spins, besides those that happen to; two shapes; a change on the way."""

    spinning: float = 0.0
    two_shapes: float = 0.1
    switched: float = 0.0


def chunk_frames(chunk: int, frames_per_chunk: int) -> slice:
    """The frames of the video that chunk number `chunk` of so many latent frames decodes to."""
    first, end = chunk * frames_per_chunk, (chunk + 1) * frames_per_chunk
    return slice(max(FRAMES_PER_LATENT * (first - 1) + 1, 0), FRAMES_PER_LATENT * (end - 1) + 1)


def _motions(rng: random.Random, kind: EndlessKind) -> tuple[str, ...]:
    return ("spinning",) if rng.random() < kind.spinning else ENDLESS_MOTIONS


def _anywhere(rng: random.Random, shape: MovingShape, height: int, width: int) -> MovingShape:
    """A shape on its way may be anywhere, also across the border; of those that stay, most lie inside the frame."""
    if shape.motion not in DIRECTIONS and rng.random() < 0.7:
        return shape
    short = min(height, width)
    return replace(shape, x=rng.uniform(0, width / short), y=rng.uniform(0, height / short))


def random_endless_clip(
    rng: random.Random, kind: EndlessKind, num_frames: int, height: int, width: int, switch_frames: Sequence[int],
    held_out: frozenset[Combination] = frozenset(),
) -> EndlessClip:
    """A clip that, with probability `kind.switched`, changes at one of `switch_frames`."""
    switched = rng.random() < kind.switched
    colours = rng.sample(list(COLOURS), 2 if not switched and rng.random() < kind.two_shapes else 1)
    shapes = tuple(
        _anywhere(rng, random_shape(rng, colour, SHAPES, _motions(rng, kind), PLACED_FOR_FRAMES, height, width,
                                    held_out), height, width)
        for colour in colours
    )
    first = Clip(shapes, *random_background(rng), num_frames, height, width, wraps=True)
    if not switched:
        return EndlessClip(first)
    switch_frame = rng.choice(switch_frames)
    return EndlessClip(first, _changed(rng, kind, first, switch_frame, held_out), switch_frame)


def _changed(
    rng: random.Random, kind: EndlessKind, clip: Clip, switch_frame: int, held_out: frozenset[Combination]
) -> Clip:
    """What `clip`, of one shape, becomes: another shape, or the same one moving otherwise, from where the first is."""
    (before,) = clip.shapes
    same = rng.random() < 0.35
    # A circle that is to spin is no circle any more, so that a shape is kept only with a motion that it can show.
    motions = tuple(motion for motion in ENDLESS_MOTIONS if motion != before.motion) if same else _motions(rng, kind)
    colour, shapes = (before.colour, (before.shape,)) if same else (rng.choice(list(COLOURS)), SHAPES)
    after = random_shape(rng, colour, shapes, motions, PLACED_FOR_FRAMES, clip.height, clip.width, held_out)
    if same:
        after = replace(after, rgb=before.rgb, size=before.size)
    if after.size == before.size:
        after = replace(after, radius=before.radius)
    here, there = before.middle(switch_frame), after.middle(switch_frame)
    after = replace(after, x=after.x + here[0] - there[0], y=after.y + here[1] - there[1],
                    turn=-after.radians_per_frame * switch_frame)
    background = (clip.background, clip.background_rgb) if rng.random() < 0.6 else random_background(rng)
    return replace(clip, shapes=(after,), background=background[0], background_rgb=background[1])


def plain_endless_clip(
    rng: random.Random, num_frames: int, height: int, width: int, held_out: frozenset[Combination] = frozenset()
) -> EndlessClip:
    """For the empty caption: one shape of ordinary size and speed on the default background, as it goes on."""
    while True:
        colour, shape, motion = rng.choice(list(COLOURS)), rng.choice(SHAPES), rng.choice(ENDLESS_MOTIONS)
        if visible_combination(shape, motion) and (colour, shape, motion) not in held_out:
            return endless_clip_for(rng, colour, shape, motion, DEFAULT_BACKGROUND, num_frames, height, width)


def endless_clip_for(
    rng: random.Random, colour: str, shape: str, motion: str, background: str, num_frames: int, height: int, width: int
) -> EndlessClip:
    """A clip that shows exactly this, at ordinary size and speed."""
    while True:
        placed = random_shape(rng, colour, (shape,), (motion,), PLACED_FOR_FRAMES, height, width, frozenset())
        if placed.size is None and placed.speed is None:
            break
    placed = _anywhere(rng, placed, height, width)
    return EndlessClip(Clip((placed,), background, BACKGROUNDS[background], num_frames, height, width, wraps=True))


def captions(rng: random.Random, clip: EndlessClip) -> tuple[str, str]:
    """Of what is shown first and of what is shown then; the second is empty where nothing changes."""
    return caption(rng, clip.first), "" if clip.then is None else caption(rng, clip.then)


def draw_endless(clips: Sequence[EndlessClip], device: torch.device | str = "cpu") -> torch.Tensor:
    """Frames [clips, 3, frames, height, width] in -1..1, as `clips.draw` gives them."""
    frames = draw([clip.first for clip in clips], device)
    changed = [index for index, clip in enumerate(clips) if clip.then is not None]
    if not changed:
        return frames
    later = draw([clips[index].then for index in changed], device)
    rows = torch.tensor(changed).to(device)
    switch = torch.tensor([clips[index].switch_frame for index in changed]).to(device)
    changed_yet = torch.arange(frames.shape[2], device=device) >= switch.view(-1, 1)
    return frames.index_copy(0, rows, torch.where(changed_yet[:, None, :, None, None], later, frames[rows]))
