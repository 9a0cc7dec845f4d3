"""A tiny causal model, its texts, and one stream made by hand: a session, forwards, commits."""

from __future__ import annotations

import itertools
import math

import torch

from attention_backend.kv_cache import PagedKVCache
from visual_gen.config import CausalConfig
from visual_gen.models.wan import WanConfig
from visual_gen.models.wan.text_pool import pooled
from visual_gen.pipelines.stream_loading import engine_cache
from visual_gen.pipelines.stream_options import EngineOptions
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


def cache_for(model, settings, frame_tokens, branches=1, action_capacity=0) -> PagedKVCache:
    """With room for one stream of an engine."""
    options = EngineOptions(max_streams=1, guidance_scale=float(branches), action_capacity=action_capacity)
    return engine_cache(model, settings, frame_tokens, options, pads=0)


def by_hand(
    model, prompts, seed=0, scale=None, negative=None, steps=None, given=None, extra=None, size=SIZE, **changes
):
    """Latents [1, C, F, H, W] of a stream whose chunk i is made with prompts[i] (a text), steps[i] and the forward-only
    tokens extra[i] where given, behind given frames [C, F, H, W] committed one by one under the first prompt. seed: or
    a generator. size: (H, W)."""
    settings = CausalConfig(**(FEW | changes))
    rows, extra = 1 if negative is None else 2, extra or [None] * len(prompts)
    most = max(0 if tokens is None else len(tokens) for tokens in extra)
    tokens_of_frame = math.prod(size) // math.prod(CONFIG.patch_size)
    cache, generator = cache_for(model, settings, tokens_of_frame, branches=rows, action_capacity=most), seed
    if not isinstance(seed, torch.Generator):
        generator = seeded(seed)
    session = cache.open_session(
        sink_frames=settings.sink_frames, recent_frames=settings.recent_frames, branches=rows,
        max_chunk_frames=settings.max_chunk_frames,
    )  # fmt: skip
    made = []
    for frame in () if given is None else given.split(1, dim=1):
        rows_of_text = encode(prompts[0])
        kv = pooled(model.project_text(rows_of_text.hidden, rows_of_text.lens))
        with session.begin(1) as chunk:
            model(frame[None], torch.zeros(1), kv=cache.batch([chunk]), text_kv=kv)
            chunk.commit()
    for i, prompt in enumerate(prompts):
        own = settings if steps is None else CausalConfig(**(FEW | changes | {"steps": steps[i]}))
        frames = (settings.first_chunk_frames if i == 0 and given is None else None) or settings.frames_per_chunk
        texts = [encode(prompt)] if negative is None else [encode(prompt), encode(negative)]
        hidden, lens = torch.cat([t.hidden for t in texts]), [t.lens[0] for t in texts]
        kv = pooled(model.project_text(hidden, lens))
        with session.begin(frames) as chunk:
            x = torch.randn(C, frames, *size, generator=generator)
            for t, following in itertools.zip_longest(own.timesteps, own.timesteps[1:]):
                call = (x.expand(rows, *x.shape), torch.full((rows,), t))
                if extra[i] is None:
                    flow = model(*call, kv=cache.batch([chunk]), text_kv=kv)
                else:
                    batch = cache.batch([chunk], extra_tokens=[len(extra[i])])
                    flow, _ = model(*call, kv=batch, text_kv=kv, extra=[extra[i]] * rows)
                flow = flow[0] if rows == 1 else flow[1] + scale * (flow[0] - flow[1])
                x = x - t / 1000 * flow
                if following is not None:
                    x = torch.lerp(x, torch.randn(x.shape, generator=generator), following / 1000)
            model(x.expand(rows, *x.shape), torch.zeros(rows), kv=cache.batch([chunk]), text_kv=kv)
            chunk.commit()
        made.append(x)
    return torch.cat(made, dim=1)[None]
