"""From pixels and frames to the latents and tokens of a Wan transformer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from visual_gen.checkpoint import part_path
from visual_gen.models.wan.config import WanConfig
from visual_gen.models.wan.layouts import read_config


@dataclass(frozen=True)
class Geometry:
    """How pixels and frames become latents and tokens."""

    spatial_scale: int
    temporal_scale: int
    patch_size: tuple[int, int, int]
    channels: int
    max_positions: int

    @classmethod
    def of(cls, wan: WanConfig, *, spatial_scale: int, temporal_scale: int = 4) -> Geometry:
        """Of a transformer beside a VAE that compresses by these scales; published VAEs differ in the spatial one."""
        return cls(spatial_scale, temporal_scale, wan.patch_size, wan.out_channels, wan.rope_max_seq_len)

    @classmethod
    def from_folder(cls, folder: str | Path) -> Geometry:
        """Of a pipeline folder of either layout, from its configuration files. Raises ValueError naming a bad one."""
        vae = read_config(part_path(folder, "vae"))
        return cls.of(
            WanConfig.from_folder(Path(folder) / "transformer"),
            spatial_scale=vae.get("scale_factor_spatial") or 8,
            temporal_scale=vae.get("scale_factor_temporal") or 4,
        )

    def latent_shape(self, batch: int, num_frames: int, height: int, width: int) -> tuple[int, int, int, int, int]:
        """[B, C, F, H, W] of the latents. Raises ValueError on a size that scale and patch do not divide, with the
        nearest that they do, and on one beyond the positions that the model knows."""
        sizes = {"num_frames": num_frames, "height": height, "width": width}
        scales = (self.temporal_scale, self.spatial_scale, self.spatial_scale)
        latents = []
        for (name, value), scale, patch in zip(sizes.items(), scales, self.patch_size, strict=True):
            multiple = scale * patch
            # the first frame is a latent frame of its own
            offset = 1 + scale * (patch - 1) - multiple if name == "num_frames" else 0
            _check_divisible(name, value, multiple, offset)
            latent = (value - 1) // scale + 1 if name == "num_frames" else value // scale
            if latent // patch > self.max_positions:
                raise ValueError(
                    f"{name} is {value}, {latent // patch} positions of the transformer, which knows "
                    f"{self.max_positions} (rope_max_seq_len): at most {self.max_positions * multiple + offset}"
                )
            latents.append(latent)
        return (batch, self.channels, *latents)

    def num_tokens(self, latent_shape: Sequence[int]) -> int:
        """Tokens of each row of latents [B, C, F, H, W]."""
        return math.prod(size // patch for size, patch in zip(latent_shape[2:], self.patch_size, strict=True))


def _check_divisible(name: str, value: Any, multiple: int, offset: int) -> None:
    """`value` must be k · multiple + offset for some k >= 1."""
    rule = f"a multiple of {multiple}" if not offset else f"{multiple} · k + {(offset - 1) % multiple + 1}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} is {value!r}; it must be an integer, {rule}")
    lowest = multiple + offset
    below = (value - offset) // multiple * multiple + offset
    if value < lowest:
        raise ValueError(f"{name} is {value}; it must be {rule}, and {lowest} is the smallest")
    if below != value:
        raise ValueError(f"{name} is {value}; it must be {rule}: the nearest are {below} and {below + multiple}")
