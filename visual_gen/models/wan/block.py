"""One layer of Wan. Shape letters: B batch, S tokens, D hidden size."""

from __future__ import annotations

import torch
from torch import nn

from attention_backend import AttentionBackend, AttentionMetadataState
from attention_backend.kv_cache import LayerKV
from visual_gen.models.wan.config import WanConfig
from visual_gen.modules.attention import Attention
from visual_gen.modules.block_causal import BlockMask
from visual_gen.modules.cross_kv import CrossKV
from visual_gen.modules.feed_forward import FeedForward
from visual_gen.modules.norms import add_gated, layer_norm_fp32, modulated_layer_norm


class WanBlock(nn.Module):
    """Self-attention, cross-attention to text (and image), feed-forward, modulated by the timestep."""

    def __init__(
        self, config: WanConfig, backends: dict[str, AttentionBackend], state: AttentionMetadataState, cross_kv: str
    ) -> None:
        super().__init__()
        dim, heads = config.hidden_size, (config.num_attention_heads, config.attention_head_dim)

        def attention(role: str) -> Attention:
            return Attention(
                dim, *heads, role=role, backend=backends[role], attention_metadata_state=state, eps=config.eps,
                cross_kv=cross_kv if role == "cross_text" else "padded",
            )  # fmt: skip

        self.eps = config.eps
        self.self_attn = attention("self")
        self.cross_text = attention("cross_text")
        self.cross_image = attention("cross_image") if "cross_image" in backends else None
        self.norm2 = nn.LayerNorm(dim, eps=config.eps) if config.cross_attn_norm else None
        self.ffn = FeedForward(dim, config.ffn_dim)
        self.scale_shift_table = nn.Parameter(torch.randn(1, 6, dim) / dim**0.5)

    def forward(
        self,
        x: torch.Tensor,
        modulation: torch.Tensor,
        rotary: torch.Tensor,
        text: CrossKV,
        image: CrossKV | None = None,
        *,
        cache: LayerKV | None = None,
        block_mask: BlockMask | None = None,
    ) -> torch.Tensor:
        """x [B, S, D]; modulation [B or 1, S or 1, 6, D]; rotary complex [S, 1, D / 2H] or [B, S, 1, D / 2H], or
        its parts (see apply_rotary) → [B, S, D].

        cache, block_mask: how self-attention sees other rows; see Attention.
        """
        modulation = self.scale_shift_table + modulation.float()
        shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = modulation.unbind(2)

        normed = modulated_layer_norm(x, scale, shift, self.eps)
        x = add_gated(x, self.self_attn(normed, rotary=rotary, cache=cache, block_mask=block_mask), gate)

        normed = x if self.norm2 is None else layer_norm_fp32(x, self.norm2.weight, self.norm2.bias, self.eps)
        q = self.cross_text.project_q(normed)
        attended = self.cross_text.attend(q, text)
        if image is not None:
            attended = attended + self.cross_image.attend(q, image)
        x = x + self.cross_text.to_out(attended.flatten(2))

        return add_gated(x, self.ffn(modulated_layer_norm(x, ffn_scale, ffn_shift, self.eps)), ffn_gate)
