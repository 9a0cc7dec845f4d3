"""The parts of the evaluation: each takes an `evaluate.Evaluation`, notes scores and checks, and returns rows to show.

Thresholds are those that the checkpoint must reach; percentages are of prompts.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from visual_gen.pipelines.cpu_conv import OneDnnConv3d, channels_innermost

from .clips import clip_for, draw
from .combinations import Prompt
from .scorecard import Rows
from .scores import chance_share, read_clip, right_share

SIZES = {
    "33 frames of 96x96": {"num_frames": 33, "height": 96, "width": 96},
    "33 frames of 96x160": {"num_frames": 33, "height": 96, "width": 160},
    "33 frames of 128x128": {"num_frames": 33, "height": 128, "width": 128},
    "17 frames of 96x96": {"num_frames": 17, "height": 96, "width": 96},
    "49 frames of 96x96": {"num_frames": 49, "height": 96, "width": 96},
    "49 frames of 128x128": {"num_frames": 49, "height": 128, "width": 128},
}
PROMPTS_PER_SIZE = 32


def real_clip(prompt: Prompt, num_frames: int = 33, height: int = 96, width: int = 96) -> Tensor:
    """Drawn frames [1, 3, F, H, W] in -1..1 of what the prompt says."""
    rng, what = random.Random(prompt.seed), (prompt.colour, prompt.shape, prompt.motion, prompt.background)
    return draw([clip_for(rng, *what, num_frames, height, width)])


def shown(frames: Tensor) -> Tensor:
    """[1, 3, F, H, W] in -1..1 to [F, H, W, 3] in 0..1."""
    return (frames[0].permute(1, 2, 3, 0) + 1) / 2


@cache
def _vae(folder):
    from diffusers import AutoencoderKLWan

    vae = AutoencoderKLWan.from_pretrained(folder / "vae", torch_dtype=torch.float32).eval()
    channels_innermost(vae)
    return vae


@torch.no_grad()
def through_vae(folder, frames: Tensor) -> Tensor:
    """Frames as the checkpoint's VAE gives them back, in -1..1."""
    vae = _vae(folder)
    with OneDnnConv3d():
        return vae.decode(vae.encode(frames).latent_dist.mode()).sample.clamp(-1, 1)


def shape_overlap(readings, prompts: Sequence[Prompt]) -> float:
    """Mean over clips of the overlap with the template of the shape that was asked for."""
    overlaps = [reading.iou_of[prompt.shape] if reading.iou_of else 0.0
                for reading, prompt in zip(readings, prompts, strict=True)]
    return sum(overlaps) / len(overlaps)


def _rows(prompts: Sequence[Prompt], clips: Sequence[Tensor], count: int = 12) -> Rows:
    return [(prompt.prompt, clip) for prompt, clip in list(zip(prompts, clips, strict=True))[:count]]


def controls(evaluation) -> Rows:
    """Real clips must all be read right, and against another prompt's answer only as often as chance has it."""
    for name in ("seen", "held_out"):
        prompts = evaluation.prompts(name)
        for size, shape in SIZES.items():
            readings = [read_clip(shown(real_clip(prompt, **shape))) for prompt in prompts]
            evaluation.check(f"real clips, {name}, {size}", right_share(readings, prompts)["all"], at_least=100)
            if size == "33 frames of 96x96":
                shuffled = random.Random(0).sample(prompts, len(prompts))
                by_chance, found = chance_share(prompts), right_share(readings, shuffled)
                evaluation.scores[f"shuffled prompts, {name}"] = {"found": found, "chance": by_chance}
                for attribute, chance in by_chance.items():
                    evaluation.check(f"shuffled prompts, {name}, {attribute}, points from chance",
                                     abs(found[attribute] - chance), at_most=15)
    return []


def vae(evaluation) -> Rows:
    """PSNR of real clips through the VAE."""
    prompts = evaluation.prompts("seen")[:16]
    rows = []
    for size, shape in SIZES.items():
        values = []
        for prompt in prompts:
            frames = real_clip(prompt, **shape)
            back = through_vae(evaluation.folder, frames)
            values.append(float(10 * torch.log10(4 / (back - frames).square().mean())))
            if size == "33 frames of 96x96" and len(rows) < 8:
                rows += [(prompt.prompt, shown(frames)), ("through the VAE", shown(back))]
        evaluation.check(f"VAE PSNR in dB, {size}", sum(values) / len(values), at_least=38)
    return rows


