"""One small model of each kind of Wan, as a diffusers folder and as its authors would store it."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanTransformer3DModel
from safetensors.torch import save_file
from transformers import CLIPVisionConfig, CLIPVisionModel, UMT5Config, UMT5EncoderModel

from tests.unittest.visual_gen import authors_names
from visual_gen.checkpoint import resolve_folder

T5_FILE, CLIP_FILE = "models_t5_umt5-xxl-enc-bf16.pth", "models_clip_open-clip-xlm-roberta-large-vit-huge-14.pth"
WAN = {"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 16, "out_channels": 16, "text_dim": 16,
       "freq_dim": 16, "ffn_dim": 40, "num_layers": 2}  # fmt: skip
VAE22 = {"decoder_base_dim": 6, "z_dim": 48, "in_channels": 12, "out_channels": 12, "patch_size": 2,
         "is_residual": True, "scale_factor_spatial": 16}  # fmt: skip
IMAGE = {"in_channels": 36, "image_dim": 80, "added_kv_proj_dim": 24}
# What the authors' config.json and file names say; index: what diffusers' model_index.json has beside the parts.
KINDS = {
    "t2v": SimpleNamespace(wan={}, vae={}, experts=False, index={}),
    "i2v": SimpleNamespace(wan=IMAGE, vae={}, experts=False, index={}),
    "flf2v": SimpleNamespace(wan={**IMAGE, "pos_embed_seq_len": 10}, vae={}, experts=False, index={}),
    "t2v-a14b": SimpleNamespace(wan={}, vae={}, experts=True, index={"boundary_ratio": 0.875}),
    "i2v-a14b": SimpleNamespace(wan={"in_channels": 36}, vae={}, experts=True, index={"boundary_ratio": 0.9}),
    "ti2v": SimpleNamespace(
        wan={"in_channels": 48, "out_channels": 48}, vae=VAE22, experts=False, index={"expand_timesteps": True}
    ),
}


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory):
    """make_checkpoint(kind) → the same random weights as .diffusers, a folder, and .authors, another; made once each.
    The text encoder is bf16, the rest fp32 with the image encoder in fp16, as published. Write into neither: copy it.
    """
    made = {}

    def make(kind):
        if kind not in made:
            made[kind] = _make(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return make


@torch.no_grad()
def _make(kind, root):
    spec = KINDS[kind]
    generator = torch.Generator().manual_seed(len(kind))

    def randomise(model, dtype=torch.float32):
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            fan_in = parameter[0].numel() if parameter.ndim > 1 else 1
            parameter.copy_(noise / fan_in**0.5 if parameter.ndim > 1 else 1 + 0.1 * noise)
        return model.to(dtype).eval()

    ours, theirs = root / "diffusers", root / "authors"
    theirs.mkdir()
    wan = {**WAN, **spec.wan}
    for part, folder in _transformers(spec, theirs).items():
        model = randomise(WanTransformer3DModel(**wan))
        model.save_pretrained(ours / part, max_shard_size="30KB")
        save_authors_transformer(model, folder, kind)
    statistics = {"latents_mean": VAE22_MEAN, "latents_std": VAE22_STD} if spec.vae else {}
    vae = randomise(AutoencoderKLWan(base_dim=4, **spec.vae, **statistics))
    vae.save_pretrained(ours / "vae")
    state = {authors_names.vae(name, residual=bool(spec.vae)): x for name, x in vae.state_dict().items()}
    torch.save(state, theirs / ("Wan2.2_VAE.pth" if spec.vae else "Wan2.1_VAE.pth"))

    text = randomise(
        UMT5EncoderModel(UMT5Config(vocab_size=128, d_model=16, d_kv=8, d_ff=24, num_heads=2, num_layers=2)),
        torch.bfloat16,
    )
    text.save_pretrained(ours / "text_encoder")
    state = text.state_dict()
    del state["encoder.embed_tokens.weight"]
    torch.save({authors_names.text_encoder(name): x for name, x in state.items()}, theirs / T5_FILE)
    for folder in (ours / "tokenizer", theirs / "google" / "umt5-xxl"):
        shutil.copytree(resolve_folder("wan-shapes") / "tokenizer", folder)

    image_encoder = None
    if "image_dim" in wan:
        image_encoder = randomise(CLIPVisionModel(CLIPVisionConfig(
            hidden_size=80, intermediate_size=96, projection_dim=8, num_hidden_layers=2, num_attention_heads=1,
            image_size=8, patch_size=4, hidden_act="gelu",
        )), torch.float16)  # fmt: skip
        image_encoder.save_pretrained(ours / "image_encoder")
        unused = {"visual.head": torch.zeros(80, 8), "log_scale": torch.zeros(()), "textual.norm.weight": torch.ones(3)}
        torch.save(authors_names.image_encoder(image_encoder.state_dict()) | unused, theirs / CLIP_FILE)
    UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True,
        flow_shift={"flf2v": 16.0, "ti2v": 5.0}.get(kind, 3.0),
    ).save_pretrained(ours / "scheduler")  # fmt: skip
    none, wan_class = [None, None], ["diffusers", "WanTransformer3DModel"]
    index = {
        "_class_name": "WanImageToVideoPipeline" if wan["in_channels"] == 36 else "WanPipeline",
        "scheduler": ["diffusers", "UniPCMultistepScheduler"], "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "PreTrainedTokenizerFast"], "vae": ["diffusers", "AutoencoderKLWan"],
        "transformer": wan_class, "transformer_2": wan_class if spec.experts else none,
        "boundary_ratio": None, "expand_timesteps": False, **spec.index,
    }  # fmt: skip
    if wan["in_channels"] == 36:
        image = image_encoder is not None
        index["image_encoder"] = ["transformers", "CLIPVisionModel"] if image else none
        index["image_processor"] = ["transformers", "CLIPImageProcessor"] if image else none
    (ours / "model_index.json").write_text(json.dumps(index))
    return SimpleNamespace(kind=kind, diffusers=ours, authors=theirs)


def _transformers(spec, theirs):
    if spec.experts:
        return {"transformer": theirs / "high_noise_model", "transformer_2": theirs / "low_noise_model"}
    return {"transformer": theirs}


def save_authors_transformer(model, folder, kind):
    """A WanTransformer3DModel in the authors' layout: two shards with an index, and their config.json."""
    config = model.config
    folder.mkdir(exist_ok=True)
    state = {authors_names.transformer(name): x.contiguous() for name, x in model.state_dict().items()}
    assert len(state) == len(model.state_dict())
    names, stem = sorted(state), "diffusion_pytorch_model"
    shards = [f"{stem}-0000{i}-of-00002.safetensors" for i in (1, 2)]
    weight_map = {name: shards[i >= len(names) // 2] for i, name in enumerate(names)}
    for shard in shards:
        save_file({name: state[name] for name in names if weight_map[name] == shard}, folder / shard)
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps({
        "_class_name": "WanModel", "_diffusers_version": "0.33.0", "dim": 24, "eps": 1e-6, "ffn_dim": config.ffn_dim,
        "freq_dim": config.freq_dim, "in_dim": config.in_channels, "model_type": kind.removesuffix("-a14b"),
        "num_heads": 2, "num_layers": config.num_layers, "out_dim": config.out_channels, "text_len": 512,
    }))  # fmt: skip


# Of Wan2.2's VAE, vae2_2.py; Wan2.1's are AutoencoderKLWan's defaults.
VAE22_MEAN = [
    -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542, 0.2813, 0.0891, 0.1570,
    -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502, -0.2055, -0.0322,
    0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230, -0.0313, -0.1649, 0.0117, 0.0723, -0.2839, -0.2083, -0.0520,
    0.3748, 0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
]  # fmt: skip
VAE22_STD = [
    0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894, 1.0901, 0.6885, 0.6165,
    0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659, 0.7069, 0.5338, 0.4889, 0.4917,
    0.4069, 0.4999, 0.6866, 0.4093, 0.5709, 0.6065, 0.6415, 0.4944, 0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.0600,
    0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
]  # fmt: skip
