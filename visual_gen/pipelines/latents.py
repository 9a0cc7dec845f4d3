"""Latents: the noise they start as, and their way through the VAE, from images and to frames."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from diffusers.utils.torch_utils import randn_tensor
from diffusers.video_processor import VideoProcessor

from visual_gen.pipelines.cpu_conv import OneDnnConv3d

# Half of an 8-bit level on the decoder's scale of -1..1: a frame that varies by less is of one colour.
_ONE_COLOUR_RANGE = 1 / 255


def initial_latents(
    shape: Sequence[int],
    generator: torch.Generator | Sequence[torch.Generator] | None,
    latents: torch.Tensor | None,
    device: torch.device,
) -> torch.Tensor:
    """fp32 noise [B, C, F, H, W] on `device`: `latents` if given, else drawn from `generator` as diffusers draws it.

    Raises ValueError if `latents` has another shape, or NaN or infinity in it.
    """
    if latents is None:
        generator = list(generator) if isinstance(generator, tuple) else generator
        return randn_tensor(tuple(shape), generator=generator, device=device, dtype=torch.float32)
    if not isinstance(latents, torch.Tensor) or tuple(latents.shape) != tuple(shape):
        found = f"shape {list(latents.shape)}" if isinstance(latents, torch.Tensor) else repr(latents)
        raise ValueError(f"latents has {found}; these sizes and prompts need a tensor of shape {list(shape)}")
    if not torch.isfinite(latents).all():
        raise ValueError("latents hold NaN or infinity; give finite ones, or none to have them drawn")
    return latents.to(device=device, dtype=torch.float32)


def draw_noise(shape: Sequence[int], generator: torch.Generator | None, device: torch.device) -> torch.Tensor:
    """fp32 noise on `device`, drawn where the generator is (None: on `device`): one on the CPU gives every device the
    same numbers. The host does not wait for the copy."""
    drawn_on = device if generator is None else generator.device
    pinned = drawn_on.type == "cpu" and device.type == "cuda"  # else the copy would be waited for
    noise = torch.randn(tuple(shape), generator=generator, device=drawn_on, dtype=torch.float32, pin_memory=pinned)
    return noise.to(device, non_blocking=True)


def encode_clip(vae: torch.nn.Module, clip: torch.Tensor) -> torch.Tensor:
    """fp32 latents [1, C, F', H', W'], of mean 0 and deviation 1 as a transformer takes them, of a clip [1, 3, F, H, W]
    in -1..1: the mean of what the VAE says, so that no noise is drawn."""
    vae = copy.copy(vae)  # the same weights; what it keeps from frame to frame belongs to this call
    try:
        with torch.inference_mode(), OneDnnConv3d():
            latents = vae.encode(clip.to(vae.device, vae.dtype)).latent_dist.mode().float()
    finally:
        vae.clear_cache()
    mean, std = (
        torch.tensor(values, dtype=torch.float32, device=vae.device).view(1, -1, 1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    return (latents - mean) / std


def decode(
    vae: torch.nn.Module,
    latents: torch.Tensor,
    output_type: str,
    video_shape: tuple[int, int, int],
    *,
    advance: Callable[[], None],
) -> tuple[Any, dict[int, str]]:
    """Frames of `latents` [B, C, F, H, W]: "np" [B, F, H, W, 3] and "pt" [B, F, 3, H, W] in 0..1, "pil" image lists;
    and, for each row whose frames are no usable video, what is wrong with them. video_shape: (F, H, W) asked for.

    One video at a time, so that memory does not grow with the batch and a video's bits do not depend on it.
    """
    vae = copy.copy(vae)  # the same weights; what it keeps from frame to frame belongs to this call
    processor = VideoProcessor(vae_scale_factor=vae.config.scale_factor_spatial)
    column = (1, -1, 1, 1, 1)
    mean = torch.tensor(vae.config.latents_mean, dtype=vae.dtype, device=vae.device).view(column)
    std = torch.tensor(vae.config.latents_std, dtype=vae.dtype, device=vae.device).view(column)
    clips, faults = [], {}
    for i, row in enumerate(latents.split(1)):
        try:
            with torch.inference_mode(), OneDnnConv3d():
                video = vae.decode(row.to(vae.device, vae.dtype) * std + mean, return_dict=False)[0]
        finally:
            vae.clear_cache()
        if fault := _fault(video[0], video_shape):
            faults[i] = fault
            video = torch.nan_to_num(video, posinf=1.0, neginf=-1.0)  # so that pictures can be made of it
        clips.append(processor.postprocess_video(video, output_type=output_type))
        advance()
    if output_type == "pil":
        return [clip for batch in clips for clip in batch], faults
    if len(clips) == 1:
        return clips[0], faults
    return torch.cat(clips) if output_type == "pt" else np.concatenate(clips), faults


def _fault(video: torch.Tensor, video_shape: tuple[int, int, int]) -> str | None:
    """What is wrong with `video` [3, F, H, W], and what may help; None if nothing is."""
    if tuple(video.shape[1:]) != tuple(video_shape):
        found, asked = ("×".join(map(str, shape)) for shape in (video.shape[1:], video_shape))
        return f"frames×height×width are {found}, not {asked}: the VAE is not the one that its config.json tells"
    broken, flat = unusable_frames(video)
    return broken_fault(broken, video) or flat_fault(flat, video)


def unusable_frames(video: torch.Tensor) -> tuple[list[int], list[int]]:
    """Frames of `video` [3, F, H, W] that hold NaN or infinity, and those that are of one colour."""
    span = (video.amax(dim=(2, 3)) - video.amin(dim=(2, 3))).amax(dim=0).tolist()  # one for each frame
    broken = [frame for frame, value in enumerate(span) if not math.isfinite(value)]
    return broken, [frame for frame, value in enumerate(span) if value < _ONE_COLOUR_RANGE]


def broken_fault(frames: list[int], video: torch.Tensor) -> str | None:
    """A sentence on `frames` that are not finite; None without any."""
    if not frames:
        return None
    return (
        f"frame(s) {_listed(frames)} of {video.shape[1]} hold NaN or infinity: the VAE runs in "
        f"{str(video.dtype).removeprefix('torch.')}, try dtype float32"
    )


def flat_fault(frames: list[int], video: torch.Tensor) -> str | None:
    """A sentence on `frames` of one colour; None without any."""
    if not frames:
        return None
    return (
        f"frame(s) {_listed(frames)} of {video.shape[1]} are of one colour: try more steps, another seed or "
        "guidance_scale, or another dtype"
    )


def _listed(frames: list[int]) -> str:
    if len(frames) > 3 and frames[-1] - frames[0] == len(frames) - 1:
        return f"{frames[0]} to {frames[-1]}"
    return ", ".join(map(str, frames))
