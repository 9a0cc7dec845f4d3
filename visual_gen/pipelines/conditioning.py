"""What a transformer is shown of a request's images: tokens beside the text, and latents beside or in the noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from diffusers.video_processor import VideoProcessor
from PIL import Image

from visual_gen.models.wan.task import Task
from visual_gen.pipelines.latents import encode_clip

if TYPE_CHECKING:
    from visual_gen.pipelines.request import Request


class Conditioning:
    """Of a request from text alone: the model sees the noise, all of it at one timestep.

    image_tokens [B or 2B, N, image_dim]: of each row's image, or of its first and its last; None for models without.
    """

    def __init__(self, image_tokens: torch.Tensor | None = None) -> None:
        self.image_tokens = image_tokens

    def model_input(self, latents: torch.Tensor) -> torch.Tensor:
        """[B, in_channels, F, H, W] for latents [B, C, F, H, W]."""
        return latents

    def timestep(self, timestep: torch.Tensor, rows: int) -> torch.Tensor:
        """[rows], or [rows, S] where tokens differ, of the 0-dimensional `timestep`."""
        return timestep.expand(rows)

    def result(self, latents: torch.Tensor) -> torch.Tensor:
        """What is decoded, of the latents after the last step."""
        return latents


class ChannelCondition(Conditioning):
    """`channels` [B, C', F, H, W], a mask of the given frames and their latents, stand beside the noise."""

    def __init__(self, channels: torch.Tensor, image_tokens: torch.Tensor | None) -> None:
        super().__init__(image_tokens)
        self._channels = channels

    def model_input(self, latents: torch.Tensor) -> torch.Tensor:
        return torch.cat([latents, self._channels], dim=1)


class FirstFrameCondition(Conditioning):
    """`first` [B, C, 1, H, W] stands in place of the first latent frame, its tokens at timestep 0."""

    def __init__(self, first: torch.Tensor, tokens_per_frame: int, frames: int) -> None:
        super().__init__()
        self._first = first
        self._noisy = torch.ones(frames, tokens_per_frame, device=first.device)
        self._noisy[0] = 0

    def model_input(self, latents: torch.Tensor) -> torch.Tensor:
        return torch.cat([self._first, latents[:, :, 1:]], dim=2)

    def timestep(self, timestep: torch.Tensor, rows: int) -> torch.Tensor:
        return (timestep * self._noisy).flatten().expand(rows, -1)

    def result(self, latents: torch.Tensor) -> torch.Tensor:
        return self.model_input(latents)


@torch.inference_mode()
def encode_images(
    task: Task,
    request: Request,
    *,
    vae: torch.nn.Module,
    image_encoder: torch.nn.Module | None,
    image_processor: Any,
    patch_size: tuple[int, int, int],
    device: torch.device,
) -> Conditioning:
    """The conditioning of a request, its latents fp32 on `device`. Images that rows share are encoded once."""
    if not request.images:
        return Conditioning()
    rows = [pair for pair in zip(request.images, request.last_images or [None] * len(request.images), strict=True)]
    keys = [tuple(map(id, pair)) for pair in rows]
    distinct = dict(zip(keys, rows, strict=True))
    index = torch.tensor([list(distinct).index(key) for key in keys], device=device)
    _, height, width = request.video_shape
    processor = VideoProcessor(vae_scale_factor=vae.config.scale_factor_spatial)

    def pixels(image: Image.Image) -> torch.Tensor:
        """[1, 3, 1, H, W] in -1..1, as diffusers resizes it."""
        return processor.preprocess(image, height=height, width=width).unsqueeze(2)

    if task.condition == "first_frame":
        first = torch.cat([encode_clip(vae, pixels(image)) for image, _ in distinct.values()]).to(device)
        _, _, frames, latent_height, latent_width = request.latent_shape
        tokens = (latent_height // patch_size[1]) * (latent_width // patch_size[2])
        return FirstFrameCondition(first[index], tokens, frames // patch_size[0])
    channels = torch.cat([
        _channels(vae, pixels(first), None if last is None else pixels(last), request)
        for first, last in distinct.values()
    ]).to(device)  # fmt: skip
    tokens = None
    if image_encoder is not None:
        shown = [[image for image in pair if image is not None] for pair in distinct.values()]
        encoded = torch.stack([image_tokens(image_encoder, image_processor, images) for images in shown])
        tokens = encoded.to(device)[index].flatten(0, 1)
    return ChannelCondition(channels[index], tokens)


def _channels(vae: torch.nn.Module, first: torch.Tensor, last: torch.Tensor | None, request: Request) -> torch.Tensor:
    """[1, temporal scale + C, F, H, W]: 1 where a frame is given, one channel for each frame of a latent frame (the
    first latent frame is of one, which counts for all), and the latents of a clip that is grey where none is."""
    num_frames = request.video_shape[0]
    clip = first.new_zeros(1, 3, num_frames, *first.shape[3:])
    clip[:, :, :1] = first
    if last is not None:
        clip[:, :, -1:] = last
    latents = encode_clip(vae, clip)
    mask = latents.new_zeros(1, vae.config.scale_factor_temporal, *latents.shape[2:])
    mask[:, :, 0] = 1
    if last is not None:
        mask[:, -1, -1] = 1
    return torch.cat([mask, latents], dim=1)


def image_tokens(image_encoder: torch.nn.Module, image_processor: Any, images: Sequence[Image.Image]) -> torch.Tensor:
    """[images, N, image_dim]: the encoder's states before its last layer, class token included, as Wan takes them."""
    inputs = image_processor(images=list(images), return_tensors="pt").to(image_encoder.device)
    return image_encoder(**inputs, output_hidden_states=True).hidden_states[-2]
