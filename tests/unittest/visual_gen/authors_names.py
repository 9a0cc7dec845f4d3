"""How Wan's authors name what diffusers and transformers name otherwise, written from their sources (model.py, t5.py,
vae.py, vae2_2.py and clip.py of wan/modules) in the direction that the package does not go."""

import re

import torch

ATTENTION = {"to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "o", "add_k_proj": "k_img", "add_v_proj": "v_img",
             "norm_q": "norm_q", "norm_k": "norm_k", "norm_added_k": "norm_k_img"}  # fmt: skip
OUTSIDE_BLOCKS = {
    "patch_embedding": "patch_embedding", "proj_out": "head.head",
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "condition_embedder.image_embedder.norm1": "img_emb.proj.0",
    "condition_embedder.image_embedder.ff.net.0.proj": "img_emb.proj.1",
    "condition_embedder.image_embedder.ff.net.2": "img_emb.proj.3",
    "condition_embedder.image_embedder.norm2": "img_emb.proj.4",
}  # fmt: skip


def transformer_module(name):
    """"blocks.0.attn1.to_q" → "blocks.0.self_attn.q"."""
    if name in OUTSIDE_BLOCKS:
        return OUTSIDE_BLOCKS[name]
    _, block, inside = name.split(".", 2)
    if inside.startswith("attn"):
        attention, part = inside.split(".", 1)
        inside = f"{'self_attn' if attention == 'attn1' else 'cross_attn'}.{ATTENTION[part]}"
    else:  # the norm before cross-attention is the third that the authors define
        inside = {"norm2": "norm3", "ffn.net.0.proj": "ffn.0", "ffn.net.2": "ffn.2"}[inside]
    return f"blocks.{block}.{inside}"


def transformer(name):
    if name == "scale_shift_table":
        return "head.modulation"
    if name.endswith("scale_shift_table"):
        return name.replace("scale_shift_table", "modulation")
    if name.endswith("pos_embed"):
        return "img_emb.emb_pos"
    module, kind = name.rsplit(".", 1)
    return f"{transformer_module(module)}.{kind}"


def text_encoder(name):
    if name in ("shared.weight", "encoder.final_layer_norm.weight"):
        return {"shared.weight": "token_embedding.weight"}.get(name, "norm.weight")
    _, _, block, _, layer, inside = name.removesuffix(".weight").split(".", 5)
    inside = {
        "layer_norm": "norm1" if layer == "0" else "norm2",
        "SelfAttention.relative_attention_bias": "pos_embedding.embedding",
        "DenseReluDense.wi_0": "ffn.gate.0",  # the one that goes through GELU
        "DenseReluDense.wi_1": "ffn.fc1", "DenseReluDense.wo": "ffn.fc2",
    }.get(inside) or f"attn.{inside[-1]}"  # fmt: skip
    return f"blocks.{block}.{inside}.weight"


RESIDUAL = {"norm1": "residual.0", "conv1": "residual.2", "norm2": "residual.3", "conv2": "residual.6",
            "conv_shortcut": "shortcut"}  # fmt: skip


def vae(name, *, residual):
    if name.startswith(("quant_conv", "post_quant_conv")):
        return name.replace("post_quant_conv", "conv2").replace("quant_conv", "conv1")
    half, inside = name.split(".", 1)
    for new, old in (("conv_in", "conv1"), ("norm_out", "head.0"), ("conv_out", "head.2")):
        if inside.startswith(new):
            return f"{half}.{inside.replace(new, old)}"
    if match := re.match(r"mid_block\.resnets\.(\d)\.(\w+)\.(\w+)", inside):
        return f"{half}.middle.{2 * int(match[1])}.{RESIDUAL[match[2]]}.{match[3]}"
    if inside.startswith("mid_block.attentions.0."):
        return f"{half}.middle.1.{inside.removeprefix('mid_block.attentions.0.')}"
    outer = "downsamples" if half == "encoder" else "upsamples"
    last = 2 if half == "encoder" else 3  # residual blocks in a level, which the resampling module comes after
    if match := re.match(r"\w+_blocks\.(\d)\.resnets\.(\d)\.(\w+)\.(\w+)", inside):
        level, i, rest = int(match[1]), int(match[2]), f"{RESIDUAL[match[3]]}.{match[4]}"
    elif match := re.match(r"\w+_blocks\.(\d)\.(?:downsampler|upsampler|upsamplers\.0)\.(.+)", inside):
        level, i, rest = int(match[1]), last, match[2]
    else:  # Wan 2.1's encoder, whose modules are one list in diffusers too
        match = re.match(r"down_blocks\.(\d+)\.(.+)", inside)
        part, _, kind = match[2].partition(".")
        return f"encoder.downsamples.{match[1]}.{RESIDUAL.get(part, part)}.{kind}"
    return f"{half}.{outer}.{level}.{outer}.{i}.{rest}" if residual else f"{half}.{outer}.{4 * level + i}.{rest}"


def image_encoder(state):
    """The state dict of transformers' CLIPVisionModel as the authors' CLIP, whose q, k and v are one projection."""
    out = {}
    for name, tensor in state.items():
        name = name.removeprefix("vision_model.")
        if match := re.match(r"encoder\.layers\.(\d+)\.(.+)\.(weight|bias)", name):
            layer, inside, kind = match.groups()
            if inside in ("self_attn.k_proj", "self_attn.v_proj"):
                continue
            if inside == "self_attn.q_proj":
                prefix = next(key for key in state if key.endswith(name)).removesuffix(f"q_proj.{kind}")
                tensor = torch.cat([state[f"{prefix}{part}_proj.{kind}"] for part in "qkv"])
            inside = {"layer_norm1": "norm1", "layer_norm2": "norm2", "self_attn.q_proj": "attn.to_qkv",
                      "self_attn.out_proj": "attn.proj", "mlp.fc1": "mlp.0", "mlp.fc2": "mlp.2"}[inside]  # fmt: skip
            out[f"visual.transformer.{layer}.{inside}.{kind}"] = tensor
        elif name == "embeddings.class_embedding":
            out["visual.cls_embedding"] = tensor[None, None]
        elif name == "embeddings.position_embedding.weight":
            out["visual.pos_embedding"] = tensor[None]
        else:
            for new, old in (("embeddings.", ""), ("pre_layrnorm", "pre_norm"), ("post_layernorm", "post_norm")):
                name = name.replace(new, old)
            out[f"visual.{name}"] = tensor
    return out
