"""The tiny model, and engines over it."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from tests.unittest.visual_gen.pipelines.stream_engine.tiny_model import (
    CONFIG,
    FEW,
    SIZE,
    TEXT_LEN,
    C,
    S,
    by_hand,
    encode,
    seeded,
    text,
)
from visual_gen.config import CausalConfig
from visual_gen.models.wan import CausalWanTransformer
from visual_gen.pipelines.stream_engine import StreamEngine


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

    def engine(size=SIZE, **options):
        settings = {name: options.pop(name) for name in list(options) if name in CausalConfig.model_fields}
        given = {"causal": FEW | settings, "encode": encode, "text_len": TEXT_LEN, "max_streams": 3}
        made = StreamEngine(model, size, **(given | options))
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
    that were not taken before. A chunk that fails is an error: it would be tried again without end."""
    streams = streams or list(engine.streams)
    parts = {stream: stream.take_latents() for stream in streams}
    while left := [stream for stream in streams if stream.chunk_index < chunks]:
        for event in engine.step(left):
            assert event.error is None, f"chunk {event.chunk_index} of stream {event.stream.id}: {event.error}"
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
