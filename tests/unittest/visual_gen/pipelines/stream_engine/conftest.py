"""A tiny causal model, engines over it, and one stream made by hand: a session, forwards, commits."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from visual_gen.config import CausalConfig
from visual_gen.models.wan import CausalWanTransformer, WanConfig
from visual_gen.models.wan.text_pool import pooled
from visual_gen.pipelines.rollout import stream_cache
from visual_gen.pipelines.stream_engine import StreamEngine
from visual_gen.pipelines.text import TextRows

CONFIG = WanConfig(
    num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=10, freq_dim=16, ffn_dim=40,
    num_layers=2, rope_max_seq_len=64,
)  # fmt: skip
C, SIZE, S, TEXT_LEN = 4, (4, 6), 6, 7
FEW = {"frames_per_chunk": 2, "recent_frames": 6, "steps": [1000, 500]}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def text(n=5, seed=0):
    """Rows of one prompt of n tokens."""
    hidden = torch.randn(1, TEXT_LEN, CONFIG.text_dim, generator=seeded(seed))
    hidden[:, n:] = 0
    return TextRows(hidden, [n], [0])


def encode(prompt):
    """A text encoder: the number of words, and numbers that the words give."""
    return text(min(len(prompt.split()) + 1, TEXT_LEN), sum(prompt.encode()))


def by_hand(model, prompts, seed=0, scale=None, negative=None, steps=None, **changes):
    """Latents [1, C, F, H, W] of a stream whose chunk i is made with prompts[i] (a text), steps[i] where given."""
    settings = CausalConfig(**(FEW | changes))
    rows = 1 if negative is None else 2
    cache, generator = stream_cache(model, settings, S, branches=rows), seeded(seed)
    session = cache.open_session(
        sink_frames=settings.sink_frames, recent_frames=settings.recent_frames, branches=rows,
        max_chunk_frames=settings.max_chunk_frames,
    )  # fmt: skip
    made = []
    for i, prompt in enumerate(prompts):
        own = settings if steps is None else CausalConfig(**(FEW | changes | {"steps": steps[i]}))
        frames = (settings.first_chunk_frames if i == 0 else None) or settings.frames_per_chunk
        texts = [encode(prompt)] if negative is None else [encode(prompt), encode(negative)]
        hidden, lens = torch.cat([t.hidden for t in texts]), [t.lens[0] for t in texts]
        kv = pooled(model.project_text(hidden, lens))
        with session.begin(frames) as chunk:
            x = torch.randn(C, frames, *SIZE, generator=generator)
            for t, following in itertools.zip_longest(own.timesteps, own.timesteps[1:]):
                flow = model(x.expand(rows, *x.shape), torch.full((rows,), t), kv=cache.batch([chunk]), text_kv=kv)
                flow = flow[0] if rows == 1 else flow[1] + scale * (flow[0] - flow[1])
                x = x - t / 1000 * flow
                if following is not None:
                    x = torch.lerp(x, torch.randn(x.shape, generator=generator), following / 1000)
            model(x.expand(rows, *x.shape), torch.zeros(rows), kv=cache.batch([chunk]), text_kv=kv)
            chunk.commit()
        made.append(x)
    return torch.cat(made, dim=1)[None]


@pytest.fixture(scope="session")
def model():
    torch.manual_seed(0)
    model = CausalWanTransformer(CONFIG).requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter += 0.2 * torch.randn_like(parameter)
    return model


@pytest.fixture
def tiny(model):
    """The functions above, and engine(**changes of the settings and of the engine); closed at the end, all free."""
    engines = []

    def engine(**options):
        settings = {name: options.pop(name) for name in list(options) if name in CausalConfig.model_fields}
        given = {"causal": FEW | settings, "encode": encode, "text_len": TEXT_LEN, "max_streams": 3}
        made = StreamEngine(model, SIZE, **(given | options))
        engines.append((made, made.cache.free_blocks))
        return made

    yield SimpleNamespace(
        model=model, engine=engine, text=text, encode=encode, seeded=seeded, C=C, SIZE=SIZE, S=S, take=take, run=run,
        by_hand=lambda *args, **options: by_hand(model, *args, **options),
    )  # fmt: skip
    for made, free in engines:
        made.close()
        assert made.cache.free_blocks == free and not made.used_blocks and not made._texts.used
        assert not made.cache._batches or made._run.pads


def take(stream, latents=None):
    """All that the stream has finished, behind `latents` [1, C, F, H, W]."""
    parts = [] if latents is None else [latents]
    return torch.cat([*parts, *stream.take_latents()], dim=2)


def run(engine, chunks, streams=None):
    """Steps the streams, one forward at a time, until each has finished so many chunks in all; for each the latents
    that were not taken before."""
    streams = streams or list(engine.streams)
    parts = {stream: stream.take_latents() for stream in streams}
    while left := [stream for stream in streams if stream.chunk_index < chunks]:
        engine.step(left)
        for stream in streams:
            parts[stream] += stream.take_latents()
    return [torch.cat(parts[stream], dim=2) for stream in streams]


@pytest.fixture
def fault(model, monkeypatch):
    """fault.at(n, what, layer=None, rows=...): in the n-th forward from now, `what` is raised (in a layer, if one is
    named), or multiplied with some rows of the output; heal() ends it."""

    def break_(n, what, layer=None, rows=slice(None)):
        calls = itertools.count(1)

        def faulty(inner, *args, **kwargs):
            now = next(calls) == n
            if now and isinstance(what, BaseException):
                raise what
            out = inner(*args, **kwargs)
            if now:
                out[rows] *= what
            return out

        target, name = (model, "run") if layer is None else (model.blocks[layer].ffn, "forward")
        inner = getattr(target, name)
        monkeypatch.setattr(target, name, lambda *args, **kwargs: faulty(inner, *args, **kwargs))

    return SimpleNamespace(at=break_, heal=monkeypatch.undo)
