"""Small folders of the Wan family with the layout, tensor names, dtypes and configuration keys of the published ones,
written by diffusers, and diffusers' own pipelines of them."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKLWan,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanTransformer3DModel,
)
from diffusers import WanPipeline as DiffusersWanPipeline
from PIL import Image
from transformers import AutoTokenizer, CLIPImageProcessorPil, CLIPVisionConfig, CLIPVisionModel, UMT5EncoderModel

from visual_gen.checkpoint import resolve_folder
from visual_gen.pipelines import WanPipeline

WAN21 = {"in_channels": 16, "out_channels": 16}
I2V21 = {"in_channels": 36, "out_channels": 16, "image_dim": 32, "added_kv_proj_dim": 32}
# What of scripts/convert_wan_to_diffusers.py tells the members apart, sizes scaled down.
MEMBERS = {
    "i2v": dict(transformer=I2V21, flow_shift=3.0),
    "flf2v": dict(transformer=I2V21 | {"pos_embed_seq_len": 2 * 5}, flow_shift=16.0),
    "t2v_a14b": dict(transformer=WAN21, flow_shift=3.0, boundary_ratio=0.875),
    "i2v_a14b": dict(transformer={"in_channels": 36, "out_channels": 16}, flow_shift=3.0, boundary_ratio=0.9),
    "ti2v_5b": dict(transformer={"in_channels": 48, "out_channels": 48}, flow_shift=5.0, expand_timesteps=True),
}
VAE21 = dict(base_dim=8, z_dim=16)
VAE22 = dict(
    base_dim=8, decoder_base_dim=12, z_dim=48, is_residual=True, in_channels=12, out_channels=12, patch_size=2,
    scale_factor_temporal=4, scale_factor_spatial=16,
)  # fmt: skip


def randomized(model, seed):
    """Random values in every tensor, norms and embeddings that start as ones and zeros included."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        fan_in = parameter[0].numel() if parameter.ndim > 1 else 1
        value = noise / fan_in**0.5 if parameter.ndim > 1 else 0.1 * noise
        if ("norm" in name or "gamma" in name) and not name.endswith("bias"):
            value = 1 + 0.2 * noise
        parameter.data.copy_(value)
    return model.eval().requires_grad_(False)


def make_member(name, folder):
    shapes, facts = resolve_folder("wan-shapes"), dict(MEMBERS[name])
    config, flow_shift = facts.pop("transformer"), facts.pop("flow_shift")
    text_encoder = UMT5EncoderModel.from_pretrained(shapes / "text_encoder", dtype=torch.bfloat16)

    def transformer(seed):
        return randomized(
            WanTransformer3DModel(
                num_attention_heads=2, attention_head_dim=16, text_dim=text_encoder.config.d_model, freq_dim=32,
                ffn_dim=64, num_layers=2, **config,
            ),
            seed,
        )  # fmt: skip

    vae_config = VAE22 if name == "ti2v_5b" else VAE21
    z_dim, numbers = vae_config["z_dim"], torch.Generator().manual_seed(7)
    statistics = {
        "latents_mean": torch.randn(z_dim, generator=numbers).mul(0.3).tolist(),
        "latents_std": torch.rand(z_dim, generator=numbers).add(0.5).tolist(),
    }
    parts = dict(
        tokenizer=AutoTokenizer.from_pretrained(shapes / "tokenizer"),
        text_encoder=text_encoder,
        vae=randomized(AutoencoderKLWan(**vae_config, **statistics), 1),
        scheduler=UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=flow_shift
        ),
        transformer=transformer(2),
        transformer_2=transformer(3) if "boundary_ratio" in facts else None,
    )
    cls = DiffusersWanPipeline if name in ("t2v_a14b", "ti2v_5b") else WanImageToVideoPipeline
    if "image_dim" in config:
        vision = CLIPVisionConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, patch_size=14,
            image_size=28, hidden_act="gelu",
        )  # fmt: skip
        parts["image_encoder"] = randomized(CLIPVisionModel(vision), 4).to(torch.bfloat16)
        size = {"height": 28, "width": 28}
        parts["image_processor"] = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=size)
    cls(**parts, **facts).save_pretrained(folder, max_shard_size="100KB")
    if "image_dim" in config:  # the class that published folders name
        index = json.loads((folder / "model_index.json").read_text())
        index["image_processor"] = ["transformers", "CLIPImageProcessor"]
        (folder / "model_index.json").write_text(json.dumps(index))


@pytest.fixture(scope="session")
def member(tmp_path_factory):
    """member(name) → the folder of that member of the family, made once."""
    made = {}

    def folder(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            make_member(name, made[name])
        return made[name]

    return folder


@pytest.fixture(scope="session")
def opened(member):
    """opened(name, **settings) → our pipeline of that member, loaded once for the same settings."""
    pipes = {}

    def open_member(name, **settings):
        key = (name, *sorted(settings.items()))
        if key not in pipes:
            pipes[key] = WanPipeline.from_pretrained(member(name), progress=False, **settings)
        return pipes[key]

    return open_member


@pytest.fixture(scope="session")
def reference(member):
    """reference(name, with_image) → diffusers' pipeline of that member, loaded once."""
    pipes = {}

    def load(name, with_image):
        cls = WanImageToVideoPipeline if with_image else DiffusersWanPipeline
        if (name, cls) not in pipes:
            extra = {}
            if "image_dim" in MEMBERS[name]["transformer"]:  # as diffusers takes it where torchvision is missing
                extra["image_processor"] = CLIPImageProcessorPil.from_pretrained(member(name) / "image_processor")
            pipe = cls.from_pretrained(member(name), dtype=torch.float32, **extra)
            pipe.set_progress_bar_config(disable=True)
            pipes[name, cls] = pipe
        return pipes[name, cls]

    return load


def picture(seed, width=70, height=40):
    """A smooth picture of the given size, so that another way to resize it does not hide in noise."""
    generator = np.random.default_rng(seed)
    coarse = Image.fromarray(generator.integers(0, 256, (5, 7, 3), dtype=np.uint8))
    return coarse.resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture(scope="session")
def pictures():
    return SimpleNamespace(first=picture(0), last=picture(1, 48, 48), other=picture(2, 33, 60))
