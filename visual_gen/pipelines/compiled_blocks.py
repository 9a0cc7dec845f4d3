"""Compiles the blocks that a configuration will run, on one layer of random weights: all layers share their graphs."""

from __future__ import annotations

import dataclasses

import torch

from visual_gen.compilation import check_compile, compile_seconds
from visual_gen.config import RunConfig
from visual_gen.models.wan import CausalWanTransformer, WanTransformer
from visual_gen.pipelines.stream_engine import StreamEngine
from visual_gen.pipelines.text import TextRows
from visual_gen.runtime.costs import image_tokens, text_groups
from visual_gen.runtime.model import Model, required_model
from visual_gen.runtime.plan import Plan, plan
from visual_gen.runtime.warmup import Variant


def warm_up_blocks(config: RunConfig) -> Variant:
    """Runs a step of the video's own size, or two chunks of as many streams as there are prompts.

    Torch keeps what it made of a graph on disk (TORCHINDUCTOR_CACHE_DIR), so another process only traces it again.
    Raises ValueError where torch.compile cannot run, or the model or a backend cannot be had.
    """
    device = config.torch_device()
    check_compile(True, device)
    model, planned = required_model(config), plan(config)
    wan = dataclasses.replace(model.transformer, num_layers=1)
    cls = WanTransformer if config.causal is None else CausalWanTransformer
    transformer = cls(wan, attention=config.attention, dtype=config.torch_dtype(), device=device).requires_grad_(False)
    transformer.compile_blocks()
    before = compile_seconds()
    if config.causal is None:
        _run_steps(config, model, planned, transformer)
    else:
        _run_streams(config, planned, transformer)
    what = "a step" if config.causal is None else "two chunks"
    return Variant("blocks", "torch.compile", what, compile_seconds() - before)


@torch.inference_mode()  # as steps do
def _run_steps(config: RunConfig, model: Model, planned: Plan, transformer: WanTransformer) -> None:
    """A forward of every kind that the two branches of guidance take."""
    generation, wan = config.generation, transformer.config
    groups = text_groups(planned.text_lens, config)
    if model.num_experts > 1 and generation.guidance_scale_2 == 1:
        groups = [*groups, planned.text_lens[: max(1, len(generation.prompts))]]
    for lens in groups:
        image = None
        if wan.image_dim is not None:
            pictures = 2 if wan.pos_embed_seq_len else 1  # first and last
            image = _zeros(transformer, pictures * len(lens), image_tokens(wan) // pictures, wan.image_dim)
        text = _zeros(transformer, len(lens), generation.max_sequence_length, wan.text_dim)
        latents = _zeros(transformer, len(lens), wan.in_channels, *planned.latent_shape[2:])
        timestep = torch.tensor(1000.0, device=transformer.device).expand(len(lens))
        if model.timestep_per_token and generation.image is not None:
            timestep = timestep[:1].expand(planned.tokens).expand(len(lens), -1)
        transformer(latents, timestep, text_kv=transformer.project_text(text, lens, image))


def _run_streams(config: RunConfig, planned: Plan, transformer: CausalWanTransformer) -> None:
    generation = config.generation
    streams = max(1, len(generation.prompts))
    branches = 2 if generation.guidance_scale > 1 else 1
    text = TextRows(_zeros(transformer, 1, generation.max_sequence_length, transformer.config.text_dim), [1], [0])
    engine = StreamEngine(
        transformer, planned.latent_shape[-2:], causal=config.causal, guidance_scale=generation.guidance_scale,
        max_streams=streams, batch_rows=streams * branches, text_len=generation.max_sequence_length,
        deterministic=config.stream is not None and config.stream.deterministic,
    )  # fmt: skip
    try:
        for seed in range(streams):
            engine.open(text, negative_prompt=text, seed=seed)
        for _ in range(2):  # the first may be of another length
            engine.step(until="chunk")
    finally:
        engine.close()


def _zeros(transformer: WanTransformer, *shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=transformer.dtype, device=transformer.device)
