"""Tokens beside those of the frames, such as actions: attended to in their forward, and never kept.

Shape letters: N frames of all rows, S tokens of a frame, D hidden size, T tokens of all rows, extra ones included.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from attention_backend.kv_cache import KVBatch


class ExtraTokens:
    """Embedded tokens [a, D] of each row, behind its frames' own; a row may have none.

    They are modulated and placed as the first token of their row's last frame. After the forward, `outputs` has what
    came out for each row, [a, D], in front of an output projection of their own.
    """

    def __init__(self, kv: KVBatch, embeds: Sequence[torch.Tensor | None], hidden_size: int) -> None:
        shapes = [(0, hidden_size) if x is None else tuple(x.shape) for x in embeds]
        if shapes != [(a, hidden_size) for a in kv.extra_tokens]:
            raise ValueError(
                f"extra tokens have shapes {shapes}; the cache's batch has {list(kv.extra_tokens)} for its rows, of "
                f"{hidden_size} each"
            )
        self._kv, self._embeds = kv, embeds
        self.outputs: list[torch.Tensor] = []

    def join(self, x: torch.Tensor) -> torch.Tensor:
        """[N, S, D] → [1, T, D]."""
        rows = zip(x.split(self._kv.frames), self._embeds, strict=True)
        parts = [y for frames, more in rows for y in (frames.flatten(0, 1), more) if y is not None]
        return torch.cat([y.to(x.dtype) for y in parts])[None]

    def per_token(self, x: torch.Tensor) -> torch.Tensor:
        """Values [N, 1, ...] of frames → [1, T, ...] of tokens."""
        return x[self._frame_of_token(x.device), 0][None]

    def rotary(self, x: torch.Tensor) -> torch.Tensor:
        """[N, S, 1, D / 2H] → [1, T, 1, D / 2H]."""
        rows = zip(x.split(self._kv.frames), self._kv.extra_tokens, strict=True)
        parts = [y for frames, a in rows for y in (frames.flatten(0, 1), frames[-1, :1].expand(a, *x.shape[2:]))]
        return torch.cat(parts)[None]

    def part(self, x: torch.Tensor) -> torch.Tensor:
        """[1, T, D] → [N, S, D]; the rest is in outputs."""
        rows = x[0].split(self._kv.q_lens)
        own = [row[: len(row) - a] for row, a in zip(rows, self._kv.extra_tokens, strict=True)]
        self.outputs = [row[len(frames) :] for row, frames in zip(rows, own, strict=True)]
        return torch.cat(own).unflatten(0, (-1, self._kv.frame_tokens))

    def _frame_of_token(self, device: torch.device) -> torch.Tensor:
        frames, counts = [], []
        for n, a in zip(self._kv.frames, self._kv.extra_tokens, strict=True):
            frames += range(len(frames), len(frames) + n)
            counts += [self._kv.frame_tokens] * (n - 1) + [self._kv.frame_tokens + a]
        host = torch.tensor([frames, counts], pin_memory=device.type == "cuda")
        index, repeats = host.to(device, non_blocking=True)
        return index.repeat_interleave(repeats, output_size=sum(counts))
