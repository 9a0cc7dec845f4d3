"""One call of a Wan pipeline, checked before any work: every value that cannot be served is a ValueError."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from PIL import Image

from visual_gen.config import CFG_MODES, check_unicode
from visual_gen.models.wan.geometry import Geometry
from visual_gen.models.wan.task import Task
from visual_gen.pipelines.images import open_images

MOST_TEXT_TOKENS = 4096
OUTPUT_TYPES = ("np", "pil", "pt", "latent")


@dataclass(frozen=True)
class Request:
    """What one call asks for. `negative_prompts` is empty where guidance runs no second branch. `video_shape` is
    (frames, height, width) of a clip. `images` and `last_images` hold one for each prompt, or none. `guidance_scales`
    has one for each transformer."""

    prompts: list[str]
    negative_prompts: list[str]
    latent_shape: tuple[int, int, int, int, int]
    video_shape: tuple[int, int, int]
    num_inference_steps: int
    guidance_scales: tuple[float, ...]
    max_sequence_length: int
    cfg: str
    output_type: str
    images: list[Image.Image]
    last_images: list[Image.Image]

    @property
    def guided(self) -> bool:
        return self.guidance_scales[0] > 1


def check_request(
    geometry: Geometry,
    most_steps: int,
    task: Task,
    num_experts: int,
    *,
    prompt: str | Sequence[str],
    negative_prompt: str | Sequence[str] | None,
    height: int,
    width: int,
    num_frames: int,
    num_inference_steps: int,
    guidance_scale: float,
    max_sequence_length: int,
    cfg: str,
    output_type: str,
    callback_on_step_end: Callable | None,
    image: Any,
    last_image: Any,
    guidance_scale_2: float | None,
) -> Request:
    """The call as a Request; numbers may be numpy's. most_steps: the scheduler's num_train_timesteps. Raises ValueError
    naming the argument, its value and what would do."""
    task.check_images(image=image is not None, last_image=last_image is not None)
    prompts = _texts("prompt", [prompt] if isinstance(prompt, str) else prompt)
    if not prompts:
        raise ValueError("prompt is an empty list; give at least one text ('' is the unconditional one)")
    video_shape = (_plain(num_frames), _plain(height), _plain(width))
    latent_shape = geometry.latent_shape(len(prompts), *video_shape)
    num_inference_steps = _count("num_inference_steps", num_inference_steps, most_steps, "the scheduler's timesteps")
    max_sequence_length = _count("max_sequence_length", max_sequence_length, MOST_TEXT_TOKENS, "Wan's is 512")
    _check_guidance("guidance_scale", guidance_scale)
    if guidance_scale_2 is not None:
        _check_guidance("guidance_scale_2", guidance_scale_2)
        if num_experts == 1:
            raise ValueError(
                f"guidance_scale_2 is {guidance_scale_2}, but this checkpoint has one transformer, for which "
                "guidance_scale is: leave it out"
            )
    scales = (guidance_scale, guidance_scale if guidance_scale_2 is None else guidance_scale_2)
    for name, value, allowed in (("cfg", cfg, CFG_MODES), ("output_type", output_type, OUTPUT_TYPES)):
        if value not in allowed:
            raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, allowed))}")
    if callback_on_step_end is not None and not callable(callback_on_step_end):
        raise ValueError(f"callback_on_step_end is {callback_on_step_end!r}; it must be callable, or None")
    if last_image is not None and video_shape[0] == 1:
        raise ValueError("num_frames is 1, but there are a first and a last image: ask for more frames")
    negative_prompts = _negative_prompts(negative_prompt, len(prompts))
    return Request(
        prompts,
        negative_prompts if guidance_scale > 1 else [],
        latent_shape,
        video_shape,
        num_inference_steps,
        tuple(map(float, scales[:num_experts])),
        max_sequence_length,
        cfg,
        output_type,
        open_images("image", image, len(prompts)),
        open_images("last_image", last_image, len(prompts)),
    )


def _check_guidance(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{name} is {value!r}; it must be a number, 0 or above")
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} is {value}; it must be finite and 0 or above (up to 1: no guidance; Wan: 5)")


def _negative_prompts(negative_prompt: str | Sequence[str] | None, batch: int) -> list[str]:
    if negative_prompt is None or isinstance(negative_prompt, str):
        return _texts("negative_prompt", [negative_prompt or ""]) * batch
    negative_prompts = _texts("negative_prompt", negative_prompt)
    if len(negative_prompts) != batch:
        raise ValueError(
            f"negative_prompt has {len(negative_prompts)} texts for {batch} prompt(s); give one text for all, or one "
            "for each"
        )
    return negative_prompts


def _texts(name: str, value: Any) -> list[str]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name} is {value!r} ({type(value).__name__}); it must be a text or a list of texts")
    for i, text in enumerate(value):
        if not isinstance(text, str):
            raise ValueError(f"{name}[{i}] is {text!r} ({type(text).__name__}); it must be a text")
        check_unicode(name, text)
    return list(value)


def _plain(value: Any) -> Any:
    """`value` as Python's int if it is an integer of any library; else as it is, to be refused."""
    try:
        return value if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return value


def _count(name: str, value: Any, most: int, why: str) -> int:
    value = _plain(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} is {value!r}; it must be an integer of at least 1")
    if value > most:
        raise ValueError(f"{name} is {value}; it must be at most {most} ({why})")
    return value


def check_generators(
    generator: torch.Generator | Sequence[torch.Generator] | None, batch: int, device: torch.device
) -> None:
    """Raise ValueError unless `generator` is None, one Generator, or one for each of `batch` prompts, all of which can
    draw for `device`."""
    if generator is None:
        return
    generators = [generator] if isinstance(generator, torch.Generator) else generator
    if not isinstance(generators, list | tuple) or not all(isinstance(g, torch.Generator) for g in generators):
        raise ValueError(
            f"generator is {generator!r}; it must be a torch.Generator, or a list with one for each prompt"
        )
    if generators is generator and len(generators) != batch:
        raise ValueError(
            f"generator has {len(generators)} generators for {batch} prompt(s); give one for each, or a single one"
        )
    for g in generators:
        if g.device.type not in ("cpu", device.type):
            raise ValueError(f"a generator is on {g.device} and the pipeline on {device}; use one there or on the CPU")
    if len({g.device.type for g in generators}) > 1:
        raise ValueError("the generators are on different devices; put all of them on one")
