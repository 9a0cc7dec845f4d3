"""The tensor names of Wan's authors, which Self-Forcing and its kin save in a .pt file, for this model's parameters."""

from __future__ import annotations

import pickle
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from visual_gen.checkpoint import CheckpointError, WeightFiles
from visual_gen.models.wan.weights import SourceNames

# This model's names → the authors', as in visual_gen.models.wan.weights for diffusers' names. Source: WanModel and
# WanModel's blocks in Wan2.1's wan/modules/model.py.
_RENAMES = (
    ("time_embedding.linear_1.", "time_embedding.0."),
    ("time_embedding.linear_2.", "time_embedding.2."),
    ("time_embedding.proj.", "time_projection.1."),
    ("text_embedding.linear_1.", "text_embedding.0."),
    ("text_embedding.linear_2.", "text_embedding.2."),
    ("image_embedding.norm1.", "img_emb.proj.0."),
    ("image_embedding.linear_1.", "img_emb.proj.1."),
    ("image_embedding.linear_2.", "img_emb.proj.3."),
    ("image_embedding.norm2.", "img_emb.proj.4."),
    ("image_embedding.pos_embed", "img_emb.emb_pos"),
    (".ffn.linear_1.", ".ffn.0."),
    (".ffn.linear_2.", ".ffn.2."),
    (".norm2.", ".norm3."),
    (".scale_shift_table", ".modulation"),
    ("scale_shift_table", "head.modulation"),  # what is left of that name is the output's
    ("proj_out.", "head.head."),
    (".to_out.", ".o."),
    (".cross_text.", ".cross_attn."),
    (".cross_image.to_kv.", ".cross_attn.to_image_kv."),
    (".cross_image.qk_norm_weight", ".cross_attn.norm_k_img.weight"),
)
_FUSED = {
    ".to_qkv.": (".q.", ".k.", ".v."),
    ".to_q.": (".q.",),
    ".to_kv.": (".k.", ".v."),
    ".to_image_kv.": (".k_img.", ".v_img."),
    ".qk_norm_weight": (".norm_q.weight", ".norm_k.weight"),
}
AUTHORS_NAMES = SourceNames(_RENAMES, _FUSED)

# Dictionaries of a training checkpoint, the one to generate with first.
STATE_DICTS = ("generator_ema", "generator")
# What wrappers put in front of a module's name, at any depth. Only a leading "model." is a wrapper's.
WRAPPER_PARTS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


@dataclass(frozen=True)
class PickledWeights(WeightFiles):
    """The tensors of a .pt file, named as in the bare model. Made by `PickledWeights.open_file`."""

    state: Mapping[str, torch.Tensor]

    @classmethod
    def open_file(
        cls, path: str | Path, *, state_dict: str | None = None, candidates: tuple[str, ...] = STATE_DICTS
    ) -> PickledWeights:
        """Reads `path` with torch.load(weights_only=True), memory-mapped.

        state_dict: which dictionary of a training checkpoint; None takes the first of `candidates` (generator_ema, else
        generator) that is there, else the file itself where it is a plain dictionary of tensors. Raises
        CheckpointError, naming the file, when it is missing, damaged, holds more than tensors, or lacks that
        dictionary.
        """
        path = Path(path)
        if not path.is_file():
            raise CheckpointError(f"{path} is missing: give the .pt file of a Self-Forcing-style checkpoint")
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (RuntimeError, ValueError, EOFError, OSError, pickle.UnpicklingError) as error:
            if not zipfile.is_zipfile(path):
                raise CheckpointError(
                    f"{path} is damaged, or is no .pt file as torch.save writes it: download it again, or give another"
                ) from error
            cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise CheckpointError(
                f"{path} is damaged, or holds more than tensors ({cause}): download it again, or save its state_dict"
            ) from error
        found = _find_state(path, content, candidates, state_dict)
        state = {_bare(name): x for name, x in found.items()}
        if len(state) != len(found):
            twice = [name for name, count in Counter(map(_bare, found)).items() if count > 1]
            raise CheckpointError(
                f"{path} has {', '.join(twice[:4])} more than once, under names that differ in what wrappers put in "
                "front: keep one of each"
            )
        shapes = {name: tuple(x.shape) for name, x in state.items()}
        return cls((path,), shapes, {name: x.dtype for name, x in state.items()}, state)

    def tensors(self, device: str | torch.device = "cpu") -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.state.items():
            yield name, tensor.to(device)


def _find_state(
    path: Path, content: object, candidates: tuple[str, ...], state_dict: str | None
) -> dict[str, torch.Tensor]:
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}; it must be a dictionary of tensors")
    wanted = candidates if state_dict is None else (state_dict,)
    found = next((content[key] for key in wanted if key in content), None)
    if found is None and state_dict is None and _is_state(content):
        found = content
    if not _is_state(found):
        keys = ", ".join(map(repr, list(content)[:8]))
        raise CheckpointError(f"{path} has no tensors under {' or '.join(wanted)}; its keys are {keys}")
    return found


def _is_state(found: object) -> bool:
    return isinstance(found, dict) and bool(found) and all(isinstance(x, torch.Tensor) for x in found.values())


def _bare(name: str) -> str:
    for part in WRAPPER_PARTS:
        name = name.replace(part, "")
    return name.removeprefix("model.")
