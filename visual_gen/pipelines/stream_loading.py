"""What a stream engine is made of: a cache of the right size, and a folder's transformer, text encoder and VAE."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from attention_backend.kv_cache import PagedKVCache
from visual_gen.checkpoint import part_path, resolve_folder
from visual_gen.compilation import check_compile
from visual_gen.config import AttentionConfig, CausalConfig, attention_config
from visual_gen.device import find_device
from visual_gen.models.wan import CausalWanTransformer
from visual_gen.models.wan.geometry import Geometry
from visual_gen.models.wan.layouts import part_folder
from visual_gen.pipelines.components import load_text_encoder, load_vae, open_tokenizer
from visual_gen.pipelines.folder import read_stream_folder
from visual_gen.pipelines.stream_options import EngineOptions
from visual_gen.pipelines.text import TextRows, encode, tokenize
from visual_gen.runtime.streams import pad_size, stream_size


def engine_cache(
    transformer: CausalWanTransformer, settings: CausalConfig, frame_tokens: int, options: EngineOptions, *, pads: int
) -> PagedKVCache:
    """A cache for the options' streams of these settings, or of their memory_bytes, and for `pads` rows that fill a
    batch. Deterministic, it has settings' read, or the best that the backend has, and no other."""
    backend, config, branches = transformer.self_attention, transformer.config, options.branches
    size = stream_size(
        settings, frame_tokens, backend, branches=branches, rollback_chunks=options.kept_chunks,
        action_capacity=options.action_capacity,
    )  # fmt: skip
    pad = pad_size(settings, size, backend)
    sizes = {"num_blocks": 1 + options.max_streams * size.num_blocks + pads * pad.num_blocks}
    if options.memory_bytes is not None:
        sizes = {"memory_bytes": options.memory_bytes}
    return PagedKVCache(
        config.num_layers, config.num_attention_heads, config.attention_head_dim, frame_tokens, **sizes,
        block_size=size.block_size, read=size.read if options.deterministic else settings.read, backend=backend,
        dtype=transformer.dtype, device=transformer.device, action_capacity=options.action_capacity,
        staging_tokens=options.max_streams * size.staging_tokens + pads * pad.staging_tokens,
        attention_metadata_state=transformer.attention_metadata_state, max_frames=size.geometry.window_frames,
    )  # fmt: skip


@dataclass(frozen=True)
class StreamParts:
    transformer: CausalWanTransformer
    encode: Callable[[str], TextRows]
    vae: torch.nn.Module
    geometry: Geometry


def load_stream_parts(
    folder_or_id: str | Path,
    *,
    dtype: torch.dtype,
    device: str | torch.device,
    attention: AttentionConfig | dict | None,
    max_sequence_length: int,
    compile: bool,
) -> StreamParts:
    """Of a folder in diffusers' format. ValueError, before weights are read, on what does not fit together."""
    device, attention = find_device(device), attention_config(attention)
    check_compile(compile, device)
    folder = resolve_folder(folder_or_id)
    read_stream_folder(folder)
    tokenizer = open_tokenizer(folder)
    transformer = CausalWanTransformer.from_pretrained(
        part_folder(folder / "transformer"), dtype=dtype, device=device, attention=attention
    )
    if compile:
        transformer.compile_blocks()
    encoder = load_text_encoder(part_path(folder, "text_encoder"), dtype=dtype, device=device)
    vae = load_vae(part_path(folder, "vae"), dtype=dtype, device=device)

    def encode_prompt(prompt: str) -> TextRows:
        return encode(encoder, [tokenize(tokenizer, prompt, max_sequence_length)], max_sequence_length, dtype)

    return StreamParts(transformer, encode_prompt, vae, Geometry.from_folder(folder))
