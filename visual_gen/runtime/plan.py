"""What a configuration will cost, from its geometry alone: no weights are read and none are allocated."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attention_backend import (
    AUTO_ORDER,
    AttentionSpec,
    backend_classes,
)
from attention_backend.interface import ROLES
from visual_gen.config import CROSS_KV_MODES, RunConfig
from visual_gen.device import find_device
from visual_gen.models.wan import CausalWanTransformer, WanConfig, WanTransformer
from visual_gen.models.wan.lora_file import LoRAFile
from visual_gen.models.wan.text_pool import SERVED_CROSS_KV
from visual_gen.runtime.costs import (
    activation_bytes,
    flops,
    image_kv_bytes,
    kept_as,
    text_groups,
    text_kv_bytes,
    text_rows,
)
from visual_gen.runtime.model import Model, check_settings, required_model
from visual_gen.runtime.prompts import clean_prompt
from visual_gen.runtime.stream_plan import StreamPlan, plan_stream, stream_activation_bytes
from visual_gen.runtime.streams import TEXT_SLOTS

TOKENS_PER_WORD = 1.3  # of an English prompt with UMT5's tokenizer, roughly; only where there is no tokenizer to ask


@dataclass(frozen=True)
class Plan:
    """Counts of one run. FLOPs are of the transformer; `notes` say what is not counted.

    flops_per_step: multiplications and additions, 2 for each multiply-add, of all forwards of one denoising step.
    text_kv_bytes: keys and values of the text in all layers and rows, for each cross mode that the model serves.
    memory_bytes: expected peak of a denoising step on the device: weights (of the transformers that stay there), lora
    (unfused beside them; where there is any), text_encoder, vae and image_encoder (weights that the pipeline keeps
    there), text_kv (of images too), kv_cache (of streams), activations, and their total.

    With `stream`, num_frames, latent_shape and tokens are those of a chunk after the first, one stream for each prompt;
    num_steps are its forwards, the committing one included; and flops_per_step is with a full window.
    """

    source: str
    parameters: int
    num_experts: int
    dtype: str
    height: int
    width: int
    num_frames: int
    latent_shape: tuple[int, ...]
    tokens: int
    num_steps: int
    rows_per_forward: int
    forwards_per_step: int
    text_lens: tuple[int, ...]
    text_lens_from: str
    cross_kv: str
    flops_per_step: dict[str, int]
    text_kv_bytes: dict[str, int]
    memory_bytes: dict[str, int]
    notes: tuple[str, ...]
    stream: StreamPlan | None = None

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def plan(config: RunConfig, text_lens: Sequence[int] | None = None, *, device_memory_bytes: int | None = None) -> Plan:
    """The costs of `config`.

    text_lens: text tokens of each prompt and, under guidance, of the negative prompt at the end; None counts them with
    the checkpoint's tokenizer, or guesses from the words where there is none. Raises ValueError on sizes that the model
    does not divide, on lengths and LoRA files that do not fit, if neither a local folder nor a preset says what the
    model is, and if they contradict each other or the settings. device_memory_bytes: what the device has, for how many
    causal streams fit.
    """
    model = required_model(config)
    check_settings(model, config)
    wan, generation, geometry, causal = model.transformer, config.generation, model.geometry, config.causal
    batch = max(1, len(generation.prompts))
    branches = 2 if generation.guidance_scale > 1 else 1
    batched = causal is not None or generation.cfg == "batched"
    rows = batch * (branches if batched else 1)
    lens, lens_from = _text_lens(config, model, text_lens, batch, guided=branches == 2)
    # Nothing runs here, so what other backends would say on this machine does not matter.
    backends = dict.fromkeys(ROLES, "sdpa")
    if wan.image_dim is None:  # the model refuses one
        backends["cross_image"] = config.attention.cross_image
    weights = (WanTransformer if causal is None else CausalWanTransformer)(
        wan,
        attention={**backends, "cross_kv": config.attention.cross_kv},
        dtype=config.torch_dtype(),
        init_weights=False,
    )
    # After the model, which may have refused to run so.
    if causal is None:
        num_frames, num_steps = generation.num_frames, generation.num_inference_steps
        latent_shape = geometry.latent_shape(batch, num_frames, generation.height, generation.width)
        keys = most_tokens = tokens = geometry.num_tokens(latent_shape)
    else:
        num_frames, num_steps = causal.frames_per_chunk * geometry.temporal_scale, len(causal.steps) + 1
        one_frame = geometry.latent_shape(batch, 1, generation.height, generation.width)
        latent_shape = (*one_frame[:2], causal.frames_per_chunk, *one_frame[3:])
        tokens, most_tokens, keys = (
            frames * geometry.num_tokens(one_frame)
            for frames in (causal.frames_per_chunk, causal.max_chunk_frames, causal.sink_frames + causal.recent_frames)
        )
    weight_bytes = sum(parameter.numel() * parameter.element_size() for parameter in weights.parameters())
    text_length, dtype = generation.max_sequence_length, config.torch_dtype()
    repeated_key = _repeats_last_key(config, wan)
    groups = text_groups(lens, config)
    if causal is None:
        text_kv_rows = {
            mode: sum(text_rows(mode, group, text_length, repeated_key=repeated_key) for group in groups)
            for mode in CROSS_KV_MODES
        }
    else:  # a slot has room for the longest text in every mode
        text_kv_rows = dict.fromkeys(SERVED_CROSS_KV, batch * TEXT_SLOTS * text_length)
    text_kv = {mode: text_kv_bytes(wan, count, dtype) for mode, count in text_kv_rows.items()}
    text_kv_now = text_kv[kept_as(config.attention.cross_kv, config.compile)] + image_kv_bytes(wan, len(lens), dtype)
    # A first frame that is given has a timestep of its own; without one all tokens share theirs.
    per_token = model.timestep_per_token and generation.image is not None
    if causal is None:
        activations = activation_bytes(wan, rows, most_tokens, dtype, per_token, on_gpu=config.counts_as_gpu)
    else:
        activations = stream_activation_bytes(config, wan, rows, most_tokens)
    parts = {"text_encoder": model.text_encoder, "vae": model.vae, "image_encoder": model.image_encoder}
    # On the device also while the transformer that they belong to rests in host memory.
    loras = [LoRAFile.open(lora.file, weights).num_bytes(weights) for lora in config.lora if lora.file.exists()]
    memory = {
        "weights": (1 if config.offload == "experts" else model.num_experts) * weight_bytes,
        **({"lora": sum(loras)} if loras else {}),
        **{name: size.num_bytes(config.torch_dtype()) for name, size in parts.items() if size is not None},
    }
    stream = None if causal is None else plan_stream(config, model, branches, sum(memory.values()), device_memory_bytes)
    memory["text_kv"] = text_kv_now
    if stream is not None:
        memory["kv_cache"] = batch * stream.kv_cache_bytes
    memory["activations"] = activations
    return Plan(
        source=model.source,
        parameters=sum(parameter.numel() for parameter in weights.parameters()),
        num_experts=model.num_experts,
        dtype=config.dtype,
        height=generation.height,
        width=generation.width,
        num_frames=num_frames,
        latent_shape=latent_shape,
        tokens=tokens,
        num_steps=num_steps,
        rows_per_forward=rows,
        forwards_per_step=1 if batched else branches,
        text_lens=lens,
        text_lens_from=lens_from,
        cross_kv=config.attention.cross_kv,
        flops_per_step=flops(
            wan, tokens, lens, text_length, config, per_token, keys=keys, repeated_key=repeated_key
        ),
        text_kv_bytes=text_kv,
        memory_bytes=memory | {"total": sum(memory.values())},
        notes=_notes(model, config),
        stream=stream,
    )


def _repeats_last_key(config: RunConfig, wan: WanConfig) -> bool:
    """Whether the backend of text attention counts a last key several times. Of "auto": what it takes on such a device
    if all packages are installed, so that the plan is one for machines that have yet to be set up."""
    classes, name = backend_classes(), config.attention.cross_text
    if name != "auto":
        return classes[name].supports_repeated_last_key()
    device = find_device("auto").type if config.device == "auto" else config.device.partition(":")[0]
    heads = (wan.num_attention_heads, wan.attention_head_dim)
    spec = AttentionSpec("cross_text", *heads, config.torch_dtype(), device)
    taken = next(cls for cls in map(classes.get, AUTO_ORDER) if not cls.unsupported_reasons(spec))
    return taken.supports_repeated_last_key()


def _text_lens(
    config: RunConfig, model: Model, given: Sequence[int] | None, batch: int, *, guided: bool
) -> tuple[tuple[int, ...], str]:
    """Text tokens of every row of a step, and where they come from."""
    generation, longest = config.generation, config.generation.max_sequence_length
    if given is not None:
        wanted = batch + guided
        if len(given) != wanted or not all(1 <= length <= longest for length in given):
            shape = f"{batch} prompt(s)" + (" and the negative prompt" if guided else "")
            raise ValueError(f"text lengths are {list(given)}; {shape} need {wanted}, each from 1 to {longest}")
        lens, source = list(given), "given"
    else:
        texts = [*generation.prompts] + [generation.negative_prompt or ""] * guided
        if model.tokenizer_file is not None:
            lens, source = _count_tokens(model.tokenizer_file, texts), "counted by the tokenizer"
        else:
            words = [len(text.split()) for text in texts]
            lens, source = [math.ceil(TOKENS_PER_WORD * count) + 1 for count in words], "guessed from the words"
        if not generation.prompts:
            lens, source = [longest, *lens], "of a prompt as long as it may be"
        lens = [min(length, longest) for length in lens]
    # The negative prompt stands in a row for each prompt.
    return (*lens[:batch], *lens[batch:] * batch), source


def _count_tokens(file: Path, texts: Sequence[str]) -> list[int]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return [len(tokenizer.encode(clean_prompt(text)).ids) for text in texts]


def _notes(model: Model, config: RunConfig) -> tuple[str, ...]:
    notes = [
        "Not counted: the FLOPs of text encoder and VAE, and what the VAE holds while it decodes, after the steps."
    ]
    parts = [("text encoder", model.text_encoder), ("VAE", model.vae)]
    if model.transformer.image_dim is not None:
        parts.append(("image encoder", model.image_encoder))
    unknown = [name for name, size in parts if size is None]
    if unknown:
        notes.append(f"Not counted: the weights of {' and '.join(unknown)}, whose files are not in the folder, whole.")
    if model.transformer.image_dim is not None:
        notes.append("Not counted: the FLOPs of the image encoder.")
    if any(lora.file.exists() for lora in config.lora):
        notes.append("LoRA is counted unfused, as `generate` runs it; pipe.fuse_lora() brings its bytes to 0.")
    if missing := [lora.path for lora in config.lora if not lora.file.exists()]:
        notes.append(f"Not counted: LoRA of {', '.join(missing)}, which is not here.")
    if config.compile:
        notes.append(
            "compile: the first step compiles the blocks, or finds on disk what `visual-gen warmup` has compiled. "
            "Activations are counted as without; in every mode text keys lie in buffers of the padded size."
        )
    if model.num_experts > 1:
        place = "the other rests in host memory" if config.offload == "experts" else "all stay on the device"
        notes.append(f"{model.num_experts} transformers of this size, of which one runs in each step; {place}.")
    if model.num_experts > 1 and config.generation.guidance_scale_2 == 1 and config.generation.guidance_scale > 1:
        notes.append("The second transformer's steps, of guidance 1, run one branch: half of what is said of a step.")
    return tuple(notes)
