"""From diffusers' tensor names to this model's fused parameters, with every mismatch an error that names the tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from visual_gen.checkpoint import CheckpointError, WeightFiles

# Published image-to-video checkpoints carry this norm, which Wan's forward never uses.
UNUSED_SUFFIX = ".norm_added_q.weight"
# How the extra layers of Wan's relatives are named, in the authors' files and in diffusers'.
RELATIVES = {
    "patch_embedding_wancamctrl": "camera moves (LingBot-World, Matrix-Game)",
    "cam_plucker_proj": "camera moves (LingBot-World)",
    "vace_": "control videos (VACE)",
}


@dataclass(frozen=True)
class Slot:
    """Where a source tensor goes: rows [start, start + rows) of a parameter."""

    parameter: str
    start: int
    rows: int
    shape: tuple[int, ...]  # of the source tensor


@dataclass(frozen=True)
class SourceNames:
    """How a kind of checkpoint names this model's parameters: replacements in their order, then the parts of those that
    are fused here."""

    renames: tuple[tuple[str, str], ...]
    fused: Mapping[str, tuple[str, ...]]

    def of(self, name: str) -> list[str]:
        """The source tensors that make up the parameter `name`, in the order of its rows."""
        for ours, theirs in self.renames:
            name = name.replace(ours, theirs)
        for fused, parts in self.fused.items():
            if fused in name:
                return [name.replace(fused, part) for part in parts]
        return [name]


_RENAMES = (
    ("time_embedding.proj.", "condition_embedder.time_proj."),
    ("time_embedding.", "condition_embedder.time_embedder."),
    ("text_embedding.", "condition_embedder.text_embedder."),
    ("image_embedding.linear_1.", "condition_embedder.image_embedder.ff.net.0.proj."),
    ("image_embedding.linear_2.", "condition_embedder.image_embedder.ff.net.2."),
    ("image_embedding.", "condition_embedder.image_embedder."),
    (".ffn.linear_1.", ".ffn.net.0.proj."),
    (".ffn.linear_2.", ".ffn.net.2."),
    (".to_out.", ".to_out.0."),
    (".self_attn.", ".attn1."),
    (".cross_text.", ".attn2."),
    (".cross_image.to_kv.", ".attn2.to_added_kv."),
    (".cross_image.qk_norm_weight", ".attn2.norm_added_k.weight"),
)
_FUSED = {
    ".to_qkv.": (".to_q.", ".to_k.", ".to_v."),
    ".to_kv.": (".to_k.", ".to_v."),
    ".to_added_kv.": (".add_k_proj.", ".add_v_proj."),
    ".qk_norm_weight": (".norm_q.weight", ".norm_k.weight"),
}
DIFFUSERS_NAMES = SourceNames(_RENAMES, _FUSED)


def source_slots(model: nn.Module, names: SourceNames = DIFFUSERS_NAMES) -> dict[str, Slot]:
    """Source tensor name → its slot, for all parameters of a WanTransformer."""
    slots: dict[str, Slot] = {}
    for name, parameter in model.named_parameters():
        sources = names.of(name)
        rows = parameter.shape[0] // len(sources)
        for i, source in enumerate(sources):
            shape = (rows, *parameter.shape[1:])
            if name.endswith("qk_norm_weight"):  # one row for each norm, a vector in the source
                shape = shape[1:]
            elif name == "patch_embedding.weight":  # a convolution whose kernel is its stride
                shape = (rows, model.config.in_channels, *model.config.patch_size)
            slots[source] = Slot(name, i * rows, rows, shape)
    return slots


def diffusers_names(model: nn.Module, names: SourceNames) -> dict[str, str]:
    """Source tensor name → diffusers' for the same rows of the same parameter."""
    theirs = {(slot.parameter, slot.start): name for name, slot in source_slots(model).items()}
    return {name: theirs[slot.parameter, slot.start] for name, slot in source_slots(model, names).items()}


def check_weights(model: nn.Module, files: WeightFiles, names: SourceNames) -> dict[str, tuple[int, ...]]:
    """The tensors of `files` that no model uses. Raises CheckpointError on a relative of Wan with layers of its own, or
    listing every missing, unexpected and wrongly shaped tensor."""
    for name in files.shapes:
        relative = next((what for part, what in RELATIVES.items() if name.startswith(part)), None)
        if relative is not None:
            raise CheckpointError(
                f"{files.files[0].parent} has {name!r}, a layer for {relative}, which is not served: name one of Wan's "
                "own models, or a plain causal one made from them"
            )
    expected = {name: slot.shape for name, slot in source_slots(model, names).items()}
    unused = {name: shape for name, shape in files.shapes.items() if name.endswith(UNUSED_SUFFIX)}
    files.check_names_and_shapes(expected | unused, type(model).__name__)
    return unused


def load_weights(model: nn.Module, files: WeightFiles, names: SourceNames = DIFFUSERS_NAMES) -> None:
    """Copies a checkpoint's tensors into the model's parameters, which may be on any device and of another dtype.

    One pass over memory-mapped files. Names and shapes are checked before the first copy: CheckpointError lists every
    missing, unexpected and wrongly shaped tensor.
    """
    slots = source_slots(model, names)
    unused = check_weights(model, files, names)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in files.tensors():
            if name in unused:
                continue
            slot = slots[name]
            target = parameters[slot.parameter][slot.start : slot.start + slot.rows]
            target.copy_(tensor.reshape(target.shape))
