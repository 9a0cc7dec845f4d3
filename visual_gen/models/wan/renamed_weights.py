"""Weight files whose tensors are read under other names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from visual_gen.checkpoint import CheckpointError, WeightFiles


@dataclass(frozen=True)
class Target:
    """What a stored tensor, or the rows [start, start + rows) of it (all where rows is None), is read as. shape: its
    shape then, None to keep the stored one."""

    name: str
    start: int = 0
    rows: int | None = None
    shape: tuple[int, ...] | None = None

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A view of `tensor`."""
        part = tensor if self.rows is None else tensor[self.start : self.start + self.rows]
        return part if self.shape is None else part.reshape(self.shape)

    def shape_of(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        if self.shape is not None:
            return self.shape
        return stored if self.rows is None else (self.rows, *stored[1:])


@dataclass(frozen=True)
class RenamedWeights(WeightFiles):
    """`source`, each tensor read as its `targets`; stored tensors with an empty tuple of those are left aside."""

    source: WeightFiles
    targets: Mapping[str, tuple[Target, ...]]

    @classmethod
    def of(
        cls, source: WeightFiles, targets_of: Callable[[str, tuple[int, ...]], tuple[Target, ...] | None]
    ) -> RenamedWeights:
        """targets_of(stored name, stored shape) → its targets, or None for a name that is not known: CheckpointError
        lists all of those, and two tensors that would be read under one name."""
        targets = {name: targets_of(name, shape) for name, shape in source.shapes.items()}
        unknown = sorted(name for name, found in targets.items() if found is None)
        if unknown:
            raise CheckpointError(
                f"{source.files[0]} holds tensors that no such model has: {', '.join(unknown)}: give another file"
            )
        shapes: dict[str, tuple[int, ...]] = {}
        dtypes: dict[str, torch.dtype] = {}
        for stored, found in targets.items():
            for target in found:
                if target.name in shapes:
                    raise CheckpointError(f"{source.files[0]} holds {target.name!r} twice: download it again")
                shapes[target.name] = target.shape_of(source.shapes[stored])
                dtypes[target.name] = source.dtypes[stored]
        return cls(source.files, shapes, dtypes, source, targets)

    def tensors(self, device: str | torch.device = "cpu") -> Iterator[tuple[str, torch.Tensor]]:
        for stored, tensor in self.source.tensors(device):
            for target in self.targets[stored]:
                yield target.name, target.of(tensor)
