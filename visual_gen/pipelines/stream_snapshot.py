"""A stream in host memory or in a file, to go on from later, in this process or another."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from attention_backend.kv_cache import SessionGeometry, SessionSnapshot
from attention_backend.kv_cache.chunk import Record
from visual_gen.pipelines.stream_state import Committed
from visual_gen.pipelines.text import TextRows
from visual_gen.runtime.files import written_whole

if TYPE_CHECKING:
    from visual_gen.pipelines.stream import Stream

FORMAT = "visual_gen stream 2"


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Everything on the CPU. Of the meta, settings are CausalConfig's; what snapshot_meta names is compared with the
    engine that restores."""

    meta: dict[str, Any]
    session: SessionSnapshot
    texts: tuple[TextRows, ...]
    history: tuple[Committed, ...]

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for x in self._tensors().values())

    def save(self, path: str | Path) -> None:
        """Writes a safetensors file, whole or not at all."""
        session = self.session
        description = self.meta | {
            "geometry": asdict(session.geometry),
            "frames": session.frames,
            "serial": session.serial,
            "records": [asdict(record) for record in session.records],
            "text_lens": [rows.lens[0] for rows in self.texts],
            "history": [
                {"chunk_index": c.chunk_index, "frames": c.frames, "clean": [at for at, _ in c.clean]}
                for c in self.history
            ],
        }
        with written_whole(path) as part:
            save_file(self._tensors(), part, metadata={"format": FORMAT, "stream": json.dumps(description)})

    @classmethod
    def load(cls, path: str | Path) -> Snapshot:
        """What save wrote. FileNotFoundError; ValueError on a file of another kind or a damaged one."""
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such snapshot file")
        try:
            with safe_open(path, "pt", device="cpu") as file:
                metadata = file.metadata() or {}
                if metadata.get("format") != FORMAT:
                    raise ValueError(f"{path} is no snapshot of a stream: its format is {metadata.get('format')!r}")
                x = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            meta = json.loads(metadata["stream"])
            geometry = SessionGeometry(**meta.pop("geometry"))
            branches = range(geometry.branches)
            session = SessionSnapshot(
                geometry, meta.pop("frames"), meta.pop("serial"), tuple(Record(**r) for r in meta.pop("records")),
                tuple(x[f"window.{i}"] for i in branches), tuple(x[f"journal.{i}"] for i in branches),
            )  # fmt: skip
            texts = tuple(TextRows(x[f"text.{i}"], [n], [0]) for i, n in enumerate(meta.pop("text_lens")))
            history = tuple(
                Committed(c["chunk_index"], c["frames"], x[f"generator.{i}"], _latents(x, c["clean"]))
                for i, c in enumerate(meta.pop("history"))
            )
        except (SafetensorError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is damaged ({error!r}): take the snapshot again") from error
        return cls(meta, session, texts, history)

    def _tensors(self) -> dict[str, torch.Tensor]:
        tensors = {f"window.{i}": x for i, x in enumerate(self.session.windows)}
        tensors |= {f"journal.{i}": x for i, x in enumerate(self.session.journals)}
        tensors |= {f"text.{i}": rows.hidden for i, rows in enumerate(self.texts)}
        tensors |= {f"generator.{i}": c.generator_state for i, c in enumerate(self.history)}
        tensors |= {f"clean.{at}": x for c in self.history for at, x in c.clean}
        return {name: x.contiguous() for name, x in tensors.items()}


def _latents(tensors: dict[str, torch.Tensor], starts: list[int]) -> tuple[tuple[int, torch.Tensor], ...]:
    return tuple((at, tensors[f"clean.{at}"]) for at in starts)


def take_snapshot(stream: Stream) -> Snapshot:
    """Of a stream between two chunks."""
    meta = snapshot_meta(stream._engine) | {
        "settings": stream.settings.model_dump(),
        "prompt": stream.prompt,
        "guidance_scale": stream.guidance_scale,
    }
    texts = tuple(TextRows(rows.hidden.cpu(), rows.lens, [0]) for rows in map(stream._engine._texts.text, stream._text))
    there: dict[int, torch.Tensor] = {}
    history = tuple(
        Committed(
            c.chunk_index, c.frames, c.generator_state.clone(),
            tuple((at, there.setdefault(at, x.cpu().clone())) for at, x in c.clean),
        )
        for c in stream._history
    )  # fmt: skip
    return Snapshot(meta, stream.session.snapshot(), texts, history)


def snapshot_meta(engine) -> dict[str, Any]:
    """What a snapshot and an engine must have in common."""
    config = engine.transformer.config
    return {
        "latent_shape": [config.out_channels, *engine.latent_size],
        "text_dim": config.text_dim,
        "frames_per_chunk": engine.causal.frames_per_chunk,
        "first_chunk_frames": engine.causal.first_chunk_frames,
    }
