"""How the chunks of an engine's stream are made: begun, denoised, committed on trust, checked, dropped if they fail.

Shape letters: C channels, F latent frames, H, W latent height and width.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from attention_backend.kv_cache import Session
from attention_backend.kv_cache.interrupts import no_interrupt, uninterrupted
from visual_gen.config import CausalConfig
from visual_gen.pipelines.denoise import denoise_chunk
from visual_gen.pipelines.errors import GenerationError
from visual_gen.pipelines.given_frames import given_chunks
from visual_gen.pipelines.stream_forward import Part
from visual_gen.pipelines.stream_state import Committed, Making, StreamEvent, Switch, Unread

if TYPE_CHECKING:
    from visual_gen.pipelines.stream_engine import StreamEngine


class StreamChunks:
    """The part of a Stream that the engine drives. Whatever ends a chunk early leaves all as before that chunk."""

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
    def _now(self) -> Committed:
        return self._history[-1]

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
