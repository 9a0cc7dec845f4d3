"""Text encoder, VAE and image encoder as Wan's authors store them: the names that transformers and diffusers give their
tensors, and the settings that their shapes tell.

Sources: wan/modules/t5.py, vae.py and clip.py of Wan2.1, vae2_2.py of Wan2.2, which fix what shapes cannot tell.
"""

from __future__ import annotations

import re
from typing import Any

from visual_gen.checkpoint import CheckpointError, WeightFiles
from visual_gen.models.wan.renamed_weights import RenamedWeights, Target

Shape = tuple[int, ...]

# Authors' pattern → transformers' or diffusers' name, tried in order.
_T5 = (
    (r"token_embedding\.weight", r"shared.weight"),
    (r"norm\.weight", r"encoder.final_layer_norm.weight"),
    (r"blocks\.(\d+)\.norm1\.weight", r"encoder.block.\1.layer.0.layer_norm.weight"),
    (r"blocks\.(\d+)\.norm2\.weight", r"encoder.block.\1.layer.1.layer_norm.weight"),
    (r"blocks\.(\d+)\.attn\.([qkvo])\.weight", r"encoder.block.\1.layer.0.SelfAttention.\2.weight"),
    (
        r"blocks\.(\d+)\.pos_embedding\.embedding\.weight",
        r"encoder.block.\1.layer.0.SelfAttention.relative_attention_bias.weight",
    ),
    (r"blocks\.(\d+)\.ffn\.gate\.0\.weight", r"encoder.block.\1.layer.1.DenseReluDense.wi_0.weight"),
    (r"blocks\.(\d+)\.ffn\.fc1\.weight", r"encoder.block.\1.layer.1.DenseReluDense.wi_1.weight"),
    (r"blocks\.(\d+)\.ffn\.fc2\.weight", r"encoder.block.\1.layer.1.DenseReluDense.wo.weight"),
)
_CLIP = (
    (r"patch_embedding\.weight", r"embeddings.patch_embedding.weight"),
    (r"cls_embedding", r"embeddings.class_embedding"),
    (r"pos_embedding", r"embeddings.position_embedding.weight"),
    (r"pre_norm\.(weight|bias)", r"pre_layrnorm.\1"),  # spelled so in transformers
    (r"post_norm\.(weight|bias)", r"post_layernorm.\1"),
    (r"transformer\.(\d+)\.norm([12])\.(weight|bias)", r"encoder.layers.\1.layer_norm\2.\3"),
    (r"transformer\.(\d+)\.attn\.to_qkv\.(weight|bias)", r"encoder.layers.\1.self_attn.{}_proj.\2"),
    (r"transformer\.(\d+)\.attn\.proj\.(weight|bias)", r"encoder.layers.\1.self_attn.out_proj.\2"),
    (r"transformer\.(\d+)\.mlp\.0\.(weight|bias)", r"encoder.layers.\1.mlp.fc1.\2"),
    (r"transformer\.(\d+)\.mlp\.2\.(weight|bias)", r"encoder.layers.\1.mlp.fc2.\2"),
)
_VAE_INSIDE = (  # of a residual block, after its own place was found
    (".residual.0.", ".norm1."),
    (".residual.2.", ".conv1."),
    (".residual.3.", ".norm2."),
    (".residual.6.", ".conv2."),
    (".shortcut.", ".conv_shortcut."),
)
_VAE_ENDS = (
    (r"conv1\.(.+)", r"quant_conv.\1"),
    (r"conv2\.(.+)", r"post_quant_conv.\1"),
    (r"(encoder|decoder)\.conv1\.(.+)", r"\1.conv_in.\2"),
    (r"(encoder|decoder)\.head\.0\.(.+)", r"\1.norm_out.\2"),
    (r"(encoder|decoder)\.head\.2\.(.+)", r"\1.conv_out.\2"),
    (r"(encoder|decoder)\.middle\.0\.(.+)", r"\1.mid_block.resnets.0.\2"),
    (r"(encoder|decoder)\.middle\.1\.(.+)", r"\1.mid_block.attentions.0.\2"),
    (r"(encoder|decoder)\.middle\.2\.(.+)", r"\1.mid_block.resnets.1.\2"),
)
_VAE21_LEVELS = ((r"encoder\.downsamples\.(.+)", r"encoder.down_blocks.\1"),)
_VAE22_LEVELS = (
    (
        r"encoder\.downsamples\.(\d)\.downsamples\.\d\.((?:resample|time_conv)\..+)",
        r"encoder.down_blocks.\1.downsampler.\2",
    ),
    (r"encoder\.downsamples\.(\d)\.downsamples\.(.+)", r"encoder.down_blocks.\1.resnets.\2"),
    (r"decoder\.upsamples\.(\d)\.upsamples\.\d\.((?:resample|time_conv)\..+)", r"decoder.up_blocks.\1.upsampler.\2"),
    (r"decoder\.upsamples\.(\d)\.upsamples\.(.+)", r"decoder.up_blocks.\1.resnets.\2"),
)
_VAE21_UP = re.compile(r"decoder\.upsamples\.(\d+)\.(.+)")
_VAE21_LEVEL_MODULES = 4  # of the decoder, one after another: three residual blocks and what doubles the size
_VAE22_SECOND_LEVEL = "encoder.downsamples.0.downsamples.0.residual.2.weight"

