"""A pipeline's folder before its weights are read or fetched: everything that can be refused by then is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from visual_gen.checkpoint import CONFIG_FILES, part_path, resolve_folder
from visual_gen.compilation import check_compile
from visual_gen.config import OFFLOAD_MODES, AttentionConfig, attention_config
from visual_gen.device import find_device
from visual_gen.models.wan import WanTransformer
from visual_gen.models.wan.geometry import Geometry
from visual_gen.pipelines.components import empty_image_encoder, load_image_processor, open_tokenizer
from visual_gen.pipelines.folder import FolderFacts, read_folder
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
    facts: FolderFacts
    one_expert_on_device: bool
    compile: bool
    geometry: Geometry
    scheduler: Any
    tokenizer: Any
    image_processor: Any

    @property
    def boundary_timestep(self) -> float | None:
        """The timestep below which the second transformer takes over; None where there is one."""
        ratio = self.facts.boundary_ratio
        return None if ratio is None else ratio * self.scheduler.config.num_train_timesteps


def open_pipeline(
    folder_or_id: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    attention: AttentionConfig | dict | None = None,
    scheduler: str | None = None,
    flow_shift: float | None = None,
    vae_dtype: torch.dtype | None = None,
    boundary_ratio: float | None = None,
    offload: str = "none",
    compile: bool = False,
) -> OpenedPipeline:
    """Arguments and errors are those of WanPipeline.from_pretrained. Of a Hub repository no weights are fetched."""
    for name, value in (("dtype", dtype), ("vae_dtype", vae_dtype or dtype)):
        if value not in _DTYPES:
            raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(str, _DTYPES))}")
    device = find_device(device)
    check_compile(compile, device)
    check_flow_shift(flow_shift)
    attention = attention_config(attention)
    folder = resolve_folder(folder_or_id, files=CONFIG_FILES)
    facts = read_folder(folder, boundary_ratio)
    _check_offload(offload, facts, device)
    made_scheduler = make_scheduler(part_path(folder, "scheduler"), scheduler, flow_shift)
    # Without memory for weights: it selects the backends, or says why one cannot serve this model here.
    model = WanTransformer(
        facts.wan,
        attention=attention,
        dtype=dtype,
        device=device,
        init_weights=False,
    )
    tokenizer = open_tokenizer(folder)
    image_processor = None
    if facts.image_encoder:
        empty_image_encoder(folder / "image_encoder")
        image_processor = load_image_processor(folder / "image_processor")
    return OpenedPipeline(
        dtype=dtype,
        vae_dtype=vae_dtype or dtype,
        device=device,
        attention=attention,
        repeats_last_key=model.repeats_last_key,
        facts=facts,
        one_expert_on_device=offload == "experts",
        compile=compile,
        geometry=Geometry.from_folder(folder),
        scheduler=made_scheduler,
        tokenizer=tokenizer,
        image_processor=image_processor,
    )


def _check_offload(offload: str, facts: FolderFacts, device: torch.device) -> None:
    if offload not in OFFLOAD_MODES:
        raise ValueError(f"offload is {offload!r}; it must be one of {', '.join(map(repr, OFFLOAD_MODES))}")
    if offload == "experts" and len(facts.transformers) == 1:
        raise ValueError(
            "offload is 'experts', but this checkpoint has one transformer, which every step needs: leave it at 'none'"
        )
    if offload == "experts" and device.type == "cpu":
        raise ValueError(
            "offload is 'experts', which rests a transformer in host memory, but the device is the CPU, whose memory "
            "that is: leave it at 'none'"
        )
