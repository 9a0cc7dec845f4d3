"""Wan's conditioning: timestep, text and image embeddings. Module names follow diffusers' checkpoint."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from visual_gen.modules.norms import layer_norm_fp32


def sinusoidal_embedding(timestep: torch.Tensor, dim: int) -> torch.Tensor:
    """timestep [...] → fp32 [..., dim]: cosines, then sines, of t · 10000^(-i / (dim/2))."""
    half = dim // 2
    frequencies = torch.exp(-math.log(10000) / half * torch.arange(half, dtype=torch.float32, device=timestep.device))
    angles = timestep.float().unsqueeze(-1) * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class TimeEmbedding(nn.Module):
    """timestep [...] → (temb [..., D], modulation [..., 6, D] of the blocks). The embedder's weights stay fp32."""

    def __init__(self, freq_dim: int, hidden_size: int) -> None:
        super().__init__()
        self.freq_dim = freq_dim
        self.linear_1 = nn.Linear(freq_dim, hidden_size)
        self.linear_2 = nn.Linear(hidden_size, hidden_size)
        self.proj = nn.Linear(hidden_size, 6 * hidden_size)

    def forward(self, timestep: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        temb = self.linear_2(F.silu(self.linear_1(sinusoidal_embedding(timestep, self.freq_dim))))
        temb = temb.to(self.proj.weight.dtype)
        return temb, self.proj(F.silu(temb)).unflatten(-1, (6, -1))


class TextEmbedding(nn.Module):
    """Text encoder rows [..., text_dim] → [..., D]. A zero row gives one constant vector, which pads attend as."""

    def __init__(self, text_dim: int, hidden_size: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(text_dim, hidden_size)
        self.linear_2 = nn.Linear(hidden_size, hidden_size)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.linear_2(F.gelu(self.linear_1(rows), approximate="tanh"))


class ImageEmbedding(nn.Module):
    """Image encoder tokens [B, N, image_dim] → [B, N, D].

    With pos_embed_seq_len, first and last image come as [2B, N, image_dim] and leave as one row [B, 2N, D].
    """

    def __init__(self, image_dim: int, hidden_size: int, pos_embed_seq_len: int | None) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(image_dim)
        self.linear_1 = nn.Linear(image_dim, image_dim)
        self.linear_2 = nn.Linear(image_dim, hidden_size)
        self.norm2 = nn.LayerNorm(hidden_size)
        self.pos_embed = nn.Parameter(torch.zeros(1, pos_embed_seq_len, image_dim)) if pos_embed_seq_len else None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.pos_embed is not None:
            pair = (-1, 2 * tokens.shape[1], tokens.shape[2])
            if tokens.shape[0] % 2 or pair[1] != self.pos_embed.shape[1]:
                raise ValueError(
                    f"image tokens have shape {tuple(tokens.shape)}; a first-and-last-frame model takes "
                    f"[2·B, {self.pos_embed.shape[1] // 2}, {tokens.shape[2]}], first and last image of each row"
                )
            tokens = tokens.reshape(pair) + self.pos_embed
        tokens = layer_norm_fp32(tokens, self.norm1.weight, self.norm1.bias, self.norm1.eps)
        tokens = self.linear_2(F.gelu(self.linear_1(tokens)))
        return layer_norm_fp32(tokens, self.norm2.weight, self.norm2.bias, self.norm2.eps)