_CLIP_HEAD_DIM = 80  # of the ViT-H/14; no shape tells it
_LATENT_STATISTICS = {
    16: (
        (-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508, 0.4134, -0.0715, 0.5517, -0.3632,
         -0.1922, -0.9497, 0.2503, -0.2921),
        (2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743, 3.2687, 2.1526, 2.8652, 1.5579, 1.6382,
         1.1253, 2.8251, 1.9160),
    ),
    48: (
        (-0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542, 0.2813, 0.0891,
         0.1570, -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502,
         -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230, -0.0313, -0.1649, 0.0117, 0.0723,
         -0.2839, -0.2083, -0.0520, 0.3748, 0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667),
        (0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894, 1.0901, 0.6885,
         0.6165, 0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659, 0.7069, 0.5338,
         0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093, 0.5709, 0.6065, 0.6415, 0.4944, 0.5726, 1.2042, 0.5458,
         1.6887, 0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744),
    ),
}  # fmt: skip


def _renamed(name: str, rules: tuple[tuple[str, str], ...]) -> str | None:
    for pattern, new in rules:
        if match := re.fullmatch(pattern, name):
            return match.expand(new)
    return None


def text_encoder_weights(files: WeightFiles) -> WeightFiles:
    """The authors' T5 encoder under transformers' UMT5EncoderModel's names."""

    def targets(name: str, shape: Shape) -> tuple[Target, ...] | None:
        new = _renamed(name, _T5)
        return None if new is None else (Target(new),)

    return RenamedWeights.of(files, targets)


def text_encoder_config(files: WeightFiles) -> dict[str, Any]:
    """config.json of the UMT5EncoderModel that the authors' T5 encoder is."""
    shape = _shapes(files, "T5 encoder")
    vocab_size, d_model = shape("token_embedding.weight")
    buckets, heads = shape("blocks.0.pos_embedding.embedding.weight")
    inner = shape("blocks.0.attn.q.weight")[0]
    return {
        "architectures": ["UMT5EncoderModel"], "model_type": "umt5", "vocab_size": vocab_size, "d_model": d_model,
        "d_kv": inner // heads, "d_ff": shape("blocks.0.ffn.fc1.weight")[0], "num_heads": heads,
        "num_layers": _count(files, r"blocks\.(\d+)\."), "relative_attention_num_buckets": buckets,
        "relative_attention_max_distance": 128, "layer_norm_epsilon": 1e-6, "feed_forward_proj": "gated-gelu",
        "dense_act_fn": "gelu_new", "is_gated_act": True, "dropout_rate": 0.1, "is_encoder_decoder": True,
        "use_cache": True, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0,
        "tie_word_embeddings": True, "dtype": _dtype(files, "token_embedding.weight"),
    }  # fmt: skip


def image_encoder_weights(files: WeightFiles) -> WeightFiles:
    """The image half of the authors' CLIP under transformers' CLIPVisionModel's names, with the prefix that published
    folders have. Its text half and the projection to CLIP's common space are left aside: Wan uses neither."""

    def targets(name: str, shape: Shape) -> tuple[Target, ...] | None:
        if name.startswith("textual.") or name in ("log_scale", "visual.head"):
            return ()
        new = _renamed(name.removeprefix("visual."), _CLIP) if name.startswith("visual.") else None
        if new is None:
            return None
        new = f"vision_model.{new}"
        if "{}" in new:
            rows = shape[0] // 3
            return tuple(Target(new.format(part), i * rows, rows) for i, part in enumerate("qkv"))
        if new.endswith("class_embedding"):
            return (Target(new, shape=shape[-1:]),)
        return (Target(new, shape=shape[1:] if name == "visual.pos_embedding" else None),)

    return RenamedWeights.of(files, targets)


