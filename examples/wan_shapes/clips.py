"""Clips of moving shapes: what is in one, drawn at random or for a prompt, and its frames.

Lengths are in units of the frame's shorter side, x to the right and y down; angles are in radians, clockwise.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .captions import BACKGROUNDS, COLOURS, DEFAULT_BACKGROUND, DIRECTIONS, MOTIONS, SHAPES, visible_combination

# Speeds are stated for this many frame steps, and hold per frame whatever the clip's length.
REFERENCE_STEPS = 32
MIN_RADIUS, MAX_RADIUS = 0.075, 0.30
RADII = {None: (0.12, 0.20), "small": (0.09, 0.12), "large": (0.19, 0.24)}
TRAVEL = {None: (0.30, 0.60), "slow": (0.18, 0.26), "quick": (0.60, 0.80)}
BOUNCES = {None: (1.6, 2.2), "slow": (1.2, 1.5), "quick": (2.4, 2.8)}
GROWTH = {None: (1.9, 2.5), "slow": (1.5, 1.7), "quick": (2.7, 3.2)}
TURN = {None: (1.5, 2.4), "slow": (0.9, 1.2), "quick": (2.8, 3.8)}
COLOUR_JITTER = 0.015


@dataclass(frozen=True)
class MovingShape:
    """A shape on its way through a clip. `x`, `y`, `radius` and `turn` hold at frame 0."""

    shape: str
    colour: str
    motion: str
    size: str | None
    speed: str | None
    rgb: tuple[float, float, float]
    x: float
    y: float
    radius: float
    x_per_frame: float = 0.0
    y_per_frame: float = 0.0
    growth_per_frame: float = 1.0
    radians_per_frame: float = 0.0
    turn: float = 0.0
    bounce_height: float = 0.0
    bounces_per_frame: float = 0.0
    bounce_phase: float = 0.0

    def middle(self, frame: float) -> tuple[float, float]:
        bounce = abs(math.sin(math.pi * (self.bounces_per_frame * frame + self.bounce_phase)))
        return self.x + self.x_per_frame * frame, self.y + self.y_per_frame * frame - self.bounce_height * bounce


@dataclass(frozen=True)
class Clip:
    """The content of a clip made for `num_frames` frames of `height` × `width` pixels.

    In a world that wraps, what leaves the frame on one side comes back on the other.
    """

    shapes: tuple[MovingShape, ...]
    background: str
    background_rgb: tuple[float, float, float]
    num_frames: int
    height: int
    width: int
    wraps: bool = False


def _jittered(rng: random.Random, rgb: Sequence[float]) -> tuple[float, ...]:
    return tuple(min(1.0, max(0.0, value + rng.uniform(-COLOUR_JITTER, COLOUR_JITTER))) for value in rgb)


def place_shape(
    rng: random.Random, colour: str, shape: str, motion: str, size: str | None, speed: str | None,
    num_frames: int, height: int, width: int,
) -> MovingShape:
    """Where the shape starts and how it moves, drawn so that it stays inside the frame for the whole clip."""
    if not visible_combination(shape, motion):
        raise ValueError(f"a {motion} {shape} looks still; pick a shape with corners")
    short = min(height, width)
    span_x, span_y = width / short, height / short
    steps = max(num_frames - 1, 1)
    radius = rng.uniform(*RADII[size])
    moving = {}
    if motion in ("growing", "shrinking"):
        # The largest and the smallest radius that a clip may reach bound how much it can grow.
        factor = rng.uniform(*GROWTH[speed]) ** (steps / REFERENCE_STEPS)
        factor = min(factor, MAX_RADIUS / MIN_RADIUS)
        smallest = min(max(radius / factor**0.5, MIN_RADIUS), MAX_RADIUS / factor)
        radius = smallest if motion == "growing" else smallest * factor
        moving["growth_per_frame"] = factor ** ((1 if motion == "growing" else -1) / steps)
    # A square's corner is 1.13 radii away from its middle.
    margin = 1.14 * max(radius, radius * moving.get("growth_per_frame", 1.0) ** steps)
    x, y = rng.uniform(margin, span_x - margin), rng.uniform(margin, span_y - margin)
    if motion in DIRECTIONS:
        right, down = DIRECTIONS[motion]
        travel = rng.uniform(*TRAVEL[speed]) * steps / REFERENCE_STEPS
        for step, span in ((right, span_x), (down, span_y)):
            if step:
                travel = min(travel, (span - 2 * margin) / abs(step))
        dx, dy = right * travel, down * travel
        x = rng.uniform(margin - min(dx, 0), span_x - margin - max(dx, 0))
        y = rng.uniform(margin - min(dy, 0), span_y - margin - max(dy, 0))
        moving |= {"x_per_frame": dx / steps, "y_per_frame": dy / steps}
    elif motion == "bouncing":
        bounce_height = min(rng.uniform(0.30, 0.50), span_y - 2 * margin)
        y = rng.uniform(margin + bounce_height, span_y - margin)
        moving |= {
            "bounce_height": bounce_height,
            "bounces_per_frame": rng.uniform(*BOUNCES[speed]) / REFERENCE_STEPS,
            "bounce_phase": rng.random(),
        }
    elif motion == "spinning":
        clockwise = rng.random() < 0.75
        moving["radians_per_frame"] = (1 if clockwise else -1) * rng.uniform(*TURN[speed]) / REFERENCE_STEPS
    return MovingShape(shape, colour, motion, size, speed, _jittered(rng, COLOURS[colour]), x, y, radius, **moving)


def random_clip(
    rng: random.Random, num_frames: int, height: int, width: int,
    held_out: frozenset[tuple[str, str, str]] = frozenset(), two_shapes: float = 0.1, spinning: float = 0.0,
) -> Clip:
    """A clip of one shape, or of two with probability `two_shapes`, none in a combination of `held_out`.

    A shape spins with probability `spinning`, and else moves in any way, spinning among them.
    """
    shapes = []
    # Two shapes differ in colour, or the words could not tell them apart.
    for colour in rng.sample(list(COLOURS), 2 if rng.random() < two_shapes else 1):
        motions = ("spinning",) if spinning and rng.random() < spinning else MOTIONS
        shapes.append(random_shape(rng, colour, SHAPES, motions, num_frames, height, width, held_out))
    return Clip(tuple(shapes), *random_background(rng), num_frames, height, width)


def random_shape(
    rng: random.Random, colour: str, shapes: Sequence[str], motions: Sequence[str], num_frames: int, height: int,
    width: int, held_out: frozenset[tuple[str, str, str]],
) -> MovingShape:
    """One of these shapes in one of these motions, not in a combination of `held_out`, at any size and speed."""
    while True:
        shape, motion = rng.choice(shapes), rng.choice(motions)
        if visible_combination(shape, motion) and (colour, shape, motion) not in held_out:
            break
    size = rng.choice((None, None, None, "small", "large"))
    speed = rng.choice((None, None, None, "slow", "quick"))
    return place_shape(rng, colour, shape, motion, size, speed, num_frames, height, width)


def random_background(rng: random.Random) -> tuple[str, tuple[float, ...]]:
    """Its name and colour; the default one more often than the others."""
    background = DEFAULT_BACKGROUND if rng.random() < 0.2 else rng.choice(list(BACKGROUNDS))
    return background, _jittered(rng, BACKGROUNDS[background])


def plain_clip(
    rng: random.Random, num_frames: int, height: int, width: int,
    held_out: frozenset[tuple[str, str, str]] = frozenset(),
) -> Clip:
    """What the empty caption stands for: one shape of ordinary size and speed on the default background."""
    while True:
        colour, shape, motion = rng.choice(list(COLOURS)), rng.choice(SHAPES), rng.choice(MOTIONS)
        if visible_combination(shape, motion) and (colour, shape, motion) not in held_out:
            return clip_for(rng, colour, shape, motion, DEFAULT_BACKGROUND, num_frames, height, width)


def clip_for(
    rng: random.Random, colour: str, shape: str, motion: str, background: str, num_frames: int, height: int, width: int
) -> Clip:
    """A clip that shows exactly this, at ordinary size and speed."""
    placed = place_shape(rng, colour, shape, motion, None, None, num_frames, height, width)
    return Clip((placed,), background, _jittered(rng, BACKGROUNDS[background]), num_frames, height, width)


def _distances(x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    """Signed distance to every shape of radius about 1, negative inside."""
    across, along = x.abs(), y.abs()
    r = torch.sqrt(x * x + y * y)
    slanted = 0.8660254 * across - 0.5 * y
    # The star folds onto half of one of its five points: an edge from the tip to the notch beside it.
    half = math.pi / 5
    angle = torch.remainder(torch.atan2(x, -y) + half, 2 * half) - half
    tip_x, notch_x, notch_y = 1.1, 0.46 * math.cos(half), 0.46 * math.sin(half)
    edge_x, edge_y = notch_x - tip_x, notch_y
    star = ((r * torch.cos(angle) - tip_x) * edge_y - r * torch.sin(angle.abs()) * edge_x) / math.hypot(edge_x, edge_y)
    bar = torch.maximum(across - 1.0, along - 0.32)
    return {
        "circle": r - 0.9,
        "square": torch.maximum(across, along) - 0.8,
        "triangle": torch.maximum(y, slanted) - 0.55,
        "star": star,
        "ring": (r - 0.74).abs() - 0.24,
        "cross": torch.minimum(bar, torch.maximum(across - 0.32, along - 1.0)),
    }


def signed_distance(shape: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Signed distance from (x, y) to a shape of radius about 1 at the origin, negative inside."""
    return _distances(x, y)[shape]


