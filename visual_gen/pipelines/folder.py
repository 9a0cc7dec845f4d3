"""Which member of the Wan family a folder of either layout holds, and whether its parts belong together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from visual_gen.checkpoint import CheckpointError, part_path, read_json
from visual_gen.models.wan import WanConfig
from visual_gen.models.wan.layouts import LOOKED_FOR, is_authors_folder, part_folder, read_config, read_index
from visual_gen.models.wan.task import Task, check_streamable
from visual_gen.pipelines.vae_config import empty_vae

_SERVED = ("WanPipeline", "WanImageToVideoPipeline")
_NOT_SERVED = {
    "WanVideoToVideoPipeline": "Wan video-to-video, which this pipeline does not serve",
    "WanVACEPipeline": "Wan VACE (editing), which this pipeline does not serve",
    "WanAnimatePipeline": "Wan Animate, which this pipeline does not serve",
}
_COMPONENT_CLASSES = {
    "text_encoder": ("UMT5EncoderModel",),
    "transformer": ("WanTransformer3DModel",),
    "vae": ("AutoencoderKLWan",),
}
_IMAGE_CLASSES = {
    "image_encoder": ("CLIPVisionModel", "CLIPVisionModelWithProjection"),
    "image_processor": ("CLIPImageProcessor", "CLIPImageProcessorFast", "CLIPImageProcessorPil", "CLIPProcessor"),
}


@dataclass(frozen=True)
class FolderFacts:
    """wan: of every transformer. boundary_ratio: of the scheduler's training timesteps, the share below which the
    second transformer takes over; None where there is one transformer."""

    wan: WanConfig
    task: Task
    boundary_ratio: float | None

    @property
    def transformers(self) -> tuple[str, ...]:
        """Their folders, from the noisiest steps on."""
        return ("transformer",) if self.boundary_ratio is None else ("transformer", "transformer_2")

    @property
    def image_encoder(self) -> bool:
        """Whether the transformer looks at the tokens of an image encoder."""
        return self.wan.image_dim is not None


def read_folder(folder: Path, boundary_ratio: float | None = None) -> FolderFacts:
    """What `folder` holds. boundary_ratio: in place of the folder's own; None keeps that.

    Raises CheckpointError when it is of another pipeline, when a part or its configuration is missing, or when the
    parts do not fit one another; ValueError on a boundary_ratio that is none, or that one transformer cannot follow.
    """
    index = _read_index(folder)
    ratio = _boundary_ratio(folder, index, boundary_ratio)
    for name, classes in _COMPONENT_CLASSES.items():
        _check_class(folder, index, name, classes)
    wan = _wan_config(folder, "transformer")
    if ratio is not None and _wan_config(folder, "transformer_2") != wan:
        raise CheckpointError(
            f"{folder / 'transformer_2' / 'config.json'} describes another model than transformer/config.json: the two "
            "experts of a checkpoint are of one shape; download it again"
        )
    per_token = bool(index.get("expand_timesteps"))
    if per_token and (ratio is not None or wan.in_channels != wan.out_channels or wan.image_dim is not None):
        raise CheckpointError(
            f"{folder / 'model_index.json'} has expand_timesteps (one timestep for each token, as in Wan 2.2 TI2V 5B), "
            "which goes neither with a second transformer nor with one made for image-to-video: download it again"
        )
    facts = FolderFacts(wan, Task.of(wan, timestep_per_token=per_token), ratio)
    _check_pipeline_class(folder, index, facts.task)
    if facts.image_encoder:
        for name, classes in _IMAGE_CLASSES.items():
            _check_class(folder, index, name, classes)
    _check_sizes(folder, facts)
    return facts


def read_stream_folder(folder: Path) -> FolderFacts:
    """read_folder of what a stream can be made with; CheckpointError, too, on a checkpoint that takes an image, and on
    one with a second transformer."""
    facts = read_folder(folder)
    check_streamable(f"folder {folder}", facts.task, len(facts.transformers))
    return facts


def _read_index(folder: Path) -> dict:
    path = folder / "model_index.json"
    if not path.exists() and not is_authors_folder(folder):
        beside = read_json(folder / "config.json").get("_class_name") if (folder / "config.json").exists() else None
        found = f"; it holds a lone {beside}, so give the folder above it" if beside else ""
        raise CheckpointError(
            f"{path} is missing, and {folder} has neither diffusers' layout nor that of Wan's authors{found}: give a "
            f"folder with {LOOKED_FOR}"
        )
    index = read_index(folder)
    class_name = index.get("_class_name")
    if class_name not in _SERVED:
        other = f"a {class_name}, which is not a Wan text-to-video or image-to-video pipeline"
        kind = _NOT_SERVED.get(class_name, other)
        raise CheckpointError(
            f"{path} has _class_name {class_name!r}: {kind}. WanPipeline serves folders of class "
            f"{' and '.join(map(repr, _SERVED))} (Wan2.1-T2V-*-Diffusers, Wan2.2-I2V-A14B-Diffusers, wan-shapes, …); "
            "diffusers.DiffusionPipeline.from_pretrained serves this one"
        )
    return index


def _class_of(path: Path, index: dict, name: str) -> str | None:
    entry = index.get(name) or [None, None]
    if not (isinstance(entry, list) and len(entry) == 2 and all(isinstance(part, str | None) for part in entry)):
        raise CheckpointError(f"{path} has {entry!r} as {name}; it must be a pair [library, class]: download it again")
    return entry[1]


def _check_class(folder: Path, index: dict, name: str, classes: tuple[str, ...]) -> None:
    path = folder / "model_index.json"
    stored = _class_of(path, index, name)
    if stored not in classes:
        raise CheckpointError(f"{path} names {stored!r} as {name}; a Wan pipeline needs {' or '.join(classes)}")


def _checked_config(folder: Path, name: str) -> dict[str, Any]:
    """The settings of a Wan transformer or VAE, if it is of the class that it has to be."""
    config, wanted = read_config(part_path(folder, name)), _COMPONENT_CLASSES[name.removesuffix("_2")][0]
    stored = config.get("_class_name")
    if stored != wanted:
        path = part_path(folder, name) / "config.json"
        raise CheckpointError(f"{path} has _class_name {stored!r}; a Wan pipeline needs {wanted!r}")
    return config


def _wan_config(folder: Path, name: str) -> WanConfig:
    _checked_config(folder, name)
    try:
        return WanConfig.from_folder(folder / name)
    except ValueError as error:
        raise CheckpointError(str(error)) from None


def _boundary_ratio(folder: Path, index: dict, given: float | None) -> float | None:
    """The ratio of a pair of transformers; None where there is one. Both must be there or neither."""
    path = folder / "model_index.json"
    check_boundary_ratio(given)
    stored = index.get("boundary_ratio")
    try:
        check_boundary_ratio(stored)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}: download it again") from None
    named = _class_of(path, index, "transformer_2")
    there = part_folder(folder / "transformer_2").is_dir()
    if named is not None and not there:
        raise CheckpointError(
            f"{path} names a second transformer (two experts, as in Wan 2.2 A14B), but {folder / 'transformer_2'} is "
            "missing: download it"
        )
    if named is None and there:
        raise CheckpointError(
            f"{folder / 'transformer_2'} is there, but {path} does not name it: download {path.name} again"
        )
    if named is not None and named not in _COMPONENT_CLASSES["transformer"]:
        raise CheckpointError(f"{path} names {named!r} as transformer_2; a Wan pipeline needs WanTransformer3DModel")
    if named is None and stored is not None:
        raise CheckpointError(
            f"{path} has boundary_ratio {stored} (two experts, as in Wan 2.2 A14B), but names no transformer_2 to take "
            "over there: download the whole checkpoint"
        )
    if named is None and given is not None:
        raise ValueError(
            f"boundary_ratio is {given}, but {folder} has no transformer_2 to take over there: leave it out"
        )
    ratio = given if given is not None else stored
    if named is not None and ratio is None:
        raise CheckpointError(
            f"{path} has a second transformer, but no boundary_ratio says where it takes over: give boundary_ratio "
            "(Wan2.2 T2V A14B: 0.875, I2V: 0.9)"
        )
    return ratio


def check_boundary_ratio(value: Any) -> None:
    """Raise ValueError unless `value` is None or a number between 0 and 1."""
    number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if value is not None and not (number and 0 < value < 1):
        raise ValueError(
            f"boundary_ratio is {value!r}; it must be a number between 0 and 1 (Wan2.2 T2V A14B: 0.875, I2V: 0.9)"
        )


def _check_pipeline_class(folder: Path, index: dict, task: Task) -> None:
    """TI2V 5B's folder may be of either class, all others of the one that their transformer is made for."""
    wanted = {"no": "WanPipeline", "required": "WanImageToVideoPipeline"}.get(task.image)
    if wanted is not None and index["_class_name"] != wanted:
        raise CheckpointError(
            f"{folder / 'model_index.json'} has _class_name {index['_class_name']!r}, but the in_channels and "
            f"out_channels of {folder / 'transformer' / 'config.json'} are those of a {wanted}: these files do not "
            "belong together; download the checkpoint again"
        )


