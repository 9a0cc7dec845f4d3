"""Reads a clip of one shape back: its colour, shape, motion and background, by thresholds and templates alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F

from .captions import BACKGROUNDS, COLOURS, DIRECTIONS, MOTIONS, SHAPES
from .clips import signed_distance
from .combinations import Prompt

TEMPLATE_SIZE = 48
# A template's shape covers the area of a square of this share of its side.
TEMPLATE_FILL = 0.42
# Turning by this much looks the same again; 0 where no turn shows.
SYMMETRY_DEGREES = {"circle": 0.0, "square": 90.0, "triangle": 120.0, "star": 72.0, "ring": 0.0, "cross": 90.0}
TURNS_PER_SYMMETRY = 24
MIN_PIXELS = 25
ATTRIBUTES = ("colour", "shape", "motion", "background")


@dataclass(frozen=True)
class Reading:
    """What a clip shows. `colour`, `shape` and `motion` are "none" where no shape stands out.

    `template_iou` is the overlap with the best template of the shape read, `iou_of` that with each shape's, both means
    over the frames; `start` is where the shape is in the first frame, in shorter sides.
    """

    colour: str
    shape: str
    motion: str
    background: str
    template_iou: float = 0.0
    iou_of: dict[str, float] | None = None
    start: tuple[float, float] = (0.0, 0.0)
    travel: tuple[float, float] = (0.0, 0.0)
    area_ratio: float = 1.0
    turned_degrees: float = 0.0
    shown: float = 0.0


@cache
def _templates() -> dict[str, torch.Tensor]:
    """Masks [turns, TEMPLATE_SIZE²] of every shape over one period of its symmetry, all of one area."""
    fine = (torch.arange(256) + 0.5) / 256 * 3 - 1.5
    grid = (torch.arange(TEMPLATE_SIZE) + 0.5) / TEMPLATE_SIZE * 2 - 1
    masks = {}
    for shape, symmetry in SYMMETRY_DEGREES.items():
        inside = signed_distance(shape, fine.view(1, -1).expand(256, 256), fine.view(-1, 1).expand(256, 256)) < 0
        scale = math.sqrt(float(inside.float().mean()) * 9) / (2 * TEMPLATE_FILL)
        rows = []
        for turn in range(TURNS_PER_SYMMETRY if symmetry else 1):
            angle = math.radians(symmetry) * turn / TURNS_PER_SYMMETRY
            x, y = grid.view(1, -1) * scale, grid.view(-1, 1) * scale
            u, v = math.cos(angle) * x + math.sin(angle) * y, math.cos(angle) * y - math.sin(angle) * x
            rows.append((signed_distance(shape, u, v) < 0).float().flatten())
        masks[shape] = torch.stack(rows)
    return masks


def _nearest(rgb: torch.Tensor, palette: dict[str, tuple[float, ...]]) -> str:
    distances = (torch.tensor(list(palette.values())) - rgb).norm(dim=1)
    return list(palette)[int(distances.argmin())]


def _border_colour(frames: torch.Tensor, width: int = 3) -> torch.Tensor:
    sides = (frames[:, :width], frames[:, -width:], frames[:, :, :width], frames[:, :, -width:])
    return torch.cat([side.reshape(-1, 3) for side in sides]).median(0).values


def _centred(cover: torch.Tensor, x: torch.Tensor, y: torch.Tensor, area: torch.Tensor) -> torch.Tensor:
    """Masks [frames, TEMPLATE_SIZE²] with the shape moved to the middle and scaled to the templates' area."""
    height, width = cover.shape[1:]
    offsets = (torch.arange(TEMPLATE_SIZE) + 0.5) / TEMPLATE_SIZE * 2 - 1
    reach = torch.sqrt(area).view(-1, 1) / (2 * TEMPLATE_FILL)
    grid_x = ((x.view(-1, 1) + offsets * reach) / width * 2 - 1)[:, None, :].expand(-1, TEMPLATE_SIZE, -1)
    grid_y = ((y.view(-1, 1) + offsets * reach) / height * 2 - 1)[:, :, None].expand(-1, -1, TEMPLATE_SIZE)
    moved = F.grid_sample(cover[:, None], torch.stack([grid_x, grid_y], -1), align_corners=False)
    return (moved[:, 0] > 0.5).float().flatten(1)


