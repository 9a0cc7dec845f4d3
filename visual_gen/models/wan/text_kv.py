from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attention_backend import AttentionMetadataState
from attention_backend.metadata import host_lens, host_mask
from visual_gen.modules.cross_kv import CrossKV


@dataclass(frozen=True, eq=False, repr=False)
class TextKV:
    """Text (and image) keys and values of all layers for one batch, projected once and read by every step.

    Belongs to the batch rows that it was projected for, in their order.
    """

    text_lens: tuple[int, ...] | None  # real rows of each batch row, the end token included; None in a graph's buffers
    batch: int
    padded_len: int  # rows that the padded form has
    cross_kv: str  # "padded", "packed" or "packed_pad_exact"
    text: tuple[CrossKV, ...]  # one for each layer
    image: tuple[CrossKV, ...] | None = None

    def __repr__(self) -> str:
        sizes = f"text_lens={self.text_lens}, batch={self.batch}, padded_len={self.padded_len}"
        image = "" if self.image is None else f", image={len(self.image)} layers of {self.image[0]}"
        return f"TextKV({sizes}, cross_kv={self.cross_kv!r}, text={len(self.text)} layers of {self.text[0]}{image})"

    @property
    def formulation(self) -> str:
        """How the text's pad rows are accounted for, see CrossKV."""
        return self.text[0].formulation

    def signature(self) -> tuple:
        """What a CUDA graph over this text is keyed on: batch, bounds, mode and formulation, never its lengths."""
        layers = tuple(kv.signature() for kv in (*self.text[:1], *(self.image or ())[:1]))
        return (self.batch, self.padded_len, self.cross_kv, len(self.text), layers)

    @property
    def num_bytes(self) -> int:
        """Bytes of all keys and values."""
        layers = (*self.text, *(self.image or ()))
        return sum(
            x.numel() * x.element_size() for kv in layers for x in (kv.k, kv.v, kv.k_pad, kv.v_pad) if x is not None
        )


def real_rows(
    text: torch.Tensor,
    text_lens: Sequence[int] | None,
    text_mask: Sequence[Sequence[bool]] | torch.Tensor | None,
    state: AttentionMetadataState,
) -> Sequence[torch.Tensor]:
    """The real rows [n, text_dim] of each text [T, L, text_dim]: the first text_lens, or those that text_mask [T, L]
    marks; all of them if neither is given. Raises ValueError on what does not fit."""
    num_texts, padded_len = text.shape[:2]
    if text_mask is not None:
        if text_lens is not None:
            raise ValueError("text_lens and text_mask are both given; a mask says by itself which rows are real")
        mask = host_mask("text_mask", text_mask, (num_texts, padded_len))
        masked = state.masked_kv("cross_text", mask, text.device)
        return masked.gather(text).split(masked.packed.kv_lens)
    lens = host_lens("text_lens", [padded_len] * num_texts if text_lens is None else text_lens, padded_len)
    if len(lens) != num_texts:
        raise ValueError(f"text_lens has {len(lens)} lengths for encoder_hidden_states of batch {num_texts}")
    return [text[i, :n] for i, n in enumerate(lens)]
