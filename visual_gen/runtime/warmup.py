"""Compiles the attention kernels that a configuration will call, each by one call on tensors as small as do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from attention_backend import (
    AttentionBackend,
    AttentionBackendError,
    AttentionMetadataState,
    AttentionSpec,
    select_backend,
)
from attention_backend.kv_cache import CachedAttention, PagedKVCache
from visual_gen.config import CausalConfig, ConfigError, RunConfig
from visual_gen.models.wan import WanConfig
from visual_gen.models.wan.causal import causal_needs
from visual_gen.modules.attention import Attention
from visual_gen.modules.cross_kv import CROSS_KV_NEEDS, CrossKV
from visual_gen.modules.qk_norm_rope import norm_and_rope
from visual_gen.runtime.costs import image_tokens
from visual_gen.runtime.model import check_settings, required_model
from visual_gen.runtime.streams import stream_size

# Kernels that take two tiles of queries at once where there are as many are the ones that a video needs.
QUERIES = 512


@dataclass(frozen=True)
class Variant:
    """One kind of call of one role, or of the blocks as a whole. seconds: of its first call, compilation included (of
    blocks, that alone), None where nothing is compiled. Kinds that another role has compiled already take next
    to none."""

    role: str
    backend: str
    call: str
    seconds: float | None


@dataclass(frozen=True)
class WarmUp:
    """selection_seconds: choosing the backends, which imports their packages. notes: what the caller should know."""

    selection_seconds: float
    variants: list[Variant]
    notes: list[str]

    @property
    def compile_seconds(self) -> float:
        return sum(variant.seconds or 0.0 for variant in self.variants)


def warm_up(config: RunConfig) -> WarmUp:
    """Calls each attention site of `config` once in every form that its text lengths may make it take.

    What is compiled depends on dtype, head size, kind of lengths, LSE, text length and card, not on the video's size.
    With a `causal` section these are the calls of a stream's chunk over its KV cache and a text pool. Raises
    ValueError on a model that is not known here, on settings that it cannot follow and on a GPU that is not here,
    AttentionBackendError if a named backend cannot run here.
    """
    model = required_model(config)
    check_settings(model, config)
    wan, generation = model.transformer, config.generation
    latents = model.geometry.latent_shape(1, generation.num_frames, generation.height, generation.width)
    frame_tokens = model.geometry.num_tokens((*latents[:2], wan.patch_size[0], *latents[3:]))
    tokens = model.geometry.num_tokens(latents)
    if config.causal is not None:
        tokens = config.causal.frames_per_chunk * frame_tokens
    # Divided by the same powers of two as the video's own: kernels are compiled apart for numbers that 16 divides.
    queries = QUERIES + tokens % 16
    start = time.perf_counter()
    try:
        device = config.torch_device()
        backends = {role: _backend(config, wan, role, device) for role in _roles(wan)}
    except (ConfigError, AttentionBackendError) as error:
        raise type(error)(
            f"nothing can be compiled here: {error}. Kernels are compiled on the machine whose card will run them"
        ) from error
    selected = time.perf_counter() - start
    variants = []
    with torch.inference_mode():
        for role, backend in backends.items():
            if config.causal is None:
                calls = _calls(config, wan, role, backend, queries)
            else:
                calls = _stream_calls(config, wan, role, backend, queries, frame_tokens)
            for name, compiles, call in calls:
                variants.append(Variant(role, backend.name, name, _seconds(call, device) if compiles else None))
    notes = [note for cls in dict.fromkeys(map(type, backends.values())) if (note := cls.kernel_cache_problem())]
    if device.type == "cpu" and config.device == "auto":
        notes.append("There is no GPU here: the kernels of one are compiled on the machine that has it.")
    return WarmUp(selected, variants, notes)


def _roles(wan: WanConfig) -> list[str]:
    return ["self", "cross_text"] + ["cross_image"] * (wan.image_dim is not None)


def _backend(config: RunConfig, wan: WanConfig, role: str, device: torch.device) -> AttentionBackend:
    if config.causal is not None:
        needs = causal_needs(role, config.attention)
    else:
        needs = CROSS_KV_NEEDS[config.attention.cross_kv] if role == "cross_text" else frozenset()
    heads = (wan.num_attention_heads, wan.attention_head_dim)
    return select_backend(
        getattr(config.attention, role), AttentionSpec(role, *heads, config.torch_dtype(), device, needs=needs)
    )


def _calls(
    config: RunConfig, wan: WanConfig, role: str, backend: AttentionBackend, queries: int
) -> Iterator[tuple[str, bool, Callable[[], torch.Tensor]]]:
    """(what is called, whether that compiles something, the call) for every form that a role's K/V can take."""
    generation, compiles = config.generation, type(backend).compiles_kernels
    batch = max(1, len(generation.prompts))
    batch *= 1 + (generation.cfg == "batched" and generation.guidance_scale > 1)
    heads, device = (wan.num_attention_heads, wan.attention_head_dim), backend.spec.device

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, *heads, dtype=config.torch_dtype(), device=device)

    if role == "self":
        qkv = zeros(batch, queries, 3)
        q, k, v = qkv.unbind(2)
        if device.type == "cuda":  # a kernel of this project, whatever the backend; so is the merge below
            weight, rotary = _norm_and_turns(qkv, queries)
            turn = partial(norm_and_rope, qkv, weight, rotary[:, None], wan.eps)
            yield "QK norm and RoPE", True, lambda: turn()[0]
            q, k, v = turn()
        yield "all keys", compiles, lambda: backend.forward(q, k, v)
        return
    text_length = generation.max_sequence_length
    mode = config.attention.cross_kv if role == "cross_text" else "padded"
    with torch.device("meta"):  # only its attention is called, so its projections need no memory
        site = Attention(8, *heads, role=role, backend=backend, cross_kv=mode, qk_norm=None)
    q, state = zeros(batch, queries), AttentionMetadataState()
    rows = text_length if role == "cross_text" else image_tokens(wan)
    padded = CrossKV(zeros(batch, rows), zeros(batch, rows))
    yield "all keys", compiles, lambda: site.attend(q, padded)
    lens = [1] * batch
    if mode == "packed":
        metadata = state.packed_kv(role, lens, device, max_seqlen_kv=text_length)
        packed = CrossKV(zeros(batch), zeros(batch), metadata)
        yield "packed K/V", compiles, lambda: site.attend(q, packed)
    if mode == "packed_pad_exact":
        if backend.supports_repeated_last_key():
            pads = state.packed_pad_kv(role, lens, text_length, device, formulation="repeated_key")
            repeated = CrossKV(zeros(2 * batch), zeros(2 * batch), pads)
            yield "packed K/V, repeated key", compiles, lambda: site.attend(q, repeated)
        pads = state.packed_pad_kv(role, lens, text_length, device, formulation="merge")
        merged = CrossKV(zeros(batch), zeros(batch), pads, zeros(), zeros())
        yield "packed K/V with LSE, and merge", compiles or device.type == "cuda", lambda: site.attend(q, merged)


