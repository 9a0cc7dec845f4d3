"""Many streams of a causal Wan at once: each forward takes chunks of several, whatever step each is at.

Shape letters: C channels, F latent frames, H, W latent height and width.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from diffusers.utils.torch_utils import randn_tensor

from attention_backend.kv_cache import OutOfBlocks
from attention_backend.kv_cache.interrupts import no_interrupt
from visual_gen.config import AttentionConfig, CausalConfig
from visual_gen.models.wan import CausalWanTransformer
from visual_gen.pipelines.errors import EngineFull, GenerationError
from visual_gen.pipelines.given_frames import check_given
from visual_gen.pipelines.stream import Stream
from visual_gen.pipelines.stream_forward import StreamForward, even_frames, pad_rows
from visual_gen.pipelines.stream_loading import engine_cache, load_stream_parts
from visual_gen.pipelines.stream_record import EngineRecord, ForwardRecord
from visual_gen.pipelines.stream_snapshot import Snapshot, snapshot_meta
from visual_gen.pipelines.stream_state import StreamEvent, check_guidance, stream_settings
from visual_gen.pipelines.stream_text import TextSlots, check_text
from visual_gen.pipelines.text import TextRows

POLICIES = ("refuse", "evict_lru")


class StreamEngine:
    """Opens streams, and steps them together; not thread-safe.

    Made of a transformer and latent_size (H, W), or by from_pretrained. encode: a prompt → TextRows of one row of
    text_len; without it prompts are given as TextRows. causal: chunk length, and window and steps where a stream does
    not say. guidance_scale: where a stream does not say; above 1 the streams have two branches.

    max_streams: how many may be open. memory_bytes: of the KV cache; None: what max_streams of the default window take.
    batch_rows: the most rows of a forward, a row being a branch of a stream. policy: what open() does when there is no
    room: "refuse", or "evict_lru", which closes the stream that was not stepped for longest. rollback_chunks: how many
    chunks a stream can take back. waiting_chunks: a stream with so many chunks not taken is not stepped.
    deterministic: every forward has the same number of rows, filled up where it must, and the same read, so that a
    stream's bits do not depend on who is there. graphs: forwards run as CUDA graphs, filled up to buckets.
    """

    def __init__(
        self,
        transformer: CausalWanTransformer,
        latent_size: tuple[int, int],
        *,
        causal: CausalConfig | dict | None = None,
        encode: Callable[[str], TextRows] | None = None,
        text_len: int = 512,
        text_slots: int | None = None,
        guidance_scale: float = 1.0,
        max_streams: int = 4,
        batch_rows: int | None = None,
        memory_bytes: int | None = None,
        policy: str = "refuse",
        rollback_chunks: int = 0,
        waiting_chunks: int = 4,
        deterministic: bool = False,
        graphs: bool = False,
    ) -> None:
        if policy not in POLICIES:
            raise ValueError(f"policy is {policy!r}; it must be one of {', '.join(POLICIES)}")
        for name, value, least in (
            ("max_streams", max_streams, 1), ("text_len", text_len, 1), ("waiting_chunks", waiting_chunks, 1),
            ("rollback_chunks", rollback_chunks, 0), ("batch_rows", batch_rows, 1), ("text_slots", text_slots, 1),
        ):  # fmt: skip
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise ValueError(f"{name} is {value!r}; it must be an integer of at least {least}")
        config = transformer.config
        patches = config.patch_size[1:]
        if any(size % patch or size < patch for size, patch in zip(latent_size, patches, strict=True)):
            raise ValueError(f"latent_size is {latent_size}; both must be multiples of the patch {patches}")
        if graphs and transformer.device.type != "cuda":
            raise ValueError(f"graphs are CUDA graphs and the model is on {transformer.device}: leave graphs out")
        self.transformer, self.latent_size, self.policy = transformer, tuple(latent_size), policy
        self.causal = CausalConfig.model_validate({} if causal is None else causal)
        self.guidance_scale = check_guidance(guidance_scale)
        self.max_streams, self.rollback_chunks, self.waiting_chunks = max_streams, rollback_chunks, waiting_chunks
        self.deterministic, self.text_len = deterministic, text_len
        self.vae: torch.nn.Module | None = None  # of from_pretrained, for who decodes
        branches = 2 if self.guidance_scale > 1 else 1
        self.batch_rows = batch_rows or max_streams * branches
        # One more than the streams' own: a chunk is kept on trust until its check is read.
        self._kept_chunks = rollback_chunks + 1
        grid = tuple(size // patch for size, patch in zip(latent_size, patches, strict=True))
        frames = self.causal.max_chunk_frames
        buckets = [rows * frames for rows in _buckets(self.batch_rows)] if graphs else []
        if deterministic:
            even = even_frames(transformer, grid[0] * grid[1])
            buckets = [-(-self.batch_rows * frames // even) * even]
        self.cache = engine_cache(
            transformer, self.causal, grid[0] * grid[1], streams=max_streams, branches=branches,
            rollback_chunks=self._kept_chunks, pads=pad_rows(buckets, frames), memory_bytes=memory_bytes,
            one_read=deterministic,
        )  # fmt: skip
        self._texts = TextSlots(transformer, text_slots or 3 * max_streams, text_len, encode)
        self._run = StreamForward(transformer, self.cache, self._texts, grid, frames, buckets=buckets, graphs=graphs)
        self._room = self.cache.free_blocks
        self.streams: list[Stream] = []
        self._last_forward: dict[Stream, int] = {}  # of each stream, in the engine's count
        self._events: list[StreamEvent] = []
        self._forwards = self._next_id = 0
        self._step_tensors: dict[tuple[float, ...], torch.Tensor] = {}
        self._made_at = time.perf_counter()
        choices = transformer.attention_choices.items()
        self._record = EngineRecord(
            max_streams, self.batch_rows, self._room, self.cache.block_size,
            {role: {"backend": choice.name, "why": str(choice.why)} for role, choice in choices},
        )  # fmt: skip

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
        max_streams: int = 4,
        memory_bytes: int | None = None,
        policy: str = "refuse",
        deterministic: bool = False,
        **options,
    ) -> StreamEngine:
        """Loads a diffusers-format folder whose transformer is a causal one. height, width: of the video, in pixels.

        The other arguments are the engine's. Raises ValueError on bad arguments and on folders that are damaged, of
        another pipeline, or whose parts do not fit together.
        """
        parts = load_stream_parts(
            folder_or_id, dtype=dtype, device=device, attention=attention, max_sequence_length=max_sequence_length
        )
        size = parts.geometry.latent_shape(1, 1, height, width)[-2:]
        engine = cls(
            parts.transformer, size, causal=causal, encode=parts.encode, text_len=max_sequence_length,
            max_streams=max_streams, memory_bytes=memory_bytes, policy=policy, deterministic=deterministic, **options,
        )  # fmt: skip
        engine.vae = parts.vae
        return engine

    @property
    def used_blocks(self) -> int:
        """Of the cache, by streams; the record's num_blocks is how many there are."""
        return self._room - self.cache.free_blocks

    def record(self) -> EngineRecord:
        return self._record

    def open(
        self,
        prompt: str | TextRows,
        *,
        negative_prompt: str | TextRows = "",
        seed: int = 0,
        guidance_scale: float | None = None,
        sink_frames: int | None = None,
        recent_frames: int | None = None,
        steps: Sequence[float] | None = None,
        initial_latents: torch.Tensor | None = None,
    ) -> Stream:
        """A stream that nothing is made of yet. None: the engine's setting.

        guidance_scale above 1: two branches, with negative_prompt. initial_latents [C, F, H, W] or [1, C, F, H, W]:
        clean frames to continue from, which are committed now and not given back by take_latents. ValueError, with
        nothing taken, on bad arguments; EngineFull, one too, if there is no room and the policy makes none.
        """
        scale = self.guidance_scale if guidance_scale is None else check_guidance(guidance_scale)
        settings = stream_settings(self.causal, sink_frames=sink_frames, recent_frames=recent_frames, steps=steps)
        prompts = (prompt, negative_prompt) if scale > 1 else (prompt,)
        if len(prompts) > self.batch_rows:
            raise ValueError(f"the stream has {len(prompts)} branches and a forward batch_rows {self.batch_rows}")
        first = initial_latents
        if first is not None:
            first = first[0] if first.ndim == 5 and len(first) == 1 else first
            check_given("initial_latents", first, (self.transformer.config.out_channels, *self.latent_size))
            self._check_positions(first.shape[1])
        generator = self._generator(seed)
        text: list[int] = []
        try:
            for name, each in zip(("prompt", "negative_prompt"), prompts, strict=False):
                text.append(self._take_text(name, each))
            session = self._with_room(
                lambda: self.cache.open_session(
                    sink_frames=settings.sink_frames, recent_frames=settings.recent_frames, branches=len(prompts),
                    max_chunk_frames=settings.max_chunk_frames, rollback_chunks=self._kept_chunks,
                ),
                joins=True,
            )  # fmt: skip
            name = prompt if isinstance(prompt, str) else None
            stream = Stream(self, self._next_id, session, settings, name, tuple(text), scale, generator)
            if first is not None:
                with torch.no_grad():
                    stream._continue(first.to(self.transformer.device, torch.float32))
            return self._add(stream)
        except BaseException:
            self._reconcile()
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
        if len(snapshot.texts) > self.batch_rows:
            raise ValueError(f"the stream has {len(snapshot.texts)} branches and a forward {self.batch_rows} rows")
        meta, device = snapshot.meta, self.transformer.device
        settings, generator = CausalConfig.model_validate(meta["settings"]), self._generator(0)
        there = {at: x.to(device, copy=True) for c in snapshot.history for at, x in c.clean}
        history = tuple(replace(c, clean=tuple((at, there[at]) for at, _ in c.clean)) for c in snapshot.history)
        text: list[int] = []
        try:
            for each in snapshot.texts:
                text.append(self._take_text("prompt", each))
            session = self._with_room(lambda: self.cache.restore_session(snapshot.session), joins=True)
            return self._add(
                Stream(
                    self, self._next_id, session, settings, meta["prompt"], tuple(text), meta["guidance_scale"],
                    generator, history,
                )
            )  # fmt: skip
        except BaseException:
            self._reconcile()
            raise

    def _fork(self, stream: Stream, seed: int | None) -> Stream:
        generator, history = self._generator(seed or 0), stream._history
        if seed is not None:
            history = (*history[:-1], replace(history[-1], generator_state=generator.get_state()))
        try:
            session = self._with_room(stream.session.fork, keep=stream, joins=True)
            text = [self._texts.share(slot) for slot in stream._text]
            fork = Stream(
                self, self._next_id, session, stream.settings, stream.prompt, tuple(text), stream.guidance_scale,
                generator, history,
            )  # fmt: skip
            return self._add(fork)
        except BaseException:
            self._reconcile()
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
        if until == "forward":
            self._forward(self._group(chosen))
            return self._take_events()
        goals = {stream: stream._now.chunk_index + 1 for stream in chosen if stream._ready}
        left = list(goals)
        while left:
            self._forward(self._group(left))
            over = {s for s in left if s.error is not None or s.closed_because is not None}
            left = [s for s in left if s not in over and s._now.chunk_index < goals[s]]
        for stream in goals:
            stream._settle()
        return self._take_events()

    def close(self, stream: Stream | None = None) -> None:
        """Closes a stream, or all, and frees what they have."""
        for each in list(self.streams) if stream is None else [stream]:
            self._close(each, "by its user")

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

    def _group(self, streams: Sequence[Stream]) -> list[Stream]:
        """Of those that can go on, the ones that were not stepped for longest, as many as the batch has rows for."""
        group, rows = [], 0
        for stream in sorted((s for s in streams if s._ready or s._making), key=self._last_forward.__getitem__):
            if rows + len(stream._text) <= self.batch_rows:
                group.append(stream)
                rows += len(stream._text)
        return group

    @torch.no_grad()
    def _forward(self, group: list[Stream]) -> None:
        start = time.perf_counter()
        try:
            begun = [stream for stream in group if self._begun(stream)]
            group = [stream for stream in begun if stream.closed_because is None]  # making room may have closed some
            if group:
                self._launch(group, start)
        except BaseException:
            for stream in group:
                stream._recover()
            raise
        # Now that the device has work, what it said of the forwards before.
        for stream in self.streams:
            stream._settle(before=self._forwards)

    def _begun(self, stream: Stream) -> bool:
        if stream.closed_because is not None:
            return False
        try:
            stream._begin()
        except (ValueError, GenerationError) as error:
            stream._recover()
            stream._fail(error)
            return False
        return True

    def _launch(self, group: list[Stream], start: float) -> None:
        self._forwards += 1
        flows, batch = self._run([stream._part() for stream in group])
        committing = [(stream, flow) for stream, flow in zip(group, flows, strict=True) if stream._making.commits]
        finite, done = _checks([flow for _, flow in committing])
        flags = dict(zip((stream for stream, _ in committing), finite, strict=True))
        for stream, flow in zip(group, flows, strict=True):
            self._last_forward[stream] = self._forwards
            if stream in flags:
                stream._commit(flags[stream], done, self._forwards)
            else:
                index = stream._now.chunk_index
                stream._denoise(flow)
                self._note(StreamEvent(stream, "denoised", index))
        rows = sum(len(stream._text) for stream in group)
        now = time.perf_counter()
        self._record.add(
            ForwardRecord(
                start - self._made_at, now - start, tuple(stream.id for stream in group), rows, batch.num_rows - rows,
                sum(batch.frames), len(group) - len(flags), len(flags), self.used_blocks, batch.read,
            )
        )  # fmt: skip

    def _with_room(self, make: Callable, *, keep: Stream | None = None, joins: bool = False):
        """What `make` makes; where there is no room for it, the policy decides. keep: not to be closed for it. joins:
        it is a stream more."""
        while True:
            why = f"{len(self.streams)} streams are open (max_streams)"
            if not joins or len(self.streams) < self.max_streams:
                try:
                    return make()
                except OutOfBlocks as error:
                    why = str(error)
            others = [stream for stream in self.streams if stream is not keep]
            if self.policy == "refuse" or not others:
                raise EngineFull(f"no room: {why}")
            self._close(min(others, key=self._last_forward.__getitem__), "evicted to make room")
            self._record.evicted += 1

    def _take_text(self, name: str, prompt: str | TextRows) -> int:
        """A text slot with the prompt's K/V."""
        check_text(name, prompt, self.transformer.config.text_dim, self.text_len)
        with torch.no_grad():
            return self._texts.take(prompt)

    def _generator(self, seed: int) -> torch.Generator:
        if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**63:
            raise ValueError(f"seed is {seed!r}; it must be an integer from 0 to 2**63 - 1")
        return torch.Generator(self.transformer.device).manual_seed(seed)

    def _reconcile(self) -> None:
        """After something that ended half-way: what no stream has is free."""
        with no_interrupt():
            ours = [stream.session for stream in self.streams] + self._run.pads
            for session in [session for session in self.cache.sessions if session not in ours]:
                session.close()
            self._texts.keep([slot for stream in self.streams for slot in stream._slots])

    def _add(self, stream: Stream) -> Stream:
        with no_interrupt():
            self._last_forward[stream] = self._forwards
            self.streams.append(stream)
            self._next_id += 1
            self._record.opened += 1
            self._record.peak_blocks = max(self._record.peak_blocks, self.used_blocks)
            return stream

    def _close(self, stream: Stream, why: str) -> None:
        if stream.closed_because is not None:
            return
        if stream._engine is not self:
            raise ValueError(f"stream {stream.id} is another engine's: close it there")
        with no_interrupt():
            stream._settle()
            stream.session.close()
            for slot in stream._slots:
                self._texts.give(slot)
            stream.closed_because, stream._making = why, None
            self.streams.remove(stream)
            del self._last_forward[stream]

    def _note(self, event: StreamEvent) -> None:
        self._events.append(event)
        self._record.chunks += event.kind == "committed"
        self._record.failed_chunks += event.kind == "failed"

    def _take_events(self) -> list[StreamEvent]:
        events, self._events = self._events, []
        return events

    def _check_positions(self, frames: int) -> None:
        end = self.transformer.config.rope_max_seq_len
        if frames > end:
            raise ValueError(
                f"the next chunk ends at latent frame {frames} and the model knows {end} (rope_max_seq_len): close the "
                "stream, and continue from its last frames in another"
            )

    def _timesteps(self, settings: CausalConfig) -> torch.Tensor:
        """The settings' timesteps on the device, 0 behind them."""
        steps = settings.timesteps
        if steps not in self._step_tensors:
            self._step_tensors[steps] = torch.tensor((*steps, 0.0), device=self.transformer.device)
        return self._step_tensors[steps]

    def _noise(self, frames: int, generator: torch.Generator) -> torch.Tensor:
        shape = (self.transformer.config.out_channels, frames, *self.latent_size)
        return randn_tensor(shape, generator=generator, device=self.transformer.device, dtype=torch.float32)


def _checks(flows: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], torch.cuda.Event | None]:
    """Whether each flow is finite throughout, on its way to the host, and when it will be there."""
    if not flows:
        return [], None
    finite = torch.stack([torch.isfinite(flow).all() for flow in flows])
    if finite.device.type != "cuda":
        return list(finite), None
    host = torch.empty(finite.shape, dtype=torch.bool, pin_memory=True)
    host.copy_(finite, non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    return list(host), done


def _buckets(rows: int) -> list[int]:
    """Powers of two below `rows`, and `rows`."""
    return [*(1 << i for i in range(rows.bit_length()) if 1 << i < rows), rows]
