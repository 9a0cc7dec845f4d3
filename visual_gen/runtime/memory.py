"""Whether a run fits into the memory that is free, by the estimate that `visual-gen plan` shows."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from visual_gen.config import CrossKVMode
from visual_gen.models.wan import WanConfig
from visual_gen.runtime.costs import activation_bytes, image_kv_bytes, text_kv_bytes, text_rows
from visual_gen.runtime.units import format_bytes

if TYPE_CHECKING:
    from visual_gen.pipelines.request import Request
    from visual_gen.pipelines.text import TokenizedText


def available_bytes(device: torch.device) -> int | None:
    """Memory of `device` that this process can still take; None where the system does not say."""
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + held
    meminfo = Path("/proc/meminfo")
    found = re.search(r"^MemAvailable:\s*(\d+) kB", meminfo.read_text(), re.MULTILINE) if meminfo.exists() else None
    return int(found[1]) * 1024 if found else None


def check_memory(needed_bytes: int, device: torch.device, what: str = "a denoising step") -> None:
    """Raise ValueError if `needed_bytes` are more than `device` has left."""
    there = available_bytes(device)
    if there is not None and needed_bytes > there:
        raise ValueError(
            f"{what} of this request needs about {format_bytes(needed_bytes)}, and {device} has {format_bytes(there)} "
            "left: ask for fewer or smaller frames, fewer prompts at once, or cfg 'sequential' (`visual-gen plan` "
            "shows what takes how much)"
        )


def request_bytes(
    wan: WanConfig,
    request: Request,
    rows: Sequence[TokenizedText],
    cross_kv: CrossKVMode,
    dtype: torch.dtype,
    *,
    repeated_key: bool,
    on_gpu: bool,
    timestep_per_token: bool = False,
) -> int:
    """What a denoising step of `request` takes beside the weights: keys and values of text and images, and activations.

    rows: of the prompts, then of the negative prompts. repeated_key: see text_rows.
    """
    tokens = math.prod(size // patch for size, patch in zip(request.latent_shape[2:], wan.patch_size, strict=True))
    lens = [len(row.ids) for row in rows]
    at_once = len(rows) if request.cfg == "batched" else len(request.prompts)
    kept = sum(
        text_rows(cross_kv, lens[i : i + at_once], request.max_sequence_length, repeated_key=repeated_key)
        for i in range(0, len(lens), at_once)
    )
    kv = text_kv_bytes(wan, kept, dtype) + image_kv_bytes(wan, len(rows), dtype)
    return kv + activation_bytes(wan, at_once, tokens, dtype, timestep_per_token, on_gpu=on_gpu)
