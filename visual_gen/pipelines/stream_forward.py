"""One forward for chunks of many streams, each at its own step, filled up to a bucket where bits or graphs ask for it.

Shape letters: R rows, C channels, F latent frames of a chunk, H, W latent height and width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attention_backend.kv_cache import Chunk, PagedBatch, PagedKVCache
from visual_gen.models.wan import CausalWanTransformer
from visual_gen.models.wan.causal_inputs import CausalGraph
from visual_gen.pipelines.stream_text import TextSlots


@dataclass(frozen=True, eq=False)
class Part:
    """One stream's share: its open chunk, latents [C, F, H, W] at a 0-dimensional timestep, each branch's text, and
    tokens that this forward alone sees, embedded, [a, hidden size]."""

    chunk: Chunk
    latents: torch.Tensor
    timestep: torch.Tensor
    text: tuple[int, ...]
    extra: torch.Tensor | None = None


class StreamForward:
    """buckets: numbers of frames, ascending, that forwards are filled up to by rows of up to max_chunk_frames; none:
    forwards have the rows that they have. graphs: forwards of equal chunks run as CUDA graphs."""

    def __init__(
        self,
        transformer: CausalWanTransformer,
        cache: PagedKVCache,
        texts: TextSlots,
        grid: tuple[int, int],
        max_chunk_frames: int,
        *,
        buckets: Sequence[int],
        graphs: bool,
    ) -> None:
        self._transformer, self._cache, self._texts, self._grid = transformer, cache, texts, grid
        self._max_chunk_frames, self._buckets, self._graphs_wanted = max_chunk_frames, tuple(buckets), graphs
        self._graphs: dict[tuple, CausalGraph] = {}
        # Rows that nobody reads; a pad row's tokens need places of their own.
        self.pads = [
            cache.open_session(recent_frames=max_chunk_frames, max_chunk_frames=max_chunk_frames)
            for _ in range(pad_rows(buckets, max_chunk_frames))
        ]

    def __call__(
        self, parts: Sequence[Part], *, frame_causal: bool = False
    ) -> tuple[list[torch.Tensor], list[torch.Tensor | None], PagedBatch]:
        """The flow of each part, [branches, C, F, H, W], what came out for its extra tokens, [branches, a, hidden
        size], and the batch that they were made with."""
        frames = [part.latents.shape[1] for part in parts for _ in part.text]
        pads = [] if frame_causal else self._pad_chunks(frames)
        counts = [0 if part.extra is None else len(part.extra) for part in parts] + [0] * len(pads)
        chunks = [*(part.chunk for part in parts), *pads]
        batch = self._cache.batch(chunks, extra_tokens=counts, frame_causal=frame_causal)
        extra = [part.extra for part in parts for _ in part.text] + [None] * len(pads) if any(counts) else None
        text = [slot for part in parts for slot in part.text]
        text += text[:1] * len(pads)
        first = parts[0]
        blank = first.latents.new_zeros(())
        rows = [part.latents for part in parts for _ in part.text]
        rows += [blank.expand(len(first.latents), chunk.frames, *first.latents.shape[2:]) for chunk in pads]
        timesteps = torch.stack(
            [part.timestep for part in parts for _ in part.text] + [torch.zeros_like(first.timestep)] * len(pads)
        )
        inputs = self._transformer.prepare(batch, self._texts.rows(text), self._grid, extra)
        if len({row.shape for row in rows}) == 1:
            rows = torch.stack(rows)
            graphed = self._graphs_wanted and not frame_causal and extra is None
            run = self._graph(rows, timesteps, inputs) if graphed else None
            flows = (run or self._transformer.run)(rows, timesteps, inputs)
        else:
            flows = self._transformer.run(rows, timesteps, inputs)
        out, outputs, row = [], [], 0
        for part in parts:
            ours = slice(row, row + len(part.text))
            out.append(flows[ours] if isinstance(flows, torch.Tensor) else torch.stack(flows[ours]))
            outputs.append(None if part.extra is None else torch.stack(inputs.extra.outputs[ours]))
            row = ours.stop
        return out, outputs, batch

    def _graph(self, rows: torch.Tensor, timesteps: torch.Tensor, inputs) -> CausalGraph:
        key = (tuple(rows.shape), inputs.signature())
        if key not in self._graphs:
            self._graphs[key] = CausalGraph(self._transformer.run, rows, timesteps, inputs)
        return self._graphs[key]

    def _pad_chunks(self, frames: Sequence[int]) -> list[Chunk]:
        """Open chunks that fill the rows up to the next bucket, frames and all."""
        # A row counts as a whole one, so that streams in short chunks get no bucket of their own.
        full = len(frames) * self._max_chunk_frames
        bucket = next((bucket for bucket in self._buckets if bucket >= full), None)
        if bucket is None:
            return []
        left, chunks = bucket - sum(frames), []
        for session in self.pads:
            wanted, chunk = min(left, self._max_chunk_frames), session.chunk
            if chunk is not None and chunk.frames != wanted:
                chunk.abort()
            if wanted:
                chunks.append(session.chunk or session.begin(wanted))
                left -= wanted
        return chunks


def pad_rows(buckets: Sequence[int], max_chunk_frames: int) -> int:
    """The most rows that fill a forward of at least one frame up to one of these numbers of frames."""
    return -(-(max(buckets) - 1) // max_chunk_frames) if buckets else 0


def even_frames(transformer: CausalWanTransformer, frame_tokens: int) -> int:
    """Of how many frames a forward must be a multiple for a row's bits not to depend on its place.

    On a CPU torch computes elementwise functions by vectors, and what is left of a tensor behind the last pair of
    vectors, up to 31 numbers, by others that round otherwise.
    """
    config = transformer.config
    if transformer.device.type != "cpu":
        return 1
    return 32 // math.gcd(32, config.hidden_size, config.freq_dim // 2, frame_tokens * config.ffn_dim)
