"""One stream of a causal Wan from texts to latents, chunk after chunk: a stream engine of its own, run to its end."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import closing

import torch

from visual_gen.config import CausalConfig
from visual_gen.models.wan import CausalWanTransformer
from visual_gen.pipelines.stream import Stream
from visual_gen.pipelines.stream_engine import StreamEngine
from visual_gen.pipelines.stream_state import check_guidance
from visual_gen.pipelines.text import TextRows


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
    initial_latents: torch.Tensor | None = None,
    switches: Mapping[int, TextRows] | None = None,
) -> Iterator[torch.Tensor]:
    """Yields the latents of each chunk, fp32 [C, F, H, W], as soon as its K/V are committed.

    text: one row. latent_size: (H, W). num_chunks: how many; None goes on until the positions end (those of
    settings.rope_max_seq_len, or the checkpoint's), which is a ValueError. guidance_scale above 1 with a `negative` row
    runs both branches in one forward; else there is one branch, and memory for one. generator: what noise is drawn
    from; None: one seeded by torch's own. initial_latents [C, F, H, W]: clean frames to continue from; they are
    committed at once, each seeing those up to itself, and not yielded. switches: by a chunk's index, the text that it
    and those after it are made under, encoded to the length of `text`; what is cached stays as it is.

    Between steps the clean chunk is predicted from the flow and fresh noise brings it to the next level, as in
    Self-Forcing. Raises ValueError on a bad argument, before any work; GenerationError if a chunk is not finite, which
    is then not committed. For several streams at once, or to steer one, take a StreamEngine.
    """
    settings, switches = settings or CausalConfig(), dict(switches or {})
    for chunk in switches:
        if not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 0:
            raise ValueError(f"switches has {chunk!r}; each key must be the index of a chunk, an integer of at least 0")
    if num_chunks is not None and (not isinstance(num_chunks, int) or isinstance(num_chunks, bool) or num_chunks < 1):
        raise ValueError(f"num_chunks is {num_chunks!r}; it must be an integer of at least 1, or None for no end")
    named = {"text": text, "negative": negative} | {f"switches[{chunk}]": rows for chunk, rows in switches.items()}
    for name, rows in named.items():
        if rows is None:
            continue
        if len(rows.lens) != 1:
            raise ValueError(f"{name} has {len(rows.lens)} rows; a stream has one prompt")
        if rows.hidden.shape[1:] != text.hidden.shape[1:]:
            raise ValueError(
                f"{name} has shape {tuple(rows.hidden.shape)}, text {tuple(text.hidden.shape)}; encode both to one "
                "length"
            )
    given = 0 if initial_latents is None or initial_latents.ndim < 4 else initial_latents.shape[-3]
    end = settings.frames_end(transformer.config.rope_max_seq_len)
    if num_chunks is not None and (total := settings.frames_after(num_chunks, given)) > end:
        raise ValueError(
            f"num_chunks is {num_chunks}, which makes {total} latent frames; the model knows {end}: ask for fewer, or "
            "extend its positions (causal.rope_max_seq_len)"
        )
    guide = check_guidance(guidance_scale) > 1 and negative is not None
    engine = StreamEngine(
        transformer, latent_size, causal=settings, guidance_scale=guidance_scale if guide else 1.0, max_streams=1,
        text_len=text.hidden.shape[1], text_slots=1 + guide + bool(switches),
    )  # fmt: skip
    stream = engine.open(
        switches.pop(0, text), negative_prompt=negative if guide else "",
        seed=int(torch.randint(2**63 - 1, ())) if generator is None else generator, initial_latents=initial_latents,
    )  # fmt: skip
    return _chunks(engine, stream, switches, num_chunks)


def rollout_latents(*args, num_chunks: int, initial_latents: torch.Tensor | None = None, **arguments) -> torch.Tensor:
    """`rollout` to its end: all latents, fp32 [1, C, F, H, W], initial_latents in front where they were given."""
    if num_chunks is None:
        raise ValueError("num_chunks is None, a stream without end: give a number, or take the chunks from rollout")
    chunks = list(rollout(*args, num_chunks=num_chunks, initial_latents=initial_latents, **arguments))
    if initial_latents is not None:
        chunks.insert(0, initial_latents.to(chunks[0]))
    return torch.cat(chunks, dim=1)[None]


def _chunks(
    engine: StreamEngine, stream: Stream, switches: dict[int, TextRows], num_chunks: int | None
) -> Iterator[torch.Tensor]:
    with closing(engine):
        for index in itertools.count() if num_chunks is None else range(num_chunks):
            if index in switches:
                stream.switch_prompt(switches[index])
            engine.step(until="chunk")
            if stream.error is not None:
                raise stream.error
            (latents,) = stream.take_latents()
            yield latents[0]
