from __future__ import annotations

import torch
from torch import nn


class FeedForward(nn.Module):
    """Linear, GELU in its tanh form, Linear: [..., hidden_size] → [..., hidden_size]."""

    def __init__(self, hidden_size: int, ffn_dim: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(hidden_size, ffn_dim)
        self.linear_2 = nn.Linear(ffn_dim, hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear_2(nn.functional.gelu(self.linear_1(x), approximate="tanh"))
