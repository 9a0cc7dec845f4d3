"""What batching four streams can win at the kernels alone: part `kernels` of the benchmark of streams."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from measure import interleaved
from streams_setup import STREAMS, Bench, Shape

from attention_backend.kv_cache import CachedAttention
from visual_gen.pipelines.stream_loading import engine_cache
from visual_gen.pipelines.stream_options import EngineOptions


class Kernels:
    """What a forward of some rows asks of the matrix units: products and attention of all layers, and nothing else."""

    def __init__(self, bench: Bench, shape: Shape) -> None:
        self.model, size = bench.model(), bench.size
        options = EngineOptions(max_streams=STREAMS)
        cache = engine_cache(self.model, shape.settings, shape.frame_tokens, options, pads=0)
        self.chunk_tokens = shape.chunk_frames * shape.frame_tokens
        self.attend = CachedAttention(self.model.self_attention)
        self.inputs: dict[tuple[int, ...], torch.Tensor] = {}
        self.on = {"dtype": size.dtype, "device": size.device}
        self.heads = (size.config.num_attention_heads, size.config.attention_head_dim)
        pool = self.model.new_text_pool(STREAMS, size.text_rows)
        for i in range(STREAMS):
            text = bench.text(i)
            self.model.write_text(pool, i, text.hidden[0], text.lens[0])
        sessions = [
            cache.open_session(recent_frames=shape.recent_frames, max_chunk_frames=shape.chunk_frames)
            for _ in range(STREAMS)
        ]
        for _ in range(shape.recent_frames // shape.chunk_frames):
            for session in sessions:
                with session.begin(shape.chunk_frames) as chunk:
                    self.self_attention(cache.batch([chunk]), 1)
                    chunk.commit()
        chunks = [session.begin(shape.chunk_frames) for session in sessions]
        groups = [list(range(STREAMS)), *([i] for i in range(STREAMS))]
        batches = [cache.batch([chunks[i] for i in group]) for group in groups]
        self.read = batches[0].read
        state = self.model.attention_metadata_state
        texts = [pool.rows(group).layers(state, batch.q_lens) for group, batch in zip(groups, batches, strict=True)]
        forwards = list(zip(batches, texts, map(len, groups), strict=True))
        self.groups = {"together": forwards[:1], "one_after_another": forwards[1:]}

    def rand(self, *shape: int) -> torch.Tensor:
        if shape not in self.inputs:
            self.inputs[shape] = torch.randn(shape, **self.on)
        return self.inputs[shape]

    def products(self, batch, text, rows: int) -> None:
        for block in self.model.blocks:
            for linear in (
                block.self_attn.to_qkv, block.self_attn.to_out, block.cross_text.to_q, block.cross_text.to_out,
                block.ffn.linear_1, block.ffn.linear_2,
            ):  # fmt: skip
                linear(self.rand(rows * self.chunk_tokens, linear.in_features))

    def self_attention(self, batch, rows: int) -> None:
        x = self.rand(rows * self.chunk_tokens, *self.heads)
        for i in range(len(self.model.blocks)):
            self.attend(x, x, x, batch.layer(i))

    def attention(self, batch, text, rows: int) -> None:
        self.self_attention(batch, rows)
        q = self.rand(rows * self.chunk_tokens, *self.heads)[None]
        for block, layer in zip(self.model.blocks, text, strict=True):
            block.cross_text.attend(q, layer)

    def both(self, *forward) -> None:
        self.products(*forward)
        self.attention(*forward)

    def arms(self) -> dict[str, Callable[[], None]]:
        def run(call: Callable, forwards: list[tuple]) -> None:
            for forward in forwards:
                call(*forward)

        calls = {"products": self.products, "attention": self.attention, "both": self.both}
        return {
            f"{what}, {how}": partial(run, call, forwards)
            for what, call in calls.items()
            for how, forwards in self.groups.items()
        }


@torch.no_grad()
def kernels_part(bench: Bench) -> dict:
    shape = bench.size.shapes["long"]
    kernels = Kernels(bench, shape)
    ms = interleaved(kernels.arms(), bench.rounds, keep_busy=True, device=bench.size.device)
    ratios = {
        what: round(ms[f"{what}, one_after_another"] / ms[f"{what}, together"], 3)
        for what in ("products", "attention", "both")
    }
    return {"frame_tokens": shape.frame_tokens, "read": kernels.read, "median_ms": ms, "ratio": ratios}
