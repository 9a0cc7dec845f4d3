"""What a VAE's config.json says against what its structure does, before its weights are read."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan

from visual_gen.checkpoint import CheckpointError
from visual_gen.models.wan.layouts import part_file, read_config


def empty_vae(folder: Path) -> AutoencoderKLWan:
    """The VAE of the part `folder` (see models.wan.layouts), on the meta device. Raises CheckpointError on settings
    from which none can be made, whose scale factors are not those of its structure, or whose latent statistics are no
    numbers."""
    config = read_config(folder)
    path = folder / "config.json" if folder.is_dir() else part_file(folder)
    try:
        with torch.device("meta"):
            vae = AutoencoderKLWan.from_config(config)
        scales = _scales(vae.config)
    except Exception as error:  # whatever diffusers meets in values of another kind
        raise CheckpointError(f"{path} describes no VAE that can be made ({error}): download it again") from error
    for name, scale in scales.items():
        if vae.config[name] != scale:
            raise CheckpointError(
                f"{path} has {name} {vae.config[name]!r}, but its dim_mult {vae.config.dim_mult}, temperal_downsample "
                f"{vae.config.temperal_downsample} and patch_size {vae.config.patch_size} make {scale}: "
                "download it again"
            )
    for name in ("latents_mean", "latents_std"):
        _check_statistics(path, name, config.get(name), vae.config.z_dim)
    return vae


def _scales(config: Any) -> dict[str, int]:
    """Pixels and frames of one latent: every level but the last halves the size, some the frames too."""
    levels = len(config.dim_mult) - 1
    if len(config.temperal_downsample) != levels:
        raise ValueError(f"temperal_downsample has {len(config.temperal_downsample)} entries for {levels} levels")
    return {
        "scale_factor_spatial": 2**levels * (config.patch_size or 1),
        "scale_factor_temporal": 2 ** sum(map(bool, config.temperal_downsample)),
    }


def _check_statistics(path: Path, name: str, values: Any, channels: int) -> None:
    # Missing ones would be those of another VAE: diffusers fills in Wan 2.1's.
    if not isinstance(values, list):
        raise CheckpointError(f"{path} has {name} {values!r}; it must be a list of numbers: download it again")
    if len(values) != channels:
        raise CheckpointError(f"{path} has {len(values)} {name} for {channels} channels: download it again")
    for value in values:
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not number or (name == "latents_std" and value <= 0):
            wanted = "numbers above 0" if name == "latents_std" else "finite numbers"
            raise CheckpointError(f"{path} has {value!r} in {name}; they must be {wanted}: download it again")