def _turned(ious: torch.Tensor, symmetry: float) -> float:
    """Degrees turned from the first to the last frame, from overlaps [frames, turns] over one symmetry period."""
    if not symmetry:
        return 0.0
    angles = ious.argmax(1).float() * symmetry / TURNS_PER_SYMMETRY
    steps = torch.remainder(angles.diff() + symmetry / 2, symmetry) - symmetry / 2
    return float(steps.sum())


def _motion(x: torch.Tensor, y: torch.Tensor, area: torch.Tensor, turned: float) -> str:
    """`x`, `y` in shorter sides, one per frame."""
    dx, dy = float(x[-3:].mean() - x[:3].mean()), float(y[-3:].mean() - y[:3].mean())
    path_y, height = float(y.diff().abs().sum()), float(y.max() - y.min())
    ratio = float(area[-3:].mean() / area[:3].mean())
    if height > 0.12 and path_y > 0.22 and path_y > 1.6 * abs(float(y[-1] - y[0])):
        return "bouncing"
    if math.hypot(dx, dy) > 0.08:
        heading = math.degrees(math.atan2(dy, dx))

        def away(direction: str) -> float:
            right, down = DIRECTIONS[direction]
            return abs((heading - math.degrees(math.atan2(down, right)) + 180) % 360 - 180)

        return min(DIRECTIONS, key=away)
    if ratio > 1.4 or ratio < 1 / 1.4:
        return "growing" if ratio > 1 else "shrinking"
    return "spinning" if abs(turned) > 20 else "still"


