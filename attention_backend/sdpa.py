"""torch's scaled_dot_product_attention, on any device and for every kind of metadata.

With lengths known on the host, each run of sequences of equal lengths is sliced out and attended to without a mask, so
rows past a length are never read. With lengths known only on the device (graph mode), rows past them are replaced by
zeros and masked, without a host sync. Private aten operators (fused kernels that return the LSE, and torch's own
choice of kernel) are used in this file alone.

Shape letters: B batch, Sq query rows, Skv key rows, H query heads, Hkv key/value heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention_backend.interface import AttentionBackend, AttentionSpec, AttentionTensorLayout
from attention_backend.metadata import AttentionMetadata, ExtentKV, PackedKV, PaddedKV
from attention_backend.reference import accumulation_dtype, chunked_attention

# The math kernel holds all scores at once. Below this it may; above it, a fused kernel or chunks.
MATH_SCORES_BYTES_LIMIT = 256 * 2**20
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]


class SDPABackend(AttentionBackend):
    name: ClassVar[str] = "sdpa"
    preferred_layout: ClassVar[AttentionTensorLayout] = AttentionTensorLayout.HND
    capabilities: ClassVar[frozenset[str]] = frozenset(
        {"varlen", "padding_mask", "paged_kv", "extent_kv", "lse", "causal", "grad"}
    )

    @classmethod
    def unsupported_reasons(cls, spec: AttentionSpec) -> list[str]:
        reasons = super().unsupported_reasons(spec)
        if spec.dtype not in DTYPES:
            reasons.append(f"dtype is {spec.dtype}; it takes {', '.join(map(str, DTYPES))}")
        return reasons

    def attend(self, q, k, v, metadata, *, causal: bool, return_lse: bool):
        scale = self.spec.softmax_scale
        if metadata is None:
            return _attend_dense(q, k, v, scale, causal, return_lse)
        if not _lens_on_host(metadata):
            return _attend_device_lens(q, k, v, metadata, scale, causal, return_lse)
        runs = [_attend_dense(*run, scale, causal, return_lse) for run in _equal_runs(q, k, v, metadata)]
        outs, lses = zip(*runs, strict=True)
        if q.ndim == 4:
            return _cat(outs, dim=0), _cat(lses, dim=0) if return_lse else None
        outs = [out.flatten(0, 1) for out in outs]
        lses = [lse.transpose(0, 1).flatten(1) for lse in lses] if return_lse else None
        return _cat(outs, dim=0), _cat(lses, dim=1) if return_lse else None


def _lens_on_host(metadata: AttentionMetadata) -> bool:
    if torch.compiler.is_compiling():
        return False  # a graph that had read them would serve one layout alone
    packed_q = getattr(metadata, "cu_seqlens_q", None) is not None
    starts_known = not isinstance(metadata, ExtentKV) or metadata.starts is not None
    return starts_known and metadata.kv_lens is not None and not (packed_q and metadata.q_lens is None)


def _equal_runs(q, k, v, metadata) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Neighbours of equal lengths, as views: q [b, q_len, H, D], k and v [b, kv_len, Hkv, D] (of pages: copies)."""
    packed_q, extents = q.ndim == 3, isinstance(metadata, ExtentKV)
    q_lens = metadata.q_lens if packed_q else (q.shape[1],) * q.shape[0]
    lens = list(zip(q_lens, metadata.kv_lens, strict=True))
    first = q_start = kv_start = 0
    while first < len(lens):
        q_len, kv_len = lens[first]
        count = 1
        # Extents may lie anywhere: each is a view by itself, several would be a copy.
        while not extents and first + count < len(lens) and lens[first + count] == lens[first]:
            count += 1
        rows = slice(first, first + count)
        if isinstance(metadata, PaddedKV):
            keys, values = k[rows, :kv_len], v[rows, :kv_len]
        elif extents:
            keys, values = (x[None, metadata.starts[first] : metadata.starts[first] + kv_len] for x in (k, v))
        elif isinstance(metadata, PackedKV):
            packed = slice(kv_start, kv_start + count * kv_len)
            keys, values = (x[packed].unflatten(0, (count, kv_len)) for x in (k, v))
        else:
            table = metadata.block_table[rows, : -(-kv_len // metadata.block_size)]
            keys, values = (_gather_blocks(x, table)[:, :kv_len] for x in (k, v))
        queries = q[q_start : q_start + count * q_len].unflatten(0, (count, q_len)) if packed_q else q[rows]
        yield queries, keys, values
        first, q_start, kv_start = first + count, q_start + count * q_len, kv_start + count * kv_len


def _gather_blocks(pool: torch.Tensor, block_table: torch.Tensor) -> torch.Tensor:
    """[blocks, block_size, Hkv, D] through [B, width] to [B, width * block_size, Hkv, D]."""
    return pool.index_select(0, block_table.flatten()).unflatten(0, block_table.shape).flatten(1, 2)


def _cat(parts, dim: int) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


def _attend_device_lens(q, k, v, metadata, scale: float, causal: bool, return_lse: bool):
    """Lengths that only the device knows: all is brought to padded form, zeroed past the lengths and masked."""
    if q.numel() == 0 or metadata.max_seqlen_kv == 0:
        return _no_keys(q, return_lse)
    cu_seqlens_q = getattr(metadata, "cu_seqlens_q", None)
    packed = isinstance(metadata, PackedKV)
    kv_lens = (metadata.cu_seqlens_kv.diff() if packed else metadata.seqused_kv).unsqueeze(1)
    k, v = (_padded_keys(x, metadata, kv_lens) for x in (k, v))
    q_padded, q_lens = q, q.shape[1]
    if cu_seqlens_q is not None:
        rows = torch.arange(metadata.max_seqlen_q, device=q.device)
        q_padded = q[(cu_seqlens_q[:-1, None] + rows).clamp(max=q.shape[0] - 1)]
        q_lens = cu_seqlens_q.diff().unsqueeze(1)
    num_visible = kv_lens
    if causal:
        rows = torch.arange(1, q_padded.shape[1] + 1, device=q.device)
        num_visible = torch.minimum(kv_lens, (kv_lens - q_lens + rows).clamp(min=0))
    out, lse = _attend(q_padded, k, v, scale, return_lse, num_visible=num_visible)
    out = out.masked_fill((num_visible == 0)[..., None, None], 0.0)
    if cu_seqlens_q is None:
        return out, lse

    tokens = torch.arange(q.shape[0], device=q.device, dtype=torch.int32)
    sequence = torch.searchsorted(cu_seqlens_q[1:], tokens, right=True).clamp(max=cu_seqlens_q.shape[0] - 2)
    row = (tokens - cu_seqlens_q[sequence]).clamp(max=metadata.max_seqlen_q - 1)
    beyond = tokens >= cu_seqlens_q[-1]  # rows of a buffer of fixed capacity that no sequence uses
    out = out[sequence, row].masked_fill(beyond[:, None, None], 0.0)
    return out, lse.transpose(1, 2)[sequence, row].T.masked_fill(beyond, -torch.inf) if return_lse else None


def _padded_keys(x: torch.Tensor, metadata: AttentionMetadata, kv_lens: torch.Tensor) -> torch.Tensor:
    """K or V as [B, max_seqlen_kv, Hkv, D] with zeros past kv_lens [B, 1], whatever was there: 0 times NaN is NaN."""
    positions = torch.arange(metadata.max_seqlen_kv, device=x.device)
    if isinstance(metadata, PaddedKV):
        x = x[:, : metadata.max_seqlen_kv]
    elif isinstance(metadata, PackedKV):
        x = _rows_from(metadata.cu_seqlens_kv[:-1], positions, x)
    elif isinstance(metadata, ExtentKV):
        x = _rows_from(metadata.starts_kv[:-1], positions, x)
    else:
        table = metadata.block_table
        used = torch.arange(table.shape[1], device=x.device) * metadata.block_size < kv_lens
        x = _gather_blocks(x, table.masked_fill(~used, 0))[:, : metadata.max_seqlen_kv]
    return x.masked_fill((positions >= kv_lens)[..., None, None], 0.0)


def _rows_from(starts: torch.Tensor, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """[B, len(positions), Hkv, D]: rows of x [rows, Hkv, D] behind each start; past the end of x, its last row."""
    x = x if len(x) else x.new_zeros(1, *x.shape[1:])
    return x[(starts[:, None] + positions).clamp(max=len(x) - 1)]


def _attend_dense(q, k, v, scale: float, causal: bool, return_lse: bool):
    """q [B, Sq, H, D] over all of k, v [B, Skv, Hkv, D], whose rows are all real."""
    q_len, kv_len = q.shape[1], k.shape[1]
    if kv_len == 0 or q.numel() == 0:
        return _no_keys(q, return_lse)
    if not causal or q_len == 1:
        return _attend(q, k, v, scale, return_lse)
    if q_len == kv_len:
        return _attend(q, k, v, scale, return_lse, is_causal=True)
    if q_len < kv_len:
        num_visible = torch.arange(kv_len - q_len + 1, kv_len + 1, device=q.device).unsqueeze(0)
        return _attend(q, k, v, scale, return_lse, num_visible=num_visible)
    blind = q_len - kv_len
    out, lse = _attend(q[:, blind:], k, v, scale, return_lse, is_causal=True)
    return F.pad(out, (0, 0, 0, 0, blind, 0)), F.pad(lse, (blind, 0), value=-torch.inf) if return_lse else None


def _no_keys(q: torch.Tensor, return_lse: bool):
    """0 and -inf. Filled, not made anew, so that a backward pass goes through (with zero gradients)."""
    out = q.masked_fill(q.new_ones((), dtype=torch.bool), 0.0)
    if not return_lse:
        return out, None
    shape = (q.shape[1], q.shape[0]) if q.ndim == 3 else (q.shape[0], q.shape[2], q.shape[1])
    return out, q.new_full(shape, -torch.inf, dtype=accumulation_dtype(q.dtype))


def _attend(q, k, v, scale: float, return_lse: bool, *, is_causal: bool = False, num_visible=None):
    """The kernel: q [B, Sq, H, D], k, v [B, Skv, Hkv, D]; no dimension is 0.

    is_causal only with Sq == Skv. num_visible, int [B or 1, Sq or 1]: how many of the first keys a row sees; where it
    is 0 the output is undefined.
    """
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = lse = None
    if not return_lse:
        out = _fused(q, k, v, scale, is_causal, num_visible)
    elif num_visible is None and not (torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))):
        # The fused kernels' LSE is cut off from the graph: with gradients, the chunked one.
        out, lse = _fused_with_lse(q, k, v, scale, is_causal)
    if out is None:
        if is_causal:
            num_visible = torch.arange(1, q.shape[2] + 1, device=q.device).unsqueeze(0)
        out, lse = chunked_attention(q, k, v, softmax_scale=scale, num_visible=num_visible)
    return out.transpose(1, 2), lse


def _fused(q, k, v, scale: float, is_causal: bool, num_visible) -> torch.Tensor | None:
    """F.scaled_dot_product_attention on [B, H, S, D], or None where it would hold more scores than the limit."""
    batch, num_heads, q_len, _ = q.shape
    kv_len = k.shape[2]
    scores_bytes = batch * num_heads * q_len * kv_len * 4
    mask = None
    if num_visible is not None:
        if num_visible.numel() * kv_len * 4 > MATH_SCORES_BYTES_LIMIT:
            return None  # the mask itself is that large once a kernel has it in floating point
        mask = (torch.arange(kv_len, device=q.device) < num_visible.clamp(min=1).unsqueeze(-1)).unsqueeze(1)
    options = {"is_causal": is_causal, "scale": scale, "enable_gqa": num_heads != k.shape[1]}
    if scores_bytes <= MATH_SCORES_BYTES_LIMIT:
        return F.scaled_dot_product_attention(q, k, v, mask, **options)
    if torch.compiler.is_compiling():
        # The choice cannot be traced. Without the math kernel, a shape that no fused kernel takes is an error.
        if options["enable_gqa"] and q.is_cuda:
            k, v, options["enable_gqa"] = *_repeat_heads(num_heads, k, v), False
        with sdpa_kernel(FUSED):
            return F.scaled_dot_product_attention(q, k, v, mask, **options)
    if torch._fused_sdp_choice(q, k, v, mask, **options) > 0:
        return F.scaled_dot_product_attention(q, k, v, mask, **options)
    if options["enable_gqa"]:
        # Some fused kernels take no groups, and repeated keys are small beside the scores.
        return _fused(q, *_repeat_heads(num_heads, k, v), scale, is_causal, num_visible)
    return None


def _fused_with_lse(q, k, v, scale: float, is_causal: bool) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The private operators behind scaled_dot_product_attention that also return the LSE; (None, None) if none fits."""
    dtype, head_dim, aten = q.dtype, q.shape[3], torch.ops.aten
    if q.device.type == "cpu" and hasattr(aten, "_scaled_dot_product_flash_attention_for_cpu"):
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, scale=scale)
    if q.device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return None, None
    if dtype != torch.float32 and head_dim % 8 == 0 and head_dim <= 256 and _has(aten, "flash", q.device):
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=scale)
        return out, lse
    if head_dim * dtype.itemsize % 16 == 0 and _has(aten, "efficient", q.device):
        k, v = _repeat_heads(q.shape[1], k, v)
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, is_causal, scale=scale)
        return out, lse[:, :, : q.shape[2]]  # its rows are padded to a multiple of 32
    return None, None


def _has(aten, kind: str, device: torch.device) -> bool:
    """Whether this torch has the private operator, and the device runs it."""
    min_major = {"flash": 8, "efficient": 5}[kind]
    found = hasattr(aten, f"_scaled_dot_product_{kind}_attention")
    return found and torch.cuda.get_device_properties(device).major >= min_major


def _repeat_heads(num_heads: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if num_heads == k.shape[1]:
        return k, v
    return tuple(x.repeat_interleave(num_heads // x.shape[1], dim=1) for x in (k, v))
