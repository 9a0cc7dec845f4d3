"""The two layouts of a Wan checkpoint, read alike: diffusers' folders, and those of Wan's authors.

A part is named by the path that it has in a diffusers folder, FOLDER/vae say. In an authors' folder that path does not
exist and stands for the file that holds the part.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from visual_gen.checkpoint import CheckpointError, WeightFiles, part_path, read_json
from visual_gen.models.wan import authors_parts
from visual_gen.models.wan.authors_names import PickledWeights

AUTHORS_CLASS = "WanModel"
EXPERTS = {"transformer": "high_noise_model", "transformer_2": "low_noise_model"}  # of Wan 2.2 A14B
TEXT_ENCODER = "models_t5_*.pth"
IMAGE_ENCODER = "models_clip_*.pth"
VAES = ("Wan2.1_VAE.pth", "Wan2.2_VAE.pth")
TOKENIZER = "google/umt5-xxl"
LOOKED_FOR = (
    "model_index.json (diffusers' layout), or config.json with diffusion_pytorch_model*.safetensors or "
    f"high_noise_model and low_noise_model, beside {TEXT_ENCODER}, {' or '.join(VAES)} and {TOKENIZER} (the layout of "
    "Wan's authors)"
)
# What tokenizer_config.json says → a fast class that every transformers has.
_TOKENIZERS = {
    None: "T5TokenizerFast",
    "T5Tokenizer": "T5TokenizerFast",
    "TokenizersBackend": "PreTrainedTokenizerFast",  # transformers 5's name
}
_STEMS = {"text_encoder": "model", "image_encoder": "model"}
_PARTS = {
    "text_encoder": (authors_parts.text_encoder_config, authors_parts.text_encoder_weights),
    "image_encoder": (authors_parts.image_encoder_config, authors_parts.image_encoder_weights),
    "vae": (authors_parts.vae_config, authors_parts.vae_weights),
}
# Source: scripts/convert_wan_to_diffusers.py of diffusers, for the shift and where experts change.
_FLOW_SHIFTS = {"flf2v": 16.0, "ti2v": 5.0}
_BOUNDARY_RATIOS = {"t2v": 0.875, "i2v": 0.9}


def is_authors_folder(folder: Path) -> bool:
    """Whether `folder` has the authors' layout, whole or in part: told by what lies in it."""
    if (folder / "model_index.json").exists():
        return False
    if any((folder / name).is_dir() for name in EXPERTS.values()) or any(folder.glob(TEXT_ENCODER)):
        return True
    return any((folder / name).exists() for name in VAES) or is_authors_transformer(folder)


def is_authors_transformer(folder: Path) -> bool:
    """Whether `folder` holds one transformer with the authors' config.json."""
    path = folder / "config.json"
    try:
        return path.is_file() and read_json(path).get("_class_name") == AUTHORS_CLASS
    except CheckpointError:  # whoever reads its settings says so
        return False


def part_folder(path: Path) -> Path:
    """Where a transformer's config.json and weights lie: `path`, or what it stands for in an authors' folder."""
    if path.is_dir() or path.name not in EXPERTS or not is_authors_folder(path.parent):
        return path
    folder = path.parent
    experts = {part: folder / name for part, name in EXPERTS.items()}
    present = [part for part, expert in experts.items() if expert.is_dir()]
    if not present:
        return folder if path.name == "transformer" else path
    for part, expert in experts.items():
        if part not in present:
            raise CheckpointError(
                f"{folder} has {EXPERTS[present[0]]}, but {expert} is missing, the other of Wan 2.2's two experts: "
                "download it"
            )
    return experts[path.name]


