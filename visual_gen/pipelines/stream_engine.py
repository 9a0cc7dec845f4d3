"""Many streams of a causal Wan at once: each forward takes chunks of several, whatever step each is at.

engine = StreamEngine.from_pretrained(folder, height=96, width=96, max_streams=4)
stream = engine.open("a red circle moving right")
while stream.chunk_index < 20:
    engine.step()                       # one forward, for all streams that are open
    for latents in stream.take_latents():
        ...                             # [1, C, F, H, W], for a FrameDecoder
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from visual_gen.config import AttentionConfig, CausalConfig
from visual_gen.models.wan import CausalWanTransformer
from visual_gen.pipelines.given_frames import check_given
from visual_gen.pipelines.latents import draw_noise
from visual_gen.pipelines.stream import Stream
from visual_gen.pipelines.stream_forward import StreamForward, pad_rows
from visual_gen.pipelines.stream_loading import engine_cache, load_stream_parts
from visual_gen.pipelines.stream_options import EngineOptions
from visual_gen.pipelines.stream_record import EngineRecord
from visual_gen.pipelines.stream_room import StreamRoom, seeded
from visual_gen.pipelines.stream_scheduler import StreamScheduler
from visual_gen.pipelines.stream_snapshot import Snapshot, snapshot_meta
from visual_gen.pipelines.stream_state import StreamEvent, check_guidance, stream_settings
from visual_gen.pipelines.stream_text import TextSlots, check_text
from visual_gen.pipelines.text import TextRows
from visual_gen.runtime.streams import TEXT_SLOTS


class StreamEngine:
    """Opens streams, and steps them together; not thread-safe.

    Made of a transformer and latent_size (H, W), or by from_pretrained. causal: chunk length, and window and steps
    where a stream does not say; its window is the largest that a stream can have, its rope_max_seq_len how long one can
    get. encode: a prompt → TextRows of one row of text_len; without it prompts are given as TextRows. options: the
    fields of EngineOptions. ValueError on what cannot be.
    """

    def __init__(
        self,
        transformer: CausalWanTransformer,
        latent_size: tuple[int, int],
        *,
        causal: CausalConfig | dict | None = None,
        encode: Callable[[str], TextRows] | None = None,
        **options,
    ) -> None:
        self.options = options = EngineOptions(**options)
        if len(latent_size) != 2 or not all(isinstance(size, int) for size in latent_size):
            raise ValueError(f"latent_size is {latent_size}; it must be (H, W), two integers")
        patches = transformer.config.patch_size[1:]
        if any(size % patch or size < patch for size, patch in zip(latent_size, patches, strict=True)):
            raise ValueError(f"latent_size is {latent_size}; both must be multiples of the patch {patches}")
        self.transformer, self.latent_size = transformer, tuple(latent_size)
        self.causal = CausalConfig.model_validate({} if causal is None else causal)
        self._frames_end = self.causal.frames_end(transformer.config.rope_max_seq_len)
        transformer.extend_frames(self._frames_end)
        self.vae: torch.nn.Module | None = None  # of from_pretrained, for who decodes
        grid = tuple(size // patch for size, patch in zip(latent_size, patches, strict=True))
        frame_tokens, chunk_frames = grid[0] * grid[1], self.causal.max_chunk_frames
        buckets = options.buckets(transformer, frame_tokens, chunk_frames)
        self.cache = engine_cache(
            transformer, self.causal, frame_tokens, options, pads=pad_rows(buckets, chunk_frames)
        )  # fmt: skip
        slots = options.text_slots or TEXT_SLOTS * options.max_streams
        self._texts = TextSlots(transformer, slots, options.text_len, encode)
        self._run = StreamForward(
            transformer, self.cache, self._texts, grid, chunk_frames, buckets=buckets, graphs=options.graphs
        )
        choices = transformer.attention_choices.items()
        self._record = EngineRecord(
            options.max_streams, options.rows, self.cache.free_blocks, self.cache.block_size,
            {role: {"backend": choice.name, "why": str(choice.why)} for role, choice in choices},
            self.cache.read_counts,
        )  # fmt: skip
        self._room = StreamRoom(self.cache, self._texts, self._run.pads, options, self._record)
        self._scheduler = StreamScheduler(self._room, self._run, options.rows, self._record)
        self._step_tensors: dict[tuple[float, ...], torch.Tensor] = {}

    @classmethod
    def from_pretrained(
        cls,
        folder_or_id: str | Path,
        *,
        causal: CausalConfig | dict | None = None,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        attention: AttentionConfig | dict | None = None,
        height: int,
        width: int,
        max_sequence_length: int = 512,
        compile: bool = False,
        **options,
    ) -> StreamEngine:
        """Loads a diffusers-format folder whose transformer is a causal one. height, width: of the video, in pixels.
        compile: its blocks (see WanTransformer.compile_blocks).

        options: the fields of EngineOptions but text_len, which is max_sequence_length. Raises ValueError on bad
        arguments and on folders that are damaged, of another pipeline, or whose parts do not fit together.
        """
        EngineOptions(text_len=max_sequence_length, **options)  # before anything is loaded
        parts = load_stream_parts(
            folder_or_id, dtype=dtype, device=device, attention=attention, max_sequence_length=max_sequence_length,
            compile=compile,
        )  # fmt: skip
        size = parts.geometry.latent_shape(1, 1, height, width)[-2:]
        engine = cls(
            parts.transformer, size, causal=causal, encode=parts.encode, text_len=max_sequence_length, **options
        )
        engine.vae = parts.vae
        return engine

    @property
    def streams(self) -> list[Stream]:
        """The open ones."""
        return self._room.streams

    @property
    def used_blocks(self) -> int:
        """Of the cache, by streams; the record's num_blocks is how many there are."""
        return self._room.used_blocks

    def record(self) -> EngineRecord:
        return self._record

    def open(
        self,
        prompt: str | TextRows,
        *,
        negative_prompt: str | TextRows = "",
        seed: int | torch.Generator = 0,
        guidance_scale: float | None = None,
        sink_frames: int | None = None,
        recent_frames: int | None = None,
        steps: Sequence[float] | None = None,
        initial_latents: torch.Tensor | None = None,
    ) -> Stream:
        """A stream that nothing is made of yet. None: the engine's setting. seed: of its noise, or the generator that
        it is drawn from, which is then the stream's alone; to be restored from a snapshot, one on the model's device.

        guidance_scale above 1: two branches, with negative_prompt. initial_latents [C, F, H, W] or [1, C, F, H, W]:
        clean frames to continue from, which are committed now and not given back by take_latents. ValueError, with
        nothing taken, on bad arguments; EngineFull, one too, if there is no room and the policy makes none.
        """
        scale = self.options.guidance_scale if guidance_scale is None else check_guidance(guidance_scale)
        settings = stream_settings(self.causal, sink_frames=sink_frames, recent_frames=recent_frames, steps=steps)
        given = {"prompt": prompt, "negative_prompt": negative_prompt} if scale > 1 else {"prompt": prompt}
        self._check_rows(len(given))
        first = initial_latents
        if first is not None:
            first = first[0] if first.ndim == 5 and len(first) == 1 else first
            check_given("initial_latents", first, (self.transformer.config.out_channels, *self.latent_size))
            self._check_positions(first.shape[1])
        generator = seed if isinstance(seed, torch.Generator) else seeded(seed)
        try:
            text = tuple([self._take_text(name, each) for name, each in given.items()])
            session = self._room.make(
                lambda: self.cache.open_session(
                    sink_frames=settings.sink_frames, recent_frames=settings.recent_frames, branches=len(given),
                    max_chunk_frames=settings.max_chunk_frames, rollback_chunks=self.options.kept_chunks,
                ),
                joins=True,
            )  # fmt: skip
            name = prompt if isinstance(prompt, str) else None
            stream = self._add(session, settings, name, text, scale, generator)
            if first is not None:
                self._continue(stream, first)
            return stream
        except BaseException:
            self._room.reconcile()
            raise

    def restore(self, snapshot: Snapshot | str | Path) -> Stream:
        """The stream that Stream.snapshot was taken of, or its file, as a new one. The model must be the same: shapes
        are compared, weights are not. FileNotFoundError; ValueError, with nothing taken, on a damaged file and on a
        snapshot of another geometry; EngineFull."""
        if not isinstance(snapshot, Snapshot):
            snapshot = Snapshot.load(snapshot)
        for key, ours in snapshot_meta(self).items():
            if snapshot.meta.get(key) != ours:
                raise ValueError(f"the snapshot has {key} {snapshot.meta.get(key)!r}, this engine {ours!r}")
        self._check_rows(len(snapshot.texts))
        meta, device = snapshot.meta, self.transformer.device
        settings = CausalConfig.model_validate(meta["settings"])
        there = {at: x.to(device, copy=True) for c in snapshot.history for at, x in c.clean}
        history = tuple(replace(c, clean=tuple((at, there[at]) for at, _ in c.clean)) for c in snapshot.history)
        try:
            text = tuple([self._take_text("prompt", each) for each in snapshot.texts])
            session = self._room.make(lambda: self.cache.restore_session(snapshot.session), joins=True)
            return self._add(
                session, settings, meta["prompt"], text, meta["guidance_scale"], seeded(0), history
            )  # fmt: skip
        except BaseException:
            self._room.reconcile()
            raise

    def step(self, streams: Sequence[Stream] | None = None, *, until: str = "forward") -> list[StreamEvent]:
        """One forward for the streams that waited longest, of `streams` (None: all that have not failed), as many as
        the batch holds; or, until "chunk", forwards until each of them has finished a chunk or failed.

        A stream that has failed tries its chunk again if it is named. An exception or Ctrl-C in a forward drops the
        chunks of the streams in it, which are then as before these chunks, and is raised.
        """
        if until not in ("forward", "chunk"):
            raise ValueError(f"until is {until!r}; it must be 'forward' or 'chunk'")
        chosen = self._chosen(streams)
        (self._scheduler.forward if until == "forward" else self._scheduler.chunk)(chosen)
        return self._scheduler.take_events()

    def close(self, stream: Stream | None = None) -> None:
        """Closes a stream, or all, and frees what they have."""
        for each in self.streams if stream is None else [stream]:
            if each._engine is not self:
                raise ValueError(f"stream {each.id} is another engine's: close it there")
            if each.closed_because is None:
                self._room.close(each, "by its user")

    def _fork(self, stream: Stream, seed: int | None) -> Stream:
        generator, history = seeded(seed or 0, stream._generator.device), stream._history
        if seed is not None:
            history = (*history[:-1], replace(history[-1], generator_state=generator.get_state()))
        try:
            session = self._room.make(stream.session.fork, keep=stream, joins=True)
            text = tuple([self._texts.share(slot) for slot in stream._text])
            return self._add(
                session, stream.settings, stream.prompt, text, stream.guidance_scale, generator, history
            )  # fmt: skip
        except BaseException:
            self._room.reconcile()
            raise

    def _add(self, *of_stream) -> Stream:
        return self._room.add(lambda id: Stream(self, id, *of_stream), self._scheduler.forwards)

    @torch.no_grad()
    def _continue(self, stream: Stream, latents: torch.Tensor) -> None:
        try:
            stream._continue(latents.to(self.transformer.device, torch.float32))
        except BaseException:
            self.close(stream)
            raise

    def _chosen(self, streams: Sequence[Stream] | None) -> list[Stream]:
        if streams is None:
            return [stream for stream in self.streams if stream.error is None]
        chosen = list(dict.fromkeys(streams))
        for stream in chosen:
            if stream._engine is not self:
                raise ValueError(f"stream {stream.id} is another engine's: step it there")
            stream._check_open()
        for stream in chosen:
            stream.error = None
        return chosen

    def _take_text(self, name: str, prompt: str | TextRows) -> int:
        """A text slot with the prompt's K/V."""
        check_text(name, prompt, self.transformer.config.text_dim, self.options.text_len)
        with torch.no_grad():
            return self._texts.take(prompt)

    def _check_rows(self, branches: int) -> None:
        if branches > self.options.rows:
            raise ValueError(
                f"the stream has {branches} branches and a forward {self.options.rows} rows: raise batch_rows"
            )

    def _check_positions(self, frames: int) -> None:
        if frames > self._frames_end:
            raise ValueError(
                f"the next chunk ends at latent frame {frames} and the engine knows {self._frames_end} "
                "(causal.rope_max_seq_len): make the engine with more, or close the stream and continue from its last "
                "frames in another"
            )

    def _timesteps(self, settings: CausalConfig) -> torch.Tensor:
        """The settings' timesteps on the device, 0 behind them."""
        steps = settings.timesteps
        if steps not in self._step_tensors:
            self._step_tensors[steps] = torch.tensor((*steps, 0.0), device=self.transformer.device)
        return self._step_tensors[steps]

    def _noise(self, frames: int, generator: torch.Generator) -> torch.Tensor:
        shape = (self.transformer.config.out_channels, frames, *self.latent_size)
        return draw_noise(shape, generator, self.transformer.device)