def image_encoder_config(files: WeightFiles) -> dict[str, Any]:
    """config.json of the CLIPVisionModel that the image half of the authors' CLIP is. All layers: pipelines read the
    last but one layer's output."""
    shape = _shapes(files, "CLIP with a 'visual' half")
    width, _, patch, _ = shape("visual.patch_embedding.weight")
    grid = round((shape("visual.pos_embedding")[1] - 1) ** 0.5)
    if width % _CLIP_HEAD_DIM:
        raise CheckpointError(f"{files.files[0]} has width {width}; Wan's image encoder has heads of {_CLIP_HEAD_DIM}")
    return {
        "architectures": ["CLIPVisionModel"], "model_type": "clip_vision_model", "hidden_size": width,
        "intermediate_size": shape("visual.transformer.0.mlp.0.weight")[0], "projection_dim": shape("visual.head")[1],
        "num_hidden_layers": _count(files, r"visual\.transformer\.(\d+)\."),
        "num_attention_heads": width // _CLIP_HEAD_DIM, "image_size": grid * patch, "patch_size": patch,
        "num_channels": 3, "hidden_act": "gelu", "layer_norm_eps": 1e-5, "attention_dropout": 0.0,
        "dtype": _dtype(files, "visual.patch_embedding.weight"),
    }  # fmt: skip


def image_processor_config(files: WeightFiles) -> dict[str, Any]:
    """preprocessor_config.json that goes with image_encoder_config."""
    size = image_encoder_config(files)["image_size"]
    return {
        "image_processor_type": "CLIPImageProcessor", "crop_size": {"height": size, "width": size},
        "size": {"shortest_edge": size}, "do_center_crop": True, "do_convert_rgb": True, "do_normalize": True,
        "do_rescale": True, "do_resize": True, "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711], "resample": 3, "rescale_factor": 1 / 255,
    }  # fmt: skip


def vae_weights(files: WeightFiles) -> WeightFiles:
    """The authors' VAE, of Wan 2.1 or 2.2, under diffusers' AutoencoderKLWan's names."""
    levels = _VAE22_LEVELS if _VAE22_SECOND_LEVEL in files.shapes else _VAE21_LEVELS

    def targets(name: str, shape: Shape) -> tuple[Target, ...] | None:
        new = _renamed(name, _VAE_ENDS + levels) or _decoder_level_21(name)
        if new is None:
            return None
        for theirs, diffusers in _VAE_INSIDE:
            new = new.replace(theirs, diffusers)
        return (Target(new),)

    return RenamedWeights.of(files, targets)


def _decoder_level_21(name: str) -> str | None:
    match = _VAE21_UP.fullmatch(name)
    if match is None:
        return None
    level, module = divmod(int(match[1]), _VAE21_LEVEL_MODULES)
    inside = f"resnets.{module}" if module < _VAE21_LEVEL_MODULES - 1 else "upsamplers.0"
    return f"decoder.up_blocks.{level}.{inside}.{match[2]}"


def vae_config(files: WeightFiles) -> dict[str, Any]:
    """config.json of the AutoencoderKLWan that the authors' VAE is."""
    shape = _shapes(files, "Wan VAE")
    z_dim = shape("conv2.weight")[0]
    if z_dim not in _LATENT_STATISTICS:
        raise CheckpointError(
            f"{files.files[0]} has {z_dim} latent channels; the statistics are known of Wan 2.1's 16 and Wan 2.2's 48"
        )
    residual = _VAE22_SECOND_LEVEL in files.shapes
    base, channels = shape("encoder.conv1.weight")[:2]
    mean, std = _LATENT_STATISTICS[z_dim]
    return {
        "_class_name": "AutoencoderKLWan", "base_dim": base,
        "decoder_base_dim": shape("decoder.head.0.gamma")[0] if residual else None, "z_dim": z_dim,
        "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "attn_scales": [], "temperal_downsample": [False, True, True],
        "dropout": 0.0, "latents_mean": list(mean), "latents_std": list(std), "is_residual": residual,
        "in_channels": channels, "out_channels": shape("decoder.head.2.weight")[0],
        "patch_size": 2 if residual else None, "scale_factor_temporal": 4,
        "scale_factor_spatial": 16 if residual else 8,
    }  # fmt: skip


def _shapes(files: WeightFiles, what: str):
    def shape(name: str) -> Shape:
        if name not in files.shapes:
            raise CheckpointError(f"{files.files[0]} has no tensor {name!r}, so it is no {what}: give that file")
        return files.shapes[name]

    return shape


def _count(files: WeightFiles, pattern: str) -> int:
    return 1 + max(int(match[1]) for name in files.shapes if (match := re.match(pattern, name)))


def _dtype(files: WeightFiles, name: str) -> str:
    return str(files.dtypes[name]).removeprefix("torch.")
