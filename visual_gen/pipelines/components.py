"""The parts of a Wan pipeline, loaded from a diffusers-format folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
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
from transformers.utils import logging as transformers_logging

from visual_gen.checkpoint import CheckpointError, WeightFiles, part_path, read_json
from visual_gen.models.wan import WanTransformer
from visual_gen.pipelines.cpu_conv import channels_innermost
from visual_gen.pipelines.experts import Experts
from visual_gen.pipelines.folder import FolderFacts
from visual_gen.pipelines.vae_config import empty_vae

STEM = "diffusion_pytorch_model"


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
    """The encoder that `folder`/config.json describes, on the meta device; CheckpointError if it describes none."""
    read_json(folder / "config.json")
    try:
        config = UMT5Config.from_pretrained(folder, local_files_only=True)
        with torch.device("meta"):
            return UMT5EncoderModel(config)
    except Exception as error:  # whatever transformers meets in values of another kind
        raise CheckpointError(
            f"{folder / 'config.json'} describes no text encoder that can be made ({error}): download it again"
        ) from error


def load_text_encoder(folder: Path, *, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
    """transformers' UMT5EncoderModel with every tensor from the files: transformers itself fills a missing one with
    random numbers and only logs it, so names and shapes are compared first."""
    weights = WeightFiles.open(folder, stem="model")
    empty = empty_text_encoder(folder)
    expected = _shapes(empty)
    tied = _tied_names(empty)
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
    with _quiet_transformers():
        return UMT5EncoderModel.from_pretrained(folder, dtype=dtype, local_files_only=True).to(device).eval()


def load_image_processor(folder: Path) -> CLIPImageProcessorPil:
    """How images are cut to the image encoder's size. The one that works with PIL, so that a picture has the same
    tokens on every machine: transformers' other takes torchvision, which rounds another way."""
    if not any((folder / name).exists() for name in ("preprocessor_config.json", "processor_config.json")):
        raise CheckpointError(f"{folder / 'preprocessor_config.json'} is missing: download it")
    try:
        return CLIPImageProcessorPil.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever transformers meets in values of another kind
        raise CheckpointError(f"{folder} describes no image processor ({error}): download it again") from error


def empty_image_encoder(folder: Path) -> CLIPVisionModel:
    """The encoder that `folder`/config.json describes, on the meta device; CheckpointError if it describes none."""
    read_json(folder / "config.json")
    try:
        config = CLIPVisionConfig.from_pretrained(folder, local_files_only=True)
        with torch.device("meta"):
            return CLIPVisionModel(config)
    except Exception as error:  # whatever transformers meets in values of another kind
        raise CheckpointError(
            f"{folder / 'config.json'} describes no image encoder that can be made ({error}): download it again"
        ) from error


def load_image_encoder(folder: Path, *, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
    """transformers' CLIPVisionModel with every tensor from the files, whose names are compared first, as those of the
    text encoder are."""
    weights = WeightFiles.open(folder, stem="model")
    expected = {name: tuple(tensor.shape) for name, tensor in empty_image_encoder(folder).named_parameters()}
    prefix = "vision_model."  # of published files; later transformers writes none
    # One with a projection was saved, or the numbers of the patches, which are counted anew.
    unused = ("visual_projection.weight", "embeddings.position_ids")
    named = {name: name.removeprefix(prefix) for name in weights.shapes}
    shapes, dtypes = (
        {named[name]: value for name, value in found.items() if named[name] not in unused}
        for found in (weights.shapes, weights.dtypes)
    )
    WeightFiles(weights.files, shapes, dtypes).check_names_and_shapes(expected, "CLIPVisionModel")
    with _quiet_transformers():
        return CLIPVisionModel.from_pretrained(folder, dtype=dtype, local_files_only=True).to(device).eval()


def load_vae(folder: Path, *, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
    """diffusers' AutoencoderKLWan with every tensor from the files, in `dtype` on `device`."""
    weights = WeightFiles.open(folder)
    vae = empty_vae(folder / "config.json")
    weights.check_names_and_shapes(_shapes(vae), "AutoencoderKLWan")
    # copies, so that no parameter lies in the memory-mapped file
    state = {name: tensor.to(dtype=dtype, copy=True) for name, tensor in weights.tensors(device)}
    vae.load_state_dict(state, assign=True)
    if device.type == "cpu":
        channels_innermost(vae)
    return vae.requires_grad_(False).eval()


def _shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _tied_names(model: torch.nn.Module) -> list[list[str]]:
    """Groups of names that transformers ties to one tensor, the source first."""
    groups: dict[str, list[str]] = {}
    for name, source in model.all_tied_weights_keys.items():
        groups.setdefault(source, [source]).append(name)
    return list(groups.values())


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bar of transformers' own beside ours."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


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
    stems = {"text encoder": "model", "image encoder": "model"}
    for name in parts_of(facts):
        WeightFiles.open(part_path(folder, name.replace(" ", "_").lower()), stem=stems.get(name, STEM))
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
            return WanTransformer.from_pretrained(folder / name, dtype=dtype, device=device, attention=attention)

    experts = Experts.load(load_transformer, facts.transformers, boundary_timestep, one_on_device=one_expert_on_device)
    return Components(tokenizer, text_encoder, experts, vae, image_processor, image_encoder)


def parts_of(facts: FolderFacts) -> list[str]:
    """The parts of a folder that have weights, as progress names them."""
    image = ["image encoder"] if facts.image_encoder else []
    return ["text encoder", *image, "VAE", *(name.replace("_", " ") for name in facts.transformers)]
