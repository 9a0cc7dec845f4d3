"""A stack of cached attention layers to drive a cache with, and a plain dense model of each session beside it."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from attention_backend import AttentionSpec, select_backend
from attention_backend.kv_cache import CachedAttention, PagedKVCache

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 8


@dataclass(eq=False)
class Stream:
    """A session, and the K/V of all its committed frames: frames[f][branch][layer] is (k, v) [c, Hkv, D]."""

    session: object
    frames: list = field(default_factory=list)

    def visible(self, first: int, count: int) -> list[int]:
        """The committed frames that a chunk of frames first to first + count - 1 sees."""
        geometry = self.session.geometry
        recent = geometry.recent_frames
        oldest = 0 if recent is None else first + count - recent
        return [f for f in range(first) if f < geometry.sink_frames or f >= oldest]


@dataclass
class Forward:
    """One forward of some chunks: q, k, v of each layer for all rows, and what came out."""

    batch: object
    inputs: list
    outs: list

    def rows(self, x):
        return x.split(self.batch.q_lens)


class Harness:
    """Builds caches and runs forwards over them; compares every row of every layer with the dense oracle."""

    def __init__(self, oracle, *, head_dim=HEAD_DIM, dtype=torch.float32, device="cpu", backend="sdpa", tolerance=1e-5):
        self.oracle, self.dtype, self.device, self.head_dim, self.tolerance = oracle, dtype, device, head_dim, tolerance
        spec = AttentionSpec("self", HEADS, head_dim, dtype, device, num_kv_heads=KV_HEADS)
        self.backend = select_backend(backend, spec)
        self.attend = CachedAttention(self.backend)
        self.generator = torch.Generator().manual_seed(0)

    def cache(self, frame_tokens=24, *, num_blocks=128, block_size=16, poison=None, read="auto", **options):
        if read == "staged":
            options.setdefault("staging_tokens", 2000)
        cache = PagedKVCache(
            LAYERS,
            KV_HEADS,
            self.head_dim,
            frame_tokens,
            num_blocks=num_blocks,
            block_size=block_size,
            read=read,
            **{"backend": self.backend, "dtype": self.dtype, "device": self.device, **options},
        )
        if poison is not None:
            everything = [cache.pool.rows] + ([cache.staging.rows] if cache.staging else [])
            for x in (x for rows in everything for layer in rows.layers for x in layer):
                x.fill_(poison)
        return cache

    def open(self, cache, **options) -> Stream:
        return Stream(cache.open_session(**{"max_chunk_frames": 1, **options}))

    def inputs(self, tokens, seed=None):
        """q, k, v of each layer [tokens, H, D]."""
        gen = self.generator if seed is None else torch.Generator().manual_seed(seed)
        shapes = [(tokens, heads, self.head_dim) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        return [[torch.randn(s, generator=gen).to(self.device, self.dtype) for s in shapes] for _ in range(LAYERS)]

    def forward(self, cache, chunks, *, inputs=None, attend=None, **options) -> Forward:
        batch = cache.batch(chunks, **options)
        inputs = inputs or self.inputs(sum(batch.q_lens))
        attend = attend or self.attend
        return Forward(batch, inputs, [attend(*qkv, batch.layer(i)) for i, qkv in enumerate(inputs)])

    def check(self, streams, forward, *, frame_causal=False):
        """Every row against the oracle over what its session has visible; returns the number of keys of each row."""
        batch, keys_of_rows, row = forward.batch, [], 0
        for stream, chunk in zip(streams, batch.chunks, strict=True):
            for branch in range(batch.num_rows // len(batch.chunks)):
                frames = stream.visible(chunk.frame_start, chunk.frames)
                for layer, (qkv, out) in enumerate(zip(forward.inputs, forward.outs, strict=True)):
                    q, k, v, got = (forward.rows(x)[row] for x in (*qkv, out))
                    past = [stream.frames[f][branch][layer] for f in frames]
                    keys, values = (torch.cat([*(kv[i] for kv in past), new]) for i, new in enumerate((k, v)))
                    step = batch.frame_tokens if frame_causal else len(q)
                    for start in range(0, len(q), step):
                        end = len(keys) - len(q) + start + step
                        self.compare(q[start : start + step], keys[:end], values[:end], got[start : start + step])
                keys_of_rows.append(len(keys))
                row += 1
        return keys_of_rows

    def compare(self, q, keys, values, got):
        some = slice(None, None, 1 + len(q) // 200)  # of 1 560 queries every eighth
        q, got = q[some], got[some]
        expected, _ = self.oracle(q, keys, values, self.head_dim**-0.5)
        error = (got.double() - expected).abs().max().item()
        assert error <= self.tolerance, f"off by {error} over {len(keys)} keys"  # false for NaN too

    @staticmethod
    def contents(cache):
        """All bits of the pool."""
        return [x.clone() for layer in cache.pool.rows.layers for x in layer]

    @staticmethod
    def window(stream):
        """What a session's visible tokens are in the pool, by branch, layer, and K or V."""
        session = stream.session
        segments = [(0, session.geometry.visible_tokens(session.frames))]
        out = []
        for branch in session.branches:
            rows = [row for start, n in branch.rows(segments) for row in range(start, start + n)]
            layers = session.cache.pool.rows.layers
            out += [x.flatten(0, 1)[rows].clone() for layer in layers for x in layer]
        return out

    @staticmethod
    def same(before, after):
        return all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(before, after, strict=True))

    def commit(self, streams, forward):
        """Commits the forward's chunks, in the cache and in the dense model."""
        row, c = 0, forward.batch.frame_tokens
        branches = forward.batch.num_rows // len(forward.batch.chunks)
        for stream, chunk in zip(streams, forward.batch.chunks, strict=True):
            kept = []  # [branch][layer] (k, v) of the chunk
            for branch in range(branches):
                layers = [[forward.rows(x)[row + branch].clone() for x in qkv[1:]] for qkv in forward.inputs]
                kept.append(layers)
            for f in range(chunk.frames):
                part = slice(f * c, (f + 1) * c)
                stream.frames.append([[tuple(x[part] for x in kv) for kv in layers] for layers in kept])
            row += branches
            chunk.commit()
            assert stream.session.frames == len(stream.frames)

    def step(self, cache, streams, frames=1, *, denoise=1, **options):
        """A chunk of each stream through denoising forwards and the clean one, all checked; keys of each row."""
        frames = [frames] * len(streams) if isinstance(frames, int) else frames
        chunks = [stream.session.begin(n) for stream, n in zip(streams, frames, strict=True)]
        for _ in range(denoise + 1):
            forward = self.forward(cache, chunks, **options)
            keys = self.check(streams, forward, frame_causal=options.get("frame_causal", False))
        self.commit(streams, forward)
        return keys


@pytest.fixture
def harness(oracle):
    return Harness(oracle)


@pytest.fixture
def make_harness(oracle):
    return lambda **options: Harness(oracle, **options)
