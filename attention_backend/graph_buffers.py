"""Tensors at fixed addresses that a CUDA graph reads in place of a layout's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch


class GraphBuffers:
    """The tensors of one entry, copied to where they stay: what one CUDA graph captures and reads in every replay.

    entry: metadata of an AttentionMetadataState, or any frozen dataclass of tensors and of such records that has a
    signature(), like the keys and values of a cross-attention site or of a whole model (then packed in buffers of fixed
    capacity). Capture with `buffers.entry`. Before every replay, copy_from the entry of the layout at hand, an old
    one of the state too: the buffers hold what was copied last. A record that stands in several places, such as the
    metadata that all layers share, is copied once.

    `buffers.entry` holds no host lengths, as they would be those of one layout: its kernels read the device's.
    """

    def __init__(self, entry: Any) -> None:
        self.signature: tuple = entry.signature()
        self._buffers: list[torch.Tensor] = []
        # Buffers outlive the inference_mode that may be on now, and none of them carries gradients.
        with torch.inference_mode(False), torch.no_grad():
            self.entry = self._own(entry, {})

    def copy_from(self, entry: Any) -> None:
        """Overwrites the buffers with the tensors of `entry`, without waiting for the device.

        Raises ValueError, before anything is written, if its signature or its tensors' shapes are not the buffers' own.
        """
        if entry.signature() != self.signature:
            raise ValueError(
                f"the entry's signature is {entry.signature()} and the buffers' {self.signature}: a graph serves the "
                "layouts of one signature; capture another graph for this one"
            )
        values = list(_tensors(entry, set()))
        found, own = ([(tuple(x.shape), x.dtype, x.device) for x in xs] for xs in (values, self._buffers))
        if found != own:
            raise ValueError(
                f"the entry's tensors are {found} and the buffers {own}: for graphs, packed keys and values lie in "
                "buffers of fixed capacity (fixed_capacity=True)"
            )
        with torch.no_grad():
            for buffer, value in zip(self._buffers, values, strict=True):
                buffer.copy_(value)

    def _own(self, value: Any, known: dict[int, Any]) -> Any:
        """`value` over new buffers, in the order of _tensors, and without what only one layout has on the host."""
        if isinstance(value, torch.Tensor):
            self._buffers.append(value.clone())
            return self._buffers[-1]
        if dataclasses.is_dataclass(value):
            if id(value) not in known:
                fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
                owned = {name: self._own(x, known) for name, x in fields.items() if name != "max_block_id"}
                known[id(value)] = type(value)(**owned)
            return known[id(value)]
        if isinstance(value, tuple):  # of records, or of a layout's lengths
            return tuple(self._own(x, known) for x in value) if _is_of_records(value) else None
        return value


def _tensors(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """All tensors of an entry; those of a record that stands in several places once."""
    if isinstance(value, torch.Tensor):
        yield value
    elif dataclasses.is_dataclass(value) and id(value) not in seen:
        seen.add(id(value))
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name), seen)
    elif isinstance(value, tuple) and _is_of_records(value):
        for x in value:
            yield from _tensors(x, seen)


def _is_of_records(value: tuple) -> bool:
    return bool(value) and all(map(dataclasses.is_dataclass, value))
