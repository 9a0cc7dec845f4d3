"""The record of one call as its work begins: its settings, and what its caller should be warned of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from visual_gen.pipelines.images import stretch_warnings
from visual_gen.pipelines.recommended import recommended_warnings
from visual_gen.pipelines.request import Request
from visual_gen.pipelines.schedulers import SCHEDULER_NAMES
from visual_gen.pipelines.text import TokenizedText, text_warnings
from visual_gen.runtime.record import RunRecord


def new_record(
    request: Request,
    transformer: torch.nn.Module,
    scheduler: Any,
    *,
    checkpoint: str,
    label: str,
    device: torch.device,
    load_seconds: float,
    lora_scales: dict[str, dict[str, float]],
) -> RunRecord:
    """What is known of the call by then, its warnings aside."""
    known = (SCHEDULER_NAMES[cls.__name__] for cls in type(scheduler).__mro__ if cls.__name__ in SCHEDULER_NAMES)
    record = RunRecord(
        attention={
            role: {"backend": choice.name, "why": choice.why} for role, choice in transformer.attention_choices.items()
        },
        cross_kv=transformer.attention.cross_kv,
        lora_scales=lora_scales,
        latent_shape=request.latent_shape,
        checkpoint=checkpoint,
        checkpoint_label=label,
        device=str(device),
        dtype=str(transformer.dtype).removeprefix("torch."),
        scheduler=next(known, type(scheduler).__name__),
        flow_shift=scheduler.config.get("flow_shift", scheduler.config.get("shift")),
        settings=_settings(request),
    )
    record.stage_seconds["load"] = load_seconds
    return record


def _settings(request: Request) -> dict[str, Any]:
    """What was asked for, with numbers that JSON has; that of images and a second transformer where there are any."""
    num_frames, height, width = request.video_shape
    settings = {
        "height": height, "width": width, "num_frames": num_frames,
        "num_inference_steps": request.num_inference_steps, "guidance_scale": request.guidance_scales[0],
        "max_sequence_length": request.max_sequence_length, "cfg": request.cfg,
    }  # fmt: skip
    if len(request.guidance_scales) > 1:
        settings["guidance_scale_2"] = request.guidance_scales[1]
    for name, images in (("image", request.images), ("last_image", request.last_images)):
        if images:
            settings[name] = [f"{image.width}x{image.height}" for image in images]
    return settings


def call_warnings(
    request: Request,
    rows: Sequence[TokenizedText],
    recommended: Mapping[str, Any],
    *,
    negative_prompt: str | Sequence[str] | None,
    guidance_scale_2: float | None,
    unused_generator: bool,
) -> list[str]:
    """rows: of the prompts, then of the negative prompts. negative_prompt and guidance_scale_2: as they were given."""
    num_frames, height, width = request.video_shape
    batch, length = len(request.prompts), request.max_sequence_length
    found = recommended_warnings(
        dict(recommended), height=height, width=width, num_frames=num_frames, max_sequence_length=length
    )
    one_for_all = isinstance(negative_prompt, str)
    for what, tokens in (
        *_named("prompt", rows[:batch]),
        *_named("negative prompt", rows[batch : batch + 1] if one_for_all else rows[batch:]),
    ):
        found += text_warnings(what, tokens, length)
    for name, images in (("image", request.images), ("last_image", request.last_images)):
        found += stretch_warnings(name, images, height=height, width=width)
    given = {"negative_prompt": negative_prompt, "guidance_scale_2": guidance_scale_2}
    for name in (name for name, value in given.items() if value and not request.guided):
        found.append(
            f"{name} has no effect: guidance_scale {request.guidance_scales[0]} runs no second branch (above 1 does)"
        )
    if unused_generator:
        found.append("generator has no effect: the initial latents were given")
    return found


def _named(what: str, rows: Sequence[TokenizedText]) -> list[tuple[str, TokenizedText]]:
    return [(what if len(rows) == 1 else f"{what} {i}", tokens) for i, tokens in enumerate(rows)]
