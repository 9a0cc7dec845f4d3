"""The report of a run: one JSON file for programs, one self-contained HTML page for people."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import platform
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import torch
from PIL import Image

from visual_gen.config import CrossKVMode, RunConfig
from visual_gen.runtime import plots
from visual_gen.runtime.files import report_paths, written_whole
from visual_gen.runtime.machine import machine
from visual_gen.runtime.record import RunRecord
from visual_gen.runtime.units import format_bytes, format_seconds
from visual_gen.runtime.versions import installed_versions, kernel_versions
from visual_gen.version import __version__

PACKAGES = (
    "torch",
    "diffusers",
    "transformers",
    "accelerate",
    "safetensors",
    "av",
    "flash-attn-4",
    "nvidia-cutlass-dsl",
)
CROSS_KV_NOTES: dict[CrossKVMode, str] = {
    "padded": "text padding attended to, as Wan was trained",
    "packed": "text padding dropped: a different video from the one that Wan was trained to give",
    "packed_pad_exact": "text padding dropped and its effect put back: the padded result to rounding",
}
FORMULATION_NOTES = {
    "padded": "every pad row kept",
    "packed": "no pad row kept",
    "merge": "one pad row for all, its share merged into the result",
    "repeated_key": "one pad row for each text with pads, counted by the kernel as often as there were pads",
}
THUMBNAIL_HEIGHT = 144


def write_report(
    video: str | Path, config: RunConfig, record: RunRecord, frames: Sequence[np.ndarray], files: Sequence[Path | None]
) -> tuple[Path, Path]:
    """Write both files beside `video` and return their paths.

    frames: one clip [F, H, W, 3] in 0..1 for each prompt. files: the video file of each; None where none was written,
    because the clip is one of `record.bad_clips`.
    """
    json_path, html_path = report_paths(video)
    report = build_report(config, record, files)
    write_json(json_path, report)
    strips = [picture_strip(_spread(clip, config.output.report_frames)) for clip in frames]
    steps = report["seconds"]["steps"]
    page = render_page(
        "report.html",
        report,
        strips=[as_data_uri(strip) for strip in strips],
        step_plot=plots.step_times(steps) if steps else None,
        median_step=float(np.median(steps)) if steps else None,
    )
    with written_whole(html_path) as part:
        part.write_text(page, encoding="utf-8")
    return json_path, html_path


def build_report(config: RunConfig, record: RunRecord, files: Sequence[Path | None]) -> dict[str, Any]:
    """The content of the JSON file. Times are in seconds, sizes in bytes."""
    generation = config.generation
    clips = [
        {"prompt": prompt, "seed": seed, "file": Path(file).name if file else None}
        for prompt, seed, file in zip(generation.prompts, generation.seeds, files, strict=True)
    ]
    for clip, tokens in zip(clips, record.prompt_tokens, strict=False):
        clip["prompt_tokens"] = tokens
    for row, fault in record.bad_clips.items():
        clips[row]["fault"] = fault
    return {
        **facts_of_run(config, record.device, record.attention),
        "checkpoint_label": record.checkpoint_label,
        "clips": clips,
        "run": {
            field.name: getattr(record, field.name)
            for field in dataclasses.fields(record)
            # Told apart from the others below, or in `clips` and `settings` already.
            if field.name not in _ELSEWHERE
        },
        "attention": record.attention,
        "cross_kv": {
            "mode": record.cross_kv,
            "note": CROSS_KV_NOTES[record.cross_kv],
            "formulations": {name: FORMULATION_NOTES[name] for name in record.cross_kv_formulations},
        },
        "seconds": {
            "total": sum(record.stage_seconds.values()),
            "stages": {name: seconds for name, seconds in record.stage_seconds.items() if seconds},
            "steps": record.step_seconds,
        },
        "peak_memory": {"bytes": record.peak_memory_bytes, "kind": record.peak_memory_kind},
        "metadata": record.metadata,
        "warnings": record.warnings,
    }


def facts_of_run(
    config: RunConfig,
    device: str,
    attention: Mapping[str, Mapping[str, str]],
    *,
    unread: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """What every report has: when and where the run was, with what settings and packages. attention: the backend of
    each role, whose kernels' packages are listed too. unread: settings that the run does not read, as pydantic's
    exclude."""
    versions = {"visual-gen": __version__, "python": platform.python_version()} | installed_versions(PACKAGES)
    for choice in attention.values():
        versions |= kernel_versions(choice["backend"])
    return {
        "created": datetime.now().astimezone().isoformat(timespec="seconds"),
        "settings": config.model_dump(mode="json", exclude=unread),
        "machine": machine(torch.device(device or "cpu")),
        "versions": versions,
    }


def write_json(path: Path, report: dict[str, Any]) -> None:
    with written_whole(path) as part:
        part.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


_ELSEWHERE = {
    "stage_seconds",
    "step_seconds",
    "peak_memory_bytes",
    "peak_memory_kind",
    "warnings",
    "attention",
    "cross_kv",
    "cross_kv_formulations",
    "metadata",
    "prompt_tokens",
    "settings",
    "bad_clips",
    "checkpoint_label",
}


def render_page(template: str, report: dict[str, Any], **parts: Any) -> str:
    """The page of a template that extends base.html, with plots and pictures inside it."""
    folder = resources.files("visual_gen.runtime").joinpath("templates")
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: folder.joinpath(name).read_text(encoding="utf-8")),
        autoescape=True, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"seconds": format_seconds, "bytes": format_bytes, "flat": _flat}
    stages = report["seconds"]["stages"]
    return environment.get_template(template).render(
        report=report, stage_plot=plots.stage_shares(stages), stage_legend=plots.stage_legend(stages), **parts
    )


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def as_data_uri(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def _spread(clip: np.ndarray, count: int) -> list[np.ndarray]:
    """Up to `count` frames of a clip in 0..1, evenly spread from the first to the last, as uint8."""
    indices = np.unique(np.linspace(0, len(clip) - 1, count).round().astype(int))
    return [(np.asarray(clip[index]).clip(0, 1) * 255).round().astype(np.uint8) for index in indices]


def picture_strip(pictures: Sequence[np.ndarray]) -> bytes:
    """uint8 pictures [H, W, 3], of one size, side by side as PNG."""
    height, width = pictures[0].shape[:2]
    size = (max(1, round(width * THUMBNAIL_HEIGHT / height)), THUMBNAIL_HEIGHT)
    gap = 4
    strip = Image.new("RGB", (len(pictures) * (size[0] + gap) - gap, size[1]), "white")
    for position, picture in enumerate(pictures):
        strip.paste(Image.fromarray(picture).resize(size, Image.Resampling.LANCZOS), (position * (size[0] + gap), 0))
    data = io.BytesIO()
    strip.save(data, "PNG", optimize=True)
    return data.getvalue()
