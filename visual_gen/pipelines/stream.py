"""One stream of an engine: what it has made, the chunk that it is making, and what steers it.

Shape letters: C channels, F latent frames, H, W latent height and width.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from attention_backend.kv_cache import Session
from attention_backend.kv_cache.interrupts import no_interrupt, uninterrupted
from visual_gen.config import CausalConfig
from visual_gen.pipelines.denoise import denoise_chunk
from visual_gen.pipelines.errors import GenerationError
from visual_gen.pipelines.given_frames import given_chunks
from visual_gen.pipelines.stream_forward import Part
from visual_gen.pipelines.stream_snapshot import Snapshot, take_snapshot
from visual_gen.pipelines.stream_state import (
    RECACHES,
    Committed,
    Making,
    StreamEvent,
    Switch,
    Unread,
    check_guidance,
    stream_settings,
)
from visual_gen.pipelines.text import TextRows

if TYPE_CHECKING:
    from visual_gen.pipelines.stream_engine import StreamEngine


class Stream:
    """Made by StreamEngine.open. Whatever ends a chunk early leaves the stream as it was before that chunk.

    What is read here (frames, chunk_index, take_latents) counts chunks that were checked; asking waits for a check that
    is still on its way.
    """

    def __init__(
        self,
        engine: StreamEngine,
        id: int,
        session: Session,
        settings: CausalConfig,
        prompt: str | None,
        text: tuple[int, ...],
        guidance_scale: float,
        generator: torch.Generator,
        history: tuple[Committed, ...] = (),
    ) -> None:
        self.id, self.prompt, self.session, self.settings = id, prompt, session, settings
        self.guidance_scale, self.error = guidance_scale, None
        self.closed_because: str | None = None
        self._engine, self._text, self._generator = engine, text, generator
        self._history = history or (Committed(0, 0, generator.get_state(), ()),)
        self._making: Making | None = None
        self._unread: Unread | None = None
        self._switch: Switch | None = None
        self._extra: torch.Tensor | None = None
        self.extra_output: torch.Tensor | None = None
        self._waiting: deque[tuple[int, torch.Tensor]] = deque()  # (chunk index, latents) not taken yet

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
    def _now(self) -> Committed:
        return self._history[-1]

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

    def _begin(self) -> None:
        """Opens the next chunk if none is. ValueError past the end of the model's positions."""
        if self._making is not None:
            return
        self._apply_switch()
        settings, now = self.settings, self._now
        end = settings.frames_after(1, now.frames)
        self._engine._check_positions(end)
        chunk = self.session.begin(end - now.frames)
        self._generator.set_state(now.generator_state)
        timesteps = self._engine._timesteps(settings)
        self._making = Making(chunk, self._noise(chunk.frames), timesteps, settings.sigmas, self.guidance_scale)

    def _apply_switch(self) -> None:
        switch = self._switch
        if switch is None:
            return
        try:
            if switch.recache == "window" and self._now.frames:
                self._recompute((switch.slot, *self._text[1:]))
            else:
                self._take_switch()
        except BaseException:
            self._drop_switch()  # unless it was taken, and the interrupt came behind it
            raise

    @uninterrupted
    def _take_switch(self) -> None:
        """The prompt that was switched to is the one."""
        switch, self._switch = self._switch, None
        self._engine._texts.give(self._text[0])
        self._text, self.prompt = (switch.slot, *self._text[1:]), switch.prompt

    @uninterrupted
    def _drop_switch(self) -> None:
        switch, self._switch = self._switch, None
        if switch is not None:
            self._engine._texts.give(switch.slot)

    def _recompute(self, text: tuple[int, ...]) -> None:
        """The window's K/V under another text, from the clean latents."""
        with self._engine._room.make(self.session.recompute, keep=self) as chunk:
            latents = self._now.latents(chunk.frame_runs)
            (flow,), *_ = self._engine._run([Part(chunk, latents, latents.new_zeros(()), text)], frame_causal=True)
            if not torch.isfinite(flow).all():
                raise GenerationError(
                    f"the window of stream {self.id} under the new prompt has NaN or infinity", step=0
                )
            with no_interrupt():
                chunk.commit()
                self._history = (self._now,)
                self._take_switch()

    def _continue(self, latents: torch.Tensor) -> None:
        """Commits given frames [C, F, H, W], each of which sees those up to itself. GenerationError if that fails."""
        timestep, clean = latents.new_zeros(()), []
        for start, frames in given_chunks(self.settings, latents.shape[1]):
            given = latents[:, start : start + frames].clone()
            with self.session.begin(frames) as chunk:
                (flow,), *_ = self._engine._run([Part(chunk, given, timestep, self._text)], frame_causal=True)
                if not torch.isfinite(flow).all():
                    raise GenerationError(f"given frames from {start} on gave NaN or infinity", step=0)
                chunk.commit()
            clean = [*self._still_needed(clean, start + frames), (start, given)]
        self._history = (Committed(0, latents.shape[1], self._now.generator_state, tuple(clean)),)

    def _part(self) -> Part:
        making = self._making
        extra = None if making.commits else self._extra
        return Part(making.chunk, making.latents, making.timesteps[making.step], self._text, extra)

    def _denoise(self, flows: torch.Tensor, extra: torch.Tensor | None) -> None:
        """flows [branches, C, F, H, W] of a denoising forward: the chunk is one step further."""
        making, self.extra_output = self._making, extra
        x = denoise_chunk(making.latents, flows, making.guidance_scale, making.sigmas, making.step, self._noise)
        self._making = replace(making, latents=x, step=making.step + 1)

    @uninterrupted
    def _commit(self, finite: torch.Tensor, done: torch.cuda.Event | None, forward: int) -> None:
        """Keeps what a committing forward wrote, on trust: `_settle` takes it back if the check says so."""
        chunk, latents, now = self._making.chunk, self._making.latents, self._now
        end = chunk.frame_start + chunk.frames
        clean = (*self._still_needed(now.clean, end), (chunk.frame_start, latents))
        after = Committed(now.chunk_index + 1, end, self._generator.get_state(), clean)
        chunk.commit()
        self._history = (*self._history, after)[-(self._engine.options.kept_chunks + 1) :]
        self._unread = Unread(after, latents, finite, done, forward)
        self._making = None

    def _still_needed(self, clean: Sequence[tuple[int, torch.Tensor]], frames: int) -> list[tuple[int, torch.Tensor]]:
        oldest = (
            frames - self.settings.recent_frames - self._engine.options.kept_chunks * self.settings.max_chunk_frames
        )
        return [(at, x) for at, x in clean if at + x.shape[1] > oldest or at < self.settings.sink_frames]

    @uninterrupted
    def _recover(self) -> None:
        """Whatever ended a step half-way: the stream is as before the chunk that is open."""
        if self.closed_because is None and self.session.chunk is not None:
            self.session.chunk.abort()
        self._making = None

    @uninterrupted
    def _settle(self, *, before: int | None = None) -> None:
        """Reads the check of the last commit, if it was launched before forward `before`, and tells the engine."""
        unread = self._unread
        if unread is None or (before is not None and unread.forward >= before):
            return
        index, failed = unread.after.chunk_index - 1, unread.failed()
        self._unread = None
        if not failed:
            self._waiting.append((index, unread.latents))
            self._engine._scheduler.note(StreamEvent(self, "committed", index))
            return
        self._recover()
        self.session.rollback(1)
        self._trim()
        self._fail(
            GenerationError(
                f"chunk {index} of stream {self.id} gave NaN or infinity and was not kept: the weights or the latents "
                "are damaged, or the dtype overflows (try dtype bfloat16 or float32)",
                step=len(self.settings.steps),
            )
        )

    def _trim(self) -> None:
        """Forgets chunks that the session has taken back."""
        while self._now.frames > self.session.frames:
            self._history = self._history[:-1]
        while self._waiting and self._waiting[-1][0] >= self._now.chunk_index:
            self._waiting.pop()

    def _fail(self, error: Exception) -> None:
        self.error = error
        self._engine._scheduler.note(StreamEvent(self, "failed", self._now.chunk_index, error))

    def _noise(self, frames: int) -> torch.Tensor:
        return self._engine._noise(frames, self._generator)
