"""Latents of a stream, chunk by chunk, to frames: the VAE's temporal cache kept for each stream, delivery bounded.

Shape letters: C latent channels, F latent frames of a chunk, h, w latent height and width; n frames, H, W pixels.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, unpatchify

from visual_gen.pipelines.cpu_conv import OneDnnConv3d
from visual_gen.pipelines.errors import GenerationError
from visual_gen.pipelines.latents import broken_fault, flat_fault, unusable_frames

if TYPE_CHECKING:
    from visual_gen.pipelines.stream_engine import Stream, StreamEngine

OnFrames = Callable[[np.ndarray], None]


class FrameDecoder:
    """Frames of one stream's latents, as decoding all of them at once would give them.

    What the VAE's convolutions remember from frame to frame is held here, so that decoders which share a `vae` may take
    turns, in several threads too; it is as large after a thousand chunks as after two. `vae` is diffusers'
    AutoencoderKLWan; latents are the normalised ones that the transformer makes.
    """

    def __init__(self, vae: AutoencoderKLWan) -> None:
        self._vae = vae
        self._remembered: list[torch.Tensor | str | None] = [None] * sum(
            isinstance(module, WanCausalConv3d) for module in vae.decoder.modules()
        )
        self.latent_frames = 0
        column = (1, -1, 1, 1, 1)
        self._mean, self._std = (
            torch.tensor(values, dtype=vae.dtype, device=vae.device).view(column)
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )

    def fork(self) -> FrameDecoder:
        """A decoder that goes on from here by itself: for a stream that was forked, or to return to after a rollback.
        Both share what they remember until they go on."""
        other = FrameDecoder(self._vae)
        other._remembered, other.latent_frames = list(self._remembered), self.latent_frames
        return other

    def decode(self, latents: torch.Tensor) -> np.ndarray:
        """uint8 frames [n, H, W, 3] of the stream's next latents, [C, F, h, w] or [1, C, F, h, w], F of at least 1.

        The stream's first latent frame is one frame, each later one as many as the VAE compresses (Wan: 4). Raises
        ValueError on another shape; GenerationError if frames are not finite, or all of one colour. Whatever is raised,
        the decoder stays as it was.
        """
        video, remembered = self._decoded(self._check(latents))
        first = self.latent_frames
        broken, flat = unusable_frames(video)
        # One frame of one colour may be what the prompt asks for, or a switch passing by; a whole chunk is not.
        if fault := broken_fault(broken, video) or (len(flat) == video.shape[1] and flat_fault(flat, video)):
            raise GenerationError(f"latent frames from {first} on: {fault}", step=0)
        pixels = video.float().div(2).add(0.5).clamp(0, 1).mul(255).round().to(torch.uint8)
        frames = pixels.permute(1, 2, 3, 0).cpu().numpy()
        self._remembered, self.latent_frames = remembered, first + latents.shape[-3]
        return frames

    def _check(self, latents: torch.Tensor) -> torch.Tensor:
        channels = self._vae.config.z_dim
        batch = latents[None] if latents.ndim == 4 else latents
        shape = tuple(batch.shape)
        if len(shape) != 5 or shape[:2] != (1, channels) or 0 in shape:
            raise ValueError(
                f"latents have shape {tuple(latents.shape)}; one stream's chunk is [{channels}, F, h, w] or "
                f"[1, {channels}, F, h, w]"
            )
        known = next((kept for kept in self._remembered if isinstance(kept, torch.Tensor)), None)
        if known is not None and known.shape[3:] != shape[3:]:
            raise ValueError(
                f"latents are {shape[3]}×{shape[4]}; this stream's are {known.shape[3]}×{known.shape[4]}: a stream "
                "keeps its size"
            )
        return batch

    @torch.inference_mode()
    def _decoded(self, latents: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor | str | None]]:
        """[3, n, H, W] in -1..1, and what is remembered afterwards. A copy is changed: the decoder replaces entries of
        the list and never writes into a tensor of it."""
        vae, remembered, videos = self._vae, list(self._remembered), []
        with OneDnnConv3d():
            z = vae.post_quant_conv(latents.to(vae.device, vae.dtype) * self._std + self._mean)
            for i, frame in enumerate(z.split(1, dim=2)):
                first = self.latent_frames + i == 0
                videos.append(vae.decoder(frame, feat_cache=remembered, feat_idx=[0], first_chunk=first))
        video = torch.cat(videos, dim=2)
        if vae.config.patch_size is not None:
            video = unpatchify(video, patch_size=vae.config.patch_size)
        return video.clamp(-1, 1)[0], remembered


class FrameStream:
    """The frames of one stream of an engine, decoded as its chunks are finished.

    With `on_frames`, each chunk's frames go to that function as soon as they are there. Without it they wait to be
    taken, by `take` or by iterating, at most `max_waiting` chunks of them: while nobody takes them nothing more is
    decoded, the stream's own latents wait, and the engine leaves the stream out of its steps; other streams go on.

    A decoder or a callback that fails closes its stream, which gives its blocks back, and is kept as `error`: other
    streams do not see it. Ctrl-C passes through.
    """

    def __init__(
        self,
        engine: StreamEngine,
        stream: Stream,
        decoder: FrameDecoder | AutoencoderKLWan,
        *,
        on_frames: OnFrames | None = None,
        max_waiting: int = 2,
    ) -> None:
        if isinstance(max_waiting, bool) or not isinstance(max_waiting, int) or max_waiting < 1:
            raise ValueError(f"max_waiting is {max_waiting!r}; it must be an integer of at least 1 (chunks)")
        if on_frames is not None and not callable(on_frames):
            raise ValueError(f"on_frames is {on_frames!r}; it must be callable, or None")
        self.engine, self.stream = engine, stream
        self.decoder = decoder if isinstance(decoder, FrameDecoder) else FrameDecoder(decoder)
        self.error: Exception | None = None
        self.chunks = 0
        self._on_frames, self._max_waiting = on_frames, max_waiting
        self._latents: deque[torch.Tensor] = deque()
        self._frames: deque[np.ndarray] = deque()

    @property
    def waiting(self) -> int:
        """Chunks of frames that wait to be taken."""
        return len(self._frames)

    def pump(self) -> int:
        """Decode what the stream has finished, as far as there is room. How many chunks were decoded and delivered."""
        done = 0
        try:
            while self.error is None and len(self._frames) < self._max_waiting:
                if not self._latents:
                    self._latents.extend(self.stream.take_latents())
                if not self._latents:
                    break
                frames = self.decoder.decode(self._latents[0])
                self._latents.popleft()  # not before: Ctrl-C leaves the decoder as it was, and must leave these too
                if self._on_frames is None:
                    self._frames.append(frames)
                else:
                    self._on_frames(frames)
                self.chunks += 1
                done += 1
        except Exception as error:  # whatever it is, other streams must go on
            self.error = error
            self._latents.clear()
            self.stream.close()
        return done

    def take(self) -> list[np.ndarray]:
        """uint8 frames [n, H, W, 3] of each chunk that is there, oldest first; empty if there is none."""
        taken = []
        while self.pump() or self._frames:
            taken += self._frames
            self._frames.clear()
        return taken

    def __iter__(self) -> Iterator[np.ndarray]:
        """Frames [n, H, W, 3] of chunk after chunk. Where none are there, the engine is stepped, with all its streams.
        Ends when the stream is closed; raises `error`, or the stream's, after the frames made before it."""
        if self._on_frames is not None:
            raise ValueError("frames go to on_frames; a FrameStream without it can be iterated")
        while True:
            self.pump()
            while self._frames:
                yield self._frames.popleft()
                self.pump()
            if error := self.error or self.stream.error:
                raise error
            if self.stream.state == "closed":
                return
            self.engine.step(until="chunk")

    def fork(
        self, *, seed: int | None = None, on_frames: OnFrames | None = None, max_waiting: int = 2
    ) -> FrameStream:
        """Forks the stream, with noise of another seed if one is given, and decodes the fork from here on: frames made
        up to now stay with this one alone. Raises ValueError while chunks wait to be decoded, which both would need,
        and as Stream.fork does."""
        self.pump()
        if self._latents:
            raise ValueError(
                f"{len(self._frames)} chunks of frames wait to be taken, and more to be decoded: take them first"
            )
        return FrameStream(
            self.engine, self.stream.fork(seed=seed), self.decoder.fork(), on_frames=on_frames, max_waiting=max_waiting
        )
