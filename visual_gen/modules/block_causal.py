"""Block-causal attention masks for training a causal video model, through FlexAttention.

A video is frames of `frame_tokens` tokens; frames are made in chunks, and a chunk sees itself and what the window keeps
of the frames before it: the same rule as a KV cache with that window, for all chunks at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention


@dataclass(frozen=True)
class ChunkWindow:
    """Which frames each chunk sees. Raises ValueError on sizes that no cache would take.

    frames_per_chunk: frames made together; first_chunk_frames: of the first chunk, if it differs. Visible are the first
    sink_frames frames and the last recent_frames, the chunk itself counted in those; recent_frames None: all.
    """

    frames_per_chunk: int
    first_chunk_frames: int | None = None
    sink_frames: int = 0
    recent_frames: int | None = None

    def __post_init__(self) -> None:
        for name in ("frames_per_chunk", "first_chunk_frames", "recent_frames"):
            value = getattr(self, name)
            if not (value is None and name != "frames_per_chunk") and not _is_int(value, 1):
                raise ValueError(f"{name} is {value!r}; it must be an integer of at least 1")
        if not _is_int(self.sink_frames, 0):
            raise ValueError(f"sink_frames is {self.sink_frames!r}; it must be an integer of at least 0")
        largest = max(self.frames_per_chunk, self.first_chunk_frames or 0)
        if self.recent_frames is not None and self.recent_frames < largest:
            raise ValueError(
                f"recent_frames is {self.recent_frames}, below the {largest} frames of a chunk, which it counts: "
                f"at least {largest}"
            )

    def chunk_start(self, frame):
        """The first frame of the chunk that `frame` (an int or an integer tensor) is in."""
        first = self._first
        in_later = (frame - first) // self.frames_per_chunk * self.frames_per_chunk + first
        return in_later * (frame >= first)

    def visible(self, q_frame, k_frame):
        """Whether the chunk of q_frame sees k_frame, itself included; ints or integer tensors."""
        start = self.chunk_start(q_frame)
        end = start + self.frames_per_chunk + (start < self._first) * (self._first - self.frames_per_chunk)
        seen = k_frame < end
        if self.recent_frames is not None:
            seen = seen & ((k_frame < self.sink_frames) | (k_frame >= end - self.recent_frames))
        return seen

    @property
    def _first(self) -> int:
        return self.frames_per_chunk if self.first_chunk_frames is None else self.first_chunk_frames


def diffusion_forcing_mask(
    window: ChunkWindow, num_frames: int, frame_tokens: int, device: torch.device | str
) -> BlockMask:
    """Mask of one sequence of num_frames · frame_tokens tokens, whose frames each have a timestep of their own."""

    def visible(batch, head, q_index, k_index):
        return window.visible(q_index // frame_tokens, k_index // frame_tokens)

    return _block_mask(visible, num_frames * frame_tokens, device)


def teacher_forcing_mask(
    window: ChunkWindow, num_frames: int, frame_tokens: int, device: torch.device | str
) -> BlockMask:
    """Mask of [clean ; noisy], num_frames · frame_tokens tokens each.

    A clean chunk sees clean frames as its commit in a rollout would. A noisy chunk sees its own noisy frames, and of
    the clean ones those that a denoising forward would find in the cache.
    """
    tokens = num_frames * frame_tokens

    def visible(batch, head, q_index, k_index):
        q_noisy, k_noisy = q_index >= tokens, k_index >= tokens
        q_frame, k_frame = (q_index - tokens * q_noisy) // frame_tokens, (k_index - tokens * k_noisy) // frame_tokens
        start = window.chunk_start(q_frame)
        seen = window.visible(q_frame, k_frame)
        own = k_frame >= start  # and not behind the chunk, as `seen` has that
        # No == between booleans: inductor cannot bound it.
        return seen & ((q_noisy & own & k_noisy) | (~(q_noisy & own) & ~k_noisy))

    return _block_mask(visible, 2 * tokens, device)


def _block_mask(visible: Callable, length: int, device: torch.device | str) -> BlockMask:
    if length < 1:
        raise ValueError(f"a mask of {length} tokens has no rows; give at least one frame of one token")
    # Compiled, it never holds the dense mask, which at the length of a real video is larger than a GPU.
    make = _compiled(create_block_mask) if torch.device(device).type == "cuda" else create_block_mask
    return make(visible, None, None, length, length, device=str(device))


def attend_block_mask(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_mask: BlockMask, softmax_scale: float
) -> torch.Tensor:
    """q, k, v [N, S, H, D], their N · S rows one or several sequences of the mask's length → out like q.

    FlexAttention, compiled on a GPU, where the plain form would hold all scores. Differentiable: on a CPU, where
    FlexAttention has no backward pass, gradients take the dense mask through torch's SDPA.
    """
    length = block_mask.seq_lengths[0]
    if q.shape[0] * q.shape[1] % length:
        raise ValueError(f"q has {q.shape[0] * q.shape[1]} rows, the block mask is for sequences of {length}")
    q_BHSD, k_BHSD, v_BHSD = (x.reshape(-1, length, *x.shape[2:]).transpose(1, 2) for x in (q, k, v))
    if not q.is_cuda and torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        mask = create_mask(block_mask.mask_mod, None, None, length, length, device=str(q.device))
        out = F.scaled_dot_product_attention(q_BHSD, k_BHSD, v_BHSD, mask, scale=softmax_scale)
    else:
        attend = flex_attention if torch.compiler.is_compiling() or not q.is_cuda else _compiled(flex_attention)
        out = attend(q_BHSD, k_BHSD, v_BHSD, block_mask=block_mask, scale=softmax_scale)
    return out.transpose(1, 2).reshape(q.shape)


@functools.cache
def _compiled(function: Callable) -> Callable:
    return torch.compile(function, dynamic=False)


def _is_int(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