def _check_sizes(folder: Path, facts: FolderFacts) -> None:
    wan, where = facts.wan, folder / "transformer" / "config.json"
    text, vae = read_config(part_path(folder, "text_encoder")), _checked_config(folder, "vae")
    latent, temporal = vae.get("z_dim", 16), vae.get("scale_factor_temporal") or 4
    channels, made_of = latent, "vae's z_dim"
    if facts.task.condition == "channels":
        channels, made_of = 2 * latent + temporal, "vae's z_dim, twice, and its scale_factor_temporal, for the mask,"
    pairs = [
        ("text_dim", wan.text_dim, "text_encoder's d_model", text.get("d_model")),
        ("in_channels", wan.in_channels, made_of, channels),
        ("out_channels", wan.out_channels, "vae's z_dim", latent),
    ]
    if facts.image_encoder:
        image = read_config(folder / "image_encoder")
        image = image.get("vision_config", image)  # as a whole CLIP has it
        pairs.append(("image_dim", wan.image_dim, "image_encoder's hidden_size", image.get("hidden_size")))
        if wan.pos_embed_seq_len is not None:
            size, patch = image.get("image_size", 224), image.get("patch_size", 32)
            both = 2 * ((size // patch) ** 2 + 1)  # and the class token
            pairs.append(("pos_embed_seq_len", wan.pos_embed_seq_len, "image_encoder's tokens of two images", both))
    for key, value, other, other_value in pairs:
        if value != other_value:
            raise CheckpointError(
                f"{where} has {key} {value}, but the {other} is {other_value}: these folders do not belong together; "
                "download the checkpoint again"
            )
    empty_vae(part_path(folder, "vae"))