def _centred_on_the_shape(frames: torch.Tensor, marked: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Frames of a world that wraps, each rolled so that its marked pixels lie around the middle, and where the rolled
    frames' upper left corners are in that world, [frames, 2] as (y, x) in pixels."""
    corners = []
    for size, along in zip(marked.shape[1:], (2, 1), strict=True):
        angle = (torch.arange(size) + 0.5) / size * 2 * math.pi
        weight = marked.sum(along).float()
        middle = torch.atan2(weight @ angle.sin(), weight @ angle.cos()) / (2 * math.pi) * size
        corners.append((middle - size / 2).round().int())
    corner = torch.stack(corners, 1)
    rolled = [torch.roll(frame, tuple((-at).tolist()), (0, 1)) for frame, at in zip(frames, corner, strict=True)]
    return torch.stack(rolled), corner


def _unwrapped(path: torch.Tensor, size: int) -> torch.Tensor:
    """A path in a world of `size` that wraps, by its shortest steps."""
    steps = torch.remainder(path.diff() + size / 2, size) - size / 2
    return torch.cat([path[:1], path[0] + steps.cumsum(0)])


def read_clip(frames: torch.Tensor, wraps: bool = False) -> Reading:
    """What a clip [frames, height, width, 3] in 0..1 shows; raises ValueError on another shape or on NaN.

    In a world that `wraps`, the shape may lie across the border, and its way is followed over it.
    """
    frames = torch.as_tensor(frames).float().cpu()
    if frames.ndim != 4 or frames.shape[-1] != 3:
        raise ValueError(f"expected frames [frames, height, width, 3], got {tuple(frames.shape)}")
    if not torch.isfinite(frames).all():
        raise ValueError("the clip has values that are not finite")
    num_frames, height, width, _ = frames.shape
    background_rgb = _border_colour(frames)
    background = _nearest(background_rgb, BACKGROUNDS)
    marked = (frames - background_rgb).abs().amax(-1) > 0.2
    corner = torch.zeros(num_frames, 2)
    if wraps:
        frames, corner = _centred_on_the_shape(frames, marked)
    away = frames - background_rgb
    marked = away.abs().amax(-1) > 0.2
    shown = marked.sum((1, 2)) > MIN_PIXELS
    if shown.sum() < max(3, num_frames // 2):
        return Reading("none", "none", "none", background, shown=float(shown.float().mean()))
    inner = -F.max_pool2d(-marked[:, None].float(), 3, 1, 1)[:, 0] > 0
    rgb = frames[inner if inner.sum() > 50 else marked].median(0).values
    # How far each pixel is on the way from the background to the shape's colour, so that soft edges count in part.
    toward = rgb - background_rgb
    cover = ((away @ toward) / toward.square().sum().clamp(min=1e-6)).clamp(0, 1)[shown]
    cover = torch.where(cover > 0.15, cover, 0.0)
    area = cover.sum((1, 2)).clamp(min=1)
    x = (cover.sum(1) @ (torch.arange(width) + 0.5)) / area
    y = (cover.sum(2) @ (torch.arange(height) + 0.5)) / area
    masks = _centred(cover, x, y, area)
    ious = {}
    for shape, templates in _templates().items():
        both = masks @ templates.T
        ious[shape] = both / (masks.sum(1, keepdim=True) + templates.sum(1) - both).clamp(min=1)
    iou_of = {shape: float(overlaps.amax(1).mean()) for shape, overlaps in ious.items()}
    shape = max(iou_of, key=iou_of.get)
    turned = _turned(ious[shape], SYMMETRY_DEGREES[shape])
    if wraps:
        x, y = _unwrapped(x + corner[shown, 1], width), _unwrapped(y + corner[shown, 0], height)
    short = min(height, width)
    return Reading(
        colour=_nearest(rgb, COLOURS),
        shape=shape,
        motion=_motion(x / short, y / short, area, turned),
        background=background,
        template_iou=iou_of[shape],
        iou_of=iou_of,
        start=(float(x[0]) / short, float(y[0]) / short),
        travel=(float(x[-1] - x[0]) / short, float(y[-1] - y[0]) / short),
        area_ratio=float(area[-3:].mean() / area[:3].mean()),
        turned_degrees=turned,
        shown=float(shown.float().mean()),
    )


def _said(prompt: Prompt) -> list[str]:
    return [name for name in ATTRIBUTES if getattr(prompt, name) is not None]


def right_share(readings: Sequence[Reading], prompts: Sequence[Prompt]) -> dict[str, float]:
    """Percent right per attribute; "direction" counts only prompts whose motion has one, "all" needs every attribute.

    What a prompt leaves open is not counted. Raises ValueError when the lists differ in length.
    """
    if len(readings) != len(prompts):
        raise ValueError(f"{len(readings)} readings for {len(prompts)} prompts")
    hits = {name: [] for name in (*ATTRIBUTES, "direction", "all")}
    for reading, prompt in zip(readings, prompts, strict=True):
        right = {name: getattr(reading, name) == getattr(prompt, name) for name in _said(prompt)}
        for name, value in right.items():
            hits[name].append(value)
        if prompt.motion in DIRECTIONS:
            hits["direction"].append(right["motion"])
        hits["all"].append(all(right.values()))
    return {name: round(100 * sum(values) / len(values), 1) for name, values in hits.items() if values}


def chance_share(prompts: Sequence[Prompt]) -> dict[str, float]:
    """Percent right that a reading of another prompt of the list gets by chance."""
    kinds = {"colour": COLOURS, "shape": SHAPES, "motion": MOTIONS, "background": BACKGROUNDS}
    share = {}
    for name, values in kinds.items():
        counts = [sum(getattr(prompt, name) == value for prompt in prompts) for value in values]
        share[name] = round(100 * sum(n * (n - 1) for n in counts) / (len(prompts) * (len(prompts) - 1)), 1)
    return share


def mistakes(readings: Sequence[Reading], prompts: Sequence[Prompt]) -> list[str]:
    """One line for each clip that is not what its prompt says."""
    lines = []
    for reading, prompt in zip(readings, prompts, strict=True):
        wrong = [name for name in _said(prompt) if getattr(reading, name) != getattr(prompt, name)]
        if wrong:
            seen = ", ".join(f"{name} {getattr(reading, name)}" for name in wrong)
            numbers = f"iou {reading.template_iou:.2f}, travel {reading.travel[0]:+.2f} {reading.travel[1]:+.2f}"
            numbers += f", area ×{reading.area_ratio:.2f}, turned {reading.turned_degrees:+.0f}°"
            lines.append(f"{prompt.prompt!r} (seed {prompt.seed}): read {seen} ({numbers})")
    return lines
