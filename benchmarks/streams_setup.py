"""Shapes, models and engines of the benchmark of streams, and how a call is timed there."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from visual_gen.config import CausalConfig
from visual_gen.models.wan import WAN_PRESETS, CausalWanTransformer, WanConfig
from visual_gen.pipelines.stream_engine import StreamEngine
from visual_gen.pipelines.text import TextRows

STREAMS = 4


@dataclasses.dataclass(frozen=True)
class Shape:
    """latent: height and width; steps: denoising forwards of a chunk that is timed."""

    latent: tuple[int, int]
    chunk_frames: int
    recent_frames: int
    steps: int

    @property
    def frame_tokens(self) -> int:
        return self.latent[0] * self.latent[1] // 4

    @property
    def settings(self) -> CausalConfig:
        steps = CausalConfig().steps[: self.steps]
        return CausalConfig(frames_per_chunk=self.chunk_frames, recent_frames=self.recent_frames, steps=steps)


@dataclasses.dataclass(frozen=True)
class Size:
    config: WanConfig
    shapes: Mapping[str, Shape]
    text_rows: int
    dtype: torch.dtype
    device: str


FULL = Size(
    WAN_PRESETS["wan2.1-t2v-1.3b"], {"short": Shape((40, 40), 1, 21, 4), "long": Shape((60, 104), 3, 21, 2)}, 512,
    torch.bfloat16, "cuda",
)  # fmt: skip
TOY = Size(
    WanConfig(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, text_dim=16, freq_dim=16,
        ffn_dim=32, num_layers=2, rope_max_seq_len=256,
    ),
    {"short": Shape((4, 4), 1, 3, 2), "long": Shape((4, 6), 3, 6, 1)}, 8, torch.float32, "cpu",
)  # fmt: skip


class Bench:
    """Models and engines of one size; `choice` is the backend of self-attention that the last one took."""

    def __init__(self, size: Size, backend: str, rounds: int) -> None:
        self.size, self.backend, self.rounds, self.cuda = size, backend, rounds, size.device == "cuda"
        self.choice: dict[str, str] = {}

    def model(self, *, compiled: bool = False) -> CausalWanTransformer:
        size = self.size
        gc.collect()  # what was before this one: engines and their streams refer to each other
        if self.cuda:
            torch.cuda.empty_cache()
        torch.manual_seed(0)
        model = CausalWanTransformer(
            size.config, attention={"self": self.backend}, dtype=size.dtype, device=size.device
        )
        model.requires_grad_(False)
        choice = model.attention_choices["self"]
        self.choice = {"backend": choice.name, "why": str(choice.why)}
        if compiled:
            torch._dynamo.reset()  # another model's graphs are no start for this one
            model.compile_blocks(**({} if self.cuda else {"backend": "eager"}))
        return model

    @contextmanager
    def engine(self, shape: Shape, mode: str, max_streams: int = STREAMS) -> Iterator[StreamEngine]:
        engine = StreamEngine(
            self.model(compiled="compiled" in mode), shape.latent, causal=shape.settings, max_streams=max_streams,
            text_len=self.size.text_rows, waiting_chunks=1_000_000, graphs="graphs" in mode,
        )  # fmt: skip
        try:
            yield engine
        finally:
            engine.close()

    def text(self, seed: int) -> TextRows:
        """Of one prompt that fills the text."""
        generator = torch.Generator(self.size.device).manual_seed(seed)
        shape = (1, self.size.text_rows, self.size.config.text_dim)
        on = {"dtype": self.size.dtype, "device": self.size.device}
        return TextRows(torch.randn(shape, generator=generator, **on), [self.size.text_rows], [0])

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def timed(self, call: Callable[[], object]) -> dict[str, float]:
        """Milliseconds until the device has done all of it, and between device events before and behind it."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if self.cuda else []
        self.synchronize()
        start = time.perf_counter()
        if events:
            events[0].record()
        call()
        if events:
            events[1].record()
        self.synchronize()
        wall = 1000 * (time.perf_counter() - start)
        return {"wall_ms": wall, "device_ms": events[0].elapsed_time(events[1]) if events else wall}

    def host_ms(self, call: Callable[[], object]) -> tuple[float, object]:
        """What the host takes for a call when the device is idle, and what comes back."""
        self.synchronize()
        start = time.perf_counter()
        found = call()
        return 1000 * (time.perf_counter() - start), found
