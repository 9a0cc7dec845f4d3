"""LoRA on a Wan transformer: load, scale, unload, fuse."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from visual_gen.models.wan.lora_file import LoRAFile
from visual_gen.models.wan.weights import Slot
from visual_gen.modules.lora import LoRALinear


@dataclass
class _Loaded:
    adapter: str  # its name in the layers
    scale: float
    layers: list[str]
    whole: dict[str, list[tuple[Slot, torch.Tensor, float]]]  # of each parameter, on the host


class TakesLoRA(nn.Module):
    """What a transformer with `config` and weights.source_slots' names can do with LoRA files.

    Low-rank additions run beside the weights, which stay as they are; whole differences (`diff`, `diff_b`) are added to
    their parameters, whose originals are kept on the host, so that unloading gives every bit back. Text that was
    projected before a change (a TextKV) stays as it was: project it again.
    """

    def __init__(self) -> None:
        super().__init__()
        self._loras: dict[str, _Loaded] = {}
        self._originals: dict[str, torch.Tensor] = {}
        self._adapters = 0  # loaded so far

    @property
    def lora_scales(self) -> dict[str, float]:
        """Name → scale of what is loaded."""
        return {name: lora.scale for name, lora in self._loras.items()}

    def load_lora(self, path: str | Path, *, name: str | None = None, scale: float = 1.0) -> str:
        """Adds the LoRA at `path` (see LoRAFile.open) and returns its name, which is the file's where none is given.

        Raises ValueError, before anything is changed, on a scale that is no number, a name that is loaded already, and
        a file that does not fit, with every key.
        """
        _check_scale(scale)
        name = Path(path).stem if name is None else name
        if name in self._loras:
            raise ValueError(f"a LoRA {name!r} is loaded: give another name, or unload it first")
        low_rank, whole = LoRAFile.open(path, self).read()
        lora = _Loaded(
            f"{self._adapters}",
            float(scale),
            [p.removesuffix(".weight") for p in low_rank],
            {p: [(slot, x.clone(), factor) for slot, x, factor in found] for p, found in whole.items()},
        )
        self._adapters += 1
        for layer, parts in zip(lora.layers, low_rank.values(), strict=True):
            linear = self.get_submodule(layer)
            if not isinstance(linear, LoRALinear):
                linear = LoRALinear.around(linear)
                self.set_submodule(layer, linear, strict=True)
            linear.add(lora.adapter, parts, lora.scale)
        self._loras[name] = lora
        self._add_whole(lora.whole)
        return name

    def set_lora_scale(self, name: str, scale: float) -> None:
        """Changes the scale of a loaded LoRA; 0 leaves it without effect. Raises ValueError on an unknown name."""
        _check_scale(scale)
        lora = self._lora(name)
        lora.scale = float(scale)
        for layer in lora.layers:
            self.get_submodule(layer).set_scale(lora.adapter, lora.scale)
        self._add_whole(lora.whole)

    def unload_lora(self, name: str | None = None) -> None:
        """Takes a LoRA off again, or all of them. The weights are then those from before, bit for bit. Raises
        ValueError on an unknown name."""
        for one in list(self._loras) if name is None else [name]:
            lora = self._lora(one)
            del self._loras[one]
            for layer in lora.layers:
                linear = self.get_submodule(layer)
                linear.remove(lora.adapter)
                if not linear.blocks:
                    self.set_submodule(layer, linear.plain(), strict=True)
            self._add_whole(lora.whole)

    def fuse_lora(self) -> None:
        """Adds what is loaded to the weights, in fp32 and rounded once, and forgets it: steps then cost what they cost
        without LoRA, and there is no way back but loading the model again. Raises ValueError if none is loaded."""
        if not self._loras:
            raise ValueError("no LoRA is loaded: load_lora first")
        for layer in {layer for lora in self._loras.values() for layer in lora.layers}:
            self.set_submodule(layer, self.get_submodule(layer).fuse(), strict=True)
        self._loras.clear()
        self._originals.clear()

    def _lora(self, name: str) -> _Loaded:
        if name not in self._loras:
            raise ValueError(f"no LoRA {name!r} is loaded; loaded are {', '.join(map(repr, self._loras)) or 'none'}")
        return self._loras[name]

    @torch.no_grad()
    def _add_whole(self, parameters: dict[str, list]) -> None:
        """Makes each of these parameters its original and all differences of it that are loaded."""
        for name in parameters:
            parameter = self.get_parameter(name)
            original = self._originals.setdefault(name, parameter.to("cpu", copy=True))
            value, changed = original.to(torch.float32, copy=True), False
            for lora in self._loras.values():
                for slot, difference, factor in lora.whole.get(name, ()):
                    rows = value[slot.start : slot.start + slot.rows]
                    rows += lora.scale * factor * difference.float().reshape(rows.shape)
                    changed = True
            parameter.copy_(value if changed else original)
            if not changed:
                del self._originals[name]


def _check_scale(scale: float) -> None:
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale):
        raise ValueError(f"scale is {scale!r}; it must be a finite number")
