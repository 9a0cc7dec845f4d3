"""The attention module of visual generation models: projections, QK norm, RoPE, and a backend for each role."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
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
from attention_backend.metadata import host_lens
from visual_gen.modules.norms import rms_norm_fp32
from visual_gen.modules.rope import apply_rotary

CROSS_KV_NEEDS = {
    "padded": frozenset(),
    "packed": frozenset({"varlen"}),
    "packed_pad_exact": frozenset({"varlen", "lse"}),
}


@dataclass(frozen=True, eq=False)
class CrossKV:
    """Keys and values of one cross-attention site, ready for every step.

    k, v [B, L, H, D] (metadata None) or packed [total, H, D] (PackedKV, PackedPadKV); where pad rows are to be merged
    in, the one key and value of them all, k_pad, v_pad [H, D].
    """

    k: torch.Tensor
    v: torch.Tensor
    metadata: PackedKV | PackedPadKV | None = None
    k_pad: torch.Tensor | None = None
    v_pad: torch.Tensor | None = None


class Attention(nn.Module):
    """Multi-head attention with a backend chosen for its role.

    role "self": fused QKV, QK norm, RoPE. role "cross_text": own Q and output, fused KV; `cross_kv` says how rows of
    unequal length are kept ("padded", "packed", "packed_pad_exact"). role "cross_image": fused KV only; it attends
    with the text site's Q and shares its output projection, as Wan's image-to-video models do.

    backend: a name or "auto" (chosen here and again when the module moves to another device or dtype), or an
    AttentionBackend that the owner of several layers has chosen once for all. qk_norm "rms_norm_across_heads"
    normalises over all heads together; None leaves it out. Raises ValueError on an unknown role, mode or norm, and
    AttentionBackendError if the backend cannot serve the site.
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
    ) -> None:
        super().__init__()
        if cross_kv not in CROSS_KV_NEEDS:
            raise ValueError(f"cross_kv is {cross_kv!r}; it must be one of {', '.join(CROSS_KV_NEEDS)}")
        if qk_norm not in (None, "rms_norm_across_heads"):
            raise ValueError(f"qk_norm is {qk_norm!r}; it must be 'rms_norm_across_heads' or None")
        self.role, self.cross_kv, self.eps = role, cross_kv, eps
        self.num_heads, self.head_dim = num_heads, head_dim
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
        self.backend = self._select(backend) if isinstance(backend, str) else backend
        self._check_backend()

    def spec(self) -> AttentionSpec:
        """What this site asks of a backend, from its weights' dtype and device."""
        weight = self.to_qkv.weight if self.role == "self" else self.to_kv.weight
        needs = CROSS_KV_NEEDS[self.cross_kv] if self.role == "cross_text" else frozenset()
        return AttentionSpec(self.role, self.num_heads, self.head_dim, weight.dtype, weight.device, needs=needs)

    def _select(self, name: str) -> AttentionBackend:
        return select_backend(name, self.spec())

    def _check_backend(self) -> None:
        """Reads the capability from the backend as it stands, wrappers included."""
        if self.role == "cross_text" and self.cross_kv != "padded" and not self.backend.supports_varlen():
            raise AttentionBackendError(
                f"cross_kv {self.cross_kv!r} needs packed K/V and {self.backend.name} cannot read them; "
                "use cross_kv 'padded' or another backend for cross_text"
            )

    def _apply(self, fn, recurse: bool = True):
        super()._apply(fn, recurse)
        spec = self.spec()
        moved = (spec.device, spec.dtype) != (self.backend.spec.device, self.backend.spec.dtype)
        if self._backend_name is not None and moved:
            self.backend = self._select(self._backend_name)
        return self

    def forward(self, x: torch.Tensor, kv: CrossKV | None = None, rotary: torch.Tensor | None = None) -> torch.Tensor:
        """x [B, S, hidden_size] → [B, S, hidden_size].

        rotary: complex [S, 1, D / 2] for role "self" (None: no position). kv: the CrossKV of a "cross_text" site.
        """
        if self.role == "self":
            q, k, v = self.project_qkv(x, rotary)
            return self.to_out(self.backend.forward(q, k, v).flatten(2))
        if kv is None:
            raise ValueError(f"a {self.role} site attends to a CrossKV; make it with project_kv and arrange_kv")
        return self.to_out(self.attend(self.project_q(x), kv).flatten(2))

    def project_qkv(
        self, x: torch.Tensor, rotary: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [B, S, hidden_size] → q, k, v [B, S, H, D], q and k normalised and turned by rotary."""
        inner = self.num_heads * self.head_dim
        qkv = self.to_qkv(x)
        qk = qkv[..., : 2 * inner].unflatten(-1, (2, inner))
        v = qkv[..., 2 * inner :].unflatten(-1, (self.num_heads, self.head_dim))
        if self.qk_norm_weight is not None:
            qk = rms_norm_fp32(qk, self.qk_norm_weight, self.eps)
        qk = qk.unflatten(-1, (self.num_heads, self.head_dim))
        if rotary is not None:
            qk = apply_rotary(qk.float(), rotary)
        q, k = qk.to(qkv.dtype).unbind(2)
        return q, k, v

    def project_q(self, x: torch.Tensor) -> torch.Tensor:
        """x [B, S, hidden_size] → normalised q [B, S, H, D] of a "cross_text" site."""
        q = self.to_q(x)
        if self.qk_norm_weight is not None:
            q = rms_norm_fp32(q, self.qk_norm_weight[0], self.eps).to(q.dtype)
        return q.unflatten(-1, (self.num_heads, self.head_dim))

    def project_kv(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """rows [..., kv_size] of text or image → k (normalised), v [..., H, D]. Independent of step and timestep."""
        k, v = self.to_kv(rows).chunk(2, dim=-1)
        if self.qk_norm_weight is not None:
            k = rms_norm_fp32(k, self.qk_norm_weight[-1], self.eps).to(v.dtype)
        heads = (self.num_heads, self.head_dim)
        return k.unflatten(-1, heads), v.unflatten(-1, heads)

    def arrange_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_lens: Sequence[int],
        padded_len: int,
        *,
        fixed_capacity: bool = False,
    ) -> CrossKV:
        """Projected rows of a ragged batch in the form that `cross_kv` asks for.

        k, v [sum(kv_lens) + 1, H, D]: the real rows of all sequences, then the one pad row, which may be missing if
        no sequence is shorter than padded_len. "packed_pad_exact" takes the formulation that is fastest for the layout.
        fixed_capacity: packed rows lie in a buffer of B · padded_len rows, zeros behind them, so that what is compiled
        or captured for one layout serves the others.
        """
        lens = host_lens("kv_lens", kv_lens, padded_len)
        total, batch = sum(lens), len(lens)
        state, formulation = self.attention_metadata_state, self.cross_kv
        capacity = batch * padded_len if fixed_capacity else 0
        if min(lens) == padded_len:  # no pads: every mode is the dense one
            state.dense_kv(self.role, batch, padded_len)
            return CrossKV(*(x[:total].unflatten(0, (batch, padded_len)) for x in (k, v)))
        if self.cross_kv == "packed":
            # The bound is the same for all layouts, as what is compiled and captured depends on it.
            packed = state.packed_kv(self.role, lens, k.device, max_seqlen_kv=padded_len)
            return CrossKV(_fill_up(k[:total], capacity), _fill_up(v[:total], capacity), packed)
        if self.cross_kv == "packed_pad_exact":
            repeated_key = self.backend.supports_repeated_last_key()
            formulation = pad_formulation(lens, padded_len, repeated_key=repeated_key)
        if formulation == "padded":
            state.dense_kv(self.role, batch, padded_len)
            num_pads = [padded_len - n for n in lens]
            return CrossKV(*(_with_pads(x, lens, num_pads).unflatten(0, (batch, padded_len)) for x in (k, v)))
        pads = state.packed_pad_kv(self.role, lens, padded_len, k.device, formulation=formulation)
        if formulation == "repeated_key":
            num_pads = [int(n < padded_len) for n in lens]
            return CrossKV(*(_fill_up(_with_pads(x, lens, num_pads), capacity) for x in (k, v)), pads)
        return CrossKV(*(_fill_up(x[:total], capacity) for x in (k, v)), pads, k[total], v[total])

    def attend(self, q: torch.Tensor, kv: CrossKV) -> torch.Tensor:
        """q [B, S, H, D] over one CrossKV → [B, S, H, D], in front of the output projection."""
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
        kv_lens: Sequence[int],
        attention_metadata_state: AttentionMetadataState | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, PackedKV]:
        """Drops the padding of k, v [B, L, H, D]: k, v [sum(kv_lens), H, D] and their PackedKV.

        The numbers do not depend on the state; with one, the metadata are built once for a layout. Raises
        AttentionBackendError if the backend (with its wrappers) cannot read packed K/V, ValueError on bad lengths.
        """
        if not self.backend.supports_varlen():
            raise AttentionBackendError(
                f"{self.backend.name} cannot read packed K/V, which pack_ragged_kv makes for {self.role}; keep them "
                "padded or use another backend"
            )
        lens = host_lens("kv_lens", kv_lens, k.shape[1])
        if len(lens) != k.shape[0]:
            raise ValueError(f"kv_lens has {len(lens)} lengths for k, v of batch {k.shape[0]}")
        state = attention_metadata_state or AttentionMetadataState(max_entries=1)
        return pack_rows(k, lens), pack_rows(v, lens), state.packed_kv(self.role, lens, k.device)


def pack_rows(x: torch.Tensor, lens: Sequence[int]) -> torch.Tensor:
    """The first lens[b] rows of each x[b], one after the other: [B, L, ...] → [sum(lens), ...]."""
    return torch.cat([x[b, :n] for b, n in enumerate(lens)])


def _with_pads(rows: torch.Tensor, lens: Sequence[int], num_pads: Sequence[int]) -> torch.Tensor:
    """Packed real rows and one pad row [sum(lens) + 1, H, D] → the same with num_pads[b] pad rows after sequence b."""
    *real, pad = rows.split([*lens, 1])
    return torch.cat([part for row, n in zip(real, num_pads, strict=True) for part in (row, pad.expand(n, -1, -1))])


def _fill_up(rows: torch.Tensor, capacity: int) -> torch.Tensor:
    """rows [n, H, D], with zeros up to `capacity` rows if they are fewer; kernels read behind the last real row."""
    missing = capacity - rows.shape[0]
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing > 0 else rows
