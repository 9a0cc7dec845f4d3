"""What model a configuration means: its folder, where that is here, else the preset that it names."""

from __future__ import annotations

import dataclasses
import difflib
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from attention_backend import AttentionBackendError, check_backend_name
from attention_backend.interface import ROLES
from visual_gen.checkpoint import PACKAGED_CHECKPOINTS, CheckpointError, part_path, resolve_folder
from visual_gen.config import ConfigError, RunConfig, StreamConfig, check_stream_settings
from visual_gen.models.wan import WAN_PRESETS, WanConfig
from visual_gen.models.wan.geometry import Geometry
from visual_gen.models.wan.layouts import open_weights, read_index, tokenizer_folder
from visual_gen.models.wan.task import Task, check_streamable
from visual_gen.models.wan.text_pool import check_served


@dataclass(frozen=True)
class PartSize:
    """Parameters of a part that stays beside the transformer. `kept_fp32` of them stay fp32 in a float16 run, as
    transformers keeps the second layer of UMT5's feed-forward."""

    parameters: int
    kept_fp32: int = 0

    def num_bytes(self, dtype: torch.dtype) -> int:
        kept = self.kept_fp32 if dtype == torch.float16 else 0
        return self.parameters * dtype.itemsize + kept * (torch.float32.itemsize - dtype.itemsize)


# Of the models that the config.json files of the Wan-AI/*-Diffusers repositories describe: the encoder of UMT5-XXL in
# all of them, Wan 2.1's VAE in all but TI2V, which has Wan 2.2's, and the vision half of CLIP ViT-H/14 in Wan 2.1's for
# images. tests/unittest/visual_gen/test_plan.py counts them.
UMT5_XXL_ENCODER = PartSize(5_680_910_336, kept_fp32=1_006_632_960)
WAN21_VAE = PartSize(126_892_531)
WAN22_VAE = PartSize(704_688_668)
CLIP_VIT_H_VISION = PartSize(630_766_080)


@dataclass(frozen=True)
class Model:
    """A checkpoint as far as its configuration files tell. A part's size is None where nothing here says it."""

    source: str
    transformer: WanConfig
    geometry: Geometry
    num_experts: int = 1
    timestep_per_token: bool = False
    text_encoder: PartSize | None = None
    vae: PartSize | None = None
    image_encoder: PartSize | None = None
    tokenizer_file: Path | None = None

    @property
    def task(self) -> Task:
        return Task.of(self.transformer, timestep_per_token=self.timestep_per_token)


def find_model(config: RunConfig) -> Model | None:
    """The model of model.path and model.preset; None if the folder is not here and no preset is given.

    Raises ConfigError on an unknown preset and on one that contradicts the folder, CheckpointError on a damaged folder.
    """
    path, preset = config.model.path, config.model.preset
    if preset is not None and preset not in WAN_PRESETS:
        near = difflib.get_close_matches(preset.lower(), WAN_PRESETS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"model.preset = {preset!r}: wants one of {', '.join(WAN_PRESETS)}{hint}")
    if path not in PACKAGED_CHECKPOINTS and not os.path.isdir(os.path.expanduser(path)):
        return None if preset is None else _from_preset(preset)
    model = _from_folder(resolve_folder(path))
    if preset is not None and (differences := _differences(_from_preset(preset), model)):
        raise ConfigError(
            f"model.preset = {preset!r} is another model than the one in model.path = {path!r} "
            f"({'; '.join(differences)}): leave the preset out, or name the folder of that model"
        )
    return model


def required_model(config: RunConfig) -> Model:
    """find_model, and a ConfigError where it has no answer."""
    model = find_model(config)
    if model is None:
        raise ConfigError(
            f"model.path = {config.model.path!r}: there is no such folder here, and no model.preset says what it would "
            f"hold; give a local folder, or a preset ({', '.join(WAN_PRESETS)})"
        )
    return model


