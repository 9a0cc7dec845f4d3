"""Operators that write a chunk's K/V into a cache and attend to what is visible, the chunk included, in one call.

`write_and_attend` takes q, k and v as they are to be read, on any device. `norm_rope_write_and_attend` takes them as
one projection gives them, on a CUDA device: the pass that normalises and turns q and k writes k and v, and so costs
less. Models on such a device take the second.

torch.compile sees one node that mutates the cache's tensors, so a block that uses it compiles fullgraph. The cache's
tensors and the metadata's are arguments and nothing names a layer, so that one graph serves all layers, all sessions,
and windows that fill, are full, or slide.
"""

from __future__ import annotations

import functools

import torch

from attention_backend.interface import AttentionBackend, AttentionBackendError, AttentionSpec
from attention_backend.kernel_operators import register_operator
from attention_backend.kv_cache.batch import LayerKV
from attention_backend.kv_cache.errors import KVCacheError
from attention_backend.kv_cache.rows import copy_rows
from attention_backend.metadata import AttentionMetadata, ExtentKV, PackedKV, PaddedKV, PagedKV
from attention_backend.selection import backend_classes

GRAD_PROBLEM = "a KV cache is inference-only, and what it was given requires grad; use torch.no_grad()"


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
        return write_and_attend(q, k, v, *_cache_operands(layer), *self._call)

    def from_qkv(
        self,
        qkv: torch.Tensor,
        norm_weight: torch.Tensor | None,
        rotary: torch.Tensor | None,
        eps: float,
        layer: LayerKV,
    ) -> torch.Tensor:
        """The same from one projection of q, k and v, on a CUDA device: q and k are normalised and turned, and k and v
        written, in one pass; returns out [total_q, H, D].

        qkv [total_q, 3, H, D]; norm_weight [2, H · D] of an RMS norm of q and of k over all heads, with eps; rotary
        fp32 [rows, D / 2, 2], cosines and sines: token i is turned by row i % rows. None leaves a step out. ValueError,
        before anything is written, as above, and for a layer whose slots are a slice.
        """
        if qkv.ndim != 4 or qkv.shape[1] != 3:
            raise KVCacheError(f"qkv has shape {tuple(qkv.shape)}; expected [total_q, 3, H, D]")
        if not qkv.is_cuda or isinstance(layer.slots, slice):
            raise KVCacheError(
                f"qkv is on {qkv.device} and slots are a {type(layer.slots).__name__}; from_qkv takes tensors on a "
                "CUDA device: normalise and turn q and k, and call this object with q, k and v"
            )
        _check(self.backend.spec, *qkv.unbind(1), layer)
        total, (heads, head_dim) = qkv.shape[0], qkv.shape[2:]
        for name, x in (("norm_weight", norm_weight), ("rotary", rotary), ("slots", layer.slots)):
            if x is not None and x.device != qkv.device:
                raise KVCacheError(f"{name} is on {x.device}, qkv on {qkv.device}: move it there")
        if norm_weight is not None and torch.is_grad_enabled() and norm_weight.requires_grad:
            raise AttentionBackendError(GRAD_PROBLEM)
        if norm_weight is not None and tuple(norm_weight.shape) != (2, heads * head_dim):
            raise KVCacheError(
                f"norm_weight has shape {tuple(norm_weight.shape)}; expected [2, H · D] = {(2, heads * head_dim)}"
            )
        if rotary is not None:
            _check_rotary_rows(rotary, total, head_dim)
        return norm_rope_write_and_attend(qkv, norm_weight, rotary, eps, *_cache_operands(layer), *self._call)


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
        raise AttentionBackendError(GRAD_PROBLEM)


def _check_rotary_rows(rotary: torch.Tensor, total: int, head_dim: int) -> None:
    shape = tuple(rotary.shape)
    fits = rotary.dtype == torch.float32 and len(shape) == 3 and shape[1] * 2 == head_dim and shape[2] == 2
    if not fits or not shape[0] or total % shape[0]:
        raise KVCacheError(
            f"rotary is {rotary.dtype} of shape {shape} for {total} tokens and head_dim {head_dim}; expected float32 "
            "[rows, head_dim / 2, 2] with rows that divide the tokens"
        )