def _stream_calls(
    config: RunConfig, wan: WanConfig, role: str, backend: AttentionBackend, queries: int, frame_tokens: int
) -> Iterator[tuple[str, bool, Callable[[], torch.Tensor]]]:
    """The same of a causal stream: a chunk of one row for each branch of guidance."""
    generation, settings, compiles = config.generation, config.causal, type(backend).compiles_kernels
    branches = 1 + (generation.guidance_scale > 1)
    heads, dtype, device = (wan.num_attention_heads, wan.attention_head_dim), config.torch_dtype(), backend.spec.device

    def zeros(tokens: int) -> torch.Tensor:
        return torch.zeros(tokens, *heads, dtype=dtype, device=device)

    q = zeros(branches * queries)
    if role != "self":
        length = generation.max_sequence_length
        starts, lens, total = range(0, branches * length, length), [length] * branches, branches * length
        text = AttentionMetadataState().extent_kv(
            role, starts, lens, total, device, max_seqlen_kv=length, q_lens=[queries] * branches
        )
        yield "a text pool", compiles, lambda: backend.forward(q, zeros(total), zeros(total), text)
        return
    # A window of one frame that is as long as the queries: what is compiled depends on the read and the block size.
    small = CausalConfig(
        frames_per_chunk=1, recent_frames=1, read=settings.read,
        block_size=stream_size(settings, frame_tokens, backend).block_size,
    )  # fmt: skip
    size = stream_size(small, queries, backend, branches=branches)
    cache = PagedKVCache(
        1, *heads, queries, num_blocks=1 + size.num_blocks, block_size=size.block_size, backend=backend, dtype=dtype,
        device=device, read=settings.read, staging_tokens=size.staging_tokens,
    )  # fmt: skip
    session = cache.open_session(recent_frames=1, max_chunk_frames=1, branches=branches)
    with session, session.begin(1) as chunk:
        batch = cache.batch([chunk])

        def attend() -> torch.Tensor:
            cached, layer = CachedAttention(backend), batch.layer(0)
            if device.type != "cuda":
                return cached(q, q, q, layer)
            qkv = zeros(3 * len(q)).view(-1, 3, *heads)
            return cached.from_qkv(qkv, *_norm_and_turns(qkv, len(q)), wan.eps, layer)

        yield f"a KV cache, {batch.read}", compiles or device.type == "cuda", attend


def _norm_and_turns(qkv: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What q and k are normalised by, [2, H · D], and turned by, [tokens, D / 2, 2]."""
    heads, head_dim = qkv.shape[-2:]
    return qkv.new_zeros(2, heads * head_dim), qkv.new_zeros(tokens, head_dim // 2, 2, dtype=torch.float32)


def _seconds(call: Callable[[], torch.Tensor], device: torch.device) -> float:
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
