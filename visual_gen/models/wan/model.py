"""What a Wan transformer is made of and loaded from; what it computes is in transformer.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from attention_backend import AttentionBackend, AttentionMetadataState, AttentionSpec, Selection, select_backend
from visual_gen.checkpoint import resolve_folder
from visual_gen.config import AttentionConfig, attention_config
from visual_gen.models.wan.authors_names import AUTHORS_NAMES, PickledWeights
from visual_gen.models.wan.block import WanBlock
from visual_gen.models.wan.config import WanConfig
from visual_gen.models.wan.embeddings import ImageEmbedding, TextEmbedding, TimeEmbedding
from visual_gen.models.wan.layouts import is_authors_folder, is_authors_transformer, open_weights, part_folder
from visual_gen.models.wan.lora import TakesLoRA
from visual_gen.models.wan.weights import DIFFUSERS_NAMES, load_weights
from visual_gen.modules.cross_kv import CROSS_KV_NEEDS
from visual_gen.modules.rope import RotaryTable

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Kept in fp32 whatever the model's dtype, as diffusers keeps them (_keep_in_fp32_modules).
FP32_PARAMETERS = ("time_embedding.linear_", "scale_shift_table", "norm1.", "norm2.")


class WanModel(TakesLoRA):
    """The parameters, their dtype and place, an attention backend for each role, and where weights come from."""

    def __init__(
        self,
        config: WanConfig,
        *,
        attention: AttentionConfig | dict | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        init_weights: bool = True,
        trainable: bool = False,
    ) -> None:
        super().__init__()
        if dtype not in DTYPES:
            raise ValueError(f"dtype is {dtype}; it must be one of {', '.join(map(str, DTYPES))}")
        self.config = config
        self.attention = attention_config(attention)
        if config.image_dim is None and self.attention.cross_image != "auto":
            raise ValueError(
                f"attention.cross_image is {self.attention.cross_image!r}, but this model has no image inputs: "
                "leave it out"
            )
        self._trainable = trainable
        self.attention_metadata_state = AttentionMetadataState()
        self._backends = self._select_backends(dtype, torch.device(device))
        dim = config.hidden_size
        with torch.device(device if init_weights else "meta"):
            patch = config.in_channels * torch.Size(config.patch_size).numel()
            self.patch_embedding = nn.Linear(patch, dim)
            self.time_embedding = TimeEmbedding(config.freq_dim, dim)
            self.text_embedding = TextEmbedding(config.text_dim, dim)
            self.image_embedding = None
            if config.image_dim is not None:
                self.image_embedding = ImageEmbedding(config.image_dim, dim, config.pos_embed_seq_len)
            self.blocks = nn.ModuleList(
                WanBlock(config, self._backends, self.attention_metadata_state, self.attention.cross_kv)
                for _ in range(config.num_layers)
            )
            self.proj_out = nn.Linear(dim, config.out_channels * torch.Size(config.patch_size).numel())
            self.scale_shift_table = nn.Parameter(torch.randn(1, 2, dim) / dim**0.5)
        self._rotary = RotaryTable(config.attention_head_dim, config.rope_max_seq_len)
        self.to(dtype)

    @classmethod
    def from_pretrained(
        cls,
        folder_or_id: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        attention: AttentionConfig | dict | None = None,
        trainable: bool = False,
    ) -> Self:
        """Loads a folder in diffusers' layout or in that of Wan's authors: a pipeline's or a transformer's alone. Of
        Wan 2.2's two experts a pipeline's folder gives that for high noise; name the other's own folder for it.

        Raises ValueError naming every missing, unexpected or wrongly shaped tensor, or what is wrong with the files.
        """
        folder = resolve_folder(folder_or_id, files=("*.json", "*.safetensors", "transformer/*"))
        if (folder / "transformer").is_dir() or is_authors_folder(folder):
            folder = part_folder(folder / "transformer")
        config = WanConfig.from_folder(folder)
        files = open_weights(folder)
        names = AUTHORS_NAMES if is_authors_transformer(folder) else DIFFUSERS_NAMES
        return cls._loaded(
            config, lambda model: load_weights(model, files, names),
            dtype=dtype, device=device, attention=attention, trainable=trainable,
        )  # fmt: skip

    @classmethod
    def from_pickle(
        cls,
        path: str | Path,
        config: WanConfig,
        *,
        state_dict: str | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        attention: AttentionConfig | dict | None = None,
        trainable: bool = False,
    ) -> Self:
        """Loads a .pt file with the authors' tensor names, as Self-Forcing saves it; `config` says which Wan it is.

        state_dict: "generator_ema", "generator", …; None takes them in that order, or a plain dictionary of tensors.
        Raises ValueError naming every missing, unexpected or wrongly shaped tensor, or what is wrong with the file.
        """
        files = PickledWeights.open_file(path, state_dict=state_dict)
        return cls._loaded(
            config, lambda model: load_weights(model, files, AUTHORS_NAMES),
            dtype=dtype, device=device, attention=attention, trainable=trainable,
        )  # fmt: skip

    @classmethod
    def _loaded(
        cls, config: WanConfig, load: Callable, *, device: torch.device | str, trainable: bool, **settings: Any
    ) -> Self:
        """A model whose parameters `load` fills; they take memory once, on the device."""
        model = cls(config, device=device, trainable=trainable, init_weights=False, **settings)
        model.to_empty(device=device).train(trainable).requires_grad_(trainable)
        load(model)
        return model

    @property
    def dtype(self) -> torch.dtype:
        return self.patch_embedding.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.patch_embedding.weight.device

    @property
    def attention_choices(self) -> dict[str, Selection]:
        """Role → the backend taken (`name`) and the reasons (`why`)."""
        return {role: backend.selection for role, backend in self._backends.items()}

    def _select_backends(self, dtype: torch.dtype, device: torch.device) -> dict[str, AttentionBackend]:
        config = self.config
        roles = ["self", "cross_text"] + (["cross_image"] if config.image_dim is not None else [])
        backends = {}
        for role in roles:
            needs = self._needs(role) | ({"grad"} if self._trainable else set())
            heads = (config.num_attention_heads, config.attention_head_dim)
            spec = AttentionSpec(role, *heads, dtype, device, needs=needs)
            backends[role] = select_backend(getattr(self.attention, role), spec)
        return backends

    def _needs(self, role: str) -> frozenset[str]:
        """What the forward asks of a role's backend."""
        return CROSS_KV_NEEDS[self.attention.cross_kv] if role == "cross_text" else frozenset()

    def _apply(self, fn: Callable, recurse: bool = True):
        """Moves or casts the model, keeping Wan's fp32 parameters in fp32, and chooses backends for the new place."""

        def keep_fp32(tensor: torch.Tensor) -> torch.Tensor:
            out = fn(tensor)
            if id(tensor) in kept and out.dtype != torch.float32:
                return tensor.to(device=out.device)
            return out

        kept = {id(p) for n, p in self.named_parameters() if _is_fp32(n)}
        super()._apply(keep_fp32, recurse)
        spec, old = self._backends["self"].spec, self._backends
        if self.device.type != "meta" and (spec.dtype, spec.device) != (self.dtype, self.device):
            self._backends = self._select_backends(self.dtype, self.device)
            for block in self.blocks:
                for site in (block.self_attn, block.cross_text, block.cross_image):
                    # A backend that somebody put in its place, such as a wrapper, stays: its owner chooses again.
                    if site is not None and site.backend is old[site.role]:
                        site.backend = self._backends[site.role]
        return self


def _is_fp32(name: str) -> bool:
    return any(part in name for part in FP32_PARAMETERS)
