"""One stream of an engine: what it has made, the chunk that it is making, and what steers it.

Shape letters: C channels, F latent frames, H, W latent height and width.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from attention_backend.kv_cache import Chunk, Session
from visual_gen.config import CausalConfig
from visual_gen.pipelines.denoise import guided
from visual_gen.pipelines.errors import GenerationError
from visual_gen.pipelines.given_frames import given_chunks
from visual_gen.pipelines.stream_forward import Part

if TYPE_CHECKING:
    from visual_gen.pipelines.stream_engine import StreamEngine

TRAIN_TIMESTEPS = 1000.0


@dataclass(frozen=True)
class StreamEvent:
    """kind: "denoised" (a step of chunk chunk_index was launched), "committed" (the chunk is finished, checked and can
    be taken), "failed" (it was dropped for `error`, and the stream is as before it)."""

    stream: Stream
    kind: str
    chunk_index: int
    error: Exception | None = None


@dataclass(frozen=True, eq=False)
class Committed:
    """A stream between two chunks. clean: (first frame, latents [C, F, H, W]) of chunks whose frames a window or a
    rollback may need again."""

    chunk_index: int
    frames: int
    generator_state: torch.Tensor
    clean: tuple[tuple[int, torch.Tensor], ...]


@dataclass(frozen=True, eq=False)
class Making:
    """The open chunk. timesteps: on the device, one for each step and 0 for the commit; sigmas: of the steps."""

    chunk: Chunk
    latents: torch.Tensor
    timesteps: torch.Tensor
    sigmas: tuple[float, ...]
    guidance_scale: float
    step: int = 0

    @property
    def commits(self) -> bool:
        """Whether the next forward is the one that commits."""
        return self.step == len(self.sigmas)


@dataclass(frozen=True, eq=False)
class Unread:
    """A committed chunk whose check is on its way from the device: one bool, there once `done` has happened."""

    after: Committed
    latents: torch.Tensor
    finite: torch.Tensor
    done: torch.cuda.Event | None
    forward: int

    def failed(self) -> bool:
        if self.done is not None:
            self.done.synchronize()
        return not bool(self.finite)


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
    ) -> None:
        self.id, self.prompt, self.session, self.settings = id, prompt, session, settings
        self.guidance_scale, self.error = guidance_scale, None
        self._engine, self._text, self._generator = engine, text, generator
        self._history: tuple[Committed, ...] = (Committed(0, 0, generator.get_state(), ()),)
        self._making: Making | None = None
        self._committing: Unread | None = None  # what a commit will have led to
        self._unread: Unread | None = None
        self._waiting: deque[tuple[int, torch.Tensor]] = deque()  # (chunk index, latents) not taken yet
        self.closed_because: str | None = None

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
        if self.closed_because is None:
            self._settle()
        taken = []
        while self._waiting:
            taken.append(self._waiting.popleft()[1][None])
        return taken

    def set(self, *, guidance_scale: float | None = None, steps=None) -> None:
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

    def abort_chunk(self) -> None:
        """Drops the chunk being made, if any: the next step begins it anew, with the same noise."""
        self._check_open()
        self._settle()
        self._recover()

    def close(self) -> None:
        """Gives all its memory back; finished latents can still be taken. A second close does nothing."""
        self._engine.close(self)

    @property
    def _now(self) -> Committed:
        return self._history[-1]

    @property
    def _ready(self) -> bool:
        return self.waiting_chunks < self._engine.waiting_chunks

    def _check_open(self) -> None:
        if self.closed_because is not None:
            raise ValueError(f"stream {self.id} is closed ({self.closed_because}): open another")

    def _begin(self) -> None:
        """Opens the next chunk if none is. ValueError past the end of the model's positions."""
        if self._making is not None:
            return
        settings, now = self.settings, self._now
        first = now.frames == 0 and settings.first_chunk_frames is not None
        frames = settings.first_chunk_frames if first else settings.frames_per_chunk
        self._engine._check_positions(now.frames + frames)
        chunk = self.session.begin(frames)
        self._generator.set_state(now.generator_state)
        timesteps = self._engine._timesteps(settings)
        sigmas = tuple(t / TRAIN_TIMESTEPS for t in settings.timesteps)
        self._making = Making(chunk, self._noise(frames), timesteps, sigmas, self.guidance_scale)

    def _continue(self, latents: torch.Tensor) -> None:
        """Commits given frames [C, F, H, W], each of which sees those up to itself. GenerationError if that fails."""
        timestep = latents.new_zeros(())
        for start, frames in given_chunks(self.settings, latents.shape[1]):
            with self.session.begin(frames) as chunk:
                part = Part(chunk, latents[:, start : start + frames], timestep, self._text)
                (flow,), _ = self._engine._run([part], frame_causal=True)
                if not torch.isfinite(flow).all():
                    raise GenerationError(f"given frames from {start} on gave NaN or infinity", step=0)
                chunk.commit()
        first = self._now
        self._history = (Committed(0, latents.shape[1], first.generator_state, ((0, latents),)),)

    def _part(self) -> Part:
        making = self._making
        return Part(making.chunk, making.latents, making.timesteps[making.step], self._text)

    def _denoise(self, flows: torch.Tensor) -> None:
        """flows [branches, C, F, H, W] of a denoising forward: the chunk is one step further."""
        making = self._making
        flow = flows[0].float() if len(flows) == 1 else guided(*flows, making.guidance_scale)
        x = making.latents - making.sigmas[making.step] * flow
        if making.step + 1 < len(making.sigmas):
            x = torch.lerp(x, self._noise(x.shape[1]), making.sigmas[making.step + 1])
        self._making = replace(making, latents=x, step=making.step + 1)

    def _commit(self, finite: torch.Tensor, done: torch.cuda.Event | None, forward: int) -> None:
        """Keeps what a committing forward wrote, on trust: `_settle` takes it back if the check says so."""
        chunk, latents = self._making.chunk, self._making.latents
        now, end = self._now, chunk.frame_start + chunk.frames
        needed = end - self.settings.recent_frames - self._engine._kept_chunks * self.settings.max_chunk_frames
        kept = [
            (start, x) for start, x in now.clean if start + x.shape[1] > needed or start < self.settings.sink_frames
        ]
        clean = (*kept, (chunk.frame_start, latents))
        after = Committed(now.chunk_index + 1, end, self._generator.get_state(), clean)
        self._committing = Unread(after, latents, finite, done, forward)
        chunk.commit()
        self._committed()

    def _committed(self) -> None:
        unread = self._committing
        if self._now is not unread.after:
            self._history = (*self._history, unread.after)[-(self._engine._kept_chunks + 1) :]
        self._unread = unread
        self._making = self._committing = None

    def _recover(self) -> None:
        """After whatever ended a step half-way: the stream is as before its chunk, or after a commit that was done."""
        if self.closed_because is not None:
            return
        if self._committing is not None and self.session.frames == self._committing.after.frames:
            self._committed()
            return
        if self.session.chunk is not None:
            self.session.chunk.abort()
        self._making = self._committing = None

    def _settle(self, *, before: int | None = None) -> None:
        """Reads the check of the last commit, if it was launched before forward `before`, and tells the engine."""
        unread = self._unread
        if unread is None or (before is not None and unread.forward >= before):
            return
        index = unread.after.chunk_index - 1
        if not unread.failed():
            self._unread = None
            self._waiting.append((index, unread.latents))
            self._engine._note(StreamEvent(self, "committed", index))
            return
        self._recover()
        if self.session.frames == unread.after.frames:
            self.session.rollback(1)
        self._trim()
        self._unread = None
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

    def _fail(self, error: Exception) -> None:
        self.error = error
        self._engine._note(StreamEvent(self, "failed", self._now.chunk_index, error))

    def _noise(self, frames: int) -> torch.Tensor:
        return self._engine._noise(frames, self._generator)


def stream_settings(settings: CausalConfig, **changes) -> CausalConfig:
    """The settings with those changes that are not None, checked as a whole. Raises ValueError."""
    given = {name: value for name, value in changes.items() if value is not None}
    return CausalConfig.model_validate(settings.model_dump() | given)


def check_guidance(scale: float) -> float:
    if not isinstance(scale, int | float) or isinstance(scale, bool) or not 0 <= scale < float("inf"):
        raise ValueError(f"guidance_scale is {scale!r}; it must be a finite number of at least 0")
    return float(scale)
