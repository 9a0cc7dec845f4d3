"""Wan: prompts and images → text rows and conditioning → denoised latents → frames, and a record of the run."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from visual_gen.checkpoint import resolve_folder
from visual_gen.config import AttentionConfig
from visual_gen.models.wan.geometry import Geometry
from visual_gen.models.wan.task import Task
from visual_gen.pipelines.call_record import call_warnings, new_record
from visual_gen.pipelines.components import Components, load_components, parts_of
from visual_gen.pipelines.conditioning import Conditioning, encode_images
from visual_gen.pipelines.denoising_stage import denoise_request
from visual_gen.pipelines.errors import bad_clips_error
from visual_gen.pipelines.latents import decode, initial_latents
from visual_gen.pipelines.lora import LoRAMethods
from visual_gen.pipelines.opening import open_pipeline
from visual_gen.pipelines.progress import StageProgress
from visual_gen.pipelines.recommended import read_recommended
from visual_gen.pipelines.request import Request, check_generators, check_request
from visual_gen.pipelines.text import encode, tokenize_all
from visual_gen.runtime.costs import kept_as
from visual_gen.runtime.memory import check_memory, request_bytes
from visual_gen.runtime.record import RunClock, RunRecord

logger = logging.getLogger(__name__)

_LEFT_OUT = {
    "output_type": "np", "callback_on_step_end": None, "image": None, "last_image": None, "guidance_scale_2": None
}  # fmt: skip
_COUNTERS = ("hits", "builds", "device_copies")


@dataclass(frozen=True)
class WanPipelineOutput:
    """frames: "np" [B, F, H, W, 3] in 0..1, "pt" [B, F, 3, H, W] in 0..1, "pil" B lists of F images, "latent" fp32
    [B, C, F, H, W]. record: what the run did."""

    frames: Any
    record: RunRecord


class WanPipeline(LoRAMethods):
    """Wan: text to video, and image to video where the checkpoint is made for it (`task` says). Made by
    `from_pretrained`; a call gives the frames that diffusers' WanPipeline or WanImageToVideoPipeline gives. Calls may
    overlap, from several threads or from a callback."""

    def __init__(
        self,
        components: Components,
        scheduler: Any,
        *,
        folder: Path,
        task: Task,
        attention: AttentionConfig,
        load_seconds: float = 0.0,
    ) -> None:
        self.tokenizer = components.tokenizer
        self.text_encoder = components.text_encoder
        self.image_processor = components.image_processor
        self.image_encoder = components.image_encoder
        self.experts = components.experts
        self.vae = components.vae
        self.scheduler = scheduler
        self.folder = folder
        self.task = task
        self.attention = attention
        self.recommended = read_recommended(folder)
        self._load_seconds = load_seconds
        self.geometry = Geometry.from_folder(folder)

    @staticmethod
    def check(folder_or_id: str | Path, settings: Mapping[str, Any], call: Mapping[str, Any]) -> None:
        """Raise the ValueError that `from_pretrained(folder_or_id, **settings)` or then a call with the arguments
        `call` would raise, without reading or fetching weights. A damaged weight file is not seen.

        Of `call`, all that describes the request is needed (prompt, sizes, …); output_type, images and guidance_scale_2
        may be left out.
        """
        opened = open_pipeline(folder_or_id, **settings)
        request = check_request(
            opened.geometry,
            opened.scheduler.config.num_train_timesteps,
            opened.facts.task,
            len(opened.facts.transformers),
            **(_LEFT_OUT | dict(call)),
        )
        texts = (*request.prompts, *request.negative_prompts)
        rows = tokenize_all(opened.tokenizer, texts, request.max_sequence_length)
        needed = request_bytes(
            opened.facts.wan, request, rows, kept_as(opened.attention.cross_kv, opened.compile), opened.dtype,
            repeated_key=opened.repeats_last_key, on_gpu=opened.device.type != "cpu",
            timestep_per_token=_per_token(opened.facts.task, request),
        )  # fmt: skip
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
        boundary_ratio: float | None = None,
        offload: str = "none",
        compile: bool = False,
        progress: bool = True,
    ) -> WanPipeline:
        """Load "wan-shapes", a diffusers-format folder, or a Hugging Face Hub id, to `dtype` on `device`.

        attention: backend per role and cross mode. scheduler: None (the folder's), "unipc" or "euler". flow_shift:
        None (the folder's) or a number above 0. vae_dtype: None means `dtype`. device: "auto" takes a GPU if one is
        there. boundary_ratio: of a pair of transformers, the share of the noise levels below which the second takes
        over; None means the folder's. offload: "experts" keeps of such a pair only the one in use on the device and the
        other in host memory; they change places twice in a request. compile: torch.compile for the transformers' blocks
        (see WanTransformer.compile_blocks), compiled at the first step of a size, and again where a LoRA is added.

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
            boundary_ratio=boundary_ratio,
            offload=offload,
            compile=compile,
        )
        folder = resolve_folder(folder_or_id)
        with StageProgress(progress) as bars:
            components = load_components(
                folder,
                opened.facts,
                opened.tokenizer,
                opened.image_processor,
                dtype=opened.dtype,
                vae_dtype=opened.vae_dtype,
                device=opened.device,
                attention=opened.attention,
                boundary_timestep=opened.boundary_timestep,
                one_expert_on_device=opened.one_expert_on_device,
                part=bars.stage("load", total=len(parts_of(opened.facts))).part,
            )
        if opened.compile:
            for transformer in components.experts.transformers:
                transformer.compile_blocks()
        return cls(
            components,
            opened.scheduler,
            folder=folder,
            task=opened.facts.task,
            attention=opened.attention,
            load_seconds=time.perf_counter() - start,
        )

    @property
    def transformer(self) -> torch.nn.Module:
        """The transformer, of two the one for the noisier steps."""
        return self.experts.transformers[0]

    @property
    def transformer_2(self) -> torch.nn.Module | None:
        """The transformer for the less noisy steps; None where one serves all."""
        return self.experts.transformers[1] if len(self.experts.transformers) > 1 else None

    @property
    def device(self) -> torch.device:
        return self.vae.device

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
        guidance_scale_2: float | None = None,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        latents: torch.Tensor | None = None,
        image: Any = None,
        last_image: Any = None,
        max_sequence_length: int = 512,
        cfg: str = "batched",
        output_type: str = "np",
        callback_on_step_end: Callable[..., dict | None] | None = None,
        progress: bool = True,
    ) -> WanPipelineOutput:
        """Make a video of each prompt.

        height, width in pixels; num_frames counts the first frame. guidance_scale up to 1 runs no second branch, and
        negative_prompt is then not used. guidance_scale_2: for the steps of a second transformer; None means the same.
        generator: one for the whole batch, or one for each prompt. latents: initial noise [B, C, F, H, W] instead of
        drawn one. image, last_image: what the video starts and ends with, for checkpoints that take it: a PIL image or
        the path of one, for all prompts, or a list with one for each; resized to height and width. cfg: "batched" puts
        both guidance branches in one forward, "sequential" runs two, for less memory. callback_on_step_end(pipe,
        step_index, timestep, {"latents": …}) may return {"latents": …} to go on with. progress: bars on stderr.

        Raises ValueError on a bad argument, before any work; GenerationError if latents are not finite, naming the
        step, or if a clip's frames are not finite or of one colour: all clips, the good ones too, are in that error.
        """
        request = check_request(
            self.geometry, self.scheduler.config.num_train_timesteps, self.task, len(self.experts.transformers),
            prompt=prompt, negative_prompt=negative_prompt, height=height, width=width, num_frames=num_frames,
            num_inference_steps=num_inference_steps, guidance_scale=guidance_scale, guidance_scale_2=guidance_scale_2,
            image=image, last_image=last_image, max_sequence_length=max_sequence_length, cfg=cfg,
            output_type=output_type, callback_on_step_end=callback_on_step_end,
        )  # fmt: skip
        check_generators(generator, len(request.prompts), self.device)
        batch = len(request.prompts)
        texts = (*request.prompts, *request.negative_prompts)
        rows = tokenize_all(self.tokenizer, texts, request.max_sequence_length)
        model = self.transformer
        needed = request_bytes(
            model.config, request, rows, kept_as(self.attention.cross_kv, model.blocks_compiled), self.dtype,
            repeated_key=model.repeats_last_key, on_gpu=self.device.type != "cpu",
            timestep_per_token=_per_token(self.task, request),
        )  # fmt: skip
        check_memory(needed, self.device)
        noise = initial_latents(request.latent_shape, generator, latents, self.device)

        record = new_record(
            request, model, self.scheduler, checkpoint=str(self.folder), label=str(self.recommended.get("label", "")),
            device=self.device, load_seconds=self._load_seconds, lora_scales=self.lora_scales,
        )  # fmt: skip
        record.warnings = call_warnings(
            request, rows, self.recommended, negative_prompt=negative_prompt, guidance_scale_2=guidance_scale_2,
            unused_generator=latents is not None and generator is not None,
        )  # fmt: skip
        for warning in record.warnings:
            logger.warning(warning)

        before = self._counters()
        clock = RunClock(self.device)
        with StageProgress(progress) as bars:
            with clock.stage("text"):
                bar = bars.stage("text", total=1)
                # All in one call, so that a text is encoded once wherever it stands.
                encoded = encode(self.text_encoder, rows, request.max_sequence_length, self.dtype)
                text, negative = encoded[:batch], encoded[batch:] if request.guided else None
                record.prompt_tokens, record.negative_prompt_tokens = encoded.lens[:batch], encoded.lens[batch:]
                bar.advance()
            with clock.stage("image") if request.images else nullcontext():
                conditioning = self._encode_images(request, bars)
            with clock.stage("denoise"):
                callback = None if callback_on_step_end is None else functools.partial(callback_on_step_end, self)
                final = denoise_request(
                    self.experts, self.scheduler, request, text, negative, conditioning, noise,
                    clock=clock, bars=bars, record=record, callback=callback,
                )  # fmt: skip
            record.metadata = {name: count - before[name] for name, count in self._counters().items()}
            with clock.stage("decode"):
                frames, record.bad_clips = self._decode(request, final, bars)
        clock.finish(record)
        self._load_seconds = 0.0  # the first call's record has them
        output = WanPipelineOutput(frames, record)
        if record.bad_clips:
            raise bad_clips_error(output, final)
        return output

    def _encode_images(self, request: Request, bars: StageProgress) -> Conditioning:
        bar = bars.stage("image", total=1) if request.images else None
        conditioning = encode_images(
            self.task, request, vae=self.vae, image_encoder=self.image_encoder, image_processor=self.image_processor,
            patch_size=self.geometry.patch_size, device=self.device,
        )  # fmt: skip
        if bar is not None:
            bar.advance()
        return conditioning

    def _decode(self, request: Request, latents: torch.Tensor, bars: StageProgress) -> tuple[Any, dict[int, str]]:
        if request.output_type == "latent":
            return latents.clone(), {}  # out of inference mode, so that the caller may do anything with it
        advance = bars.stage("decode", total=len(request.prompts)).advance
        return decode(self.vae, latents, request.output_type, request.video_shape, advance=advance)

    def _counters(self) -> dict[str, int]:
        states = [transformer.attention_metadata_state for transformer in self.experts.transformers]
        return {name: sum(getattr(state, name) for state in states) for name in _COUNTERS}


def _per_token(task: Task, request: Request) -> bool:
    """Whether tokens of a step have timesteps of their own, as beside a first frame that is given."""
    return task.condition == "first_frame" and bool(request.images)
