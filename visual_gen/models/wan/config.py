"""Wan's architecture in diffusers' field names, and the published members of the family."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass, fields
from pathlib import Path

from visual_gen.models.wan.layouts import is_authors_transformer, part_folder, transformer_config

MODEL_CLASS = "WanTransformer3DModel"


@dataclass(frozen=True)
class WanConfig:
    """The settings of a transformer/config.json. Raises ValueError on values that no Wan has."""

    patch_size: tuple[int, int, int] = (1, 2, 2)
    num_attention_heads: int = 40
    attention_head_dim: int = 128
    in_channels: int = 16
    out_channels: int = 16
    text_dim: int = 4096
    freq_dim: int = 256
    ffn_dim: int = 13824
    num_layers: int = 40
    cross_attn_norm: bool = True
    qk_norm: str = "rms_norm_across_heads"
    eps: float = 1e-6
    image_dim: int | None = None  # width of the image encoder's tokens, for image-to-video models
    added_kv_proj_dim: int | None = None  # width of the image tokens that blocks project; set with image_dim
    rope_max_seq_len: int = 1024
    pos_embed_seq_len: int | None = None  # tokens of first and last image together, for first-and-last-frame models

    def __post_init__(self) -> None:
        object.__setattr__(self, "patch_size", tuple(self.patch_size))
        for name in (
            "num_attention_heads",
            "attention_head_dim",
            "in_channels",
            "out_channels",
            "text_dim",
            "freq_dim",
            "ffn_dim",
            "num_layers",
            "rope_max_seq_len",
        ):
            if not _is_count(getattr(self, name)):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be an integer of at least 1")
        for name in ("image_dim", "added_kv_proj_dim", "pos_embed_seq_len"):
            if getattr(self, name) is not None and not _is_count(getattr(self, name)):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be null or an integer of at least 1")
        if not isinstance(self.eps, float) or not 0 < self.eps < 1:
            raise ValueError(f"eps is {self.eps!r}; it must be a number between 0 and 1")
        if len(self.patch_size) != 3 or not all(map(_is_count, self.patch_size)):
            raise ValueError(f"patch_size is {self.patch_size}; it must be three integers of at least 1")
        if self.qk_norm != "rms_norm_across_heads":
            raise ValueError(f"qk_norm is {self.qk_norm!r}; Wan has 'rms_norm_across_heads' and no other")
        if self.attention_head_dim % 2 or self.freq_dim % 2:
            raise ValueError(
                f"attention_head_dim is {self.attention_head_dim} and freq_dim {self.freq_dim}; both must be even, "
                "since their channels are turned in pairs"
            )
        if (self.image_dim is None) != (self.added_kv_proj_dim is None):
            raise ValueError(
                f"image_dim is {self.image_dim} and added_kv_proj_dim {self.added_kv_proj_dim}; an image-to-video "
                "model has both, any other has neither"
            )
        if self.added_kv_proj_dim not in (None, self.hidden_size):
            raise ValueError(
                f"added_kv_proj_dim is {self.added_kv_proj_dim}; image tokens are embedded to the hidden size "
                f"{self.hidden_size} before blocks project them"
            )

    @property
    def hidden_size(self) -> int:
        return self.num_attention_heads * self.attention_head_dim

    @classmethod
    def from_folder(cls, folder: str | Path) -> WanConfig:
        """Reads config.json of a transformer folder, diffusers' or the authors' (see models.wan.layouts). Raises
        ValueError naming the file and what is wrong in it."""
        folder = part_folder(Path(folder))
        path = folder / "config.json"
        raw = transformer_config(folder) if is_authors_transformer(folder) else _read(path)
        found = raw.get("_class_name", MODEL_CLASS)
        if found != MODEL_CLASS:
            raise ValueError(f"{path} is of a {found}; only {MODEL_CLASS} is served here")
        known = {field.name for field in fields(cls)}
        settings = {key: value for key, value in raw.items() if not key.startswith("_")}
        for key, value in list(settings.items()):
            if key in known:
                continue
            if value is None:  # a later diffusers writes its new options at their defaults; none changes nothing
                del settings[key]
                continue
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{path} has the unknown key {key!r} = {value!r}, which may change the model{hint}")
        settings["out_channels"] = settings.get("out_channels") or settings.get("in_channels", cls.in_channels)
        try:
            return cls(**settings)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from error


def _read(path: Path) -> dict:
    if not path.is_file():
        raise ValueError(f"{path} is missing; a diffusers-format transformer folder has a config.json")
    try:
        raw = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}; fetch the file again") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path} holds a {type(raw).__name__}; it must be a JSON object")
    return raw


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


# Source: the config.json files of the Wan-AI/*-Diffusers repositories.
WAN_PRESETS: dict[str, WanConfig] = {
    "wan2.1-t2v-1.3b": WanConfig(num_attention_heads=12, ffn_dim=8960, num_layers=30),
    "wan2.1-t2v-14b": WanConfig(),
    "wan2.1-i2v-14b": WanConfig(in_channels=36, image_dim=1280, added_kv_proj_dim=5120),
    "wan2.1-flf2v-14b": WanConfig(in_channels=36, image_dim=1280, added_kv_proj_dim=5120, pos_embed_seq_len=514),
    "wan2.2-t2v-a14b": WanConfig(),
    "wan2.2-i2v-a14b": WanConfig(in_channels=36),
    "wan2.2-ti2v-5b": WanConfig(num_attention_heads=24, in_channels=48, out_channels=48, ffn_dim=14336, num_layers=30),
}
