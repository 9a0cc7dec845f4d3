"""One operator that writes a chunk's K/V into a cache and attends to what is visible, the chunk included.

torch.compile sees it as one node that mutates the cache's tensors, so a block that uses it compiles fullgraph. The
cache's tensors and the metadata's are arguments and nothing names a layer, so that one graph serves all layers, all
sessions, and windows that fill, are full, or slide.
"""

from __future__ import annotations

import functools

import torch

from attention_backend.interface import AttentionBackend, AttentionBackendError, AttentionSpec
from attention_backend.kv_cache.batch import LayerKV
from attention_backend.kv_cache.errors import KVCacheError
from attention_backend.kv_cache.rows import copy_rows
from attention_backend.metadata import AttentionMetadata, ExtentKV, PackedKV, PaddedKV, PagedKV
from attention_backend.selection import backend_classes


class CachedAttention:
    """Attention of a chunk over a cache, through a backend that is registered under its name."""

    def __init__(self, backend: AttentionBackend) -> None:
        registered = backend_classes().get(backend.name)
        if registered is not type(backend):
            # The operator finds the backend by name: another class under that name would be run in its place.
            raise AttentionBackendError(
                f"backend {backend.name!r} is a {type(backend).__qualname__}, which is not registered under that name; "
                "register it with register_backend under a name of its own"
            )
        self.backend = backend
        self._call = (backend.name, backend.spec.role, backend.spec.softmax_scale)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: LayerKV) -> torch.Tensor:
        """Writes k, v at layer.slots, then attends; returns out like q.

        q [total_q, H, D], k and v [total_q, Hkv, D]: the tokens of all rows one after another. ValueError, before
        anything is written, if they do not fit each other or the cache.
        """
        _check(self.backend.spec, q, k, v, layer)
        metadata = layer.metadata
        if isinstance(layer.slots, slice):
            rows = (len(layer.k), -1)
            layer.k[:, layer.slots], layer.v[:, layer.slots] = k.unflatten(0, rows), v.unflatten(0, rows)
            return self.backend.forward(q.unflatten(0, rows), layer.k, layer.v, metadata).flatten(0, 1)
        form, lens, places, cu_seqlens_q, max_seqlen_q = _operands(metadata)
        return write_and_attend(
            q,
            k,
            v,
            layer.k,
            layer.v,
            layer.slots,
            form,
            lens,
            places,
            metadata.max_seqlen_kv,
            cu_seqlens_q,
            max_seqlen_q,
            *self._call,
        )


def _check(spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: LayerKV) -> None:
    dtypes = {x.dtype for x in (q, k, v, layer.k, layer.v)}
    if dtypes != {spec.dtype}:
        raise KVCacheError(
            f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}, the cache {layer.k.dtype}, the backend was selected for "
            f"{spec.dtype}; they must be one dtype: cast q, k and v, or make the cache in theirs"
        )
    if len({x.device for x in (q, k, v, layer.k, layer.v)}) != 1:
        raise KVCacheError(f"q is on {q.device}, k on {k.device}, v on {v.device}, the cache on {layer.k.device}")
    if not (layer.k.is_contiguous() and layer.v.is_contiguous()):
        raise KVCacheError(
            f"the cache's tensors have strides {layer.k.stride()}, {layer.v.stride()}; make them contiguous"
        )
    heads, tail = (spec.num_heads, spec.head_dim), tuple(layer.k.shape[-2:])
    if q.ndim != 3 or tuple(q.shape[1:]) != heads:
        raise KVCacheError(
            f"q has shape {tuple(q.shape)}; expected [total_q, H, D] with H, D = {heads}, which the backend was "
            "selected for"
        )
    if k.ndim != 3 or k.shape != v.shape or k.shape[0] != q.shape[0] or tuple(k.shape[1:]) != tail:
        raise KVCacheError(
            f"q, k, v have shapes {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}; expected k and v "
            f"[total_q, Hkv, D] with q's total_q and the cache's Hkv, D = {tail}"
        )
    # A compiled graph is tied to every host value that it has read, and this one is a layout's.
    if isinstance(layer.metadata, PagedKV) and not torch.compiler.is_compiling():
        last = layer.metadata.max_block_id
        if last is not None and last >= len(layer.k):
            raise KVCacheError(f"the block table names block {last} of a pool of {len(layer.k)} blocks")
    if isinstance(layer.slots, torch.Tensor):
        rows = len(layer.k) if isinstance(layer.metadata, PaddedKV) else 1
        if rows * layer.slots.shape[0] != q.shape[0]:
            raise KVCacheError(
                f"q has {q.shape[0]} tokens but the batch was made for {rows * layer.slots.shape[0]}; give the tokens "
                "of all rows one after another, extra tokens included"
            )
    # The operator cuts gradients off, as do the kernels behind it.
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise AttentionBackendError("a KV cache is inference-only and q, k or v require grad; use torch.no_grad()")