def draw(clips: Sequence[Clip], device: torch.device | str = "cpu") -> torch.Tensor:
    """Frames [clips, 3, frames, height, width] in -1..1, fp32, edges softened over one pixel.

    Raises ValueError unless all clips have one size and all wrap or none does.
    """
    sizes = {(clip.num_frames, clip.height, clip.width, clip.wraps) for clip in clips}
    if len(sizes) != 1:
        raise ValueError(f"clips drawn together must have one size, got (frames, height, width, wraps) {sorted(sizes)}")
    num_frames, height, width, wraps = sizes.pop()
    short = min(height, width)

    def on_device(rows) -> torch.Tensor:
        return torch.tensor(rows, dtype=torch.float32).to(device, non_blocking=True)

    grid_x = ((torch.arange(width, device=device) + 0.5) / short).view(1, 1, 1, width)
    grid_y = ((torch.arange(height, device=device) + 0.5) / short).view(1, 1, height, 1)
    t = torch.arange(num_frames, device=device, dtype=torch.float32).view(1, num_frames, 1, 1)
    frames = on_device([clip.background_rgb for clip in clips])[:, :, None, None, None]
    frames = frames.expand(-1, -1, num_frames, height, width)
    for layer in range(max(len(clip.shapes) for clip in clips)):
        rows = [index for index, clip in enumerate(clips) if len(clip.shapes) > layer]
        shapes = [clips[index].shapes[layer] for index in rows]

        def column(name: str, shapes=shapes) -> torch.Tensor:
            return on_device([getattr(shape, name) for shape in shapes]).view(-1, 1, 1, 1)

        bounce = torch.sin(math.pi * (column("bounces_per_frame") * t + column("bounce_phase"))).abs()
        x = column("x") + column("x_per_frame") * t
        y = column("y") + column("y_per_frame") * t - column("bounce_height") * bounce
        radius = column("radius") * column("growth_per_frame") ** t
        turn = column("turn") + column("radians_per_frame") * t
        cos, sin = torch.cos(turn), torch.sin(turn)
        right, below = grid_x - x, grid_y - y
        if wraps:
            right, below = (torch.remainder(away + size / short / 2, size / short) - size / short / 2
                            for away, size in ((right, width), (below, height)))
        u, v = (cos * right + sin * below) / radius, (cos * below - sin * right) / radius
        kinds = on_device([SHAPES.index(shape.shape) for shape in shapes]).view(-1, 1, 1, 1)
        distance = torch.zeros((), device=device)
        for index, candidate in enumerate(_distances(u, v).values()):
            distance = torch.where(kinds == index, candidate, distance)
        cover = (0.5 - distance * radius * short).clamp(0, 1)[:, None]
        rgb = on_device([shape.rgb for shape in shapes])[:, :, None, None, None]
        if len(rows) == len(clips):
            frames = torch.lerp(frames, rgb, cover)
        else:
            index = torch.tensor(rows).to(device)
            frames = frames.index_copy(0, index, torch.lerp(frames[index], rgb, cover))
    return frames * 2 - 1