def _cache_operands(layer: LayerKV) -> tuple:
    """k_cache to max_seqlen_q of the operators below: all of a cache and its metadata that crosses them."""
    metadata, cache = layer.metadata, (layer.k, layer.v, layer.slots)
    if isinstance(metadata, PaddedKV):
        return *cache, "padded", metadata.seqused_kv, None, metadata.max_seqlen_kv, None, None
    q_side = (metadata.max_seqlen_kv, metadata.cu_seqlens_q, metadata.max_seqlen_q)
    if isinstance(metadata, PackedKV):
        return *cache, "packed", metadata.cu_seqlens_kv, None, *q_side
    if isinstance(metadata, PagedKV):
        return *cache, "paged", metadata.seqused_kv, metadata.block_table, *q_side
    return *cache, "extent", metadata.seqused_kv, metadata.starts_kv, *q_side


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
    k_rows, v_rows = _rows(form, k_cache, v_cache)
    copy_rows(k_rows, v_rows, slots, *(x.unflatten(0, (len(k_rows), -1)) for x in (k, v)))
    layout = (form, lens, places, max_seqlen_kv, cu_seqlens_q, max_seqlen_q)
    return _attend(q, k_cache, v_cache, layout, backend, role, softmax_scale)


def run_norm_rope_write_and_attend(
    qkv: torch.Tensor,
    norm_weight: torch.Tensor | None,
    rotary: torch.Tensor | None,
    eps: float,
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
    from attention_backend.qk_norm_rope_triton import norm_rope

    q, _ = norm_rope(qkv, norm_weight, rotary, eps, (*_rows(form, k_cache, v_cache), slots))
    layout = (form, lens, places, max_seqlen_kv, cu_seqlens_q, max_seqlen_q)
    return _attend(q, k_cache, v_cache, layout, backend, role, softmax_scale)


def _rows(form: str, *caches: torch.Tensor) -> list[torch.Tensor]:
    """Caches as [B, rows, Hkv, D], whose rows the slots count."""
    batch = caches[0].shape[0] if form == "padded" else 1
    return [x.view(batch, -1, *x.shape[-2:]) for x in caches]


def _attend(q, k_cache, v_cache, layout: tuple, backend: str, role: str, softmax_scale: float) -> torch.Tensor:
    form = layout[0]
    if form == "padded":
        q = q.unflatten(0, (k_cache.shape[0], -1))
    elif form != "paged":
        k_cache, v_cache = (x.view(-1, *x.shape[-2:]) for x in (k_cache, v_cache))
    spec = _spec(role, q.shape[-2], q.shape[-1], q.dtype, q.device, k_cache.shape[-2], softmax_scale)
    out = _instance(backend_classes()[backend], spec).forward(q, k_cache, v_cache, _metadata(*layout, k_cache))
    # What an operator returns is new: a compiled graph would go on with what it was given.
    if _storage(out) in map(_storage, (q, k_cache, v_cache)):
        raise RuntimeError(f"{backend} returned a tensor that it was given, or a part of one; return a new one")
    return out.flatten(0, 1) if form == "padded" else out


def _storage(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


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


def like_q(q: torch.Tensor, *rest) -> torch.Tensor:
    return q.new_empty(q.shape)


def like_q_of_qkv(qkv: torch.Tensor, *rest) -> torch.Tensor:
    return qkv.new_empty(qkv.shape[0], *qkv.shape[2:])


_CACHES = ("k_cache", "v_cache")
write_and_attend = register_operator("write_and_attend", run_write_and_attend, like_q, _CACHES)
norm_rope_write_and_attend = register_operator(
    "norm_rope_write_and_attend", run_norm_rope_write_and_attend, like_q_of_qkv, _CACHES
)
