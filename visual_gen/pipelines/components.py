"""The parts of a Wan text-to-video pipeline, checked against one another and loaded from a diffusers-format folder."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, UMT5Config, UMT5EncoderModel

from visual_gen.checkpoint import CheckpointError, WeightFiles, read_json
from visual_gen.models.wan import WanTransformer
from visual_gen.models.wan.layouts import (
    LOOKED_FOR,
    is_authors_folder,
    open_weights,
    part_folder,
    read_config,
    read_index,
)
from visual_gen.pipelines.cpu_conv import channels_innermost
from visual_gen.pipelines.vae_config import empty_vae

_NOT_SERVED = {
    "WanImageToVideoPipeline": "Wan image-to-video, which this pipeline does not serve yet",
    "WanVideoToVideoPipeline": "Wan video-to-video, which this pipeline does not serve",
    "WanVACEPipeline": "Wan VACE (editing), which this pipeline does not serve",
    "WanAnimatePipeline": "Wan Animate, which this pipeline does not serve",
}
_COMPONENT_CLASSES = {
    "text_encoder": ("UMT5EncoderModel",),
    "transformer": ("WanTransformer3DModel",),
    "vae": ("AutoencoderKLWan",),
}


@dataclass(frozen=True)
class Components:
    """What `load_components` loads. `transformer` is a WanTransformer, `text_encoder` transformers' UMT5EncoderModel,
    `vae` diffusers' AutoencoderKLWan."""

    tokenizer: Any
    text_encoder: torch.nn.Module
    transformer: torch.nn.Module
    vae: torch.nn.Module


def check_model_index(folder: Path) -> None:
    """Raise CheckpointError unless `folder`/model_index.json describes a pipeline that WanPipeline serves."""
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
    if class_name != "WanPipeline":
        kind = _NOT_SERVED.get(class_name, f"a {class_name}, which is not a Wan text-to-video pipeline")
        raise CheckpointError(
            f"{path} has _class_name {class_name!r}: {kind}. WanPipeline serves folders of class 'WanPipeline' "
            f"(Wan2.1-T2V-*-Diffusers, wan-shapes); diffusers.DiffusionPipeline.from_pretrained serves this one"
        )
    _refuse_wan22(folder, index)
    for name, classes in _COMPONENT_CLASSES.items():
        stored = _class_of(path, index, name)
        if stored not in classes:
            raise CheckpointError(f"{path} names {stored!r} as {name}; a Wan pipeline needs {' or '.join(classes)}")


def _class_of(path: Path, index: dict, name: str) -> str | None:
    entry = index.get(name) or [None, None]
    if not (isinstance(entry, list) and len(entry) == 2 and all(isinstance(part, str | None) for part in entry)):
        raise CheckpointError(f"{path} has {entry!r} as {name}; it must be a pair [library, class]: download it again")
    return entry[1]


def _refuse_wan22(folder: Path, index: dict) -> None:
    path = folder / "model_index.json"
    second = _class_of(path, index, "transformer_2") is not None or (folder / "transformer_2").is_dir()
    if second or index.get("boundary_ratio") is not None:
        why = "a second transformer" if second else f"boundary_ratio {index['boundary_ratio']}"
        raise CheckpointError(
            f"{path}: {folder} has {why} (two experts, as in Wan 2.2 A14B), which WanPipeline does not serve yet; "
            "diffusers.WanPipeline does"
        )
    if index.get("expand_timesteps"):
        raise CheckpointError(
            f"{path} has expand_timesteps (one timestep per token, as in Wan 2.2 TI2V 5B), which WanPipeline does not "
            "serve yet; diffusers.WanPipeline does"
        )


def check_geometry(folder: Path) -> None:
    """Raise CheckpointError when a component's config is missing or the components' sizes do not fit one another."""
    transformer, text, vae = (
        read_config(folder / name) for name in ("transformer", "text_encoder", "vae")
    )
    where = folder / "transformer" / "config.json"
    for name, config in (("transformer", transformer), ("vae", vae)):
        stored = config.get("_class_name")
        if stored not in _COMPONENT_CLASSES[name]:
            raise CheckpointError(
                f"{folder / name / 'config.json'} has _class_name {stored!r}; a Wan pipeline needs "
                f"{_COMPONENT_CLASSES[name][0]!r}"
            )
    if transformer.get("image_dim") is not None or transformer.get("added_kv_proj_dim") is not None:
        raise CheckpointError(f"{where} describes an image-to-video transformer, which WanPipeline does not serve yet")
    pairs = (
        ("text_dim", transformer.get("text_dim", 4096), "text_encoder's d_model", text.get("d_model")),
        ("in_channels", transformer.get("in_channels", 16), "vae's z_dim", vae.get("z_dim", 16)),
        ("out_channels", transformer.get("out_channels", 16), "vae's z_dim", vae.get("z_dim", 16)),
    )
    for key, value, other, other_value in pairs:
        if value != other_value:
            raise CheckpointError(
                f"{where} has {key} {value}, but the {other} is {other_value}: these folders do not belong together; "
                "download the checkpoint again"
            )
    empty_vae(folder / "vae")


