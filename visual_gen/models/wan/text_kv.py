from __future__ import annotations

from dataclasses import dataclass

from visual_gen.modules.attention import CrossKV


@dataclass(frozen=True, eq=False)
class TextKV:
    """Text (and image) keys and values of all layers for one batch, projected once and read by every step.

    Belongs to the batch rows that it was projected for, in their order.
    """

    text_lens: tuple[int, ...]  # real rows of each batch row, the end token included
    padded_len: int  # rows that the padded form has
    cross_kv: str  # "padded", "packed" or "packed_pad_exact"
    text: tuple[CrossKV, ...]  # one for each layer
    image: tuple[CrossKV, ...] | None = None

    @property
    def batch(self) -> int:
        return len(self.text_lens)

    @property
    def num_bytes(self) -> int:
        """Bytes of all keys and values."""
        layers = (*self.text, *(self.image or ()))
        return sum(
            x.numel() * x.element_size() for kv in layers for x in (kv.k, kv.v, kv.k_pad, kv.v_pad) if x is not None
        )