def check_settings(model: Model, config: RunConfig) -> None:
    """Raise ValueError on settings that this model cannot follow: images that it does not take, what is for a second
    transformer where there is one, backends that do not exist, and of a stream what `visual-gen stream` refuses. That
    an image is missing is no error here: a plan needs none."""
    _check_backend_names(config)
    if config.causal is not None or config.stream is not None:
        check_stream_settings(config)
        check_streamable(model.source, model.task, model.num_experts)
        check_served(config.attention.cross_kv)
        chunks = (config.stream or StreamConfig()).chunks
        config.causal.check_frames(config.causal.frames_after(chunks), model.transformer.rope_max_seq_len)
    generation = config.generation
    model.task.refuse_unwanted(image=generation.image is not None, last_image=generation.last_image is not None)
    if model.num_experts > 1:
        return
    for_a_pair = {
        "generation.guidance_scale_2": generation.guidance_scale_2,
        "generation.boundary_ratio": generation.boundary_ratio,
        "offload": None if config.offload == "none" else config.offload,
        "lora.transformer": "transformer_2" if any(x.transformer == "transformer_2" for x in config.lora) else None,
    }
    for key, value in for_a_pair.items():
        if value is not None:
            raise ConfigError(f"{key} = {value!r}: is for a pair of transformers, and this model has one; leave it out")


def _check_backend_names(config: RunConfig) -> None:
    """Of all roles, as a name that exists nowhere is a mistake whether or not a command looks at its backend."""
    for role in ROLES:
        name = getattr(config.attention, role)
        try:
            check_backend_name(name)
        except AttentionBackendError as error:
            raise ConfigError(f"attention.{role} = {name!r}: {error}") from None


def _from_preset(preset: str) -> Model:
    wan = WAN_PRESETS[preset]
    ti2v = preset == "wan2.2-ti2v-5b"
    return Model(
        source=f"preset {preset}",
        transformer=wan,
        geometry=Geometry.of(wan, spatial_scale=16 if ti2v else 8),
        num_experts=2 if preset.endswith("-a14b") else 1,
        timestep_per_token=ti2v,
        text_encoder=UMT5_XXL_ENCODER,
        vae=WAN22_VAE if ti2v else WAN21_VAE,
        image_encoder=None if wan.image_dim is None else CLIP_VIT_H_VISION,
    )


def _from_folder(folder: Path) -> Model:
    index = read_index(folder)
    tokenizer = tokenizer_folder(folder) / "tokenizer.json"
    return Model(
        source=f"folder {folder}",
        transformer=WanConfig.from_folder(folder / "transformer"),
        geometry=Geometry.from_folder(folder),
        num_experts=2 if any(index.get("transformer_2") or ()) or (folder / "transformer_2").is_dir() else 1,
        timestep_per_token=bool(index.get("expand_timesteps")),
        text_encoder=_text_encoder_size(part_path(folder, "text_encoder")),
        vae=_size(part_path(folder, "vae")),
        image_encoder=_size(folder / "image_encoder"),
        tokenizer_file=tokenizer if tokenizer.is_file() else None,
    )


def _text_encoder_size(folder: Path) -> PartSize | None:
    """Of the encoder alone, where a whole T5 is stored, with the embedding that it shares counted once."""
    stored = _shapes(folder)
    if stored is None:
        return None
    counts = {name: shape.numel() for name, shape in stored.items() if not name.startswith(("decoder.", "lm_head."))}
    if "shared.weight" in counts:
        counts.pop("encoder.embed_tokens.weight", None)
    return PartSize(sum(counts.values()), sum(count for name, count in counts.items() if ".wo." in name))


def _size(folder: Path) -> PartSize | None:
    stored = _shapes(folder)
    if stored is None:
        return None
    # Of an image encoder its projection and the numbers of its patches are left aside.
    unused = ("visual_projection.weight", "position_ids")
    return PartSize(sum(shape.numel() for name, shape in stored.items() if not name.endswith(unused)))


def _shapes(folder: Path) -> dict[str, torch.Size] | None:
    """From the headers of the weight files; None if they are not here or are damaged."""
    try:
        return {name: torch.Size(shape) for name, shape in open_weights(folder).shapes.items()}
    except CheckpointError:
        return None


def _differences(preset: Model, folder: Model) -> list[str]:
    """Every fact in which a preset and a folder differ, both values named."""
    facts = [
        {
            **dataclasses.asdict(model.transformer),
            "spatial compression": model.geometry.spatial_scale,
            "transformers": model.num_experts,
            "one timestep for each token": model.timestep_per_token,
        }
        for model in (preset, folder)
    ]
    return [f"{key} {facts[0][key]} against {facts[1][key]} in the folder" for key in facts[0]
            if facts[0][key] != facts[1][key]]  # fmt: skip
