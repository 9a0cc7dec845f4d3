"""FLOPs and bytes of a Wan transformer, from its geometry."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from attention_backend import pad_formulation
from visual_gen.config import CrossKVMode, RunConfig
from visual_gen.models.wan import WanConfig

# Of the CLIP ViT-H/14 that Wan2.1's image-to-video models look through, its class token included.
IMAGE_TOKENS = 257


def flops(
    wan: WanConfig,
    tokens: int,
    lens: Sequence[int],
    text_length: int,
    config: RunConfig,
    timestep_per_token: bool,
    *,
    keys: int,
    repeated_key: bool = False,
) -> dict[str, int]:
    """FLOPs of one denoising step over all rows, "linear", "self_attention" and "cross_attention" apart.

    With d the hidden size, N the tokens, K the keys and L the text keys of a row, each layer does, per row,
    2·N·d·(3d + d) for QKV and output of self-attention, 4·N·K·d in it, 2·N·d·2d for Q and output of cross-attention,
    4·N·L·d in it, and 4·N·d·ffn_dim in the feed-forward. Text keys and values are made once for a request and are not
    in it. keys: those that a token attends to, K = N but over a KV cache.
    repeated_key: see text_rows.
    """
    d, depth = wan.hidden_size, wan.num_layers
    patch = math.prod(wan.patch_size)
    timesteps = tokens if timestep_per_token else 1
    embeddings = 2 * tokens * patch * d * (wan.in_channels + wan.out_channels)
    embeddings += 2 * timesteps * d * (wan.freq_dim + d + 6 * d)
    row_linear = depth * (12 * tokens * d * d + 4 * tokens * d * wan.ffn_dim) + embeddings
    text_keys = sum(
        # A merge scores the pad row for each sequence with pads, and keeps it once.
        text_rows(config.attention.cross_kv, group, text_length, repeated_key=repeated_key, pad_row_for_each=True)
        for group in text_groups(lens, config)
    )
    text_keys += len(lens) * image_tokens(wan)
    return {
        "linear": len(lens) * row_linear,
        "self_attention": len(lens) * depth * 4 * tokens * keys * d,
        "cross_attention": depth * 4 * tokens * text_keys * d,
    }


def text_groups(lens: Sequence[int], config: RunConfig) -> list[Sequence[int]]:
    """The text lengths of each forward of a step, from those of all prompts and then all negative prompts."""
    split = config.generation.cfg == "sequential" and config.generation.guidance_scale > 1
    middle = len(lens) // 2
    return [lens[:middle], lens[middle:]] if split else [lens]


def text_rows(
    mode: str, lens: Sequence[int], text_length: int, *, repeated_key: bool, pad_row_for_each: bool = False
) -> int:
    """Rows of text keys that one forward's sequences keep together, by the formulation that their lengths take.

    repeated_key: whether the backend can count a last key several times: each sequence with pads then keeps a pad row;
    where pads are merged in, one row serves all (pad_row_for_each counts it for each sequence all the same).
    """
    short = sum(length < text_length for length in lens)
    formulation = mode if short else "padded"
    if formulation == "packed_pad_exact":
        formulation = pad_formulation(lens, text_length, repeated_key=repeated_key)
    if formulation == "padded":
        return len(lens) * text_length
    pad_rows = {"packed": 0, "merge": short if pad_row_for_each else 1, "repeated_key": short}
    return sum(lens) + pad_rows[formulation]


def kept_as(cross_kv: CrossKVMode, compiled: bool) -> CrossKVMode:
    """The mode whose memory the text's keys and values take: for compiled blocks all lie in buffers of one size."""
    return "padded" if compiled else cross_kv


def text_kv_bytes(wan: WanConfig, rows: int, dtype: torch.dtype) -> int:
    """Bytes of the text's keys and values in all layers, `rows` of each (see text_rows)."""
    return 2 * rows * wan.hidden_size * wan.num_layers * dtype.itemsize


def text_write_bytes(wan: WanConfig, length: int, dtype: torch.dtype) -> int:
    """What a stream's text takes while it is projected: in all layers the product of K and V, whose V is a view of it,
    the normed K, and K/V once more, put together to be checked and copied."""
    return 5 * text_kv_bytes(wan, length, dtype) // 2


def activation_bytes(
    wan: WanConfig, rows: int, tokens: int, dtype: torch.dtype, timestep_per_token: bool = False, *, on_gpu: bool
) -> int:
    """Expected peak of the tensors that live beside the weights while a block runs; an estimate.

    Counted in bytes for each of the rows·tokens·d elements of the hidden state, s bytes an element: self-attention
    holds x, the normed x and QKV (5 s) while Q and K are normed and turned, which is one pass on a GPU (2 s) and takes
    two fp32 copies of them elsewhere (16); the feed-forward holds six tensors like x, and its inner activations before
    and after the GELU. One timestep for each token adds the modulation, which all rows share, in the compute dtype and
    in fp32.
    """
    size, d = dtype.itemsize, wan.hidden_size
    attention = 5 * size + (2 * size if on_gpu else 16)
    feed_forward = 6 * size + 2 * size * wan.ffn_dim / d
    modulation = 7 * size + 24 if timestep_per_token else 0
    return round(tokens * d * (rows * max(attention, feed_forward) + modulation))


def image_tokens(wan: WanConfig) -> int:
    return 0 if wan.image_dim is None else wan.pos_embed_seq_len or IMAGE_TOKENS


def image_kv_bytes(wan: WanConfig, rows: int, dtype: torch.dtype) -> int:
    return 2 * rows * image_tokens(wan) * wan.hidden_size * wan.num_layers * dtype.itemsize
