"""A LoRA file, in any of the styles that Wan's are shared in, as additions to this model's parameters.

Low-rank pairs: `lora_A`/`lora_B` (peft, diffusers), `lora_down`/`lora_up` with `alpha` (kohya and others). Whole
differences, as in distillation LoRAs: `diff` of a weight, `diff_b` of a bias, `diff_m` of a modulation. Modules under
diffusers' or the authors' names, with dots or as kohya's `lora_unet_blocks_0_self_attn_q`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from visual_gen.checkpoint import CheckpointError, WeightFiles, read_json
from visual_gen.models.wan.authors_names import AUTHORS_NAMES, PickledWeights
from visual_gen.models.wan.weights import DIFFUSERS_NAMES, Slot, diffusers_names, source_slots
from visual_gen.modules.lora import LowRank

FOLDER_FILES = ("pytorch_lora_weights.safetensors", "adapter_model.safetensors")
PICKLED_DICTS = ("generator_lora", "lora")  # LongLive's files, and plain ones
_KOHYA = "lora_unet_"
_PREFIX = re.compile(r"^(base_model\.model\.|transformer\.|diffusion_model\.|model\.)+")
_ROLES = (
    (r"\.lora_A(\.default)?\.weight", "down"), (r"\.lora_down\.weight", "down"), (r"\.lora\.down\.weight", "down"),
    (r"\.lora_B(\.default)?\.weight", "up"), (r"\.lora_up\.weight", "up"), (r"\.lora\.up\.weight", "up"),
    (r"\.lora_B(\.default)?\.bias", "up_bias"), (r"\.lora_up\.bias", "up_bias"), (r"\.alpha", "alpha"),
    (r"\.diff_b", "diff_b"), (r"\.diff_m", "diff_m"), (r"\.diff", "diff"),
)  # fmt: skip
_METADATA = "lora_adapter_metadata"  # diffusers' own, in a safetensors header


@dataclass
class _Module:
    """The keys of one module in the file, by role, and what the file calls it."""

    stored: str
    keys: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class LoRAFile:
    """What a file adds to a model, checked against it. `low_rank`: parameter → slot, keys of down and up, factor
    (alpha / r). `whole`: parameter → slot, key, factor."""

    path: Path
    files: WeightFiles
    low_rank: dict[str, list[tuple[Slot, str, str, float]]]
    whole: dict[str, list[tuple[Slot, str, float]]]

    @classmethod
    def open(cls, path: str | Path, model: nn.Module) -> LoRAFile:
        """Reads the headers of `path` and finds the place of every tensor in `model`, which may be on the meta device.

        path: a .safetensors file, a .pt file (weights_only, memory-mapped), or a folder that diffusers or peft wrote.
        Raises CheckpointError listing every key that is unknown to the model, every tensor of another size, and pairs
        that lack a half.
        """
        path = Path(path)
        files, settings = _open(path)
        modules, unknown = _modules(files, _Names(model))
        low_rank: dict[str, list[tuple[Slot, str, str, float]]] = {}
        whole: dict[str, list[tuple[Slot, str, float]]] = {}
        problems: list[str] = []
        alphas = _read_alphas(files, modules)
        slots = source_slots(model)
        for name, module in modules.items():
            keys, ratio = module.keys, 1.0
            if ("down" in keys) != ("up" in keys) or ("alpha" in keys and "up" not in keys):
                problems.append(f"{next(iter(keys.values()))} lacks the other half of its pair")
                continue
            if "up" in keys:
                slot = slots.get(f"{name}.weight")
                down, up = (files.shapes[keys[role]] for role in ("down", "up"))
                needed = None if slot is None else (slot.rows, torch.Size(slot.shape[1:]).numel())
                found = (up[0], torch.Size(down[1:]).numel())
                if slot is None or len(slot.shape) < 2:
                    unknown.append(keys["up"])
                elif found != needed or down[0] != torch.Size(up[1:]).numel():
                    problems.append(
                        f"{keys['up']} {list(up)} and {keys['down']} {list(down)}, where [{needed[0]}, r] and "
                        f"[r, {needed[1]}] are needed"
                    )
                else:
                    alpha = alphas.get(name, settings.alpha(module.stored, down[0]))
                    ratio = alpha / down[0]
                    low_rank.setdefault(slot.parameter, []).append((slot, keys["down"], keys["up"], ratio))
            for role, kind, factor in (("diff", "weight", 1.0), ("diff_b", "bias", 1.0), ("up_bias", "bias", ratio),
                                       ("diff_m", "scale_shift_table", 1.0)):  # fmt: skip
                if role not in keys:
                    continue
                slot = slots.get(f"{name}.{kind}".removeprefix("."))
                if slot is None:
                    unknown.append(keys[role])
                elif (found := files.shapes[keys[role]]) != slot.shape:
                    problems.append(f"{keys[role]} {list(found)}, where {list(slot.shape)} is needed")
                else:
                    whole.setdefault(slot.parameter, []).append((slot, keys[role], factor))
        if unknown:
            problems.insert(0, f"unknown: {', '.join(sorted(unknown))}")
        if problems:
            raise CheckpointError(
                f"{path} does not fit this {type(model).__name__} of {model.config.num_layers} layers and hidden size "
                f"{model.config.hidden_size}. {'; '.join(problems)}: take the LoRA made for this model"
            )
        return cls(path, files, low_rank, whole)

    def read(self) -> tuple[dict[str, list[LowRank]], dict[str, list[tuple[Slot, torch.Tensor, float]]]]:
        """The tensors, in one pass: parameter → its low-rank additions, and → (slot, difference, factor)."""
        tensors = dict(self.files.tensors())
        low_rank = {
            parameter: [
                LowRank(slot.start, tensors[down].flatten(1), tensors[up].flatten(1), factor)
                for slot, down, up, factor in found
            ]
            for parameter, found in self.low_rank.items()
        }
        whole = {
            parameter: [(slot, tensors[key], factor) for slot, key, factor in found]
            for parameter, found in self.whole.items()
        }
        return low_rank, whole

    def num_bytes(self, model: nn.Module) -> int:
        """Bytes that it takes on the device beside the weights of `model` until it is fused; then it takes none. Whole
        differences never take any: they are added to the weights, whose originals stay on the host."""
        total = 0
        for parameter, found in self.low_rank.items():
            keys = [key for _, down, up, _ in found for key in (down, up)]
            elements = sum(torch.Size(self.files.shapes[key]).numel() for key in keys)
            total += (elements + 1) * model.get_parameter(parameter).element_size()  # and the scale
        return total


class _Names:
    """Module names in diffusers' and the authors' words, with dots or underscores → those of diffusers."""

    def __init__(self, model: nn.Module) -> None:
        tensors = diffusers_names(model, AUTHORS_NAMES) | diffusers_names(model, DIFFUSERS_NAMES)
        self._modules = {_module(name): _module(theirs) for name, theirs in tensors.items()}
        self._by_underscores = {name.replace(".", "_"): module for name, module in self._modules.items()}

    def find(self, name: str) -> str | None:
        if name.startswith(_KOHYA):
            return self._by_underscores.get(name.removeprefix(_KOHYA))
        return self._modules.get(_PREFIX.sub("", name, count=1))


def _module(tensor: str) -> str:
    return tensor.rpartition(".")[0]


def _modules(files: WeightFiles, names: _Names) -> tuple[dict[str, _Module], list[str]]:
    modules: dict[str, _Module] = {}
    unknown = []
    for key in files.shapes:
        match = next(((m, role) for pattern, role in _ROLES if (m := re.search(f"{pattern}$", key))), None)
        name = None if match is None else names.find(key[: match[0].start()])
        if name is None:
            unknown.append(key)
            continue
        keys = modules.setdefault(name, _Module(key[: match[0].start()])).keys
        if match[1] in keys:
            raise CheckpointError(f"{files.files[0]} has {keys[match[1]]!r} and {key!r} for one tensor: remove one")
        keys[match[1]] = key
    return modules, unknown


def _read_alphas(files: WeightFiles, modules: Mapping[str, _Module]) -> dict[str, float]:
    wanted = {module.keys["alpha"]: name for name, module in modules.items() if "alpha" in module.keys}
    if not wanted:
        return {}
    return {wanted[key]: float(tensor) for key, tensor in files.tensors() if key in wanted}


@dataclass(frozen=True)
class _Settings:
    """What a file says beside its tensors: alpha of all modules, and of single ones. None: alpha is the rank."""

    lora_alpha: float | None = None
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)

    def alpha(self, module: str, rank: int) -> float:
        fitting = [value for pattern, value in self.alpha_pattern.items() if re.search(rf"(^|\.){pattern}$", module)]
        if fitting:
            return float(fitting[0])
        return float(rank if self.lora_alpha is None else self.lora_alpha)


def _open(path: Path) -> tuple[WeightFiles, _Settings]:
    if path.is_dir():
        found = [path / name for name in FOLDER_FILES if (path / name).exists()]
        if not found:
            raise CheckpointError(f"{path} holds neither {' nor '.join(FOLDER_FILES)}: name the LoRA's file")
        config = read_json(path / "adapter_config.json") if (path / "adapter_config.json").exists() else {}
        return WeightFiles.open_file(found[0]), _settings(path / "adapter_config.json", config)
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: give the LoRA's .safetensors or .pt file, downloaded here")
    if path.suffix != ".safetensors":
        return PickledWeights.open_file(path, candidates=PICKLED_DICTS), _Settings()
    files = WeightFiles.open_file(path)
    try:
        config = json.loads(files.metadata().get(_METADATA, "{}"))
    except ValueError as error:
        raise CheckpointError(f"{path} has damaged {_METADATA} ({error}): download it again") from None
    return files, _settings(path, {key.removeprefix("transformer."): value for key, value in config.items()})


def _settings(path: Path, config: Mapping[str, Any]) -> _Settings:
    for key in ("use_dora", "use_rslora"):
        if config.get(key):
            raise CheckpointError(f"{path} has {key}, which is not served: fuse that LoRA with peft, or take another")
    return _Settings(config.get("lora_alpha"), config.get("alpha_pattern") or {})
