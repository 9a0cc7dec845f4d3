"""The training forward of Wan's transformer, on plain tensors.

diffusers' blocks take no mask in cross-attention, which training needs here to stand for padding of any length, and
compile once per block. This is the same computation as a function of the block's weights: it compiles once for all.

B clips, L video tokens, D channels, T text slots, H heads.
"""

import torch
import torch.nn.functional as F
from diffusers import WanTransformer3DModel
from torch import Tensor

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
    x_BLD: Tensor, text_BTD: Tensor, modulation_B6D: Tensor, cos: Tensor, sin: Tensor, text_bias: Tensor,
    weights: dict[str, Tensor], heads: int, dtype: torch.dtype,
) -> Tensor:
    """One block on fp32 `x_BLD`; matrix products run in `dtype`."""
    shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = (
        (weights["scale_shift_table"] + modulation_B6D).unsqueeze(2).unbind(1)
    )
    width = (x_BLD.shape[-1],)

    def split(x: Tensor) -> Tensor:
        return x.unflatten(-1, (heads, -1))

    x = F.layer_norm(x_BLD, width, eps=EPS) * (1 + scale_1) + shift_1
    q = _rotate(split(_rms_norm(_linear(x, weights, "attn1.to_q", dtype), weights["attn1.norm_q.weight"])), cos, sin)
    k = _rotate(split(_rms_norm(_linear(x, weights, "attn1.to_k", dtype), weights["attn1.norm_k.weight"])), cos, sin)
    v = split(_linear(x, weights, "attn1.to_v", dtype))
    attended = _attention(q.to(dtype), k.to(dtype), v)
    x_BLD = x_BLD + _linear(attended, weights, "attn1.to_out.0", dtype).float() * gate_1

    x = F.layer_norm(x_BLD, width, weights["norm2.weight"], weights["norm2.bias"], EPS)
    q = split(_rms_norm(_linear(x, weights, "attn2.to_q", dtype), weights["attn2.norm_q.weight"])).to(dtype)
    k = split(_rms_norm(_linear(text_BTD, weights, "attn2.to_k", dtype), weights["attn2.norm_k.weight"])).to(dtype)
    v = split(_linear(text_BTD, weights, "attn2.to_v", dtype))
    x_BLD = x_BLD + _linear(_attention(q, k, v, text_bias), weights, "attn2.to_out.0", dtype).float()

    x = F.layer_norm(x_BLD, width, eps=EPS) * (1 + scale_2) + shift_2
    x = F.gelu(_linear(x, weights, "ffn.net.0.proj", dtype), approximate="tanh")
    return x_BLD + _linear(x, weights, "ffn.net.2", dtype).float() * gate_2


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

    def compile(self) -> None:
        """One program for all clip sizes: compiling for each of the fifteen would cost minutes."""
        compiled = torch.compile(block_forward, fullgraph=True)

        def with_free_sizes(x_BLD, text_BTD, modulation_B6D, cos, sin, text_bias, weights, heads, dtype):
            # Clips and tokens vary; all else is fixed, which makes the program quicker to make and to run.
            for tensor, free in ((x_BLD, (0, 1)), (text_BTD, (0,)), (modulation_B6D, (0,)), (cos, (1,)), (sin, (1,)),
                                 (text_bias, (0,))):
                for dim in free:
                    torch._dynamo.maybe_mark_dynamic(tensor, dim)
            return compiled(x_BLD, text_BTD, modulation_B6D, cos, sin, text_bias, weights, heads, dtype)

        self.block_forward = with_free_sizes

    def rotary(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [1, L, 1, head_dim / 2] for latents [B, C, F, h, w]."""
        size = tuple(x.shape[2:])
        if size not in self._rotary:
            cos, sin = self.transformer.rope(x[:1])
            self._rotary[size] = (cos[..., 0::2].float().contiguous(), sin[..., 1::2].float().contiguous())
        return self._rotary[size]

    def __call__(self, x: Tensor, timestep_B: Tensor, text_BTC: Tensor, text_bias: Tensor) -> Tensor:
        """Velocity [B, C, F, h, w] at noisy latents `x` of that shape, timesteps in 0..1000, and text embeddings."""
        model, dtype = self.transformer, self.dtype
        batch, channels, frames, height, width = x.shape
        cos, sin = self.rotary(x)
        patches = model.patch_embedding
        # A convolution whose stride is its kernel is a matrix product over patches.
        x = x.view(batch, channels, frames, height // 2, 2, width // 2, 2).permute(0, 2, 3, 5, 1, 4, 6)
        x = x.reshape(batch, -1, channels * 4)
        x = F.linear(x.to(dtype), patches.weight.flatten(1).to(dtype), patches.bias.to(dtype)).float()
        embedder = model.condition_embedder
        time = embedder.time_embedder(embedder.timesteps_proj(timestep_B.float()))
        modulation = embedder.time_proj(F.silu(time)).unflatten(1, (6, -1))
        text_weights = dict(embedder.text_embedder.named_parameters())
        text = F.gelu(_linear(text_BTC, text_weights, "linear_1", dtype), approximate="tanh")
        text = _linear(text, text_weights, "linear_2", dtype)
        for weights in self.block_weights:
            x = self.block_forward(x, text, modulation, cos, sin, text_bias, weights, self.heads, dtype)
        shift, scale = (model.scale_shift_table + time.unsqueeze(1)).unsqueeze(2).unbind(1)
        x = F.layer_norm(x, (x.shape[-1],), eps=EPS) * (1 + scale) + shift
        x = F.linear(x.to(dtype), model.proj_out.weight.to(dtype), model.proj_out.bias.to(dtype)).float()
        x = x.view(batch, frames, height // 2, width // 2, 2, 2, channels).permute(0, 6, 1, 2, 4, 3, 5)
        return x.reshape(batch, channels, frames, height, width)


def encode_text(text_encoder, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Embeddings [B, T, C] with zeros for padding, as Wan's pipeline makes them, and text lengths [B]."""
    mask = (ids_BT != 0).long()
    embeddings = text_encoder(ids_BT, attention_mask=mask).last_hidden_state.float()
    return embeddings * mask.unsqueeze(-1), mask.sum(1)