def _operands(metadata: AttentionMetadata):
    """(form, lens, places, cu_seqlens_q, max_seqlen_q): all of the metadata that crosses the operator."""
    if isinstance(metadata, PaddedKV):
        return "padded", metadata.seqused_kv, None, None, None
    q_side = (metadata.cu_seqlens_q, metadata.max_seqlen_q)
    if isinstance(metadata, PackedKV):
        return "packed", metadata.cu_seqlens_kv, None, *q_side
    if isinstance(metadata, PagedKV):
        return "paged", metadata.seqused_kv, metadata.block_table, *q_side
    return "extent", metadata.seqused_kv, metadata.starts_kv, *q_side


def run_write_and_attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    form: str,
    lens: torch.Tensor,
    places: torch.Tensor | None,
    max_seqlen_kv: int,
    cu_seqlens_q: torch.Tensor | None,
    max_seqlen_q: int | None,
    backend: str,
    role: str,
    softmax_scale: float,
) -> torch.Tensor:
    padded = form == "padded"
    if padded:
        q, k, v = (x.unflatten(0, (k_cache.shape[0], -1)) for x in (q, k, v))
        copy_rows(k_cache, v_cache, slots, k, v)
    else:
        k_rows, v_rows = (x.view(1, -1, *x.shape[-2:]) for x in (k_cache, v_cache))
        copy_rows(k_rows, v_rows, slots, k[None], v[None])
    if form in ("extent", "packed"):
        k_cache, v_cache = (x.view(-1, *x.shape[-2:]) for x in (k_cache, v_cache))
    spec = _spec(role, q.shape[-2], q.shape[-1], q.dtype, q.device, k.shape[-2], softmax_scale)
    metadata = _metadata(form, lens, places, max_seqlen_kv, cu_seqlens_q, max_seqlen_q, k_cache)
    out = _instance(backend_classes()[backend], spec).forward(q, k_cache, v_cache, metadata)
    return out.flatten(0, 1) if padded else out


def _metadata(form, lens, places, max_seqlen_kv, cu_seqlens_q, max_seqlen_q, k_cache) -> AttentionMetadata:
    # Lengths on a CPU are read for nothing, and known ones let the reference slice instead of mask.
    on_host = lens.device.type == "cpu"

    def host(x: torch.Tensor) -> tuple[int, ...] | None:
        return tuple(x.tolist()) if on_host else None

    def lengths(ends: torch.Tensor | None) -> tuple[int, ...] | None:
        return host(ends.diff()) if on_host and ends is not None else None

    if form == "padded":
        return PaddedKV(lens, max_seqlen_kv, host(lens))
    q_side = {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q, "q_lens": lengths(cu_seqlens_q)}
    if form == "packed":
        return PackedKV(lens, max_seqlen_kv, lengths(lens), **q_side)
    if form == "paged":
        return PagedKV(places, lens, k_cache.shape[1], max_seqlen_kv, kv_lens=host(lens), **q_side)
    return ExtentKV(places, lens, max_seqlen_kv, starts=host(places[:-1]), kv_lens=host(lens), **q_side)


@functools.cache
def _spec(role, num_heads, head_dim, dtype, device, num_kv_heads, softmax_scale) -> AttentionSpec:
    return AttentionSpec(role, num_heads, head_dim, dtype, device, num_kv_heads, softmax_scale)


@functools.cache
def _instance(backend: type[AttentionBackend], spec: AttentionSpec) -> AttentionBackend:
    return backend(spec)


write_and_attend = torch.library.custom_op(
    "attention_backend::write_and_attend", run_write_and_attend, mutates_args=("k_cache", "v_cache")
)


@write_and_attend.register_fake
def _(q, *rest) -> torch.Tensor:
    return q.new_empty(q.shape)
