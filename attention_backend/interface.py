"""What a backend is asked (`AttentionSpec`), what it answers (`AttentionBackend`), and the checks of every call.

Shape letters: B batch, Sq query rows, Skv key rows, H query heads, Hkv key/value heads, D head_dim.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar

import torch

from attention_backend.metadata import AttentionMetadata, ExtentKV, PackedKV, PaddedKV, PagedKV, device_with_index

ROLES = ("self", "cross_text", "cross_image")
NEEDS = frozenset({"varlen", "padding_mask", "lse", "paged_kv", "extent_kv", "grad"})
CAPABILITIES = NEEDS | {"causal", "repeated_last_key"}  # each has a supports_* method of AttentionBackend


class AttentionTensorLayout(Enum):
    """Order of the inner dimensions of q, k, v: NHD is [B, S, H, D], HND is [B, H, S, D]."""

    NHD = "NHD"
    HND = "HND"


class AttentionBackendError(ValueError):
    """A backend cannot serve what was asked of it; the message lists every reason and the way out."""


@dataclass(frozen=True)
class AttentionSpec:
    """One attention site: what a backend must be able to do there.

    role: "self", "cross_text" or "cross_image". needs: any of "varlen", "padding_mask", "lse", "paged_kv", "extent_kv",
    "grad".
    softmax_scale None means head_dim ** -0.5; num_kv_heads None means num_heads. ValueError on impossible values.
    """

    role: str
    num_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device | str
    num_kv_heads: int | None = None
    softmax_scale: float | None = None
    causal: bool = False
    needs: frozenset[str] = field(default_factory=frozenset)

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"role is {self.role!r}; it must be one of {', '.join(ROLES)}")
        for name in ("num_heads", "head_dim", "num_kv_heads"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{name} is {value!r}; it must be an integer of at least 1")
        if self.num_heads is None or self.head_dim is None:
            raise ValueError(f"num_heads is {self.num_heads} and head_dim {self.head_dim}; both must be given")
        unknown = frozenset(self.needs) - NEEDS
        if unknown:
            raise ValueError(f"needs has {sorted(unknown)}; known needs are {sorted(NEEDS)}")
        set_ = object.__setattr__
        set_(self, "needs", frozenset(self.needs))
        set_(self, "device", device_with_index(self.device))
        if self.num_kv_heads is None:
            set_(self, "num_kv_heads", self.num_heads)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}; grouped-query "
                "attention needs every key/value head to serve the same number of query heads"
            )
        scale = self.softmax_scale
        if scale is not None and not (isinstance(scale, int | float) and 0 < scale < math.inf):
            raise ValueError(f"softmax_scale is {scale!r}; it must be finite and above 0 (None means head_dim ** -0.5)")
        if self.softmax_scale is None:
            set_(self, "softmax_scale", self.head_dim**-0.5)


class AttentionBackend(ABC):
    """One attention kernel family behind one `forward`. Stateless apart from its spec; not an nn.Module.

    A subclass sets `name` and `capabilities`, and implements `attend`; `forward` has checked the call by then.
    Capabilities are asked through the `supports_*` methods, of instances too, so a wrapper can narrow what it wraps.
    """

    name: ClassVar[str]
    preferred_layout: ClassVar[AttentionTensorLayout] = AttentionTensorLayout.NHD
    capabilities: ClassVar[frozenset[str]] = frozenset()  # out of CAPABILITIES
    compiles_kernels: ClassVar[bool] = False  # at the first call of each kind, which then takes seconds
    preferred_block_size: ClassVar[int] = 16  # tokens of a block of a paged cache that this backend reads best

    def __init__(self, spec: AttentionSpec) -> None:
        reasons = self.unsupported_reasons(spec)
        unavailable = self.unavailable_reason()
        if unavailable:
            reasons.insert(0, unavailable)
        if reasons:
            raise AttentionBackendError(f"{self.name} cannot serve {spec.role} attention: " + "; ".join(reasons))
        self.spec = spec

    @classmethod
    def supports_varlen(cls) -> bool:
        """K/V packed as [total_kv, Hkv, D] (PackedKV), with padded or packed Q."""
        return "varlen" in cls.capabilities

    @classmethod
    def supports_padding_mask(cls) -> bool:
        """Key lengths over padded K/V (PaddedKV)."""
        return "padding_mask" in cls.capabilities

    @classmethod
    def supports_paged_kv(cls) -> bool:
        """K/V in block pools read through a block table (PagedKV)."""
        return "paged_kv" in cls.capabilities

    @classmethod
    def supports_extent_kv(cls) -> bool:
        """K/V read in place from anywhere in flat [rows, Hkv, D] (ExtentKV)."""
        return "extent_kv" in cls.capabilities

    @classmethod
    def supports_lse(cls) -> bool:
        """The fp32 natural-log sum of exponentials beside the output."""
        return "lse" in cls.capabilities

    @classmethod
    def supports_causal(cls) -> bool:
        """Causal masking aligned bottom-right: the last query sees every key."""
        return "causal" in cls.capabilities

    @classmethod
    def supports_repeated_last_key(cls) -> bool:
        """Packed sequences whose last key stands for several equal ones (PackedKV.last_key_repeats_to)."""
        return "repeated_last_key" in cls.capabilities

    @classmethod
    def supports_grad(cls) -> bool:
        """Gradients to q, k and v."""
        return "grad" in cls.capabilities

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """Why this backend cannot run on this machine at all, with the install command; None if it can."""
        return None

    @classmethod
    def kernel_cache_problem(cls) -> str | None:
        """Why kernels that this process compiles are gone when it ends, with the way out; None if they are kept, or
        none are compiled."""
        return None

    @classmethod
    def kernels_from(cls) -> str | None:
        """Which of several packages that carry this backend's kernels is used; None where there is no such choice."""
        return None

    @classmethod
    def unsupported_reasons(cls, spec: AttentionSpec) -> list[str]:
        """Every reason why `spec` cannot be served, each with the value and the limit. Subclasses extend the list."""
        able = {
            "varlen": cls.supports_varlen(),
            "padding_mask": cls.supports_padding_mask(),
            "paged_kv": cls.supports_paged_kv(),
            "extent_kv": cls.supports_extent_kv(),
            "lse": cls.supports_lse(),
            "grad": cls.supports_grad(),
        }
        reasons = [f"no support for {need}" for need in sorted(spec.needs) if not able[need]]
        if spec.causal and not cls.supports_causal():
            reasons.append("no support for causal attention")
        return reasons

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        metadata: AttentionMetadata | None = None,
        *,
        causal: bool = False,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """softmax(scale · q kᵀ) v over the keys that `metadata` makes visible.

        q [B, Sq, H, D], or [total_q, H, D] with cu_seqlens_q. k, v [B, Skv, Hkv, D]; [total_kv, Hkv, D] with PackedKV;
        flat [rows, Hkv, D] with ExtentKV; pools [blocks, block_size, Hkv, D] with PagedKV. Returns out, shaped and
        typed like q; with return_lse also the natural-log LSE, [B, H, Sq] or [H, total_q], fp32 (fp64 for fp64 q). A
        row without keys gives 0 and -inf.
        Raises ValueError if the call contradicts its tensors, its metadata or what this backend can do.
        """
        _check_capabilities(self, q, k, v, metadata, causal, return_lse)
        _check_tensors(self.spec, q, k, v, metadata)
        result = self.attend(q, k, v, metadata, causal=causal, return_lse=return_lse)
        # Kernel packages differ by version: a bare tensor, (out, None) or (out, lse, ...).
        out, lse, *_ = (*result, None, None) if isinstance(result, tuple | list) else (result, None)
        if not isinstance(out, torch.Tensor) or (out.shape, out.dtype, out.device) != (q.shape, q.dtype, q.device):
            found = f"{out.dtype} {tuple(out.shape)}" if isinstance(out, torch.Tensor) else repr(out)
            raise RuntimeError(f"{self.name} returned {found} for q of {q.dtype} {tuple(q.shape)} on {q.device}")
        if not return_lse:
            return out
        if lse is None:
            raise RuntimeError(f"{self.name} was asked for the LSE and returned none; use return_lse=False or sdpa")
        return out, lse

    @abstractmethod
    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        metadata: AttentionMetadata | None,
        *,
        causal: bool,
        return_lse: bool,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]:
        """The kernel call behind `forward`, on checked arguments and with its shapes.

        Returns out, or (out, lse); lse may be None unless return_lse is set.
        """


