"""The report of a run of streams: what each video shows, and how chunks, batches and the cache's blocks went by."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from attention_backend.kv_cache.checks import READS
from visual_gen.config import OF_WHOLE_VIDEOS, RunConfig
from visual_gen.runtime import plots
from visual_gen.runtime.files import report_paths, written_whole
from visual_gen.runtime.report import (
    CROSS_KV_NOTES,
    as_data_uri,
    facts_of_run,
    picture_strip,
    render_page,
    write_json,
)

if TYPE_CHECKING:
    from visual_gen.pipelines.stream_record import EngineRecord

# A plot shows no more, and a page of more would not open.
MOST_PLOTTED = 2000
_UNREAD = {"generation": set(OF_WHOLE_VIDEOS), "attention": {"cross_image"}, "offload": True, "lora": True}
_TIMELINE = ("at_s", "seconds", "rows", "pad_rows", "denoising", "committing", "used_blocks", "read")


@dataclass
class VideoRecord:
    """One video of a run. chunk_seconds: when each chunk's frames were there, since the first forward. pictures: some
    frames, uint8 [H, W, 3]. fault: why it ended early. file: None where there are no frames."""

    prompt: str
    seed: int
    file: Path | None = None
    switches: dict[int, str] = field(default_factory=dict)
    frames: int = 0
    chunk_seconds: list[float] = field(default_factory=list)
    pictures: list[np.ndarray] = field(default_factory=list)
    fault: str | None = None


@dataclass
class StreamRunRecord:
    """stage_seconds: by the host's clock; on a GPU, "decode" waits for the forwards before it; "compile" is what
    torch.compile took, which "denoise" leaves out. started_s: the first forward, in the engine's seconds."""

    videos: list[VideoRecord]
    engine: EngineRecord
    stage_seconds: dict[str, float]
    started_s: float = 0.0
    warnings: list[str] = field(default_factory=list)
    peak_memory: tuple[int, str] = (0, "rss")
    checkpoint: str = ""
    checkpoint_label: str = ""
    device: str = ""
    interrupted: bool = False


def write_stream_report(path: str | Path, config: RunConfig, record: StreamRunRecord) -> tuple[Path, Path]:
    """Write the JSON file and the page beside the video `path` and return their paths."""
    json_path, html_path = report_paths(path)
    report = build_stream_report(config, record)
    write_json(json_path, report)
    timeline = {key: _thinned(values) for key, values in report["timeline"].items()}
    lanes = [(str(i), video.chunk_seconds, list(video.switches)) for i, video in enumerate(record.videos)]
    page = render_page(
        "stream_report.html",
        report,
        strips=[as_data_uri(picture_strip(v.pictures)) if v.pictures else None for v in record.videos],
        timeline=plots.stream_timeline(lanes, timeline, record.engine.num_blocks) if timeline["at_s"] else None,
    )
    with written_whole(html_path) as part:
        part.write_text(page, encoding="utf-8")
    return json_path, html_path


def build_stream_report(config: RunConfig, record: StreamRunRecord) -> dict[str, Any]:
    """The content of the JSON file. Times are in seconds, sizes in bytes."""
    engine, made = record.engine, sum(record.stage_seconds[name] for name in ("denoise", "decode", "write"))
    frames = sum(video.frames for video in record.videos)
    totals = {
        field.name: getattr(engine, field.name)
        for field in dataclasses.fields(engine)
        if field.name not in ("timeline", "attention", "read_counts", "batch_sizes")
    }
    return {
        **facts_of_run(config, record.device, engine.attention, unread=_UNREAD),
        "checkpoint_label": record.checkpoint_label,
        "interrupted": record.interrupted,
        "videos": [_video(video) for video in record.videos],
        "frames_per_second": frames / made if made else 0.0,
        "run": {
            "checkpoint": record.checkpoint, "device": record.device, "frames": frames, **totals,
            "frames_per_second": round(frames / made, 2) if made else 0.0,
            "forwards_of_rows": [f"{count} of {rows}" for rows, count in sorted(engine.batch_sizes.items())],
            "reads": [f"{read.replace('_', ' ')} {_forwards(engine, read)}" for read in READS],
        },
        "attention": {role: choice | {"reads": _reads(engine, role)} for role, choice in engine.attention.items()},
        "cross_kv": {"mode": config.attention.cross_kv, "note": CROSS_KV_NOTES[config.attention.cross_kv]},
        "seconds": {"total": sum(record.stage_seconds.values()), "stages": record.stage_seconds},
        "peak_memory": dict(zip(("bytes", "kind"), record.peak_memory, strict=True)),
        "warnings": record.warnings,
        "batch_sizes": {str(rows): count for rows, count in sorted(engine.batch_sizes.items())},
        "timeline": _timeline(engine, record.started_s),
    }  # fmt: skip


def _reads(engine: EngineRecord, role: str) -> list[dict[str, Any]]:
    """How a role's keys and values were read, by how many forwards, and why so; what was most, first."""
    counts = engine.read_counts.most_common()
    if role != "self":
        counts = [(("extent", "every row's prompt lies in one piece in the text pool"), engine.read_counts.total())]
    return [{"read": read, "forwards": forwards, "why": why} for (read, why), forwards in counts]


def _forwards(engine: EngineRecord, read: str) -> int:
    return sum(forwards for (taken, _), forwards in engine.read_counts.items() if taken == read)


def _timeline(engine: EngineRecord, started_s: float) -> dict[str, list[Any]]:
    """One list for each fact of the forwards."""
    columns = {key: [getattr(forward, key) for forward in engine.timeline] for key in _TIMELINE}
    columns["at_s"] = [round(at - started_s, 5) for at in columns["at_s"]]
    columns["seconds"] = [round(seconds, 5) for seconds in columns["seconds"]]
    return columns


def _video(video: VideoRecord) -> dict[str, Any]:
    return {
        "prompt": video.prompt,
        "seed": video.seed,
        "file": video.file.name if video.file else None,
        "chunks": len(video.chunk_seconds),
        "frames": video.frames,
        "switches": [{"chunk": chunk, "prompt": prompt} for chunk, prompt in video.switches.items()],
        "chunk_seconds": [round(seconds, 4) for seconds in video.chunk_seconds],
        "fault": video.fault,
    }


def _thinned(values: Sequence[Any]) -> list[Any]:
    """Every n-th of them, so that a plot can hold them."""
    return list(values[:: -(-len(values) // MOST_PLOTTED) or 1])
