"""Where a checkpoint lies, and its safetensors files, checked before a byte of weights is read."""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

PACKAGED_CHECKPOINTS = {
    "wan-shapes": Path(__file__).parent / "checkpoints" / "wan_shapes",
    "wan-shapes-causal": Path(__file__).parent / "checkpoints" / "wan_shapes_causal",
}
SHARES_FILE = "shares.json"
SHARED_PARTS = ("text_encoder", "tokenizer", "vae", "scheduler")
# and the tokenizer's
CONFIG_FILES = ("model_index.json", "recommended.json", SHARES_FILE, "*/*.json", "*/*.model", "*/*.txt")
PIPELINE_FILES = (*CONFIG_FILES, "*/*.safetensors")

# https://github.com/huggingface/safetensors#format
_HEADER_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
_TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
SERVED_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class CheckpointError(ValueError):
    """A checkpoint that cannot be used: the message names the file and says what to do."""


def resolve_folder(folder_or_id: str | Path, *, files: Sequence[str] = PIPELINE_FILES) -> Path:
    """The local folder of a checkpoint.

    `folder_or_id` is "wan-shapes" (the checkpoint that ships with this package), a folder, or a Hugging Face Hub id
    "owner/name". Of a Hub repository only the paths matching `files` are fetched, unless they are cached already.

    Raises CheckpointError when nothing of that name can be found, with every place that was looked in, and on a
    packaged checkpoint whose weights this version of the package lacks.
    """
    name = str(folder_or_id)
    if not name.strip():
        raise CheckpointError("the checkpoint's name is empty: give a folder, a Hub id or 'wan-shapes'")
    if name in PACKAGED_CHECKPOINTS:
        folder = PACKAGED_CHECKPOINTS[name]
        if not folder.is_dir():
            raise CheckpointError(
                f"the checkpoint {name!r} ships with this package, but {folder} is missing: install the package again"
            )
        _check_packaged_weights(name, folder)
        return folder
    folder = Path(os.path.expanduser(folder_or_id))  # Path's own raises on an unknown user
    if folder.is_dir():
        return folder
    if folder.exists():
        raise CheckpointError(f"{folder} is a file: give the folder that holds the checkpoint")
    if isinstance(folder_or_id, str) and _looks_like_hub_id(name):
        return _fetch_from_hub(name, files)
    raise CheckpointError(
        f"checkpoint folder {name!r} not found (looked for {folder.absolute()}){_did_you_mean(name)}: "
        "check the path, or download the checkpoint there in diffusers folder format"
    )


def _check_packaged_weights(name: str, folder: Path) -> None:
    """Configuration files may ship before the weights that they are of; nothing else is to say so in its own way."""
    shares = read_json(folder / SHARES_FILE) if (folder / SHARES_FILE).exists() else {}
    own = [part for part in ("transformer", "text_encoder", "vae") if part not in shares]
    if lacking := [part for part in own if not any((folder / part).glob("*.safetensors"))]:
        raise CheckpointError(
            f"this version of the package ships without the weights of {name!r} ({folder} has none of "
            f"{', '.join(lacking)}): train it, as examples/wan_shapes does, or name another checkpoint "
            "(--set model.path=…)"
        )


def part_path(folder: str | Path, part: str) -> Path:
    """Where a part of the checkpoint in `folder` lies, "vae" for example: in a folder of that name, be it there or not,
    unless its shares.json says that a packaged checkpoint has it for both: {"vae": "wan-shapes"}.

    Raises CheckpointError on a shares.json that is damaged, names another part than those of SHARED_PARTS or a
    checkpoint that is not packaged, or gives a part that the folder has itself; and where that checkpoint has none.
    """
    folder = Path(folder)
    own, path = folder / part, folder / SHARES_FILE
    if not path.exists():
        return own
    shares = read_json(path)
    for name, source in shares.items():
        if name not in SHARED_PARTS:
            raise CheckpointError(f"{path} shares {name!r}; only {', '.join(SHARED_PARTS)} can be shared")
        if source not in tuple(PACKAGED_CHECKPOINTS):  # it may be anything that JSON holds
            raise CheckpointError(
                f"{path} takes {name} from {source!r}, which does not ship with this package; "
                f"{', '.join(map(repr, PACKAGED_CHECKPOINTS))} do"
            )
        if (folder / name).exists():
            raise CheckpointError(f"{folder} has {name} itself, and {path.name} takes it from {source!r}: remove one")
    if part not in shares:
        return own
    shared = resolve_folder(shares[part]) / part
    if not shared.is_dir():
        raise CheckpointError(
            f"{path} takes {part} from {shares[part]!r}, which has none of its own ({shared} is missing): name one "
            "that has, or install the package again"
        )
    return shared


