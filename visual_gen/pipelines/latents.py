"""Latents: the noise they start as, and their way through the VAE to frames."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from diffusers.utils.torch_utils import randn_tensor
from diffusers.video_processor import VideoProcessor

from visual_gen.pipelines.cpu_conv import OneDnnConv3d
from visual_gen.pipelines.errors import GenerationError

# Half of an 8-bit level on the decoder's scale of -1..1: a frame that varies by less is of one colour.
_ONE_COLOUR_RANGE = 1 / 255


def initial_latents(
    shape: Sequence[int],
    generator: torch.Generator | Sequence[torch.Generator] | None,
    latents: torch.Tensor | None,
    device: torch.device,
) -> torch.Tensor:
    """fp32 noise [B, C, F, H, W] on `device`: `latents` if given, else drawn from `generator` as diffusers draws it.

    Raises ValueError if `latents` has another shape.
    """
    if latents is None:
        generator = list(generator) if isinstance(generator, tuple) else generator
        return randn_tensor(tuple(shape), generator=generator, device=device, dtype=torch.float32)
    if not isinstance(latents, torch.Tensor) or tuple(latents.shape) != tuple(shape):
        found = f"shape {list(latents.shape)}" if isinstance(latents, torch.Tensor) else repr(latents)
        raise ValueError(f"latents has {found}; these sizes and prompts need a tensor of shape {list(shape)}")
    return latents.to(device=device, dtype=torch.float32)


def decode(
    vae: torch.nn.Module, latents: torch.Tensor, output_type: str, *, step: int, advance: Callable[[], None]
) -> Any:
    """Frames of `latents` [B, C, F, H, W]: "np" [B, F, H, W, 3] and "pt" [B, F, 3, H, W] in 0..1, "pil" image lists.

    One video at a time, so that memory does not grow with the batch and a video's bits do not depend on it. Raises
    GenerationError, naming `step`, if a frame is not finite or of one colour.
    """
    processor = VideoProcessor(vae_scale_factor=vae.config.scale_factor_spatial)
    column = (1, -1, 1, 1, 1)
    mean = torch.tensor(vae.config.latents_mean, dtype=vae.dtype, device=vae.device).view(column)
    std = torch.tensor(vae.config.latents_std, dtype=vae.dtype, device=vae.device).view(column)
    clips = []
    for i, row in enumerate(latents.split(1)):
        try:
            with torch.inference_mode(), OneDnnConv3d():
                video = vae.decode(row.to(vae.device, vae.dtype) * std + mean, return_dict=False)[0]
        finally:
            vae.clear_cache()
        _check_video(video[0], i, step, latents)
        clips.append(processor.postprocess_video(video, output_type=output_type))
        advance()
    if output_type == "pil":
        return [clip for batch in clips for clip in batch]
    if len(clips) == 1:
        return clips[0]
    return torch.cat(clips) if output_type == "pt" else np.concatenate(clips)


def _check_video(video: torch.Tensor, row: int, step: int, latents: torch.Tensor) -> None:
    """`video` [3, F, H, W]."""
    span = (video.amax(dim=(2, 3)) - video.amin(dim=(2, 3))).amax(dim=0).tolist()  # one for each frame
    where = f"in the video of prompt {row}, decoded after denoising step {step}"
    rest = "The latents are in this error's `latents`; output_type='latent' returns them undecoded"
    broken = [frame for frame, value in enumerate(span) if value != value or value == float("inf")]
    if broken:
        raise GenerationError(
            f"frame(s) {_listed(broken)} {where} hold NaN or infinity: the VAE runs in {video.dtype}, try "
            f"vae_dtype=torch.float32. {rest}",
            step=step,
            latents=latents.clone(),  # out of inference mode, for any use
        )
    flat = [frame for frame, value in enumerate(span) if value < _ONE_COLOUR_RANGE]
    if flat:
        raise GenerationError(
            f"frame(s) {_listed(flat)} of {len(span)} {where} are of one colour: no usable video. Try more steps, "
            f"another seed or guidance_scale, or another dtype. {rest}",
            step=step,
            latents=latents.clone(),  # out of inference mode, for any use
        )


def _listed(frames: list[int]) -> str:
    if len(frames) > 3 and frames[-1] - frames[0] == len(frames) - 1:
        return f"{frames[0]} to {frames[-1]}"
    return ", ".join(map(str, frames))