def _check_capabilities(backend, q, k, v, metadata, causal: bool, return_lse: bool) -> None:
    needed = {
        PackedKV: ("packed K/V", backend.supports_varlen),
        PaddedKV: ("key lengths", backend.supports_padding_mask),
        PagedKV: ("a block table", backend.supports_paged_kv),
        ExtentKV: ("extents", backend.supports_extent_kv),
    }
    if metadata is not None:
        if type(metadata) not in needed:
            names = ", ".join(kind.__name__ for kind in needed)
            raise ValueError(f"metadata is a {type(metadata).__name__}; it must be one of {names}, or None")
        what, supported = needed[type(metadata)]
        if not supported():
            raise AttentionBackendError(f"{backend.name} cannot read {what}; select a backend with that need, or sdpa")
        if getattr(metadata, "last_key_repeats_to", None) is not None and not backend.supports_repeated_last_key():
            raise AttentionBackendError(
                f"{backend.name} cannot count a sequence's last key several times (last_key_repeats_to); pack without "
                "it and merge the other keys' share with merge_pad_rows"
            )
    if causal and not backend.supports_causal():
        raise AttentionBackendError(f"{backend.name} has no causal attention; select one with causal=True, or sdpa")
    if return_lse and not backend.supports_lse():
        raise AttentionBackendError(f"{backend.name} returns no LSE; select a backend that needs 'lse', or sdpa")
    if torch.is_grad_enabled() and not backend.supports_grad():
        wanting = [name for name, x in (("q", q), ("k", k), ("v", v)) if x.requires_grad]
        if wanting:
            raise AttentionBackendError(
                f"{backend.name} is inference-only and {', '.join(wanting)} require grad; run under torch.no_grad(), "
                "or use sdpa (auto picks it for needs={'grad'}) or FlexAttention for training"
            )