def part_file(path: Path) -> Path:
    """The authors' file that holds the part `path`, or CheckpointError with what was looked for."""
    folder = path.parent
    patterns = {"text_encoder": (TEXT_ENCODER,), "image_encoder": (IMAGE_ENCODER,), "vae": VAES}[path.name]
    found = sorted(file for pattern in patterns for file in folder.glob(pattern))
    if len(found) != 1:
        state = f"holds {', '.join(file.name for file in found)}" if found else "lacks its"
        raise CheckpointError(
            f"{folder} {state} {path.name.replace('_', ' ')} ({' or '.join(patterns)}), of which one is needed: "
            + ("keep the one of this model" if found else "download it")
        )
    return found[0]


def read_config(path: Path, file: str = "config.json") -> dict[str, Any]:
    """The settings of a part, as `file` has them in its diffusers folder. Raises CheckpointError."""
    if path.name in EXPERTS or is_authors_transformer(path):
        folder = part_folder(path)
        if is_authors_transformer(folder):
            return transformer_config(folder)
        config = read_json(folder / "config.json")
        if folder == path:
            return config
        raise CheckpointError(
            f"{folder / 'config.json'} is of a {config.get('_class_name')}; of the authors' models only "
            f"{AUTHORS_CLASS} is served"
        )
    if path.is_dir() or not is_authors_folder(path.parent):
        return read_json(path / file)
    if path.name == "scheduler":
        return _scheduler_config(path.parent)
    if path.name == "image_processor":
        return authors_parts.image_processor_config(_open_file(path.with_name("image_encoder")))
    return _PARTS[path.name][0](_open_file(path))


def open_weights(path: Path) -> WeightFiles:
    """The weights of a part: a transformer's under the names that its folder has, any other's under those of diffusers
    and transformers. Raises CheckpointError on missing and damaged files."""
    if path.name in EXPERTS or path.is_dir() or not is_authors_folder(path.parent):
        return WeightFiles.open(part_folder(path), stem=weights_stem(path.name))
    return _PARTS[path.name][1](_open_file(path))


def weights_stem(part: str) -> str:
    """What the names of a part's weight files begin with in a diffusers folder."""
    return _STEMS.get(part, "diffusion_pytorch_model")


def _open_file(path: Path) -> WeightFiles:
    return PickledWeights.open_file(part_file(path))


def tokenizer_folder(folder: Path) -> Path:
    """Where the tokenizer of a pipeline's folder lies."""
    return folder / TOKENIZER if is_authors_folder(folder) else part_path(folder, "tokenizer")


def read_index(folder: Path) -> dict[str, Any]:
    """model_index.json of a pipeline's folder, or what it would be. Raises CheckpointError on a folder of neither
    layout, and on an authors' folder that lacks a part."""
    if not is_authors_folder(folder):
        return read_json(folder / "model_index.json")
    config = read_config(folder / "transformer")
    experts = part_folder(folder / "transformer") != folder
    kind, image = _kind(folder), config["image_dim"] is not None
    for part in ("text_encoder", "vae", *(["image_encoder"] if image else [])):
        part_file(folder / part)
    tokenizer = read_json(folder / TOKENIZER / "tokenizer_config.json").get("tokenizer_class")
    image_to_video = config["in_channels"] != config["out_channels"]
    wan, none = ["diffusers", "WanTransformer3DModel"], [None, None]
    index = {
        "_class_name": "WanImageToVideoPipeline" if image_to_video else "WanPipeline",
        "boundary_ratio": _BOUNDARY_RATIOS["i2v" if image_to_video else "t2v"] if experts else None,
        "expand_timesteps": kind == "ti2v",
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", _TOKENIZERS.get(tokenizer, tokenizer)],
        "transformer": wan,
        "transformer_2": wan if experts else none,
        "vae": ["diffusers", "AutoencoderKLWan"],
    }
    if image_to_video:
        index["image_encoder"] = ["transformers", "CLIPVisionModel"] if image else none
        index["image_processor"] = ["transformers", "CLIPImageProcessor"] if image else none
    return index