def _looks_like_hub_id(name: str) -> bool:
    owner, slash, repository = name.partition("/")
    return bool(slash and owner and repository) and "/" not in repository and owner[0] not in ".~" and "\\" not in name


def _did_you_mean(name: str) -> str:
    near = difflib.get_close_matches(name.replace("_", "-"), PACKAGED_CHECKPOINTS, n=1)
    return f"; did you mean {near[0]!r}, which ships with this package?" if near else ""


def _fetch_from_hub(hub_id: str, files: Sequence[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(files), etag_timeout=10))
    except Exception as error:  # offline, no such repository, gated, disk full: all end in "not here"
        cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"checkpoint {hub_id!r} not found: there is no folder {Path(hub_id).absolute()}, and the Hugging Face Hub "
            f"repository of that name is neither cached nor reachable ({cause}){_did_you_mean(hub_id)}: "
            "check the name, or download it on a machine with network access and give the folder's path"
        ) from error


def read_json(path: Path) -> dict:
    """The JSON object in `path`; CheckpointError if the file is missing, damaged or holds something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: download the checkpoint again, with this file") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is damaged ({error}): download it again") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a JSON {type(content).__name__}, not an object: download it again")
    return content


@dataclass(frozen=True)
class WeightFiles:
    """The tensors of one model, in one safetensors file or in shards with an index. Made by `WeightFiles.open`."""

    files: tuple[Path, ...]
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]

    @classmethod
    def open(cls, folder: str | Path, stem: str = "diffusion_pytorch_model") -> WeightFiles:
        """Read the headers of `stem.safetensors`, or of the shards that `stem.safetensors.index.json` names.

        Raises CheckpointError, naming the file, when the folder, the file or a shard is missing; a file is truncated,
        longer than its header says or no safetensors file; the index and the shards disagree; or a tensor is in two
        shards.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise CheckpointError(f"folder {folder} is missing: download the checkpoint again, with this folder")
        single, index = folder / f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"
        if single.exists() and index.exists():
            raise CheckpointError(
                f"{folder} holds both {single.name} and {index.name}, two copies of the weights: remove one of them"
            )
        if index.exists():
            return cls._open_shards(index)
        if not single.exists():
            if any(folder.glob(f"{stem}-*-of-*.safetensors")):
                raise CheckpointError(f"{index} is missing, though shards of it are there: download it")
            others = sorted(path.name for path in folder.glob("*") if path.suffix in (".safetensors", ".bin", ".pth"))
            found = f"; the folder holds {', '.join(others)}, which are not read" if others else ""
            raise CheckpointError(
                f"{single} is missing, and so is {index.name}{found}: download the checkpoint again, with its weights "
                "in safetensors format"
            )
        return cls._from_headers({single: _read_header(single)})

    @classmethod
    def open_file(cls, path: str | Path) -> WeightFiles:
        """Read the header of one safetensors file. Raises CheckpointError as `open` does."""
        path = Path(path)
        if not path.is_file():
            raise CheckpointError(f"{path} is missing: download it")
        return cls._from_headers({path: _read_header(path)})

    def metadata(self) -> dict[str, str]:
        """The free texts in the header of the first file."""
        from safetensors import safe_open

        with safe_open(self.files[0], framework="pt") as file:
            return file.metadata() or {}

    @classmethod
    def _open_shards(cls, index: Path) -> WeightFiles:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index} has no 'weight_map' of tensor names to files: download it again")
        shards = sorted({str(shard) for shard in weight_map.values()})
        outside = [shard for shard in shards if Path(shard).name != shard]
        if outside:
            raise CheckpointError(f"{index} names files outside its folder: {_some(outside)}: download it again")
        missing = [shard for shard in shards if not (index.parent / shard).exists()]
        if missing:
            raise CheckpointError(
                f"{index.parent} lacks {len(missing)} of the {len(shards)} files that {index.name} names: "
                f"{_some(missing)}: download them"
            )
        headers = {index.parent / shard: _read_header(index.parent / shard) for shard in shards}
        for path, header in headers.items():
            named = {tensor for tensor, shard in weight_map.items() if shard == path.name}
            absent = sorted(named - header.keys())
            if absent:
                raise CheckpointError(
                    f"{index} says that {path.name} holds {_some(absent)}, but it does not: download both again"
                )
        weights = cls._from_headers(headers)
        unnamed = sorted(weights.shapes.keys() - weight_map.keys())
        if unnamed:
            raise CheckpointError(
                f"{index} does not name {_some(unnamed)}, which its shards hold: download the index and shards again"
            )
        return weights

    @classmethod
    def _from_headers(cls, headers: Mapping[Path, Mapping[str, tuple[tuple[int, ...], torch.dtype]]]) -> WeightFiles:
        shapes: dict[str, tuple[int, ...]] = {}
        dtypes: dict[str, torch.dtype] = {}
        owner: dict[str, Path] = {}
        for path, header in headers.items():
            for name, (shape, dtype) in header.items():
                if name in owner:
                    raise CheckpointError(
                        f"tensor {name!r} is in both {owner[name]} and {path.name}: download the checkpoint again into "
                        "an empty folder"
                    )
                owner[name], shapes[name], dtypes[name] = path, shape, dtype
        return cls(tuple(headers), shapes, dtypes)

    def tensors(self, device: str | torch.device = "cpu") -> Iterator[tuple[str, torch.Tensor]]:
        """Every (name, tensor) once, file by file. On the CPU a tensor is a view of the memory-mapped file."""
        from safetensors import safe_open

        for path in self.files:
            with safe_open(path, framework="pt", device=str(device)) as file:
                for name in file.keys():  # noqa: SIM118 (safe_open is no mapping)
                    yield name, file.get_tensor(name)

    def _file_of(self, name: str) -> Path:
        if len(self.files) == 1:
            return self.files[0]
        return next(path for path in self.files if name in _read_header(path))

    def check_names_and_shapes(self, expected: Mapping[str, tuple[int, ...]], what: str) -> None:
        """Raise CheckpointError naming every tensor of `expected` that is missing here or has another shape, every
        tensor here that `expected` lacks, and one that is stored in no dtype of SERVED_DTYPES. `what` names the model
        in the message."""
        for name in sorted(expected.keys() & self.shapes.keys()):
            if self.dtypes[name] not in SERVED_DTYPES:
                file = self._file_of(name)
                raise CheckpointError(
                    f"{file} stores {name!r} as {str(self.dtypes[name]).removeprefix('torch.')}: quantised weights are "
                    "not served; use the checkpoint in float32, bfloat16 or float16"
                )
        missing = sorted(expected.keys() - self.shapes.keys())
        unexpected = sorted(self.shapes.keys() - expected.keys())
        misshapen = [
            f"{name} {list(self.shapes[name])} where {list(expected[name])} is needed"
            for name in sorted(expected.keys() & self.shapes.keys())
            if tuple(self.shapes[name]) != tuple(expected[name])
        ]
        problems = {"missing": missing, "unexpected": unexpected, "wrongly shaped": misshapen}
        if any(problems.values()):
            listed = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in problems.items() if names)
            where = self.files[0] if len(self.files) == 1 else self.files[0].parent
            raise CheckpointError(
                f"{where} does not fit {what}: {listed}. The config.json beside it must be the one it was saved with: "
                "download the folder again"
            )