def _adherence(evaluation, name: str, needed: dict[str, float]) -> Rows:
    prompts = evaluation.prompts(name)
    readings, clips = evaluation.read(prompts, label=name)
    share = right_share(readings, prompts)
    evaluation.scores[name] = share | {"template_iou": round(shape_overlap(readings, prompts), 3)}
    for attribute, at_least in needed.items():
        if attribute in share:
            evaluation.check(f"{name}: {attribute}", share[attribute], at_least=at_least)
    return _rows(prompts, clips)


def seen(evaluation) -> Rows:
    """64 prompts of combinations that training drew."""
    return _adherence(evaluation, "seen", {"colour": 98, "direction": 98, "background": 98, "shape": 93, "motion": 93})


def held_out(evaluation) -> Rows:
    """64 prompts of combinations that training never drew."""
    return _adherence(evaluation, "held_out",
                      {"colour": 95, "direction": 95, "background": 95, "shape": 85, "motion": 85})


def sizes(evaluation) -> Rows:
    """The same prompts at every size and length: none far behind 33 frames of 96×96."""
    prompts = evaluation.prompts("seen")[:PROMPTS_PER_SIZE]
    shares, rows = {}, []
    for size, shape in SIZES.items():
        readings, clips = evaluation.read(prompts, label=size, **shape)
        shares[size] = right_share(readings, prompts)
        if size != "33 frames of 96x96":
            rows += _rows(prompts[3:], clips[3:], 3)
    evaluation.scores["sizes"] = shares
    base = shares["33 frames of 96x96"]
    for size, share in shares.items():
        for attribute in ("colour", "shape", "motion", "background"):
            evaluation.check(f"{size}: {attribute} behind 33 frames of 96x96", base[attribute] - share[attribute],
                             at_most=8)
    return rows


def spinning(evaluation) -> Rows:
    """Spinning shapes keep their outline: template overlap against that of real clips through the VAE."""
    prompts = evaluation.prompts("spinning")
    readings, clips = evaluation.read(prompts, label="spinning")
    real = [read_clip(shown(through_vae(evaluation.folder, real_clip(prompt)))) for prompt in prompts]
    made, best = shape_overlap(readings, prompts), shape_overlap(real, prompts)
    evaluation.scores["spinning"] = right_share(readings, prompts) | {
        "template_iou": round(made, 3), "template_iou of real clips through the VAE": round(best, 3)}
    evaluation.check("spinning: template IoU over that of real clips through the VAE", made / best, at_least=0.9)
    return _rows(prompts, clips)


def words(evaluation) -> Rows:
    """Synonyms, prompts that leave things open, words nobody knows, and the empty prompt."""
    rows = []
    for name in ("synonyms", "partial", "unknown_words"):
        prompts = evaluation.prompts(name)
        readings, clips = evaluation.read(prompts, label=name)
        evaluation.scores[name] = right_share(readings, prompts)
        for attribute, share in evaluation.scores[name].items():
            if attribute in ("colour", "shape", "background"):
                evaluation.check(f"{name}: {attribute}", share, at_least=85)
        rows += _rows(prompts, clips, 6)
    prompts = [Prompt("", None, None, None, None, 5000 + index) for index in range(evaluation.max_prompts or 48)]
    clips = evaluation.generate(prompts, label="empty prompt")
    readings = [read_clip(clip) for clip in clips]
    plausible = [reading.shape != "none" and reading.template_iou > 0.8 for reading in readings]
    evaluation.check("empty prompt: clips of a clear shape", 100 * sum(plausible) / len(plausible), at_least=75)
    return rows + [("(empty prompt)", clip) for clip in clips[:6]]


def text_lengths(evaluation) -> Rows:
    """Text padded to 512 instead of 64."""
    prompts = evaluation.prompts("seen")[:PROMPTS_PER_SIZE]
    short, _ = evaluation.read(prompts, label="text length 64")
    long, clips = evaluation.read(prompts, label="text length 512", text_length=512)
    shares = {"64": right_share(short, prompts), "512": right_share(long, prompts)}
    evaluation.scores["text_lengths"] = shares
    for attribute in ("colour", "shape", "motion", "background"):
        evaluation.check(f"text length 512: {attribute} behind 64", shares["64"][attribute] - shares["512"][attribute],
                         at_most=8)
    return _rows(prompts, clips, 6)