def _check_tensors(spec: AttentionSpec, q, k, v, metadata) -> None:
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must share one dtype; they are {q.dtype}, {k.dtype} and {v.dtype}")
    if q.dtype != spec.dtype:
        raise ValueError(
            f"q, k and v are {q.dtype}, the backend was selected for {spec.dtype}; cast them or select for {q.dtype}"
        )
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v must be on one device; they are on {q.device}, {k.device} and {v.device}")
    packed_q = metadata is not None and getattr(metadata, "cu_seqlens_q", None) is not None
    q_form = "[total_q, H, D]" if packed_q else "[B, Sq, H, D]"
    kv_form, kv_ndim = "[B, Skv, Hkv, D]", 4
    if isinstance(metadata, PackedKV | ExtentKV):
        kv_form, kv_ndim = "[total_kv, Hkv, D]", 3
    elif isinstance(metadata, PagedKV):
        kv_form = "[blocks, block_size, Hkv, D]"
    q_tail = (spec.num_heads, spec.head_dim)
    if q.ndim != (3 if packed_q else 4) or tuple(q.shape[-2:]) != q_tail:
        raise ValueError(f"q has shape {tuple(q.shape)}; expected {q_form} with H, D = {q_tail}")
    kv_tail = (spec.num_kv_heads, spec.head_dim)
    for name, x in (("k", k), ("v", v)):
        if x.ndim != kv_ndim or tuple(x.shape[-2:]) != kv_tail:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; expected {kv_form} with Hkv, D = {kv_tail}")
    if k.shape != v.shape:
        raise ValueError(f"k has shape {tuple(k.shape)} and v {tuple(v.shape)}; they must be equal")
    if metadata is not None:
        metadata.check(q, k)
    elif q.shape[0] != k.shape[0]:
        raise ValueError(f"q has batch {q.shape[0]} and k, v have {k.shape[0]}; they must be equal")
