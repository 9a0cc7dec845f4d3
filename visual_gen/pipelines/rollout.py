"""One stream of a causal Wan: chunk after chunk of latents, each denoised in a few steps and committed to a KV cache.

Shape letters: C channels, F latent frames, H, W latent height and width.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping

import torch

from attention_backend.kv_cache import Chunk, KVBatch, PagedKVCache, Session
from visual_gen.config import CausalConfig
from visual_gen.models.wan import CausalWanTransformer, PooledText
from visual_gen.models.wan.text_pool import pooled
from visual_gen.pipelines.denoise import denoise_chunk
from visual_gen.pipelines.errors import GenerationError
from visual_gen.pipelines.given_frames import check_given, given_chunks
from visual_gen.pipelines.latents import draw_noise
from visual_gen.pipelines.text import TextRows
from visual_gen.runtime.streams import stream_size


def rollout(
    transformer: CausalWanTransformer,
    text: TextRows,
    latent_size: tuple[int, int],
    *,
    num_chunks: int | None,
    settings: CausalConfig | None = None,
    negative: TextRows | None = None,
    guidance_scale: float = 1.0,
    generator: torch.Generator | None = None,
    first_latents: torch.Tensor | None = None,
    cache: PagedKVCache | None = None,
    switches: Mapping[int, TextRows] | None = None,
) -> Iterator[torch.Tensor]:
    """Yields the latents of each chunk, fp32 [C, F, H, W], as soon as its K/V are committed.

    text: one row. latent_size: (H, W). num_chunks: how many; None goes on until the positions end (those of
    settings.rope_max_seq_len, or the checkpoint's), which is a ValueError. guidance_scale above 1 with a `negative` row
    runs both branches in one forward; else there is one branch, and memory for one. generator: what noise is drawn
    from. first_latents [C, F, H, W]: clean frames to continue from; they are committed first, each seeing those up to
    itself, and not yielded. cache: one to share between streams, from stream_cache; without it the stream makes its
    own. switches: by a chunk's index, the text that it and those after it are made under, encoded to the length of
    `text`; what is cached stays as it is.

    Between steps the clean chunk is predicted from the flow and fresh noise brings it to the next level, as in
    Self-Forcing. Whatever ends the stream (an exception, Ctrl-C, close()) leaves no open chunk or session behind.
    Raises ValueError on a bad argument, before any work; GenerationError if a chunk is not finite, which is then not
    committed.
    """
    settings = settings or CausalConfig()
    if not isinstance(guidance_scale, int | float) or not math.isfinite(guidance_scale):
        raise ValueError(f"guidance_scale is {guidance_scale!r}; it must be a finite number")
    guide = negative is not None and guidance_scale > 1
    switches = dict(switches or {})
    for chunk in switches:
        if not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 0:
            raise ValueError(f"switches has {chunk!r}; each key must be the index of a chunk, an integer of at least 0")
    named = {"text": text, "negative": negative} | {f"switches[{chunk}]": rows for chunk, rows in switches.items()}
    for name, rows in named.items():
        if rows is not None and len(rows.lens) != 1:
            raise ValueError(f"{name} has {len(rows.lens)} rows; a stream has one prompt")
    for chunk, rows in switches.items():
        if rows.hidden.shape[1:] != text.hidden.shape[1:]:
            raise ValueError(
                f"switches[{chunk}] has shape {tuple(rows.hidden.shape)}, text {tuple(text.hidden.shape)}; encode both "
                "to one length"
            )
    if guide and text.hidden.shape != negative.hidden.shape:
        raise ValueError(
            f"text has shape {tuple(text.hidden.shape)}, negative {tuple(negative.hidden.shape)}; encode both to "
            "one length"
        )
    if num_chunks is not None and (not isinstance(num_chunks, int) or isinstance(num_chunks, bool) or num_chunks < 1):
        raise ValueError(f"num_chunks is {num_chunks!r}; it must be an integer of at least 1, or None for no end")
    config = transformer.config
    if len(latent_size) != 2 or not all(isinstance(size, int) for size in latent_size):
        raise ValueError(f"latent_size is {latent_size}; it must be (H, W), two integers")
    shape = (config.out_channels, *latent_size)
    first = check_given("first_latents", first_latents, shape)
    if any(size % patch or size < patch for size, patch in zip(latent_size, config.patch_size[1:], strict=True)):
        raise ValueError(f"latent_size is {latent_size}; both must be multiples of the patch {config.patch_size[1:]}")
    frame_tokens = latent_size[0] * latent_size[1] // (config.patch_size[1] * config.patch_size[2])
    if cache is not None and cache.frame_tokens != frame_tokens:
        raise ValueError(
            f"the cache was made for {cache.frame_tokens} tokens a frame; latent_size {latent_size} has {frame_tokens}"
        )
    end = settings.frames_end(config.rope_max_seq_len)
    if num_chunks is not None:
        total = num_chunks * settings.frames_per_chunk
        if first is not None:
            total += first.shape[1]
        elif settings.first_chunk_frames is not None:
            total += settings.first_chunk_frames - settings.frames_per_chunk
        if total > end:
            raise ValueError(
                f"num_chunks is {num_chunks}, which makes {total} latent frames; the model knows {end}: ask for fewer, "
                "or extend its positions (causal.rope_max_seq_len)"
            )
    transformer.extend_frames(end)
    texts = {0: text} | switches
    return _Stream(transformer, settings, shape, guidance_scale if guide else None, generator, end).run(
        cache, frame_tokens, {chunk: (rows, negative) if guide else (rows,) for chunk, rows in texts.items()}, first,
        num_chunks,
    )  # fmt: skip


def stream_cache(
    transformer: CausalWanTransformer,
    settings: CausalConfig,
    frame_tokens: int,
    *,
    streams: int = 1,
    branches: int = 1,
) -> PagedKVCache:
    """A cache that holds so many streams of these settings, each with `branches` of guidance. frame_tokens: tokens of a
    latent frame."""
    backend, config = transformer.self_attention, transformer.config
    size = stream_size(settings, frame_tokens, backend, branches=branches)
    return PagedKVCache(
        config.num_layers, config.num_attention_heads, config.attention_head_dim, frame_tokens,
        num_blocks=1 + streams * size.num_blocks, block_size=size.block_size, read=settings.read, backend=backend,
        dtype=transformer.dtype, device=transformer.device, staging_tokens=streams * size.staging_tokens,
        attention_metadata_state=transformer.attention_metadata_state,
    )  # fmt: skip


def rollout_latents(*args, num_chunks: int, first_latents: torch.Tensor | None = None, **arguments) -> torch.Tensor:
    """`rollout` to its end: all latents, fp32 [1, C, F, H, W], first_latents in front where they were given."""
    if num_chunks is None:
        raise ValueError("num_chunks is None, a stream without end: give a number, or take the chunks from rollout")
    chunks = list(rollout(*args, num_chunks=num_chunks, first_latents=first_latents, **arguments))
    if first_latents is not None:
        chunks.insert(0, first_latents.to(chunks[0]))
    return torch.cat(chunks, dim=1)[None]


class _Stream:
    def __init__(
        self,
        transformer: CausalWanTransformer,
        settings: CausalConfig,
        shape: tuple[int, int, int],
        guidance_scale: float | None,
        generator: torch.Generator | None,
        frames_end: int,
    ) -> None:
        self.transformer, self.settings, self.shape, self.frames_end = transformer, settings, shape, frames_end
        self.guidance_scale, self.generator = guidance_scale, generator
        self.branches = 1 if guidance_scale is None else 2
        self.timesteps = torch.tensor((*settings.timesteps, 0.0), device=transformer.device)

    @torch.no_grad()
    def run(
        self,
        cache: PagedKVCache | None,
        frame_tokens: int,
        texts: dict[int, tuple[TextRows, ...]],
        first: torch.Tensor | None,
        num_chunks: int | None,
    ) -> Iterator[torch.Tensor]:
        text_kv = self._project(texts[0])
        settings, branches = self.settings, self.branches
        cache = cache or stream_cache(self.transformer, settings, frame_tokens, branches=branches)
        with cache.open_session(
            sink_frames=settings.sink_frames, recent_frames=settings.recent_frames, branches=branches,
            max_chunk_frames=settings.max_chunk_frames,
        ) as session:  # fmt: skip
            if first is not None:
                self._recache(session, text_kv, first.to(self.transformer.device))
            all_frames = _chunk_frames(settings, continued=first is not None)
            for index, frames in enumerate(itertools.islice(all_frames, num_chunks)):
                if index and index in texts:
                    text_kv = self._project(texts[index])
                if session.frames + frames > self.frames_end:
                    raise ValueError(
                        f"chunk {index} ends at latent frame {session.frames + frames} and the positions at "
                        f"{self.frames_end}: end the video before, start another, or set causal.rope_max_seq_len"
                    )
                with session.begin(frames) as chunk:
                    latents = self._make(chunk, text_kv, f"chunk {index}")
                    chunk.commit()
                yield latents

    def _project(self, texts: tuple[TextRows, ...]) -> PooledText:
        hidden, lens = torch.cat([rows.hidden[rows.index] for rows in texts]), [n for rows in texts for n in rows.lens]
        return pooled(self.transformer.project_text(hidden.to(self.transformer.device), lens))

    def _recache(self, session: Session, text_kv: PooledText, latents: torch.Tensor) -> None:
        """Commits given frames, each of which sees those up to itself."""
        for start, frames in given_chunks(self.settings, latents.shape[1]):
            with session.begin(frames) as chunk:
                given = latents[:, start : start + frames]
                self._write(chunk, text_kv, given, f"given frames from {start} on", frame_causal=True)
                chunk.commit()

    def _make(self, chunk: Chunk, text_kv: PooledText, what: str) -> torch.Tensor:
        """Denoises a chunk from noise and writes the K/V of the result."""
        x = self._noise(chunk.frames)
        sigmas = self.settings.sigmas
        for step in range(len(sigmas)):
            flows = self._forward(chunk.session.cache.batch([chunk]), text_kv, x, step)
            x = denoise_chunk(x, flows, self.guidance_scale, sigmas, step, self._noise)
        self._write(chunk, text_kv, x, what)
        return x

    def _write(
        self, chunk: Chunk, text_kv: PooledText, x: torch.Tensor, what: str, *, frame_causal: bool = False
    ) -> None:
        """The committing forward, and the one wait for the device that a chunk takes: what was not finite in a step
        before shows here."""
        batch = chunk.session.cache.batch([chunk], frame_causal=frame_causal)
        if batch.failed_rows(self._forward(batch, text_kv, x, -1)):
            raise GenerationError(
                f"{what} gave NaN or infinity and was not committed: the weights or the latents are damaged, or the "
                "dtype overflows (try dtype bfloat16 or float32)",
                step=len(self.settings.steps),
            )

    def _forward(self, batch: KVBatch, text_kv: PooledText, x: torch.Tensor, step: int) -> torch.Tensor:
        rows = x.expand(self.branches, *x.shape)
        return self.transformer(rows, self.timesteps[step].expand(self.branches), kv=batch, text_kv=text_kv)

    def _noise(self, frames: int) -> torch.Tensor:
        channels, height, width = self.shape
        return draw_noise((channels, frames, height, width), self.generator, self.transformer.device)


def _chunk_frames(settings: CausalConfig, *, continued: bool) -> Iterator[int]:
    """Frames of each chunk. A stream that continues given frames has its first chunk behind it."""
    if settings.first_chunk_frames is not None and not continued:
        yield settings.first_chunk_frames
    while True:
        yield settings.frames_per_chunk
