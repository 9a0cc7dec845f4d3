"""Text to video with Wan: prompts → text rows → denoised latents → frames, and a record of the run."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from visual_gen.checkpoint import resolve_folder
from visual_gen.config import AttentionConfig
from visual_gen.models.wan.geometry import Geometry
from visual_gen.pipelines.components import Components, load_components
from visual_gen.pipelines.denoise import GuidedModel, denoise
from visual_gen.pipelines.errors import GenerationError
from visual_gen.pipelines.latents import decode, initial_latents
from visual_gen.pipelines.lora import LoRAMethods
from visual_gen.pipelines.opening import open_pipeline
from visual_gen.pipelines.progress import StageProgress
from visual_gen.pipelines.recommended import read_recommended, recommended_warnings
from visual_gen.pipelines.request import Request, check_generators, check_request
from visual_gen.pipelines.schedulers import SCHEDULER_NAMES
from visual_gen.pipelines.text import TextRows, encode, text_warnings, tokenize_all
from visual_gen.runtime.memory import check_memory, request_bytes
from visual_gen.runtime.record import RunClock, RunRecord

logger = logging.getLogger(__name__)

_COUNTERS = ("hits", "builds", "device_copies")


@dataclass(frozen=True)
class WanPipelineOutput:
    """frames: "np" [B, F, H, W, 3] in 0..1, "pt" [B, F, 3, H, W] in 0..1, "pil" B lists of F images, "latent" fp32
    [B, C, F, H, W]. record: what the run did."""

    frames: Any
    record: RunRecord


class WanPipeline(LoRAMethods):
    """Wan text-to-video. Made by `from_pretrained`; a call gives the frames that diffusers' WanPipeline gives. Calls
    may overlap, from several threads or from a callback."""

    def __init__(
        self,
        components: Components,
        scheduler: Any,
        *,
        folder: Path,
        attention: AttentionConfig,
        load_seconds: float = 0.0,
    ) -> None:
        self.tokenizer = components.tokenizer
        self.text_encoder = components.text_encoder
        self.transformer = components.transformer
        self.vae = components.vae
        self.scheduler = scheduler
        self.folder = folder
        self.attention = attention
        self.recommended = read_recommended(folder)
        self._load_seconds = load_seconds
        self.geometry = Geometry.from_folder(folder)

    @staticmethod
    def check(folder_or_id: str | Path, settings: Mapping[str, Any], call: Mapping[str, Any]) -> None:
        """Raise the ValueError that `from_pretrained(folder_or_id, **settings)` or then a call with the arguments
        `call` would raise, without reading or fetching weights. A damaged weight file is not seen.

        Of `call`, all that describes the request is needed (prompt, sizes, …); output_type may be left out.
        """
        opened = open_pipeline(folder_or_id, **settings)
        request = check_request(
            opened.geometry,
            opened.scheduler.config.num_train_timesteps,
            **({"output_type": "np", "callback_on_step_end": None} | dict(call)),
        )
        texts = (*request.prompts, *request.negative_prompts)
        rows = tokenize_all(opened.tokenizer, texts, request.max_sequence_length)
        needed = request_bytes(
            opened.wan, request, rows, opened.attention.cross_kv, opened.dtype, repeated_key=opened.repeats_last_key
        )
        check_memory(needed, opened.device)

    @classmethod
    def from_pretrained(
        cls,
        folder_or_id: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        attention: AttentionConfig | dict | None = None,
        scheduler: str | None = None,
        flow_shift: float | None = None,
        vae_dtype: torch.dtype | None = None,
        progress: bool = True,
    ) -> WanPipeline:
        """Load "wan-shapes", a diffusers-format folder, or a Hugging Face Hub id, to `dtype` on `device`.

        attention: backend per role and cross mode. scheduler: None (the folder's), "unipc" or "euler". flow_shift:
        None (the folder's) or a number above 0. vae_dtype: None means `dtype`. device: "auto" takes a GPU if one is
        there.

        Raises ValueError on a bad argument; CheckpointError (a ValueError) on a folder that is missing, damaged, of
        another pipeline, or whose parts do not fit together; AttentionBackendError (a ValueError) on a backend that
        cannot serve: all before any weights are read or fetched.
        """
        start = time.perf_counter()
        opened = open_pipeline(
            folder_or_id,
            dtype=dtype,
            device=device,
            attention=attention,
            scheduler=scheduler,
            flow_shift=flow_shift,
            vae_dtype=vae_dtype,
        )
        folder = resolve_folder(folder_or_id)
        with StageProgress(progress) as bars:
            components = load_components(
                folder,
                opened.tokenizer,
                dtype=opened.dtype,
                vae_dtype=opened.vae_dtype,
                device=opened.device,
                attention=opened.attention,
                part=bars.stage("load", total=3).part,
            )
        return cls(
            components,
            opened.scheduler,
            folder=folder,
            attention=opened.attention,
            load_seconds=time.perf_counter() - start,
        )

    @property
    def device(self) -> torch.device:
        return self.transformer.device

    @property
    def dtype(self) -> torch.dtype:
        return self.transformer.dtype

    def __call__(
        self,
        prompt: str | Sequence[str],
        negative_prompt: str | Sequence[str] | None = None,
        height: int = 480,
        width: int = 832,
        num_frames: int = 81,
        num_inference_steps: int = 50,
        guidance_scale: float = 5.0,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        latents: torch.Tensor | None = None,
        max_sequence_length: int = 512,
        cfg: str = "batched",
        output_type: str = "np",
        callback_on_step_end: Callable[..., dict | None] | None = None,
        progress: bool = True,
    ) -> WanPipelineOutput:
        """Make a video of each prompt.

        height, width in pixels; num_frames counts the first frame. guidance_scale up to 1 runs no second branch, and
        negative_prompt is then not used. generator: one for the whole batch, or one for each prompt. latents: initial
        noise [B, C, F, H, W] instead of drawn one. cfg: "batched" puts both guidance branches in one forward,
        "sequential" runs two, for less memory. callback_on_step_end(pipe, step_index, timestep, {"latents": …}) may
        return {"latents": …} to go on with. progress: bars on stderr.

        Raises ValueError on a bad argument, before any work; GenerationError if latents are not finite, naming the
        step, or if a clip's frames are not finite or of one colour: all clips, the good ones too, are in that error.
        """
        request = check_request(
            self.geometry, self.scheduler.config.num_train_timesteps, prompt=prompt, negative_prompt=negative_prompt,
            height=height, width=width, num_frames=num_frames, num_inference_steps=num_inference_steps,
            guidance_scale=guidance_scale, max_sequence_length=max_sequence_length, cfg=cfg, output_type=output_type,
            callback_on_step_end=callback_on_step_end,
        )  # fmt: skip
        num_frames, height, width = request.video_shape
        max_sequence_length, guidance_scale = request.max_sequence_length, request.guidance_scale
        check_generators(generator, len(request.prompts), self.device)
        batch = len(request.prompts)
        texts = (*request.prompts, *request.negative_prompts)
        rows = tokenize_all(self.tokenizer, texts, max_sequence_length)
        model = self.transformer
        needed = request_bytes(
            model.config, request, rows, self.attention.cross_kv, self.dtype, repeated_key=model.repeats_last_key
        )
        check_memory(needed, self.device)
        noise = initial_latents(request.latent_shape, generator, latents, self.device)

        record = self._new_record(request)
        record.settings = {
            "height": height, "width": width, "num_frames": num_frames,
            "num_inference_steps": request.num_inference_steps,
            "guidance_scale": guidance_scale, "max_sequence_length": max_sequence_length, "cfg": cfg,
        }  # fmt: skip
        record.warnings = recommended_warnings(
            self.recommended, height=height, width=width, num_frames=num_frames,
            max_sequence_length=max_sequence_length,
        )  # fmt: skip
        one_for_all = isinstance(negative_prompt, str)
        for what, tokens in (
            *_named("prompt", rows[:batch]),
            *_named("negative prompt", rows[batch : batch + 1] if one_for_all else rows[batch:]),
        ):
            record.warnings += text_warnings(what, tokens, max_sequence_length)
        if negative_prompt and not request.guided:
            record.warnings.append(
                f"negative_prompt has no effect: guidance_scale {guidance_scale} runs no second branch (above 1 does)"
            )
        if latents is not None and generator is not None:
            record.warnings.append("generator has no effect: the initial latents were given")
        for warning in record.warnings:
            logger.warning(warning)

        before = self._counters()
        clock = RunClock(self.device)
        with StageProgress(progress) as bars:
            with clock.stage("text"):
                bar = bars.stage("text", total=1)
                # All in one call, so that a text is encoded once wherever it stands.
                encoded = encode(self.text_encoder, rows, max_sequence_length, self.dtype)
                text, negative = encoded[:batch], encoded[batch:] if request.guided else None
                record.prompt_tokens, record.negative_prompt_tokens = encoded.lens[:batch], encoded.lens[batch:]
                bar.advance()
            with clock.stage("denoise"):
                final = self._denoise(request, text, negative, noise, clock, bars, record, callback_on_step_end)
            record.metadata = {name: count - before[name] for name, count in self._counters().items()}
            with clock.stage("decode"):
                frames, record.bad_clips = self._decode(request, final, bars)
        clock.finish(record)
        self._load_seconds = 0.0  # the first call's record has them
        output = WanPipelineOutput(frames, record)
        if record.bad_clips:
            raise _bad_clips_error(output, final)
        return output

    def _denoise(
        self,
        request: Request,
        text: TextRows,
        negative: TextRows | None,
        noise: torch.Tensor,
        clock: RunClock,
        bars: StageProgress,
        record: RunRecord,
        callback: Callable[..., dict | None] | None,
    ) -> torch.Tensor:
        # One of its own: threads, and a call from a callback, may be at other steps of theirs.
        scheduler = copy.deepcopy(self.scheduler)
        scheduler.set_timesteps(request.num_inference_steps, device=self.device)
        bar = bars.stage("denoise", total=len(scheduler.timesteps))
        with torch.inference_mode():
            model = GuidedModel(
                self.transformer, text, negative, request.guidance_scale, batched=request.cfg == "batched"
            )

            def on_step() -> None:
                clock.step()
                if model.forwards:
                    bar.advance()

            final = denoise(
                model,
                scheduler,
                noise,
                on_step=on_step,
                callback=None if callback is None else lambda *step: callback(self, *step),
            )
        record.transformer_forwards = model.forwards
        record.cross_kv_formulations = model.formulations
        record.timesteps = [float(timestep) for timestep in scheduler.timesteps.tolist()]
        return final

    def _decode(self, request: Request, latents: torch.Tensor, bars: StageProgress) -> tuple[Any, dict[int, str]]:
        if request.output_type == "latent":
            return latents.clone(), {}  # out of inference mode, so that the caller may do anything with it
        advance = bars.stage("decode", total=len(request.prompts)).advance
        return decode(self.vae, latents, request.output_type, request.video_shape, advance=advance)

    def _new_record(self, request: Request) -> RunRecord:
        record = RunRecord(
            attention={
                role: {"backend": choice.name, "why": choice.why}
                for role, choice in self.transformer.attention_choices.items()
            },
            cross_kv=self.attention.cross_kv,
            lora_scales=self.lora_scales,
            latent_shape=request.latent_shape,
            checkpoint=str(self.folder),
            checkpoint_label=str(self.recommended.get("label", "")),
            device=str(self.device),
            dtype=str(self.dtype).removeprefix("torch."),
            scheduler=_scheduler_name(self.scheduler),
            flow_shift=self.scheduler.config.get("flow_shift", self.scheduler.config.get("shift")),
        )
        record.stage_seconds["load"] = self._load_seconds
        return record

    def _counters(self) -> dict[str, int]:
        state = self.transformer.attention_metadata_state
        return {name: getattr(state, name) for name in _COUNTERS}


def _scheduler_name(scheduler: Any) -> str:
    return next(
        (SCHEDULER_NAMES[cls.__name__] for cls in type(scheduler).__mro__ if cls.__name__ in SCHEDULER_NAMES),
        type(scheduler).__name__,
    )


def _named(what: str, rows: Sequence[Any]) -> list[tuple[str, Any]]:
    return [(what if len(rows) == 1 else f"{what} {i}", tokens) for i, tokens in enumerate(rows)]


def _bad_clips_error(output: WanPipelineOutput, latents: torch.Tensor) -> GenerationError:
    bad, steps = output.record.bad_clips, len(output.record.timesteps)
    faults = "; ".join(f"prompt {row}: {fault}" for row, fault in bad.items())
    error = GenerationError(
        f"{len(bad)} of {latents.shape[0]} clip(s), decoded after step {steps}, are no usable video. {faults}",
        step=steps,
    )
    error.output, error.latents = output, latents.clone()  # out of inference mode, for any use
    return error
