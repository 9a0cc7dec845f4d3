"""FLOPs and bytes of a Wan transformer, from its geometry."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from visual_gen.config import RunConfig
from visual_gen.models.wan import WanConfig

# Of the CLIP ViT-H/14 that Wan2.1's image-to-video models look through, its class token included.
IMAGE_TOKENS = 257


def flops(
    wan: WanConfig, tokens: int, lens: Sequence[int], text_length: int, config: RunConfig, timestep_per_token: bool
) -> dict[str, int]:
    """FLOPs of one denoising step over all rows, "linear", "self_attention" and "cross_attention" apart.

    With d the hidden size, N the tokens and L the text keys of a row, each layer does, per row, 2·N·d·(3d + d) for QKV
    and output of self-attention, 4·N²·d in it, 2·N·d·2d for Q and output of cross-attention, 4·N·L·d in it, and
    4·N·d·ffn_dim in the feed-forward. Text keys and values are made once for a request and are not in it.
    """
    d, depth = wan.hidden_size, wan.num_layers
    patch = math.prod(wan.patch_size)
    timesteps = tokens if timestep_per_token else 1
    embeddings = 2 * tokens * patch * d * (wan.in_channels + wan.out_channels)
    embeddings += 2 * timesteps * d * (wan.freq_dim + d + 6 * d)
    row_linear = depth * (12 * tokens * d * d + 4 * tokens * d * wan.ffn_dim) + embeddings
    keys = sum(_keys_attended(config.attention.cross_kv, length, text_length) for length in lens)
    keys += len(lens) * _image_tokens(wan)
    return {
        "linear": len(lens) * row_linear,
        "self_attention": len(lens) * depth * 4 * tokens * tokens * d,
        "cross_attention": depth * 4 * tokens * keys * d,
    }


def text_kv_bytes(wan: WanConfig, mode: str, lens: Sequence[int], text_length: int, dtype: torch.dtype) -> int:
    """Bytes of the text's keys and values in all layers. packed_pad_exact keeps one more row for all pads together."""
    padded = mode == "packed_pad_exact" and min(lens) < text_length
    rows = len(lens) * text_length if mode == "padded" else sum(lens) + padded
    return 2 * rows * wan.hidden_size * wan.num_layers * dtype.itemsize


def activation_bytes(
    wan: WanConfig, rows: int, tokens: int, dtype: torch.dtype, timestep_per_token: bool = False
) -> int:
    """Expected peak of the tensors that live beside the weights while a block runs; an estimate.

    Counted in bytes for each of the rows·tokens·d elements of the hidden state, s bytes an element: self-attention
    holds x, the normed x and QKV (5 s) beside three fp32 copies of Q and K while they are normed and turned (24; two,
    16, if they are fp32 already); the feed-forward holds six tensors like x, and its inner activations before and
    after the GELU. One timestep for each token adds the modulation in the compute dtype and in fp32.
    """
    size, d = dtype.itemsize, wan.hidden_size
    attention = 5 * size + (16 if dtype == torch.float32 else 24)
    feed_forward = 6 * size + 2 * size * wan.ffn_dim / d
    modulation = 7 * size + 24 if timestep_per_token else 0
    return round(rows * tokens * d * (max(attention, feed_forward) + modulation))


def _keys_attended(mode: str, length: int, text_length: int) -> int:
    if mode == "padded":
        return text_length
    return length + (mode == "packed_pad_exact" and length < text_length)


def _image_tokens(wan: WanConfig) -> int:
    return 0 if wan.image_dim is None else wan.pos_embed_seq_len or IMAGE_TOKENS


def image_kv_bytes(wan: WanConfig, rows: int, config: RunConfig) -> int:
    return 2 * rows * _image_tokens(wan) * wan.hidden_size * wan.num_layers * config.torch_dtype().itemsize