def _read_header(path: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """{name: (shape, dtype)} from a safetensors header, every extent checked against the size of the file."""
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(_HEADER_LENGTH_BYTES)
        if start == b"version ":
            raise CheckpointError(f"{path} is a Git LFS pointer, not the weights: run `git lfs pull`, or download it")
        header_bytes = int.from_bytes(start, "little")
        data_start = _HEADER_LENGTH_BYTES + header_bytes
        if header_bytes > _MAX_HEADER_BYTES:
            raise CheckpointError(f"{path} is not a safetensors file, or a damaged one: download it again")
        if size_bytes < data_start or len(start) < _HEADER_LENGTH_BYTES:
            raise CheckpointError(
                f"{path} is truncated ({size_bytes} bytes, which ends inside its header): download it again"
            )
        try:
            header = json.loads(file.read(header_bytes))
            header.pop("__metadata__", None)
            entries = {name: _read_entry(entry) for name, entry in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} has a damaged header ({error}): download it again") from None
    data_end = data_start + max((end for _, _, end in entries.values()), default=0)
    if size_bytes != data_end:
        state = "truncated" if size_bytes < data_end else "damaged"
        raise CheckpointError(
            f"{path} is {state}: {size_bytes} bytes, where its header says {data_end}: download it again"
        )
    return {name: (shape, dtype) for name, (shape, dtype, _) in entries.items()}


def safetensors_header(tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> bytes:
    """The JSON header of a file that holds `tensors`, {name: (shape, dtype)}, one after another."""
    names = {dtype: name for name, dtype in _TORCH_DTYPES.items()}
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, (shape, dtype) in tensors.items():
        end = begin + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": names[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    return json.dumps(entries, separators=(",", ":")).encode()


def _read_entry(entry: Mapping) -> tuple[tuple[int, ...], torch.dtype, int]:
    if entry["dtype"] not in _TORCH_DTYPES:
        raise ValueError(f"dtype {entry['dtype']!r} is not one of {', '.join(_TORCH_DTYPES)}")
    shape, dtype = tuple(entry["shape"]), _TORCH_DTYPES[entry["dtype"]]
    begin, end = entry["data_offsets"]
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{end - begin} bytes for a {entry['dtype']} tensor of shape {list(shape)}")
    return shape, dtype, end


def _some(names: Sequence[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
