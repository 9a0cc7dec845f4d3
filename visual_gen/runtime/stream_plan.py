"""What one causal stream will cost, and how many fit on a device."""

from __future__ import annotations

import math
from dataclasses import dataclass

from attention_backend import AUTO_ORDER_OF_CACHES, AttentionBackend, backend_classes
from visual_gen.config import RunConfig
from visual_gen.models.wan import WanConfig
from visual_gen.runtime.costs import activation_bytes, text_kv_bytes, text_write_bytes
from visual_gen.runtime.model import Model
from visual_gen.runtime.streams import TEXT_SLOTS, UNREAD_CHUNKS, pad_size, stream_size


@dataclass(frozen=True)
class StreamPlan:
    """Of one causal stream: latent frames that are visible, tokens of its largest chunk, how a fresh session's cache is
    read and why so, texts that there is room for, what the cache takes, and how many streams the given memory holds
    beside the model (None: no memory was given)."""

    window_frames: int
    chunk_tokens: int
    timesteps: tuple[float, ...]
    block_size: int
    read: str
    read_reason: str
    text_slots: int
    kv_cache_bytes: int
    streams_that_fit: int | None


def plan_stream(
    config: RunConfig, model: Model, branches: int, weight_bytes: int, device_memory_bytes: int | None
) -> StreamPlan:
    """weight_bytes: of all that stays on the device whatever the number of streams. ValueError if the backend cannot
    read as causal.read says."""
    settings, wan, generation, dtype = config.causal, model.transformer, config.generation, config.torch_dtype()
    _, _, _, height, width = model.geometry.latent_shape(1, 1, generation.height, generation.width)
    frame_tokens = height * width // math.prod(wan.patch_size[1:])
    backend = _backend_class(config)
    size = stream_size(settings, frame_tokens, backend, branches=branches, rollback_chunks=UNREAD_CHUNKS)
    chunk_tokens = settings.max_chunk_frames * frame_tokens
    kv_cache = size.num_bytes(wan, dtype)
    if config.stream is not None and config.stream.deterministic:  # forwards of one size: each row may be filled up
        kv_cache += branches * pad_size(settings, size, backend).num_bytes(wan, dtype)
    text = text_kv_bytes(wan, TEXT_SLOTS * generation.max_sequence_length, dtype)
    activations = stream_activation_bytes(config, wan, branches, chunk_tokens)
    each = kv_cache + text + activations
    fit = None if device_memory_bytes is None else max(0, (device_memory_bytes - weight_bytes) // each)
    return StreamPlan(
        window_frames=size.geometry.window_frames,
        chunk_tokens=chunk_tokens,
        timesteps=settings.timesteps,
        block_size=size.block_size,
        read=size.read,
        read_reason="causal.read" if settings.read != "auto" else f"the first that {backend.name} can do",
        text_slots=TEXT_SLOTS,
        kv_cache_bytes=kv_cache,
        streams_that_fit=fit,
    )


def stream_activation_bytes(config: RunConfig, wan: WanConfig, rows: int, tokens: int) -> int:
    """What lives beside weights and caches: in a forward of so many rows of chunks, or while a text is projected."""
    dtype = config.torch_dtype()
    text = text_write_bytes(wan, config.generation.max_sequence_length, dtype)
    return max(activation_bytes(wan, rows, tokens, dtype, on_gpu=config.counts_as_gpu), text)


def _backend_class(config: RunConfig) -> type[AttentionBackend]:
    """The backend that self-attention to a cache names; for "auto" the first that takes the dtype, installed or not."""
    name = config.attention.self
    if name == "auto":
        name = "sdpa" if config.dtype == "float32" else AUTO_ORDER_OF_CACHES[0]
    return backend_classes()[name]
