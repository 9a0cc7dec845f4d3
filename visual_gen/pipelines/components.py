"""The parts of a Wan pipeline, loaded from a folder of either layout."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoTokenizer,
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    CLIPVisionModel,
    UMT5Config,
    UMT5EncoderModel,
)

from visual_gen.checkpoint import CheckpointError, WeightFiles, part_path, read_json
from visual_gen.models.wan import WanTransformer
from visual_gen.models.wan.layouts import open_weights, part_folder, read_config, tokenizer_folder
from visual_gen.pipelines.cpu_conv import channels_innermost
from visual_gen.pipelines.experts import Experts
from visual_gen.pipelines.folder import FolderFacts
from visual_gen.pipelines.vae_config import empty_vae


@dataclass(frozen=True)
class Components:
    """What `load_components` loads. `experts` holds one WanTransformer or two, `text_encoder` is transformers'
    UMT5EncoderModel, `vae` diffusers' AutoencoderKLWan; `image_encoder`, transformers' CLIPVisionModel, and
    `image_processor` are there where the transformer looks at image tokens."""

    tokenizer: Any
    text_encoder: torch.nn.Module
    experts: Experts
    vae: torch.nn.Module
    image_processor: Any = None
    image_encoder: torch.nn.Module | None = None


def open_tokenizer(folder: Path) -> Any:
    """The tokenizer of a pipeline's folder, checked against its text encoder, of which no weights are read."""
    vocab_size = empty_text_encoder(part_path(folder, "text_encoder")).config.vocab_size
    return load_tokenizer(tokenizer_folder(folder), vocab_size)


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


def load_image_processor(folder: Path) -> CLIPImageProcessorPil:
    """How images are cut to the image encoder's size. The one that works with PIL, so that a picture has the same
    tokens on every machine: transformers' other takes torchvision, which rounds another way."""
    names = ("preprocessor_config.json", "processor_config.json")
    if folder.is_dir() and any((folder / name).exists() for name in names):
        make = functools.partial(CLIPImageProcessorPil.from_pretrained, folder, local_files_only=True)
    else:  # the authors' image encoder tells it
        make = functools.partial(CLIPImageProcessorPil.from_dict, read_config(folder, names[0]))
    try:
        return make()
    except Exception as error:  # whatever transformers meets in values of another kind
        raise CheckpointError(f"{folder} describes no image processor ({error}): download it again") from error


def empty_image_encoder(folder: Path) -> CLIPVisionModel:
    """The encoder of the part `folder` (see models.wan.layouts), on the meta device; CheckpointError if there is none.
    """
    settings = read_config(folder)
    try:
        config = CLIPVisionConfig.from_dict(settings.get("vision_config", settings))  # as a whole CLIP has it
        with torch.device("meta"):
            return CLIPVisionModel(config)
    except Exception as error:  # whatever transformers meets in values of another kind
        raise CheckpointError(
            f"{folder / 'config.json'} describes no image encoder that can be made ({error}): download it again"
        ) from error


def load_image_encoder(folder: Path, *, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
    """transformers' CLIPVisionModel with every tensor from the files, whose names are compared first, as those of the
    text encoder are."""
    weights = open_weights(folder)
    encoder = empty_image_encoder(folder)
    names = check_image_encoder(weights, encoder)
    state = {
        names[name]: tensor.to(device, dtype=dtype, copy=True) for name, tensor in weights.tensors() if name in names
    }
    encoder.load_state_dict(state, assign=True)
    # No file has these numbers of the patches.
    positions = torch.arange(encoder.embeddings.num_positions, device=device).expand((1, -1))
    encoder.embeddings.register_buffer("position_ids", positions, persistent=False)
    return encoder.requires_grad_(False).eval()


def check_image_encoder(weights: WeightFiles, encoder: torch.nn.Module) -> dict[str, str]:
    """The tensors in `weights` that make up `encoder`, and their names there. Raises CheckpointError listing every
    missing, unexpected and wrongly shaped tensor."""
    prefix = "vision_model."  # of published files; later transformers writes none
    # One with a projection was saved, or the numbers of the patches, which are counted anew.
    unused = ("visual_projection.weight", "embeddings.position_ids")
    names = {name: name.removeprefix(prefix) for name in weights.shapes if name.removeprefix(prefix) not in unused}
    shapes, dtypes = (
        {new: found[name] for name, new in names.items()} for found in (weights.shapes, weights.dtypes)
    )
    WeightFiles(weights.files, shapes, dtypes).check_names_and_shapes(_shapes(encoder), "CLIPVisionModel")
    return names


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
    facts: FolderFacts,
    tokenizer: Any,
    image_processor: Any,
    *,
    dtype: torch.dtype,
    vae_dtype: torch.dtype,
    device: torch.device,
    attention: Any,
    boundary_timestep: float | None,
    one_expert_on_device: bool,
    part: Callable[[str], AbstractContextManager[None]],
) -> Components:
    """Check that no weight file is damaged, then load each part once, inside `part(name)`; see `parts_of`."""
    for name in parts_of(facts):
        open_weights(part_path(folder, name.replace(" ", "_").lower()))
    with part("text encoder"):
        text_encoder = load_text_encoder(part_path(folder, "text_encoder"), dtype=dtype, device=device)
    image_encoder = None
    if facts.image_encoder:
        with part("image encoder"):
            image_encoder = load_image_encoder(folder / "image_encoder", dtype=dtype, device=device)
    with part("VAE"):
        vae = load_vae(part_path(folder, "vae"), dtype=vae_dtype, device=device)

    def load_transformer(name: str) -> WanTransformer:
        with part(name.replace("_", " ")):
            return WanTransformer.from_pretrained(
                part_folder(folder / name), dtype=dtype, device=device, attention=attention
            )

    experts = Experts.load(load_transformer, facts.transformers, boundary_timestep, one_on_device=one_expert_on_device)
    return Components(tokenizer, text_encoder, experts, vae, image_processor, image_encoder)


def parts_of(facts: FolderFacts) -> list[str]:
    """The parts of a folder that have weights, as progress names them."""
    image = ["image encoder"] if facts.image_encoder else []
    return ["text encoder", *image, "VAE", *(name.replace("_", " ") for name in facts.transformers)]