def _kind(folder: Path) -> str:
    """t2v, i2v, flf2v or ti2v, as config.json says."""
    path = part_folder(folder / "transformer") / "config.json"
    kind = read_json(path).get("model_type")
    if kind not in ("t2v", "i2v", "flf2v", "ti2v"):
        raise CheckpointError(f"{path} has model_type {kind!r}; served are t2v, i2v, flf2v and ti2v")
    return kind


def _scheduler_config(folder: Path) -> dict[str, Any]:
    return {
        "_class_name": "UniPCMultistepScheduler", "num_train_timesteps": 1000, "solver_order": 2, "solver_type": "bh2",
        "prediction_type": "flow_prediction", "use_flow_sigmas": True, "predict_x0": True,
        "flow_shift": _FLOW_SHIFTS.get(_kind(folder), 3.0), "final_sigmas_type": "zero", "lower_order_final": True,
        "timestep_spacing": "linspace",
    }  # fmt: skip


# The authors' names of settings → diffusers', and those that say nothing about the transformer.
_SETTINGS = {
    "ffn_dim": "ffn_dim", "freq_dim": "freq_dim", "in_dim": "in_channels", "out_dim": "out_channels",
    "num_layers": "num_layers", "eps": "eps",
}  # fmt: skip
_NOT_TRANSFORMER = {"model_type", "text_len", "dim", "num_heads"}


def transformer_config(folder: Path) -> dict[str, Any]:
    """config.json of the WanTransformer3DModel that an authors' transformer folder holds: what the authors' own
    config.json leaves out is read from the shapes in the weight files' headers.

    Raises CheckpointError on settings that are unknown or missing, on files without the tensors that tell the rest.
    """
    path = folder / "config.json"
    raw = {key: value for key, value in read_json(path).items() if not key.startswith("_")}
    unknown = sorted(raw.keys() - _SETTINGS.keys() - _NOT_TRANSFORMER)
    missing = sorted((_SETTINGS.keys() | {"dim", "num_heads"}) - raw.keys())
    if unknown or missing:
        problem = f"the unknown key(s) {', '.join(unknown)}" if unknown else f"no {', '.join(missing)}"
        raise CheckpointError(f"{path} has {problem}: only the plain {AUTHORS_CLASS} of Wan 2.1 and 2.2 is served")
    files = WeightFiles.open(folder)
    return wan_settings(files, {new: raw[old] for old, new in _SETTINGS.items()}, raw["dim"], raw["num_heads"])


def wan_settings(files: WeightFiles, settings: dict[str, Any], dim: int, num_heads: int) -> dict[str, Any]:
    """`settings` and what shapes tell, as WanTransformer3DModel's config.json."""
    shapes = files.shapes
    for name in ("patch_embedding.weight", "text_embedding.0.weight"):
        if name not in shapes:
            raise CheckpointError(f"{files.files[0]} has no tensor {name!r}, so it is no {AUTHORS_CLASS}")
    if not (isinstance(dim, int) and isinstance(num_heads, int) and num_heads > 0 and dim % num_heads == 0):
        raise CheckpointError(f"{files.files[0].parent}: dim {dim!r} is no multiple of num_heads {num_heads!r}")
    image = shapes.get("img_emb.proj.0.weight")
    positions = shapes.get("img_emb.emb_pos")
    return {
        "_class_name": "WanTransformer3DModel", **settings, "num_attention_heads": num_heads,
        "attention_head_dim": dim // num_heads, "patch_size": list(shapes["patch_embedding.weight"][2:]),
        "text_dim": shapes["text_embedding.0.weight"][1], "qk_norm": "rms_norm_across_heads",
        "cross_attn_norm": "blocks.0.norm3.weight" in shapes, "rope_max_seq_len": 1024,
        "image_dim": None if image is None else image[0], "added_kv_proj_dim": None if image is None else dim,
        "pos_embed_seq_len": None if positions is None else positions[1],
    }  # fmt: skip