def load_tokenizer(folder: Path, vocab_size: int) -> Any:
    """The tokenizer of `folder`, a fast one whose ids all fit the text encoder's `vocab_size`."""
    if not folder.is_dir():
        raise CheckpointError(f"folder {folder} is missing: download the checkpoint again, with this folder")
    if not (folder / "tokenizer_config.json").exists():
        raise CheckpointError(
            f"{folder / 'tokenizer_config.json'} is missing, without which words that the model does not know would "
            "not be named: download it"
        )
    read_json(folder / "tokenizer_config.json")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever transformers meets in a file of another kind
        raise CheckpointError(f"{folder} holds no tokenizer that loads ({error}): download it again") from error
    if not tokenizer.is_fast:
        raise CheckpointError(
            f"{folder} holds a slow tokenizer, which cannot say where a token lies in the prompt: save it with a "
            "tokenizer.json (transformers' fast format)"
        )
    if len(tokenizer) > vocab_size:
        raise CheckpointError(
            f"{folder} has {len(tokenizer)} tokens, but the text encoder only {vocab_size}: these folders do not "
            "belong together; download the checkpoint again"
        )
    return tokenizer


def empty_text_encoder(folder: Path) -> UMT5EncoderModel:
    """The encoder of the part `folder` (see models.wan.layouts), on the meta device; CheckpointError if there is none.
    """
    settings = read_config(folder)
    try:
        config = UMT5Config.from_dict(settings)
        with torch.device("meta"):
            return UMT5EncoderModel(config)
    except Exception as error:  # whatever transformers meets in values of another kind
        raise CheckpointError(
            f"{folder / 'config.json'} describes no text encoder that can be made ({error}): download it again"
        ) from error


def load_text_encoder(folder: Path, *, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
    """transformers' UMT5EncoderModel with every tensor from the files, each copied to `device` by itself, so that the
    host never holds the whole: transformers itself fills a missing one with random numbers and only logs it."""
    weights = open_weights(folder)
    encoder = empty_text_encoder(folder)
    expected = check_text_encoder(weights, encoder)
    state = {
        name: tensor.to(device, dtype=_text_encoder_dtype(name, dtype), copy=True)
        for name, tensor in weights.tensors()
        if name in expected
    }
    encoder.load_state_dict(state, strict=False, assign=True)
    for group in _tied_names(encoder):
        tensor = encoder.get_parameter(next(name for name in group if name in state))
        for name in group:
            module, _, attribute = name.rpartition(".")
            setattr(encoder.get_submodule(module), attribute, tensor)
    return encoder.requires_grad_(False).eval()


def check_text_encoder(weights: WeightFiles, encoder: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors in `weights` that make up `encoder`, tied ones under the names that are stored. Raises
    CheckpointError listing every missing, unexpected and wrongly shaped tensor."""
    expected = _shapes(encoder)
    tied = _tied_names(encoder)
    for group in tied:  # tied tensors may be stored under any one of their names
        if present := [name for name in group if name in weights.shapes]:
            for name in set(group) - set(present):
                expected.pop(name)
        else:
            for name in group[1:]:
                expected.pop(name)
    # a whole T5 was saved: transformers leaves its decoder aside, and so may we
    stored = {name: shape for name, shape in weights.shapes.items() if not name.startswith(("decoder.", "lm_head."))}
    WeightFiles(weights.files, stored, weights.dtypes).check_names_and_shapes(expected, "UMT5EncoderModel")
    return expected


def _text_encoder_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    # As transformers keeps it: the feed-forward's second layer leaves float16's range.
    return torch.float32 if dtype == torch.float16 and ".wo." in name else dtype


def load_vae(folder: Path, *, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
    """diffusers' AutoencoderKLWan with every tensor from the files, in `dtype` on `device`."""
    weights = open_weights(folder)
    vae = empty_vae(folder)
    check_vae(weights, vae)
    # copies, so that no parameter lies in the memory-mapped file
    state = {name: tensor.to(device, dtype=dtype, copy=True) for name, tensor in weights.tensors()}
    vae.load_state_dict(state, assign=True)
    if device.type == "cpu":
        channels_innermost(vae)
    return vae.requires_grad_(False).eval()


def check_vae(weights: WeightFiles, vae: torch.nn.Module) -> None:
    """Raise CheckpointError listing every missing, unexpected and wrongly shaped tensor of a VAE."""
    weights.check_names_and_shapes(_shapes(vae), "AutoencoderKLWan")


def _shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _tied_names(model: torch.nn.Module) -> list[list[str]]:
    """Groups of names that transformers ties to one tensor, the source first."""
    groups: dict[str, list[str]] = {}
    for name, source in model.all_tied_weights_keys.items():
        groups.setdefault(source, [source]).append(name)
    return list(groups.values())


def load_components(
    folder: Path,
    tokenizer: Any,
    *,
    dtype: torch.dtype,
    vae_dtype: torch.dtype,
    device: torch.device,
    attention: Any,
    part: Callable[[str], AbstractContextManager[None]],
) -> Components:
    """Check that no weight file is damaged, then load each part once, inside `part(name)`."""
    for name in ("text_encoder", "transformer", "vae"):
        open_weights(folder / name)
    with part("text encoder"):
        text_encoder = load_text_encoder(folder / "text_encoder", dtype=dtype, device=device)
    with part("VAE"):
        vae = load_vae(folder / "vae", dtype=vae_dtype, device=device)
    with part("transformer"):
        transformer = WanTransformer.from_pretrained(
            part_folder(folder / "transformer"), dtype=dtype, device=device, attention=attention
        )
    return Components(tokenizer, text_encoder, transformer, vae)
