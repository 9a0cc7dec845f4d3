"""The attention module of visual generation models: projections, QK norm, RoPE, and a backend for each role."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from attention_backend import (
    AttentionBackend,
    AttentionBackendError,
    AttentionMetadataState,
    AttentionSpec,
    PackedKV,
    PackedPadKV,
    merge_pad_rows,
    pad_formulation,
    select_backend,
)
from attention_backend.kv_cache import CachedAttention, LayerKV
from attention_backend.metadata import ExtentKV, host_lens, host_mask
from visual_gen.modules.block_causal import BlockMask, attend_block_mask
from visual_gen.modules.cross_kv import CROSS_KV_NEEDS, CrossKV, append_rows, pack_rows
from visual_gen.modules.qk_norm_rope import norm_and_rope, rotary_rows
from visual_gen.modules.rope import check_rotary


class Attention(nn.Module):
    """Multi-head attention with a backend chosen for its role.

    role "self": fused QKV, QK norm, RoPE. role "cross_text": own Q and output, fused KV; `cross_kv` says how rows of
    unequal length are kept ("padded", "packed", "packed_pad_exact"). role "cross_image": fused KV only; it attends
    with the text site's Q and shares its output projection, as Wan's image-to-video models do.

    backend: a name or "auto" (chosen here and again when the module moves to another device or dtype), or an
    AttentionBackend that the owner of several layers has chosen once for all. needs: what the site asks of a backend
    beyond its role, such as {"grad"} for training. qk_norm "rms_norm_across_heads" normalises over all heads together;
    None leaves it out. kv_size: width of the rows that a cross site projects (hidden_size if None).
    Raises ValueError on unknown or contradictory settings, AttentionBackendError if the backend cannot serve the site.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        *,
        role: str,
        backend: str | AttentionBackend = "auto",
        attention_metadata_state: AttentionMetadataState | None = None,
        qk_norm: str | None = "rms_norm_across_heads",
        eps: float = 1e-6,
        cross_kv: str = "padded",
        kv_size: int | None = None,
        needs: Iterable[str] = (),
    ) -> None:
        super().__init__()
        if cross_kv not in CROSS_KV_NEEDS:
            raise ValueError(f"cross_kv is {cross_kv!r}; it must be one of {', '.join(CROSS_KV_NEEDS)}")
        if cross_kv != "padded" and role != "cross_text":
            raise ValueError(f"cross_kv is {cross_kv!r} at a {role!r} site; only 'cross_text' has ragged rows")
        if kv_size is not None and role == "self":
            raise ValueError(f"kv_size is {kv_size} at a 'self' site, which projects its own rows: leave it out")
        if qk_norm not in (None, "rms_norm_across_heads"):
            raise ValueError(f"qk_norm is {qk_norm!r}; it must be 'rms_norm_across_heads' or None")
        self.role, self.cross_kv, self.eps = role, cross_kv, eps
        self.num_heads, self.head_dim = num_heads, head_dim
        self.needs = frozenset(needs) | CROSS_KV_NEEDS[cross_kv]
        self.attention_metadata_state = attention_metadata_state or AttentionMetadataState()
        inner, kv_size = num_heads * head_dim, kv_size or hidden_size
        # Norm weights of q and k lie in one tensor, so that self-attention normalises both in one pass.
        normed = {"self": 2, "cross_text": 2, "cross_image": 1}.get(role, 0)
        self.qk_norm_weight = nn.Parameter(torch.ones(normed, inner)) if qk_norm else None
        if role == "self":
            self.to_qkv = nn.Linear(hidden_size, 3 * inner)
        else:
            self.to_kv = nn.Linear(kv_size, 2 * inner)
        if role == "cross_text":
            self.to_q = nn.Linear(hidden_size, inner)
        if role != "cross_image":
            self.to_out = nn.Linear(inner, hidden_size)
        self._backend_name = backend if isinstance(backend, str) else None
        self.cached: CachedAttention | None = None  # what a cache is read through; set by the owner, one for all layers
        spec = self.spec()  # checks the role also where a backend is given
        self.backend = select_backend(backend, spec) if isinstance(backend, str) else backend
        self._check_backend()

    def spec(self) -> AttentionSpec:
        """What this site asks of a backend, from its weights' dtype and device."""
        weight = self.to_qkv.weight if self.role == "self" else self.to_kv.weight
        return AttentionSpec(self.role, self.num_heads, self.head_dim, weight.dtype, weight.device, needs=self.needs)

    def _check_backend(self) -> None:
        """Reads heads and capabilities from the backend as it stands, wrappers included."""
        found = (self.backend.spec.num_heads, self.backend.spec.num_kv_heads, self.backend.spec.head_dim)
        if found != (self.num_heads, self.num_heads, self.head_dim):
            raise AttentionBackendError(
                f"{self.backend.name} was built for heads, key/value heads and head_dim {found}; this site has "
                f"{(self.num_heads, self.num_heads, self.head_dim)}"
            )
        able = {"varlen": self.backend.supports_varlen, "lse": self.backend.supports_lse}
        for need in sorted(CROSS_KV_NEEDS[self.cross_kv]):
            if not able[need]():
                raise AttentionBackendError(
                    f"cross_kv {self.cross_kv!r} needs {need!r} and {self.backend.name} has no support for it; "
                    "use cross_kv 'padded' or another backend for cross_text"
                )

    def _apply(self, fn, recurse: bool = True):
        super()._apply(fn, recurse)
        spec = self.spec()
        moved = (spec.device, spec.dtype) != (self.backend.spec.device, self.backend.spec.dtype)
        if self._backend_name is not None and moved:
            self.backend = select_backend(self._backend_name, spec)
        return self

    def forward(
        self,
        x: torch.Tensor,
        kv: CrossKV | None = None,
        rotary: torch.Tensor | None = None,
        *,
        cache: LayerKV | None = None,
        block_mask: BlockMask | None = None,
    ) -> torch.Tensor:
        """x [B, S, hidden_size] → [B, S, hidden_size].

        For role "self": rotary, complex [S, 1, D / 2] or [B, S, 1, D / 2], or its parts (None: no position); cache,
        what a KV cache gives this layer: x's tokens are written there and attend to what is visible there; block_mask:
        rows attend as FlexAttention's mask says. kv: the CrossKV of a "cross_text" site.
        """
        if self.role == "self":
            if kv is not None:
                raise ValueError("a 'self' site attends to its own rows: leave kv out, or make a 'cross_text' site")
            if cache is not None and block_mask is not None:
                raise ValueError("a cache and a block_mask both say what is visible: give one of them")
            if rotary is not None and not torch.compiler.is_compiling():
                check_rotary(rotary, *x.shape[:2], self.head_dim)
            qkv = self.project_qkv(x)
            if cache is not None:
                out = self._attend_cache(qkv, rotary, cache)
            else:
                q, k, v = norm_and_rope(qkv, self.qk_norm_weight, rotary, self.eps)
                if block_mask is not None:
                    out = attend_block_mask(q, k, v, block_mask, self.backend.spec.softmax_scale)
                else:
                    out = self.backend.forward(q, k, v)
            return self.to_out(out.flatten(2))
        if cache is not None or block_mask is not None:
            raise ValueError(f"a {self.role!r} site sees all of its text or image: leave cache and block_mask out")
        if self.role == "cross_image":
            raise ValueError("a 'cross_image' site has no Q of its own: call attend with the text site's project_q")
        if rotary is not None:
            raise ValueError("a 'cross_text' site has no positions: leave rotary out")
        _check_cross_kv(kv)
        return self.to_out(self.attend(self.project_q(x), kv).flatten(2))

    def project_qkv(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, S, hidden_size] → q, k and v [B, S, 3, H, D], not normalised yet."""
        return self.to_qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim))

    def _attend_cache(self, qkv: torch.Tensor, rotary: torch.Tensor | None, cache: LayerKV) -> torch.Tensor:
        if self.cached is None:
            raise ValueError("this site was given no CachedAttention: set cached = CachedAttention(backend)")
        if qkv.is_cuda and isinstance(cache.slots, torch.Tensor):
            rows = rotary_rows(rotary)
            out = self.cached.from_qkv(qkv.flatten(0, 1), self.qk_norm_weight, rows, self.eps, cache)
        else:
            q, k, v = norm_and_rope(qkv, self.qk_norm_weight, rotary, self.eps)
            out = self.cached(*(y.flatten(0, 1) for y in (q, k, v)), cache)
        return out.unflatten(0, qkv.shape[:2])

    def project_q(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, S, hidden_size] → normalised q [B, S, H, D] of a "cross_text" site."""
        q = self.to_q(x)
        if self.qk_norm_weight is not None:
            q = F.rms_norm(q, q.shape[-1:], self.qk_norm_weight[0], self.eps)  # in fp32, rounded at the end
        return q.unflatten(-1, (self.num_heads, self.head_dim))

    def project_kv(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """rows [..., kv_size] of text or image → k (normalised), v [..., H, D], which may be views of one tensor."""
        k, v = self.to_kv(rows).chunk(2, dim=-1)
        if self.qk_norm_weight is not None:
            k = F.rms_norm(k, k.shape[-1:], self.qk_norm_weight[-1], self.eps)
        heads = (self.num_heads, self.head_dim)
        return k.unflatten(-1, heads), v.unflatten(-1, heads)

    def make_cross_kv(
        self,
        rows: Sequence[torch.Tensor],
        padded_len: int,
        pad_row: torch.Tensor | None = None,
        *,
        index: Sequence[int] | None = None,
        fixed_capacity: bool = False,
    ) -> CrossKV:
        """Keys and values of a ragged batch, in the form that `cross_kv` asks for; independent of step and timestep.

        rows: the real rows [n, kv_size] of each sequence, n at most padded_len. pad_row [1, kv_size]: what stands
        after them up to padded_len; needed if any is shorter. index: for each sequence of the batch, which of `rows`
        it attends to (None: its own), so that sequences that share rows share their projection. fixed_capacity:
        packed rows lie in a buffer for B · padded_len rows, so that a compiled or captured step takes every layout.
        "packed_pad_exact" takes the formulation that is fastest for the layout. Raises ValueError on bad rows.
        """
        if self.role == "self":
            raise ValueError("a 'self' site attends to its own rows: make a 'cross_text' site for rows of text")
        width = self.to_kv.in_features
        for i, x in enumerate(rows):
            _check_rows(f"rows[{i}]", x, (None, width))
        lens = host_lens("lengths of rows", [len(x) for x in rows], padded_len)
        needs_pad = min(lens) < padded_len and self.cross_kv != "packed"
        if needs_pad and pad_row is None:
            raise ValueError(f"rows have lengths {lens} of {padded_len}: give pad_row, which stands behind them")
        if pad_row is not None:
            _check_rows("pad_row", pad_row, (1, width))
        order = range(len(rows)) if index is None else host_lens("index", index, len(rows) - 1)
        # Each sequence is projected alone: the bits of a matrix product depend on how many rows it has, and a prompt's
        # must not depend on its neighbours.
        projected = {i: self.project_kv(rows[i]) for i in dict.fromkeys(order)}
        keys, values = zip(*(projected[i] for i in order), strict=True)
        pad = None
        if needs_pad:
            pad = tuple(x[0].clone() for x in self.project_kv(pad_row))  # no view: it would keep K and V together
        return self.arrange_kv(keys, values, padded_len, pad, fixed_capacity=fixed_capacity)

    def arrange_kv(
        self,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        padded_len: int,
        pad: tuple[torch.Tensor, torch.Tensor] | None,
        *,
        fixed_capacity: bool = False,
    ) -> CrossKV:
        """make_cross_kv from rows that are projected already: keys, values [n, H, D] of each sequence.

        pad: k and v [H, D] of the pad row; may be None where no sequence is short, or in mode "packed".
        """
        lens, batch = tuple(len(x) for x in keys), len(keys)
        state, device, num_pads = self.attention_metadata_state, keys[0].device, [padded_len - n for n in lens]
        formulation = self.cross_kv if any(num_pads) else "padded"
        if formulation == "packed_pad_exact":
            formulation = pad_formulation(lens, padded_len, repeated_key=self.backend.supports_repeated_last_key())
        if formulation == "padded":
            state.dense_kv(self.role, batch, padded_len)
            padded = (append_rows(x, i, pad, num_pads) for i, x in enumerate((keys, values)))
            return CrossKV(*(torch.stack(x) for x in padded))
        if formulation == "packed":
            # The bound is the same for all layouts, as what is compiled and captured depends on it.
            metadata, pad = state.packed_kv(self.role, lens, device, max_seqlen_kv=padded_len), ()
        else:
            metadata = state.packed_pad_kv(self.role, lens, padded_len, device, formulation=formulation)
        if formulation == "repeated_key":
            one_pad = [min(n, 1) for n in num_pads]
            keys, values = (append_rows(x, i, pad, one_pad) for i, x in enumerate((keys, values)))
            pad = ()
        if fixed_capacity:
            spare = keys[0].new_zeros(batch * padded_len - sum(map(len, keys)), self.num_heads, self.head_dim)
            keys, values = (*keys, spare), (*values, spare)
        return CrossKV(torch.cat(keys), torch.cat(values), metadata, *pad)

    def attend(self, q: torch.Tensor, kv: CrossKV) -> torch.Tensor:
        """q [B, S, H, D] over one CrossKV → [B, S, H, D], in front of the output projection.

        With ExtentKV that packs Q, sequences are runs of q's B·S rows, whatever B is.
        """
        _check_cross_kv(kv)
        if isinstance(kv.metadata, ExtentKV) and kv.metadata.cu_seqlens_q is not None:
            return self.backend.forward(q.flatten(0, 1), kv.k, kv.v, kv.metadata).unflatten(0, q.shape[:2])
        if not isinstance(kv.metadata, PackedPadKV):
            return self.backend.forward(q, kv.k, kv.v, kv.metadata)
        if kv.metadata.formulation == "repeated_key":
            return self.backend.forward(q, kv.k, kv.v, kv.metadata.packed)
        out, lse = self.backend.forward(q, kv.k, kv.v, kv.metadata.packed, return_lse=True)
        return merge_pad_rows(q, out, lse, kv.k_pad, kv.v_pad, kv.metadata, self.backend.spec.softmax_scale)

    def pack_ragged_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_lens: Sequence[int] | None = None,
        attention_metadata_state: AttentionMetadataState | None = None,
        *,
        kv_mask: Sequence[Sequence[bool]] | torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, PackedKV]:
        """Drops the padding of k, v [B, L, H, D]: k, v [total_kv, H, D] and their PackedKV.

        Give kv_lens, the first rows of each sequence, or kv_mask [B, L], True for every row that stays, in any pattern:
        host bools or a tensor on the CPU. The numbers do not depend on the state; with one, the metadata are built once
        for a layout. Raises AttentionBackendError if the backend (with its wrappers) cannot read packed K/V, ValueError
        on bad lengths or masks.
        """
        if not self.backend.supports_varlen():
            raise AttentionBackendError(
                f"{self.backend.name} cannot read packed K/V, which pack_ragged_kv makes for {self.role}; keep them "
                "padded or use another backend"
            )
        if k.shape != v.shape:
            raise ValueError(f"k has shape {tuple(k.shape)} and v {tuple(v.shape)}; they must be equal")
        if (kv_lens is None) == (kv_mask is None):
            raise ValueError("give either kv_lens or kv_mask, not both and not neither")
        state = attention_metadata_state or AttentionMetadataState(max_entries=1)
        if kv_mask is not None:
            masked = state.masked_kv(self.role, host_mask("kv_mask", kv_mask, tuple(k.shape[:2])), k.device)
            return masked.gather(k), masked.gather(v), masked.packed
        lens = host_lens("kv_lens", kv_lens, k.shape[1])
        if len(lens) != k.shape[0]:
            raise ValueError(f"kv_lens has {len(lens)} lengths for k, v of batch {k.shape[0]}")
        metadata = state.packed_kv(self.role, lens, k.device, max_seqlen_kv=k.shape[1])
        return pack_rows(k, lens), pack_rows(v, lens), metadata


def _check_rows(name: str, x: torch.Tensor, shape: tuple[int | None, int]) -> None:
    count, width = shape
    found = tuple(x.shape) if isinstance(x, torch.Tensor) else None
    if found is None or len(found) != 2 or found[1] != width or count not in (None, found[0]):
        what = f"is a {type(x).__name__}" if found is None else f"has shape {found}"
        raise ValueError(f"{name} {what}; this site takes [{'n' if count is None else count}, {width}]")


def _check_cross_kv(kv: CrossKV) -> None:
    if not isinstance(kv, CrossKV):
        raise ValueError(f"kv is a {type(kv).__name__}; it must be a CrossKV, as make_cross_kv makes from rows of text")
