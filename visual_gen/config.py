"""Settings of a run: a YAML file, checked by pydantic.

Every model here is frozen and refuses unknown keys. `load_config` turns whatever is wrong into one `ConfigError` that
says where (file and line, or the option of the command line), which key, which value, and what would be right.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from visual_gen.config_file import ConfigError, Override, line_of, origin_of, parse_override, put, read_yaml, show
from visual_gen.device import find_device

if TYPE_CHECKING:
    import torch

CrossKVMode = Literal["padded", "packed", "packed_pad_exact"]
CROSS_KV_MODES: tuple[CrossKVMode, ...] = get_args(CrossKVMode)
Recache = Literal["none", "window"]
RECACHES: tuple[Recache, ...] = get_args(Recache)
CFGMode = Literal["batched", "sequential"]
CFG_MODES: tuple[CFGMode, ...] = get_args(CFGMode)
OffloadMode = Literal["none", "experts"]
OFFLOAD_MODES: tuple[OffloadMode, ...] = get_args(OffloadMode)


def _texts(value: object) -> object:
    if value is None or isinstance(value, str):
        texts = (value or "",)
    elif isinstance(value, list | tuple) and value and all(isinstance(text, str) for text in value):
        texts = value = tuple(value)
    else:
        raise ValueError("a text, or a list of at least one text")
    if not all(map(_is_unicode, texts)):
        raise ValueError(_UNICODE)
    return value


_UNICODE = "whole characters, not half ones (lone surrogates, as of bytes that are not UTF-8): type it again in UTF-8"


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def check_unicode(name: str, text: str) -> None:
    """Raise ValueError if `text` holds half characters, which neither a tokenizer nor a file can take."""
    if not _is_unicode(text):
        raise ValueError(f"{name} is {show(text)}; it must be {_UNICODE}")


def _steps(value: object) -> object:
    if isinstance(value, list | tuple) and value and all(type(x) in (int, float) for x in value):
        value = tuple(float(x) for x in value)
        if all(a > b for a, b in zip(value, value[1:], strict=False)):
            return value
    raise ValueError("a list of noise levels that fall, such as [1000, 750, 500, 250]")


def _list(value: object) -> object:
    if isinstance(value, list | tuple):
        return tuple(value)
    raise ValueError("a list, such as [{path: lora.safetensors, scale: 1.0}]")


def _files(value: object) -> object:
    if value is None or (isinstance(value, str) and value):
        return value
    if isinstance(value, list | tuple) and value and all(isinstance(name, str) and name for name in value):
        return value[0] if len(value) == 1 else tuple(value)
    raise ValueError("the name of a file, or a list of them, one for each prompt")


def _whole(value: object) -> object:
    if isinstance(value, str) and not _is_unicode(value):
        raise ValueError(_UNICODE)
    return value


Prompt = Annotated[str | tuple[str, ...] | None, BeforeValidator(_texts)]
ImageFiles = Annotated[str | tuple[str, ...] | None, BeforeValidator(_files)]
PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
BackendName = Annotated[str, Field(min_length=1)]


class _Section(BaseModel):
    # strict: the text "480" or `true` is not a number, and says so rather than being converted.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ModelConfig(_Section):
    """Which weights. `preset` names a published model, which is believed where `path` has no folder on this machine;
    where it has one, the folder decides, and a preset that contradicts it is an error of `plan` and `generate`."""

    path: Annotated[str, Field(min_length=1)]
    preset: Annotated[str, Field(min_length=1)] | None = None


class AttentionConfig(_Section):
    """Backend per role ("auto", or a name that `visual-gen backends` lists), and how text K/V are padded.

    `cross_kv`: "padded", as Wan was trained; "packed", pads dropped, which is another video; "packed_pad_exact", pads
    dropped and their effect put back, the same video as "padded" to rounding.
    """

    self: BackendName = "auto"
    cross_text: BackendName = "auto"
    cross_image: BackendName = "auto"
    cross_kv: CrossKVMode = "padded"


class GenerationConfig(_Section):
    """What to generate. Sizes are in pixels and frames; `fps` is the rate that the video file plays at.

    With several prompts, prompt i is made from seed + i, so that each can be made again alone. `scheduler`,
    `flow_shift` and `boundary_ratio` of None take what the checkpoint says. `image` and `last_image` are files for
    models that start, and end, with a given picture: one for all prompts, or one for each. `guidance_scale_2` is for
    the steps of a second transformer, below `boundary_ratio` of the noise levels; None takes guidance_scale.
    """

    prompt: Prompt = None
    negative_prompt: Annotated[str | None, BeforeValidator(_whole)] = None
    height: PositiveInt = 480
    width: PositiveInt = 832
    num_frames: PositiveInt = 81
    num_inference_steps: PositiveInt = 50
    image: ImageFiles = None
    last_image: ImageFiles = None
    guidance_scale: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 5.0
    guidance_scale_2: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    boundary_ratio: Annotated[float, Field(gt=0, lt=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    scheduler: Literal["unipc", "euler"] | None = None
    flow_shift: PositiveFloat | None = None
    max_sequence_length: PositiveInt = 512
    cfg: CFGMode = "batched"
    fps: Annotated[float, Field(ge=1, le=240)] = 16.0

    @property
    def prompts(self) -> tuple[str, ...]:
        """The prompts as a tuple; empty where none was given."""
        if self.prompt is None:
            return ()
        return (self.prompt,) if isinstance(self.prompt, str) else self.prompt

    @property
    def seeds(self) -> tuple[int, ...]:
        """One seed for each prompt."""
        return tuple(self.seed + i for i in range(len(self.prompts)))


# Of `generation`: what says how a whole video is made, which a stream refuses, and why.
OF_WHOLE_VIDEOS = {
    "num_frames": "--chunks says how long the video is",
    "num_inference_steps": "causal.steps has the steps of a chunk",
    "scheduler": "causal.steps has the steps of a chunk",
    "flow_shift": "causal.flow_shift is the stream's",
    "cfg": "streams of one forward have their branches in it too",
    "image": "a stream is made from text",
    "last_image": "a stream is made from text",
    "guidance_scale_2": "a stream has one transformer",
    "boundary_ratio": "a stream has one transformer",
}


class CausalConfig(_Section):
    """How a causal model makes a video of any length, a chunk of latent frames at a time.

    `frames_per_chunk` latent frames are made together, `first_chunk_frames` in the first chunk if it differs. Visible
    are the first `sink_frames` frames and the last `recent_frames`, the chunk itself counted in those. `steps` are the
    noise levels, 1000 down, that each chunk is denoised at, before `flow_shift` moves them: 1 leaves them as they are.
    The defaults are Self-Forcing's. `block_size` (tokens) and `read` are those of the KV cache. `rope_max_seq_len` is
    how many latent frames a stream may have; None: as many as the checkpoint says. The table of positions is extended
    where it must, which is exact.
    """

    frames_per_chunk: PositiveInt = 3
    first_chunk_frames: PositiveInt | None = None
    sink_frames: Annotated[int, Field(ge=0)] = 0
    recent_frames: PositiveInt = 21
    steps: Annotated[tuple[Annotated[float, Field(gt=0, le=1000)], ...], BeforeValidator(_steps)] = (
        1000.0, 750.0, 500.0, 250.0,
    )  # fmt: skip
    flow_shift: PositiveFloat = 5.0
    block_size: PositiveInt | Literal["auto"] = "auto"
    read: Literal["auto", "extent", "block_table", "staged"] = "auto"
    rope_max_seq_len: Annotated[int, Field(ge=1, le=500_000)] | None = None

    def frames_end(self, checkpoint_end: int) -> int:
        """How many latent frames a stream may have, of a checkpoint whose rope_max_seq_len is checkpoint_end."""
        return self.rope_max_seq_len or checkpoint_end

    def check_frames(self, latent_frames: int, checkpoint_end: int) -> None:
        """Raises ConfigError on a stream of more frames than there are positions (see frames_end)."""
        end = self.frames_end(checkpoint_end)
        if latent_frames > end:
            raise ConfigError(
                f"the stream has {latent_frames} latent frames and the model knows {end} positions: ask for fewer "
                "chunks, or set causal.rope_max_seq_len to more"
            )

    @property
    def max_chunk_frames(self) -> int:
        return max(self.frames_per_chunk, self.first_chunk_frames or 0)

    def frames_after(self, chunks: int, frames: int = 0) -> int:
        """Latent frames of a stream that has `frames` and makes so many chunks more."""
        first = self.first_chunk_frames if not frames else None
        return frames + (first or self.frames_per_chunk) + (chunks - 1) * self.frames_per_chunk

    @property
    def timesteps(self) -> tuple[float, ...]:
        """The steps as flow_shift moves them: t = 1000 · shift · s / (1 + (shift - 1) · s) of s = step / 1000."""
        shift = self.flow_shift
        return tuple(1000 * shift * s / (1 + (shift - 1) * s) for s in (step / 1000 for step in self.steps))

    @property
    def sigmas(self) -> tuple[float, ...]:
        """The timesteps as shares of noise in 0..1."""
        return tuple(t / 1000 for t in self.timesteps)

    @model_validator(mode="after")
    def _fits(self) -> CausalConfig:
        if self.recent_frames < self.max_chunk_frames:
            raise ValueError(
                f"recent_frames of at least {self.max_chunk_frames}, the frames of a chunk, which it counts; it is "
                f"{self.recent_frames}"
            )
        return self


class LoRAConfig(_Section):
    """A LoRA file to load, and how strongly it counts. `transformer` is where it goes: "transformer_2" is Wan 2.2's
    expert for low noise."""

    path: Annotated[str, Field(min_length=1)]
    scale: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    transformer: Literal["transformer", "transformer_2"] = "transformer"

    @property
    def file(self) -> Path:
        """The path, with ~ resolved."""
        return Path(os.path.expanduser(self.path))


class StreamConfig(_Section):
    """What `visual-gen stream` makes: so many chunks of each prompt. `recache` is what a prompt switch does to what the
    model still sees of the chunks before: "none" leaves it, "window" computes it again under the new prompt.

    `deterministic`: all forwards have one size and one read, so that a video's bits do not depend on which of the
    others are still being made.
    """

    chunks: PositiveInt = 20
    recache: Recache = "none"
    deterministic: bool = False


class OutputConfig(_Section):
    """Where the video goes and how it is compressed. `crf` is x264's: 0 loses nothing, 18 looks the same, 51 is worst.

    With `report`, report files of the same name lie beside the video, with `report_frames` pictures of each clip.
    """

    path: Annotated[str, Field(min_length=1)] = "outputs/video.mp4"
    crf: Annotated[int, Field(ge=0, le=51)] = 18
    report: bool = True
    report_frames: Annotated[int, Field(ge=1, le=32)] = 8


class RunConfig(_Section):
    """All settings of one run. `device` is "auto" (CUDA if there is one, else the CPU), "cpu", "cuda" or "cuda:N".

    `offload` "experts" keeps of two transformers only the one in use on the device, the other in host memory.
    `compile`: torch.compile for the transformer's blocks, which takes its time once, at the first step.
    With `causal`, the model's weights are those of a causal one, for streams; without it, the model makes whole videos.
    `lora`: files to load into it, added up.
    `stream` is for the command of that name.
    """

    model: ModelConfig
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:[0-9]{1,3})?)$")] = "auto"
    offload: OffloadMode = "none"
    compile: bool = False
    attention: AttentionConfig = AttentionConfig()
    generation: GenerationConfig = GenerationConfig()
    output: OutputConfig = OutputConfig()
    causal: CausalConfig | None = None
    lora: Annotated[tuple[LoRAConfig, ...], BeforeValidator(_list)] = ()
    stream: StreamConfig | None = None

    def torch_dtype(self) -> torch.dtype:
        import torch

        return getattr(torch, self.dtype)

    @property
    def counts_as_gpu(self) -> bool:
        """Whether plans are for a GPU: also for "auto", as they are made on machines that have none, too."""
        return self.device != "cpu"

    def torch_device(self) -> torch.device:
        """The device that `device` stands for on this machine. Raises ConfigError if it asks for an absent GPU."""
        try:
            return find_device(self.device)
        except ValueError as error:
            raise ConfigError(str(error)) from None


def check_stream_settings(config: RunConfig) -> None:
    """Raises ConfigError on settings that no stream can follow."""
    if config.causal is None:
        raise ConfigError(
            "there is no causal section: it says how a stream is made (frames_per_chunk, recent_frames, steps, …); "
            "configs/wan_shapes_stream.yaml has one"
        )
    for key in sorted(config.generation.model_fields_set & OF_WHOLE_VIDEOS.keys()):
        raise ConfigError(f"generation.{key} is of whole videos: leave it out; {OF_WHOLE_VIDEOS[key]}")
    if config.offload != "none":
        raise ConfigError(
            f"offload = {config.offload!r}: is for a pair of transformers, and a stream has one; leave it out"
        )
    if config.lora:
        raise ConfigError("lora: is for whole videos; leave it out, or fuse it into the causal checkpoint")


def attention_config(value: AttentionConfig | dict | None) -> AttentionConfig:
    """The attention settings of a Python caller. Raises ConfigError, as a YAML file would, naming key and way out."""
    try:
        return AttentionConfig.model_validate({} if value is None else value)
    except ValidationError as error:
        problems = (_problem(("attention", *map(str, item["loc"])), item) for item in error.errors())
        raise ConfigError("\n".join(problems)) from None


def load_config(path: str | Path, overrides: Iterable[str | Override] = ()) -> RunConfig:
    """Read a YAML file, put the overrides over it in their order, and check the whole.

    `overrides` are texts of the form "generation.seed=7" or `Override`s. Raises FileNotFoundError if there is no such
    file, and ConfigError for everything that is wrong in it.
    """
    path = Path(path)
    data, lines = read_yaml(path)
    origins: dict[tuple[str, ...], str] = {}
    for override in overrides:
        if isinstance(override, str):
            override = parse_override(override)
        keys = tuple(override.key.split("."))
        put(data, keys, override)
        origins[keys] = override.origin
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        problems = []
        for item in error.errors(include_url=False):
            # Only the keys: pydantic also puts the branch of a union there.
            keys = tuple(str(key) for key in item["loc"])
            where = origin_of(keys, origins, lines) or line_of(path, keys, lines)
            problems.append(f"{where}: {_problem(keys, item)}")
        raise ConfigError("\n".join(dict.fromkeys(problems))) from None


WANTED = {
    "missing": "is missing and has no default",
    "int_type": "wants a whole number",
    "float_type": "wants a number",
    "string_type": "wants a text",
    "bool_type": "wants true or false",
    "finite_number": "wants a finite number",
    "string_unicode": f"wants {_UNICODE}",
    "string_too_short": "wants a text that is not empty",
    "string_pattern_mismatch": "wants 'auto', 'cpu', 'cuda' or 'cuda:N'",
    "literal_error": "wants {expected}",
    "greater_than": "wants more than {gt:g}",
    "greater_than_equal": "wants {ge:g} or more",
    "less_than": "wants less than {lt}",
    "less_than_equal": "wants {le:g} or less",
    "value_error": "wants {error}",
    "model_type": "wants a section (a mapping of keys)",
}


def _problem(keys: tuple[str, ...], item: dict[str, Any]) -> str:
    dotted = ".".join(keys)
    if item["type"] in ("extra_forbidden", "invalid_key"):
        return f"{dotted}: unknown key{_near(keys)}"
    wanted = WANTED.get(item["type"], item["msg"]).format(**item.get("ctx", {}))
    return f"{dotted}: {wanted}" if item["type"] == "missing" else f"{dotted} = {show(item['input'])}: {wanted}"


def _near(keys: tuple[str, ...]) -> str:
    """The nearest key of the same section, else of any other, and what the section has."""
    sections = _sections()
    section, key = tuple(part for part in keys[:-1] if not part.isdecimal()), keys[-1]  # without places in a list
    here = sections.get(section, [])
    near = difflib.get_close_matches(key, here, n=1)
    if not near:
        everywhere = {name: ".".join((*at, name)) for at, names in sections.items() for name in names}
        near = [everywhere[name] for name in difflib.get_close_matches(key, everywhere, n=1, cutoff=0.8)]
    suggestion = f"; did you mean {near[0]}?" if near else ""
    return f"{suggestion} ({'.'.join(section) or 'the top level'} has {', '.join(here)})"


def _sections() -> dict[tuple[str, ...], list[str]]:
    sections: dict[tuple[str, ...], list[str]] = {(): list(RunConfig.model_fields)}
    for name, field in RunConfig.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                sections[(name,)] = list(kind.model_fields)
    return sections
