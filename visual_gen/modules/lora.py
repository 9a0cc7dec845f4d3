"""A linear layer with low-rank additions to blocks of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class LowRank:
    """factor · up @ down, added to rows [start, start + len(up)) of a weight. down [r, in], up [rows, r]."""

    start: int
    down: torch.Tensor
    up: torch.Tensor
    factor: float = 1.0


class LoRALinear(nn.Linear):
    """An nn.Linear of weight W + Σ scale · factor · up @ down, each addition kept apart.

    It has the parameters of the layer it was made of, under the same names; adapters are no part of its state dict. A
    scale is a tensor, so compiled and captured code follows it. Adapters are named by texts that an attribute can have.
    """

    @classmethod
    def around(cls, linear: nn.Linear) -> LoRALinear:
        layer = cls(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        layer.weight, layer.bias = linear.weight, linear.bias
        layer.blocks = {}  # adapter → (first row, rows, rank) of its additions
        return layer.train(linear.training)

    def plain(self) -> nn.Linear:
        """An nn.Linear of the same parameters."""
        linear = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        linear.weight, linear.bias = self.weight, self.bias
        return linear.train(self.training)

    def add(self, adapter: str, parts: Sequence[LowRank], scale: float) -> None:
        """Puts an adapter's additions beside the weight, in its dtype and on its device."""
        place = {"dtype": self.weight.dtype, "device": self.weight.device}
        # One product for all downs, since they read the same rows.
        down = torch.cat([part.down.to(**place) * part.factor for part in parts])
        self.register_buffer(f"down_{adapter}", down, persistent=False)
        self.register_buffer(f"scale_{adapter}", torch.tensor(scale, **place), persistent=False)
        for i, part in enumerate(parts):
            self.register_buffer(f"up_{adapter}_{i}", part.up.to(**place, copy=True), persistent=False)
        self.blocks[adapter] = tuple((part.start, *part.up.shape) for part in parts)

    def set_scale(self, adapter: str, scale: float) -> None:
        getattr(self, f"scale_{adapter}").fill_(scale)

    def remove(self, adapter: str) -> None:
        for i in range(len(self.blocks.pop(adapter))):
            delattr(self, f"up_{adapter}_{i}")
        delattr(self, f"down_{adapter}")
        delattr(self, f"scale_{adapter}")

    def _apply(self, fn, recurse: bool = True):
        super()._apply(fn, recurse)
        for name, buffer in self._buffers.items():  # a model may keep this weight in another dtype than it casts to
            self._buffers[name] = buffer.to(self.weight.dtype)
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] → [..., out]."""
        out = F.linear(x, self.weight, self.bias)
        for adapter, blocks in self.blocks.items():
            low = F.linear(x, getattr(self, f"down_{adapter}")) * getattr(self, f"scale_{adapter}")
            column = 0
            for i, (start, rows, rank) in enumerate(blocks):
                update = F.linear(low[..., column : column + rank], getattr(self, f"up_{adapter}_{i}"))
                out[..., start : start + rows].add_(update)
                column += rank
        return out

    @torch.no_grad()
    def fuse(self) -> nn.Linear:
        """The layer with its adapters added to the weight, in fp32 and rounded once."""
        weight = self.weight.float()
        for adapter, blocks in self.blocks.items():
            down = getattr(self, f"down_{adapter}").float() * getattr(self, f"scale_{adapter}").float()
            column = 0
            for i, (start, rows, rank) in enumerate(blocks):
                up = getattr(self, f"up_{adapter}_{i}").float()
                weight[start : start + rows] += up @ down[column : column + rank]
                column += rank
        self.weight.copy_(weight)
        return self.plain()
