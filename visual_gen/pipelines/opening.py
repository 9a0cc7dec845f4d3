"""A pipeline's folder before its weights are read or fetched: everything that can be refused by then is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from visual_gen.checkpoint import CONFIG_FILES, resolve_folder
from visual_gen.config import AttentionConfig, attention_config
from visual_gen.device import find_device
from visual_gen.models.wan import WanConfig, WanTransformer
from visual_gen.models.wan.geometry import Geometry
from visual_gen.models.wan.layouts import tokenizer_folder
from visual_gen.pipelines.components import check_geometry, check_model_index, empty_text_encoder, load_tokenizer
from visual_gen.pipelines.schedulers import check_flow_shift, make_scheduler

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class OpenedPipeline:
    """The settings of a pipeline, checked against its folder and this machine, and its parts that are no weights."""

    dtype: torch.dtype
    vae_dtype: torch.dtype
    device: torch.device
    attention: AttentionConfig
    repeats_last_key: bool
    wan: WanConfig
    geometry: Geometry
    scheduler: Any
    tokenizer: Any


def open_pipeline(
    folder_or_id: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    attention: AttentionConfig | dict | None = None,
    scheduler: str | None = None,
    flow_shift: float | None = None,
    vae_dtype: torch.dtype | None = None,
) -> OpenedPipeline:
    """Arguments and errors are those of WanPipeline.from_pretrained. Of a Hub repository no weights are fetched."""
    for name, value in (("dtype", dtype), ("vae_dtype", vae_dtype or dtype)):
        if value not in _DTYPES:
            raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(str, _DTYPES))}")
    device = find_device(device)
    check_flow_shift(flow_shift)
    attention = attention_config(attention)
    folder = resolve_folder(folder_or_id, files=CONFIG_FILES)
    check_model_index(folder)
    check_geometry(folder)
    made_scheduler = make_scheduler(folder / "scheduler", scheduler, flow_shift)
    # Without memory for weights: it selects the backends, or says why one cannot serve this model here.
    wan = WanConfig.from_folder(folder / "transformer")
    model = WanTransformer(
        wan,
        attention=attention,
        dtype=dtype,
        device=device,
        init_weights=False,
    )
    vocab_size = empty_text_encoder(folder / "text_encoder").config.vocab_size
    return OpenedPipeline(
        dtype=dtype,
        vae_dtype=vae_dtype or dtype,
        device=device,
        attention=attention,
        repeats_last_key=model.repeats_last_key,
        wan=wan,
        geometry=Geometry.from_folder(folder),
        scheduler=made_scheduler,
        tokenizer=load_tokenizer(tokenizer_folder(folder), vocab_size),
    )
