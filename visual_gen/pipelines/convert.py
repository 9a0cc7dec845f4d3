"""A checkpoint of Wan's authors, or a distilled model's .pt file, written as a diffusers folder."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers

from visual_gen.checkpoint import CheckpointError, WeightFiles, resolve_folder
from visual_gen.models.wan import WanConfig, WanTransformer
from visual_gen.models.wan.authors_names import AUTHORS_NAMES, PickledWeights
from visual_gen.models.wan.config import MODEL_CLASS
from visual_gen.models.wan.layouts import (
    LOOKED_FOR,
    is_authors_folder,
    is_authors_transformer,
    open_weights,
    part_folder,
    read_config,
    read_index,
    tokenizer_folder,
    weights_stem,
)
from visual_gen.models.wan.renamed_weights import RenamedWeights, Target
from visual_gen.models.wan.weights import check_weights, diffusers_names
from visual_gen.pipelines.components import (
    check_image_encoder,
    check_text_encoder,
    check_vae,
    empty_image_encoder,
    empty_text_encoder,
)
from visual_gen.pipelines.progress import StageProgress
from visual_gen.pipelines.vae_config import empty_vae
from visual_gen.runtime.sharding import write_shards

_MARGIN_BYTES = 1 << 20  # of small files beside the weights


@dataclass(frozen=True)
class _Part:
    name: str
    config: dict[str, Any]
    file: str = "config.json"
    weights: WeightFiles | None = None

    @property
    def num_bytes(self) -> int:
        if self.weights is None:
            return 0
        dtypes = self.weights.dtypes
        return sum(math.prod(shape) * dtypes[name].itemsize for name, shape in self.weights.shapes.items())


def convert(
    source: str | Path,
    dest: str | Path,
    *,
    base: str | Path | None = None,
    state_dict: str | None = None,
    max_shard_bytes: int = 5_000_000_000,
    progress: bool = False,
) -> Path:
    """Writes the diffusers folder `dest`, with every tensor as it is stored in `source`, and returns its path.

    source: an authors' folder, or the .pt file of a distilled model, which takes its settings and other parts from
    `base`, a folder of either layout; state_dict says which weights of the file, see PickledWeights. Weights are read
    once, memory-mapped; the host holds at most the largest file of the source and one tensor. Everything that can be
    refused is before the first byte is written, and `dest` appears only when it is whole.

    Raises CheckpointError (a ValueError) on a source that is damaged, lacks a part or is of no known layout;
    ValueError if `dest` exists or base does not go with source; OSError if there is no room.
    """
    source, dest = Path(source), Path(dest)
    if dest.exists() or dest.is_symlink():
        raise ValueError(f"{dest} exists already: name a folder to make, or remove it")
    folder, parts = _parts_of_pickle(source, base, state_dict) if source.is_file() else _parts_of_folder(source, base)
    total = sum(part.num_bytes for part in parts)
    dest.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(dest.parent).free
    if free < total + _MARGIN_BYTES:
        raise OSError(f"{dest.parent} has {free / 1e9:.1f} GB free, the weights take {total / 1e9:.1f} GB: make room")
    partial = Path(tempfile.mkdtemp(prefix=".convert-", dir=dest.parent))
    try:
        with StageProgress(progress) as bars:
            bar = bars.stage("convert", total=total)
            for part in parts:
                (partial / part.name).mkdir()
                _write_json(partial / part.name / part.file, part.config)
                if part.weights is not None:
                    write_shards(
                        part.weights, partial / part.name, stem=weights_stem(part.name),
                        max_shard_bytes=max_shard_bytes, wrote=bar.advance,
                    )  # fmt: skip
        shutil.copytree(tokenizer_folder(folder), partial / "tokenizer")
        _write_json(partial / "model_index.json", {"_diffusers_version": diffusers.__version__, **read_index(folder)})
        partial.chmod(0o777 & ~_umask())  # mkdtemp's is for its owner alone
        os.rename(partial, dest)
    except BaseException:  # Ctrl-C included
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return dest


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _parts_of_folder(folder: Path, base: str | Path | None) -> tuple[Path, list[_Part]]:
    if base is not None:
        raise ValueError(f"--base goes with a .pt file; {folder} is a folder, which has its own parts: leave it out")
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is missing: give the folder, or the .pt file, that holds the weights")
    if (folder / "model_index.json").exists():
        raise CheckpointError(f"{folder} has diffusers' layout already: nothing is left to convert")
    if not is_authors_folder(folder):
        raise CheckpointError(f"{folder} has no known layout: looked for {LOOKED_FOR}")
    index = read_index(folder)
    names = [name for name in ("transformer", "transformer_2") if any(index[name])]
    return folder, [*(_transformer(folder / name) for name in names), *_other_parts(folder, index)]


def _parts_of_pickle(file: Path, base: str | Path | None, state_dict: str | None) -> tuple[Path, list[_Part]]:
    weights = PickledWeights.open_file(file, state_dict=state_dict)
    if base is None:
        raise ValueError(
            f"{file} holds a transformer's weights alone: give --base, the folder of the model that it was made from, "
            "for its settings, text encoder, VAE and tokenizer"
        )
    folder = resolve_folder(base)
    index = read_index(folder)
    if any(index.get("transformer_2") or ()):
        raise ValueError(f"{folder} has two transformers, {file} is one: give the base that it was made from")
    config = WanConfig.from_folder(folder / "transformer")
    return folder, [_Part("transformer", _wan_json(config), weights=_in_diffusers_names(config, weights)),
                    *_other_parts(folder, index)]  # fmt: skip


def _transformer(path: Path) -> _Part:
    config = WanConfig.from_folder(path)
    weights = open_weights(path)
    if is_authors_transformer(part_folder(path)):
        weights = _in_diffusers_names(config, weights)
    return _Part(path.name, _wan_json(config), weights=weights)


def _in_diffusers_names(config: WanConfig, weights: WeightFiles) -> WeightFiles:
    """The authors' tensors under diffusers' names."""
    model = WanTransformer(config, init_weights=False)
    check_weights(model, weights, AUTHORS_NAMES)
    new = diffusers_names(model, AUTHORS_NAMES)
    return RenamedWeights.of(weights, lambda name, _: (Target(new[name]),) if name in new else ())


def _wan_json(config: WanConfig) -> dict[str, Any]:
    settings = dataclasses.asdict(config)
    return {"_class_name": MODEL_CLASS, "_diffusers_version": diffusers.__version__, **settings}


def _other_parts(folder: Path, index: dict[str, Any]) -> Iterator[_Part]:
    text_encoder = open_weights(folder / "text_encoder")
    check_text_encoder(text_encoder, empty_text_encoder(folder / "text_encoder"))
    yield _Part("text_encoder", read_config(folder / "text_encoder"), weights=text_encoder)
    vae = open_weights(folder / "vae")
    check_vae(vae, empty_vae(folder / "vae"))
    yield _Part("vae", {"_diffusers_version": diffusers.__version__, **read_config(folder / "vae")}, weights=vae)
    yield _Part("scheduler", read_config(folder / "scheduler", "scheduler_config.json"), "scheduler_config.json")
    if any(index.get("image_encoder") or ()):
        file = "preprocessor_config.json"
        weights = open_weights(folder / "image_encoder")
        check_image_encoder(weights, empty_image_encoder(folder / "image_encoder"))
        yield _Part("image_encoder", read_config(folder / "image_encoder"), weights=weights)
        yield _Part("image_processor", read_config(folder / "image_processor", file), file)
