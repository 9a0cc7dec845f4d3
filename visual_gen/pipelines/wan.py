"""Text to video with Wan: prompts → text rows → denoised latents → frames, and a record of the run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from visual_gen.checkpoint import resolve_folder
from visual_gen.config import AttentionConfig
from visual_gen.pipelines.components import Components, check_model_index, load_components
from visual_gen.pipelines.denoise import GuidedModel, denoise
from visual_gen.pipelines.latents import decode, initial_latents
from visual_gen.pipelines.progress import StageProgress
from visual_gen.pipelines.recommended import read_recommended, recommended_warnings
from visual_gen.pipelines.request import Geometry, Request, check_generators, check_request
from visual_gen.pipelines.schedulers import SCHEDULER_NAMES, check_flow_shift, make_scheduler
from visual_gen.pipelines.text import TextRows, encode, text_warnings, tokenize
from visual_gen.runtime.record import RunClock, RunRecord

logger = logging.getLogger(__name__)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_COUNTERS = ("hits", "builds", "device_copies")


@dataclass(frozen=True)
class WanPipelineOutput:
    """frames: "np" [B, F, H, W, 3] in 0..1, "pt" [B, F, 3, H, W] in 0..1, "pil" B lists of F images, "latent" fp32
    [B, C, F, H, W]. record: what the run did."""

    frames: Any
    record: RunRecord


class WanPipeline:
    """Wan text-to-video. Made by `from_pretrained`; a call gives the frames that diffusers' WanPipeline gives."""

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
        self.geometry = Geometry(
            spatial_scale=self.vae.config.scale_factor_spatial,
            temporal_scale=self.vae.config.scale_factor_temporal,
            patch_size=tuple(self.transformer.config.patch_size),
            channels=self.transformer.config.in_channels,
            max_positions=self.transformer.config.rope_max_seq_len,
        )

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
        None (the folder's) or a number above 0. vae_dtype: None means `dtype`.

        Raises ValueError on a bad argument; CheckpointError (a ValueError) on a folder that is missing, damaged, of
        another pipeline, or whose parts do not fit together, before any weights are read.
        """
        start = time.perf_counter()
        for name, value in (("dtype", dtype), ("vae_dtype", vae_dtype or dtype)):
            if value not in _DTYPES:
                raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(str, _DTYPES))}")
        device = _check_device(device)
        check_flow_shift(flow_shift)
        attention = AttentionConfig.model_validate(attention or {})
        check_model_index(resolve_folder(folder_or_id, files=("*.json", "*/*.json")))  # before gigabytes are fetched
        folder = resolve_folder(folder_or_id)
        made_scheduler = make_scheduler(folder / "scheduler", scheduler, flow_shift)
        with StageProgress(progress) as bars:
            components = load_components(
                folder,
                dtype=dtype,
                vae_dtype=vae_dtype or dtype,
                device=device,
                attention=attention,
                part=bars.stage("load", total=4).part,
            )
        return cls(
            components,
            made_scheduler,
            folder=folder,
            attention=attention,
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

        Raises ValueError on a bad argument, before any work; GenerationError, naming the step, if latents or frames
        are not finite or a frame is of one colour.
        """
        request = check_request(
            self.geometry, prompt=prompt, negative_prompt=negative_prompt, height=height, width=width,
            num_frames=num_frames, num_inference_steps=num_inference_steps, guidance_scale=guidance_scale,
            max_sequence_length=max_sequence_length, cfg=cfg, output_type=output_type,
            callback_on_step_end=callback_on_step_end,
        )  # fmt: skip
        check_generators(generator, len(request.prompts), self.device)
        noise = initial_latents(request.latent_shape, generator, latents, self.device)
        rows = [tokenize(self.tokenizer, text, max_sequence_length) for text in request.prompts]
        negative_rows = [tokenize(self.tokenizer, text, max_sequence_length) for text in request.negative_prompts]

        record = self._new_record(request)
        record.settings = {
            "height": height, "width": width, "num_frames": num_frames, "num_inference_steps": num_inference_steps,
            "guidance_scale": guidance_scale, "max_sequence_length": max_sequence_length, "cfg": cfg,
        }  # fmt: skip
        record.warnings = recommended_warnings(
            self.recommended, height=height, width=width, num_frames=num_frames,
            max_sequence_length=max_sequence_length,
        )  # fmt: skip
        one_for_all = isinstance(negative_prompt, str)
        for what, tokens in (
            *_named("prompt", rows),
            *_named("negative prompt", negative_rows[:1] if one_for_all else negative_rows),
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
                text = encode(self.text_encoder, rows, max_sequence_length, self.dtype)
                negative = None
                if request.guided:
                    negative = encode(self.text_encoder, negative_rows, max_sequence_length, self.dtype)
                record.prompt_tokens = text.lens
                record.negative_prompt_tokens = negative.lens if negative is not None else []
                bar.advance()
            with clock.stage("denoise"):
                final = self._denoise(request, text, negative, noise, clock, bars, record, callback_on_step_end)
            record.metadata = {name: count - before[name] for name, count in self._counters().items()}
            with clock.stage("decode"):
                frames = self._decode(request, final, bars)
        clock.finish(record)
        return WanPipelineOutput(frames, record)

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
        self.scheduler.set_timesteps(request.num_inference_steps, device=self.device)
        bar = bars.stage("denoise", total=len(self.scheduler.timesteps))
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
                self.scheduler,
                noise,
                on_step=on_step,
                callback=None if callback is None else lambda *step: callback(self, *step),
            )
        record.transformer_forwards = model.forwards
        record.timesteps = [float(timestep) for timestep in self.scheduler.timesteps.tolist()]
        return final

    def _decode(self, request: Request, latents: torch.Tensor, bars: StageProgress) -> Any:
        if request.output_type == "latent":
            return latents.clone()  # out of inference mode, so that the caller may do anything with it
        advance = bars.stage("decode", total=len(request.prompts)).advance
        return decode(self.vae, latents, request.output_type, step=len(self.scheduler.timesteps), advance=advance)

    def _new_record(self, request: Request) -> RunRecord:
        record = RunRecord(
            attention={
                role: {"backend": choice.name, "why": choice.why}
                for role, choice in self.transformer.attention_choices.items()
            },
            cross_kv=self.attention.cross_kv,
            latent_shape=request.latent_shape,
            checkpoint=str(self.folder),
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


def _check_device(device: str | torch.device) -> torch.device:
    """Raises ValueError on a device that is no CPU and no CUDA GPU of this machine."""
    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device is {device!r}; it must be 'cpu', 'cuda' or 'cuda:N'") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {str(device)!r}; it must be 'cpu', 'cuda' or 'cuda:N'")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ValueError(
                f"device is {str(device)!r}; torch {torch.__version__} sees {count} CUDA device(s): use 'cpu'"
            )
    return device