def guidance(evaluation) -> Rows:
    """Guidance 4 follows the prompt more than guidance 1, over both lists: most prompts are followed without it too."""
    prompts = evaluation.prompts("seen") + evaluation.prompts("held_out")
    shares, rows = {}, []
    for scale in (1.0, 4.0):
        clips = evaluation.generate(prompts, guidance_scale=scale, label=f"guidance {scale:g}")
        readings = [read_clip(clip) for clip in clips]
        shares[scale] = right_share(readings, prompts) | {"template_iou": round(shape_overlap(readings, prompts), 3)}
        rows += _rows(prompts, clips, 4)
    evaluation.scores["guidance"] = {f"{scale:g}": share for scale, share in shares.items()}
    evaluation.check("guidance 4: all right more than at guidance 1", shares[4.0]["all"] - shares[1.0]["all"],
                     at_least=1)
    evaluation.check("guidance 4: template IoU more than at guidance 1",
                     shares[4.0]["template_iou"] - shares[1.0]["template_iou"], at_least=0.005)
    return rows


def negative_prompt(evaluation) -> Rows:
    """A colour left open, then named as what is not wanted: it goes, the rest of the prompt stays."""
    prompts = [Prompt(f"a {shape} moving {motion} on a white background", None, shape, motion, "white", 6000 + index)
               for index, (shape, motion) in enumerate((shape, motion) for motion in ("left", "right", "up", "down")
                                                       for shape in ("circle", "square", "triangle", "star"))]
    prompts = prompts[: evaluation.max_prompts]
    base, base_clips = evaluation.read(prompts, label="no negative prompt")
    unwanted = [f"a {reading.colour} shape" for reading in base]
    changed, clips = evaluation.read(prompts, negative_prompts=unwanted, label="negative prompt")
    kept = sum(a.colour == b.colour for a, b in zip(base, changed, strict=True)) / len(prompts) * 100
    share = right_share(changed, prompts)
    evaluation.scores["negative_prompt"] = {"colour kept": kept, "without": right_share(base, prompts), "with": share}
    evaluation.check("negative prompt: clips that keep the colour it names", kept, at_most=25)
    evaluation.check("negative prompt: shape", share["shape"], at_least=80)
    rows = []
    for prompt, negative, before, after in list(zip(prompts, unwanted, base_clips, clips, strict=True))[:4]:
        rows += [(prompt.prompt, before), (f"negative prompt: {negative}", after)]
    return rows


def seeds(evaluation) -> Rows:
    """Another seed shows the same thing elsewhere; the same seed the same frames."""
    prompts = evaluation.prompts("seen")[:PROMPTS_PER_SIZE]
    others = [replace(prompt, seed=prompt.seed + 500) for prompt in prompts]
    first, clips = evaluation.read(prompts, label="a seed")
    second, other_clips = evaluation.read(others, label="another seed")
    again = evaluation.generate(prompts[:1], again=True)
    moved = [sum((a - b) ** 2 for a, b in zip(one.start, two.start, strict=True)) ** 0.5
             for one, two in zip(first, second, strict=True)]
    shares = [right_share(readings, prompts) for readings in (first, second)]
    evaluation.scores["seeds"] = {"first": shares[0], "second": shares[1]}
    evaluation.check("another seed: mean distance of the start, in frame heights", sum(moved) / len(moved),
                     at_least=0.08)
    evaluation.check("another seed: all right, points from the first", abs(shares[0]["all"] - shares[1]["all"]),
                     at_most=15)
    evaluation.check("same seed: largest difference", float((again[0] - clips[0]).abs().max()), at_most=0.02)
    rows = []
    for prompt, one, two in list(zip(prompts, clips, other_clips, strict=True))[:4]:
        rows += [(prompt.prompt, one), ("another seed", two)]
    return rows


def quick(evaluation) -> Rows:
    """Eight prompts at 17 frames, and the control."""
    prompts = evaluation.prompts("seen")[:8]
    real = [read_clip(shown(real_clip(prompt, num_frames=17))) for prompt in prompts]
    evaluation.check("real clips, quick", right_share(real, prompts)["all"], at_least=100)
    readings, clips = evaluation.read(prompts, label="quick", num_frames=17)
    share = evaluation.scores["quick"] = right_share(readings, prompts)
    for attribute, at_least in {"colour": 87, "background": 87, "shape": 75, "motion": 75}.items():
        evaluation.check(f"quick: {attribute}", share[attribute], at_least=at_least)
    return _rows(prompts, clips)


MEASURES = {
    measure.__name__: measure
    for measure in (controls, vae, seen, held_out, sizes, spinning, words, text_lengths, guidance, negative_prompt,
                    seeds, quick)
}
