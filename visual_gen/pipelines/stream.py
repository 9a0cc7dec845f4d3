"""One stream of an engine: what it has made, and what steers it.

Shape letters: C channels, F latent frames, H, W latent height and width.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from attention_backend.kv_cache.interrupts import no_interrupt
from visual_gen.config import RECACHES
from visual_gen.pipelines.stream_chunks import StreamChunks
from visual_gen.pipelines.stream_snapshot import Snapshot, take_snapshot
from visual_gen.pipelines.stream_state import Switch, check_guidance, stream_settings
from visual_gen.pipelines.text import TextRows


class Stream(StreamChunks):
    """Made by StreamEngine.open. Whatever ends a chunk early leaves the stream as it was before that chunk.

    What is read here (frames, chunk_index, take_latents) counts chunks that were checked; asking waits for a check that
    is still on its way.
    """

    @property
    def state(self) -> str:
        """ "idle", "denoising" (a chunk is open), "failed" (the last chunk was dropped: see `error`), or "closed"."""
        if self.closed_because is not None:
            return "closed"
        self._settle()
        return "failed" if self.error is not None else "idle" if self._making is None else "denoising"

    @property
    def chunk_index(self) -> int:
        """Chunks that are finished; also the index of the one being made or made next."""
        self._settle()
        return self._now.chunk_index

    @property
    def frames(self) -> int:
        """Latent frames that are committed."""
        self._settle()
        return self._now.frames

    @property
    def waiting_chunks(self) -> int:
        """Finished chunks that were not taken yet. At the engine's waiting_chunks of them the stream is not stepped."""
        return len(self._waiting) + (self._unread is not None)

    def take_latents(self) -> list[torch.Tensor]:
        """Latents of the finished chunks not taken yet, fp32 [1, C, F, H, W] each, in order."""
        self._settle()
        taken = []
        while self._waiting:
            taken.append(self._waiting.popleft()[1][None])
        return taken

    def set(self, *, guidance_scale: float | None = None, steps: Sequence[float] | None = None) -> None:
        """Other guidance or noise levels from the next chunk on; None leaves them. The last step always leads to zero
        noise. ValueError, with nothing changed, on what the stream cannot have."""
        self._check_open()
        scale = self.guidance_scale if guidance_scale is None else check_guidance(guidance_scale)
        if scale > 1 and len(self._text) == 1:
            raise ValueError(
                f"guidance_scale is {scale} and the stream was opened without guidance, with memory for one branch: "
                "open it with a guidance_scale above 1"
            )
        self.settings = self.settings if steps is None else stream_settings(self.settings, steps=steps)
        self.guidance_scale = scale

    def set_extra(self, tokens: torch.Tensor | None) -> None:
        """Tokens such as actions, embedded, [a, hidden size], for the denoising forwards from the next on; None: none.

        Frames see them and they see what frames see; they are not kept, and a committing forward is without them.
        extra_output has what came out for them in the last forward, [branches, a, hidden size], in front of an output
        projection of their own. ValueError, with nothing changed, on more than the engine's action_capacity.
        """
        self._check_open()
        width, most = self._engine.transformer.config.hidden_size, self._engine.options.action_capacity
        if tokens is not None and (tokens.ndim != 2 or tokens.shape[1] != width or not 1 <= len(tokens) <= most):
            raise ValueError(
                f"tokens have shape {tuple(tokens.shape)}; expected 1 to {most} (the engine's action_capacity) by "
                f"{width}"
            )
        self._extra = None if tokens is None else tokens.to(self._engine.transformer.device, copy=True)

    @torch.no_grad()
    def switch_prompt(self, prompt: str | TextRows, *, recache: str = "none") -> None:
        """Another prompt from the next chunk on; the old one serves until all of the new one's K/V are there.

        recache "window": before that chunk, the window's K/V are computed anew under the new prompt, in one forward in
        which each frame sees those up to itself, and put in place if that succeeds; what came before can then not be
        rolled back. It takes the room of another stream meanwhile. With a chunk open the switch waits for its end, and
        if it fails then, the stream fails as it would in a chunk, with the old prompt. Raises ValueError or
        GenerationError, with nothing changed.
        """
        self._check_open()
        self._settle()
        if recache not in RECACHES:
            raise ValueError(f"recache is {recache!r}; it must be one of {', '.join(RECACHES)}")
        try:
            slot = self._engine._take_text("prompt", prompt)
            with no_interrupt():
                self._drop_switch()
                self._switch = Switch(slot, prompt if isinstance(prompt, str) else None, recache)
        except BaseException:
            self._engine._room.reconcile()
            raise
        if self._making is None:
            self._apply_switch()

    def abort_chunk(self) -> None:
        """Drops the chunk being made, if any: the next step begins it anew, with the same noise."""
        self._check_open()
        self._settle()
        self._recover()

    def rollback(self, chunks: int) -> None:
        """Takes back the last `chunks` finished chunks, and drops the one being made. Prompt and settings stay as they
        are now. ValueError, with nothing changed, if so many are not held (the engine's rollback_chunks)."""
        self._check_open()
        self._settle()
        held = min(self._engine.options.rollback_chunks, len(self._history) - 1)
        if not isinstance(chunks, int) or isinstance(chunks, bool) or not 1 <= chunks <= held:
            raise ValueError(
                f"chunks is {chunks!r}; of stream {self.id} 1 to {held} can be taken back (the engine's "
                f"rollback_chunks is {self._engine.options.rollback_chunks}, a recache ends what can be)"
                if held
                else f"chunks is {chunks!r}, and stream {self.id} has none that can be taken back (the engine's "
                f"rollback_chunks is {self._engine.options.rollback_chunks}, a recache ends what can be)"
            )
        self._recover()
        with no_interrupt():
            self.session.rollback(chunks)
            self._trim()
            self.error = None

    def fork(self, *, seed: int | None = None) -> Stream:
        """A second stream that goes on from here, with the same prompt, settings and noise, or with noise of another
        seed. Chunks not taken stay with this one. ValueError in the middle of a chunk; EngineFull."""
        self._check_between_chunks("fork")
        return self._engine._fork(self, seed)

    def snapshot(self, path: str | Path | None = None) -> Snapshot:
        """All that the stream is, in host memory, and in a safetensors file at `path`; for engine.restore. Chunks not
        taken are left out. ValueError in the middle of a chunk."""
        self._check_between_chunks("a snapshot")
        snapshot = take_snapshot(self)
        if path is not None:
            snapshot.save(path)
        return snapshot

    def close(self) -> None:
        """Gives all its memory back; finished latents can still be taken. A second close does nothing."""
        self._engine.close(self)

    @property
    def _slots(self) -> tuple[int, ...]:
        """Text slots that it uses, once for each use."""
        return self._text if self._switch is None else (*self._text, self._switch.slot)

    @property
    def _ready(self) -> bool:
        return self.waiting_chunks < self._engine.options.waiting_chunks

    def _check_open(self) -> None:
        if self.closed_because is not None:
            raise ValueError(f"stream {self.id} is closed ({self.closed_because}): open another")

    def _check_between_chunks(self, what: str) -> None:
        self._check_open()
        self._settle()
        if self._making is not None:
            raise ValueError(
                f"stream {self.id} is in the middle of chunk {self._now.chunk_index}: step it until 'chunk', or "
                f"abort_chunk(), before {what}"
            )
