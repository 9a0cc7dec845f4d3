"""The training forward of Wan's transformer, on plain tensors.

diffusers' blocks take no mask in cross-attention, which training needs here to stand for padding of any length, and
compile once per block. This is the same computation as a function of the block's weights: it compiles once for all.

B clips, G groups of L video tokens that share a timestep, D channels, T text slots, H heads.
"""

import torch
import torch.nn.functional as F
from diffusers import WanTransformer3DModel
from torch import Tensor

from visual_gen.modules.block_causal import BlockMask, attend_block_mask

EPS = 1e-6


def _linear(x: Tensor, weights: dict[str, Tensor], name: str, dtype: torch.dtype) -> Tensor:
    return F.linear(x.to(dtype), weights[f"{name}.weight"].to(dtype), weights[f"{name}.bias"].to(dtype))


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def _rotate(x_BLHd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x_BLHd.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


def _attention(q_BLHd: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q_BLHd, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2)


def block_forward(
    x_BGLD: Tensor, text_BTD: Tensor, modulation_BG6D: Tensor, cos: Tensor, sin: Tensor, text_bias: Tensor,
    weights: dict[str, Tensor], heads: int, dtype: torch.dtype, self_mask: BlockMask | None = None,
) -> Tensor:
    """One block on fp32 `x_BGLD`; matrix products run in `dtype`. `self_mask`: which tokens of G · L see which."""
    shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = (
        (weights["scale_shift_table"] + modulation_BG6D).unsqueeze(3).unbind(2)
    )
    width = (x_BGLD.shape[-1],)

    def split(x: Tensor) -> Tensor:
        return x.unflatten(-1, (heads, -1))

    x = (F.layer_norm(x_BGLD, width, eps=EPS) * (1 + scale_1) + shift_1).flatten(1, 2)
    q = _rotate(split(_rms_norm(_linear(x, weights, "attn1.to_q", dtype), weights["attn1.norm_q.weight"])), cos, sin)
    k = _rotate(split(_rms_norm(_linear(x, weights, "attn1.to_k", dtype), weights["attn1.norm_k.weight"])), cos, sin)
    v = split(_linear(x, weights, "attn1.to_v", dtype))
    if self_mask is None:
        attended = _attention(q.to(dtype), k.to(dtype), v)
    else:
        attended = attend_block_mask(q.to(dtype), k.to(dtype), v, self_mask, q.shape[-1] ** -0.5).flatten(2)
    x_BGLD = x_BGLD + _linear(attended, weights, "attn1.to_out.0", dtype).float().view(x_BGLD.shape) * gate_1

    x = F.layer_norm(x_BGLD, width, weights["norm2.weight"], weights["norm2.bias"], EPS).flatten(1, 2)
    q = split(_rms_norm(_linear(x, weights, "attn2.to_q", dtype), weights["attn2.norm_q.weight"])).to(dtype)
    k = split(_rms_norm(_linear(text_BTD, weights, "attn2.to_k", dtype), weights["attn2.norm_k.weight"])).to(dtype)
    v = split(_linear(text_BTD, weights, "attn2.to_v", dtype))
    attended = _linear(_attention(q, k, v, text_bias), weights, "attn2.to_out.0", dtype)
    x_BGLD = x_BGLD + attended.float().view(x_BGLD.shape)

    x = F.layer_norm(x_BGLD, width, eps=EPS) * (1 + scale_2) + shift_2
    x = F.gelu(_linear(x, weights, "ffn.net.0.proj", dtype), approximate="tanh")
    return x_BGLD + _linear(x, weights, "ffn.net.2", dtype).float() * gate_2


def padding_bias(text_lens_B: Tensor, text_lengths_B: Tensor, slots: int, dtype: torch.dtype) -> Tensor:
    """Additive bias [B, 1, 1, slots] with which `slots` text slots act as `text_lengths_B` of them.

    Wan attends to its padding, and all pads are one vector, so that n pads weigh as much as one with log n added to its
    score. The slots past `text_lens_B` share the weight of all text_length − text_len pads.
    """
    slot = torch.arange(slots, device=text_lens_B.device)
    pads = (text_lengths_B - text_lens_B).float()
    share = torch.log(pads / (slots - text_lens_B).clamp(min=1)).view(-1, 1)
    bias = torch.where(slot < text_lens_B.view(-1, 1), torch.zeros_like(share), share)
    return bias.view(-1, 1, 1, slots).to(dtype)


class TrainingForward:
    """Runs `transformer` by `block_forward`; parameters are read in place, so an optimiser's steps show at once."""

    def __init__(self, transformer: WanTransformer3DModel, dtype: torch.dtype) -> None:
        self.transformer, self.dtype = transformer, dtype
        self.heads = transformer.config.num_attention_heads
        self.block_forward = block_forward
        self.block_weights = [dict(block.named_parameters()) for block in transformer.blocks]
        self._rotary: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    def compile(self, one_size: bool = False) -> None:
        """One program for all blocks, and, unless all clips have `one_size`, for all clip sizes: compiling for each of
        the fifteen would cost minutes."""
        if one_size:
            self.block_forward = torch.compile(block_forward, fullgraph=True, dynamic=False)
            return
        compiled = torch.compile(block_forward, fullgraph=True)

        def with_free_sizes(x_BGLD, text_BTD, modulation_BG6D, cos, sin, text_bias, weights, heads, dtype, self_mask):
            # Clips and tokens vary; all else is fixed, which makes the program quicker to make and to run.
            for tensor, free in ((x_BGLD, (0, 2)), (text_BTD, (0,)), (modulation_BG6D, (0,)), (cos, (1,)), (sin, (1,)),
                                 (text_bias, (0,))):
                for dim in free:
                    torch._dynamo.maybe_mark_dynamic(tensor, dim)
            return compiled(x_BGLD, text_BTD, modulation_BG6D, cos, sin, text_bias, weights, heads, dtype, self_mask)

        self.block_forward = with_free_sizes

    def rotary(self, x: Tensor, copies: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines [1, tokens, 1, head_dim / 2] for latents [B, C, copies · F, h, w]."""
        size = (copies, *x.shape[2:])
        if size not in self._rotary:
            cos, sin = self.transformer.rope(x[:1, :, : x.shape[2] // copies])
            self._rotary[size] = tuple(
                angles.float().repeat(1, copies, 1, 1) for angles in (cos[..., 0::2], sin[..., 1::2])
            )
        return self._rotary[size]

    def __call__(
        self, x: Tensor, timestep: Tensor, text_BTC: Tensor, text_bias: Tensor, *,
        self_mask: BlockMask | None = None, copies: int = 1,
    ) -> Tensor:
        """Velocity [B, C, F, h, w] at noisy latents `x` of that shape and text embeddings.

        timestep: [B] in 0..1000, or [B, G] with one for each of G equal runs of frames. text_bias [B, 1, 1 or tokens,
        T]. self_mask: for all tokens of `x`; without it each sees all. copies: the frames are those of so many clips of
        one length, one after another, whose positions all begin at 0.
        """
        model, dtype = self.transformer, self.dtype
        batch, channels, frames, height, width = x.shape
        groups = 1 if timestep.ndim == 1 else timestep.shape[1]
        cos, sin = self.rotary(x, copies)
        patches = model.patch_embedding
        # A convolution whose stride is its kernel is a matrix product over patches.
        x = x.reshape(batch, channels, frames, height // 2, 2, width // 2, 2).permute(0, 2, 3, 5, 1, 4, 6)
        x = x.reshape(batch, groups, -1, channels * 4)
        x = F.linear(x.to(dtype), patches.weight.flatten(1).to(dtype), patches.bias.to(dtype)).float()
        embedder = model.condition_embedder
        time = embedder.time_embedder(embedder.timesteps_proj(timestep.flatten().float())).unflatten(0, (batch, groups))
        modulation = embedder.time_proj(F.silu(time)).unflatten(2, (6, -1))
        text_weights = dict(embedder.text_embedder.named_parameters())
        text = F.gelu(_linear(text_BTC, text_weights, "linear_1", dtype), approximate="tanh")
        text = _linear(text, text_weights, "linear_2", dtype)
        for weights in self.block_weights:
            x = self.block_forward(x, text, modulation, cos, sin, text_bias, weights, self.heads, dtype, self_mask)
        shift, scale = (model.scale_shift_table + time.unsqueeze(2)).unsqueeze(3).unbind(2)
        x = F.layer_norm(x, (x.shape[-1],), eps=EPS) * (1 + scale) + shift
        x = F.linear(x.to(dtype), model.proj_out.weight.to(dtype), model.proj_out.bias.to(dtype)).float()
        x = x.view(batch, frames, height // 2, width // 2, 2, 2, channels).permute(0, 6, 1, 2, 4, 3, 5)
        return x.reshape(batch, channels, frames, height, width)


def encode_text(text_encoder, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Embeddings [B, T, C] with zeros for padding, as Wan's pipeline makes them, and text lengths [B]."""
    mask = (ids_BT != 0).long()
    embeddings = text_encoder(ids_BT, attention_mask=mask).last_hidden_state.float()
    return embeddings * mask.unsqueeze(-1), mask.sum(1)
