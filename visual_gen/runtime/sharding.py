"""Writing a model's tensors as safetensors files of limited size, one tensor in memory at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from visual_gen.checkpoint import WeightFiles, safetensors_header

_ALIGNMENT_BYTES = 8  # of the data behind the header, as safetensors itself aligns it


def write_shards(
    weights: WeightFiles,
    folder: Path,
    *,
    stem: str,
    max_shard_bytes: int,
    wrote: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Writes `stem`.safetensors into `folder`, or shards of at most max_shard_bytes (more where one tensor has more)
    with their index. Tensors keep their dtype and are read once, in the order of the source. wrote(bytes): called after
    each of them."""
    sizes = {name: math.prod(shape) * weights.dtypes[name].itemsize for name, shape in weights.shapes.items()}
    shards = _shards(sizes, max_shard_bytes)
    names = [f"{stem}.safetensors"] if len(shards) == 1 else [
        f"{stem}-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)
    ]  # fmt: skip
    places: dict[str, tuple[int, int]] = {}  # shard, offset in it
    files = []
    try:
        for i, (name, shard) in enumerate(zip(names, shards, strict=True)):
            header = safetensors_header({t: (weights.shapes[t], weights.dtypes[t]) for t in shard})
            header += b" " * (-len(header) % _ALIGNMENT_BYTES)
            file = (folder / name).open("wb")
            files.append(file)
            file.write(len(header).to_bytes(8, "little") + header)
            offset = file.tell()
            for tensor in shard:
                places[tensor] = (i, offset)
                offset += sizes[tensor]
            file.truncate(offset)
        for name, tensor in weights.tensors():
            shard, offset = places[name]
            files[shard].seek(offset)
            files[shard].write(_bytes_of(tensor))
            wrote(sizes[name])
    finally:
        for file in files:
            file.close()
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(sizes.values())},
            "weight_map": {tensor: names[i] for i, shard in enumerate(shards) for tensor in shard},
        }
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2))


def _shards(sizes: dict[str, int], max_shard_bytes: int) -> Sequence[list[str]]:
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _bytes_of(tensor) -> memoryview:
    import torch

    return memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())
