"""Attention of causal Wan's chunks over a paged KV cache, on one GPU: reads, writes, and the host's bookkeeping.

    python benchmarks/paged_attention.py [--rounds 5] [--backends NAME ...] [--output FILE.json] [--smoke]

Geometry of 1.3B at 480p in bf16: chunks of 3 latent frames of 1 560 tokens over 9 and 21 visible frames, of them 0 and
3 sink, 1, 4 and 8 sessions, all with full windows or with windows of their own ("uneven"). All times of a point are
medians of one run, for one attention site, by device events. Arms take turns, call by call: a device's clock follows
what it did for the last milliseconds, by more than what is looked for here.

- `BACKEND contiguous | extent | block_table`: the kernel alone, everything prepared, over a few layers' K/V in turn.
- `BACKEND read`: the default read of a cache, over its tensors with its metadata, layer by layer, nothing written.
- `BACKEND chunk`: all that a cache does for a chunk of 5 forwards over 10 layers: begin, forwards (batch, then norm and
  RoPE, write and attend in every layer, from one projection of Q, K and V), commit. The sessions' windows slide
  meanwhile, so what is overwritten is set aside too.
- `BACKEND staged chunk`: the same with the staged read.

`write_and_metadata_ms` is what such a chunk takes more, for each site, than Q and K normalised and turned into tensors
of their own and then the default read, which take turns with it forward by forward. All keys of that read come from the
device's memory, where the chunk's own may still be in its L2 cache: what is found may be low by up to 1 % of attention
at 9 frames of one session. For the staged chunk the difference of the two reads is in it.
`copied_by_bandwidth` is what the bytes alone of what a chunk copies (V; K and V that are set aside) take at 4.4 TB/s,
over the read. `host_ms_per_forward` is what the host spends for a chunk outside the layers' operators, by forwards,
launches included, without waiting for the device; `host_layers` says of how many layers. --smoke runs everything at toy
size on a CPU.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from measure import Spans, relative, save

from attention_backend import AttentionBackend, AttentionMetadataState, AttentionSpec, select_backend
from attention_backend.kv_cache import CachedAttention, Chunk, KVBatch, LayerKV, PagedKVCache, SessionGeometry
from attention_backend.kv_cache.geometry import GUARD_ROWS
from attention_backend.kv_cache.sizes import choose_block_size
from attention_backend.metadata import AttentionMetadata
from visual_gen.modules.qk_norm_rope import norm_and_rope
from visual_gen.runtime.versions import installed_versions

KERNEL_LAYERS = 3  # whose K/V a kernel alone reads in turn: no cache of the device's holds what the next call needs
FORWARDS = 5  # of a chunk: four denoising, one committing
UNEVEN = (1.0, 0.45, 0.15, 0.7)  # of the window, for each session in turn
HOST_CHUNKS = 20
SITES = 20  # calls of each kernel in a round
BYTES_PER_MS = 4.4e9  # of device memory, read and written: the fastest pass that was measured on an H200
EPS = 1e-6
BACKENDS = ["paged_flash_attn3", "flash_attn4"]
GOALS = {"read over": 0.02, "write and metadata": 0.03, "host ms": 0.5}  # the most that each may be


@dataclass(frozen=True)
class Size:
    heads: int
    head_dim: int
    frame_tokens: int
    chunk_frames: int
    layers: int  # whose K/V are read and written
    host_layers: int  # that the host's bookkeeping is for
    dtype: torch.dtype
    device: str
    visible: tuple[int, ...]
    sinks: tuple[int, ...]
    sessions: tuple[int, ...]


FULL = Size(12, 128, 1560, 3, 10, 30, torch.bfloat16, "cuda", (9, 21), (0, 3), (1, 4, 8))
TOY = Size(2, 16, 24, 1, 2, 3, torch.float32, "cpu", (3,), (0, 1), (1, 2))


@dataclass(frozen=True)
class Point:
    windows: tuple[int, ...]  # visible frames of each session
    sink: int

    @property
    def name(self) -> str:
        return f"{len(self.windows)} sessions, {max(self.windows)} frames, sink {self.sink}" + (
            f", uneven {'/'.join(map(str, self.windows))}" if len(set(self.windows)) > 1 else ""
        )

    def geometry(self, window: int, size: Size) -> SessionGeometry:
        sink = min(self.sink, window - size.chunk_frames)
        return SessionGeometry(
            frame_tokens=size.frame_tokens, sink_frames=sink, recent_frames=window - sink,
            max_chunk_frames=size.chunk_frames,
        )  # fmt: skip


def points(size: Size) -> Iterator[Point]:
    for visible, sink, count in itertools.product(size.visible, size.sinks, size.sessions):
        yield Point((visible,) * count, sink)
        if count > 1:
            chunks = visible // size.chunk_frames
            uneven = [size.chunk_frames * max(1, round(chunks * UNEVEN[i % len(UNEVEN)])) for i in range(count)]
            yield Point(tuple(uneven), sink)


class Site:
    """Self-attention of `tokens` tokens between its projections, over a cache, as the model has it on its device."""

    def __init__(self, size: Size, backend: AttentionBackend, tokens: int) -> None:
        inner, on = size.heads * size.head_dim, {"device": size.device}
        self.cached = CachedAttention(backend)
        self.qkv = torch.randn(tokens, 3, size.heads, size.head_dim, dtype=size.dtype, **on)
        self.weight = torch.rand(2, inner, dtype=size.dtype, **on) + 0.5
        angles = torch.rand(tokens, size.head_dim // 2, **on)
        self.rotary = torch.stack([angles.cos(), angles.sin()], dim=-1)

    def norm_and_rope(self) -> list[torch.Tensor]:
        found = norm_and_rope(self.qkv[None], self.weight, self.rotary.unsqueeze(1), EPS)
        return [x.flatten(0, 1) for x in found]

    def __call__(self, layer: LayerKV) -> torch.Tensor:
        if self.qkv.is_cuda:
            return self.cached.from_qkv(self.qkv, self.weight, self.rotary, EPS, layer)
        return self.cached(*self.norm_and_rope(), layer)


class Streams:
    """A cache with a session for each window of a point, all windows full and sliding."""

    def __init__(self, size: Size, point: Point, backend: AttentionBackend, read: str, layers: int) -> None:
        self.size, self.layers = size, layers
        geometries = [point.geometry(window, size) for window in point.windows]
        block_size = choose_block_size(backend, size.frame_tokens)
        blocks = sum(g.branch_blocks(block_size, run=True) + g.journal_blocks(block_size) for g in geometries)
        # With max_frames every copy has room for the largest window.
        largest = max(g.branch_blocks(1, run=True) for g in geometries)
        staging = len(geometries) * largest if read == "staged" else 0
        self.cache = PagedKVCache(
            layers, size.heads, size.head_dim, size.frame_tokens, num_blocks=blocks + 1, block_size=block_size,
            backend=backend, dtype=size.dtype, device=size.device, read=read, staging_tokens=staging,
            max_frames=max(point.windows),
        )  # fmt: skip
        self.sessions = [
            self.cache.open_session(
                sink_frames=g.sink_frames, recent_frames=g.recent_frames, max_chunk_frames=size.chunk_frames
            )
            for g in geometries
        ]
        self.site = Site(size, backend, len(geometries) * size.chunk_frames * size.frame_tokens)
        for _ in range(max(point.windows) // size.chunk_frames):
            self.chunk(self.site, forwards=1)

    def chunk(self, attend: Site | None, forwards: int = FORWARDS) -> None:
        """The next chunk of every session; without `attend` only what surrounds the layers' operators."""
        with ExitStack() as chunks:
            begun = self.begin(chunks)
            for _ in range(forwards):
                self.forward(attend, self.cache.batch(begun))
            for chunk in begun:
                chunk.commit()

    def chunk_beside(self, attend: Site, other: Callable[[], object]) -> tuple[float, float]:
        """Milliseconds of a site in such a chunk, and in `other`, which goes through as many layers between its
        forwards."""
        spans = Spans(self.size.device)
        other()  # until the chunk's first call is launched
        with ExitStack() as chunks:
            begun = spans("chunk", partial(self.begin, chunks))
            for _ in range(FORWARDS):
                spans("chunk", lambda: self.forward(attend, self.cache.batch(begun)))
                spans("other", other)
            for chunk in begun:
                spans("chunk", chunk.commit)
        ms = spans.milliseconds()
        return tuple(sum(ms[name]) / (FORWARDS * self.layers) for name in ("chunk", "other"))

    def begin(self, chunks: ExitStack) -> list[Chunk]:
        return [chunks.enter_context(session.begin(self.size.chunk_frames)) for session in self.sessions]

    def forward(self, attend: Site | None, batch: KVBatch) -> torch.Tensor | None:
        out = None
        for i in range(self.layers):
            layer = batch.layer(i)
            if attend is not None:
                out = attend(layer)
        return out

    def host_ms(self) -> float:
        """Of bookkeeping, for a forward; the device works at what is launched meanwhile.

        The median of chunks that each find the device idle. A host that runs on from chunk to chunk soon waits for room
        in the device's queue, and would measure how long the device takes to set aside what the chunks overwrite.
        """
        seconds = []
        for _ in range(1 + HOST_CHUNKS):
            if self.size.device == "cuda":
                torch.cuda.synchronize()
            start_s = time.perf_counter()
            self.chunk(None)
            seconds.append(time.perf_counter() - start_s)
        return 1000 * statistics.median(seconds[1:]) / FORWARDS

    def __enter__(self) -> Streams:
        return self

    def __exit__(self, *exception) -> None:
        for session in self.sessions:
            session.close()


def keys_of(layer: LayerKV) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a pool as an extent read takes them."""
    return layer.k.flatten(0, 1), layer.v.flatten(0, 1)


@dataclass(frozen=True)
class Layout:
    """K/V of KERNEL_LAYERS layers in one form, for the kernels alone."""

    layers: list[tuple[torch.Tensor, torch.Tensor]]
    metadata: AttentionMetadata


def layouts(size: Size, lens: list[int], q_len: int, packed: list[tuple[torch.Tensor, torch.Tensor]], block_size: int):
    """Packed K/V as they are, in one run of a pool for each session, and in scattered blocks."""
    state, bounds = AttentionMetadataState(), {"max_seqlen_kv": max(lens), "q_lens": [q_len] * len(lens)}
    starts = [0, *itertools.accumulate(n + GUARD_ROWS for n in lens)]
    counts = [-(-n // block_size) for n in lens]
    blocks = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)) + 1
    tables = [table.tolist() for table in blocks.split(counts)]

    def runs(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([F.pad(rows, (0, 0, 0, 0, 0, GUARD_ROWS)) for rows in x.split(lens)])

    def scattered(x: torch.Tensor) -> torch.Tensor:
        pool = x.new_zeros(sum(counts) + 1, block_size, *x.shape[1:])
        for table, rows in zip(tables, x.split(lens), strict=True):
            missing = len(table) * block_size - len(rows)
            pool[table] = F.pad(rows, (0, 0, 0, 0, 0, missing)).unflatten(0, (-1, block_size))
        return pool

    padded = [table + [0] * (max(counts) - len(table)) for table in tables]
    device = size.device
    return {
        "contiguous": Layout(packed, state.packed_kv("self", lens, device, **bounds)),
        "extent": Layout(
            [(runs(k), runs(v)) for k, v in packed],
            state.extent_kv("self", starts[:-1], lens, starts[-1], device, **bounds),
        ),
        "block_table": Layout(
            [(scattered(k), scattered(v)) for k, v in packed],
            state.paged_kv("self", padded, lens, block_size, device, **bounds),
        ),
    }


def visible_keys(layers: list[LayerKV]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What an extent read of a cache shows, packed."""
    metadata = layers[0].metadata
    runs = [slice(start, start + n) for start, n in zip(metadata.starts, metadata.kv_lens, strict=True)]
    return [tuple(torch.cat([x[run] for run in runs]) for x in keys_of(layer)) for layer in layers]


def measure(size: Size, point: Point, backends: list[AttentionBackend], rounds: int) -> dict:
    first = backends[0].name
    with Streams(size, point, backends[0], "auto", size.host_layers) as streams:
        host_ms = {"auto": round(streams.host_ms(), 4)}
    del streams
    gc.collect()  # caches and sessions refer to each other
    with ExitStack() as stack:
        default, staged = (stack.enter_context(Streams(size, point, backends[0], read, size.layers))
                           for read in ("auto", "staged"))  # fmt: skip
        host_ms["staged"] = round(staged.host_ms(), 4)
        sites = {backend.name: Site(size, backend, len(default.site.qkv)) for backend in backends[1:]}
        sites[first] = default.site
        with ExitStack() as chunks:
            batch = default.cache.batch(default.begin(chunks))
            if batch.read != "extent":
                raise RuntimeError(f"the cache reads by {batch.read} ({batch.read_reason}), not by extents")
            out = default.forward(default.site, batch)
            layers = [batch.layer(i) for i in range(size.layers)]
            packed = visible_keys(layers[-KERNEL_LAYERS:])
        q, lens = default.site.norm_and_rope()[0], [window * size.frame_tokens for window in point.windows]
        kernel_layouts = layouts(size, lens, len(q) // len(lens), packed, default.cache.block_size)

        def without_cache(backend: AttentionBackend, site: Site) -> None:
            for layer in layers:
                backend.forward(site.norm_and_rope()[0], *keys_of(layer), layer.metadata)

        def forms() -> Iterator[tuple[str, AttentionBackend, list, AttentionMetadata]]:
            for backend in backends:
                for name, layout in kernel_layouts.items():
                    yield f"{backend.name} {name}", backend, layout.layers, layout.metadata
                yield f"{backend.name} read", backend, [keys_of(layer) for layer in layers], layers[0].metadata

        last = {name: backend.forward(q, *pairs[-1], metadata) for name, backend, pairs, metadata in forms()}
        expected = last[f"{first} contiguous"]
        differences = {name: relative(found, expected) for name, found in last.items()}
        differences[f"{first} chunk"] = relative(out, expected)
        del out, last, expected

        arms = {name: (backend, itertools.cycle(pairs), metadata) for name, backend, pairs, metadata in forms()}
        spans, order, written = Spans(size.device), random.Random(0), {}
        for _ in range((rounds + 1) * SITES):
            for name in order.sample(list(arms), len(arms)):
                backend, pairs, metadata = arms[name]
                spans(name, partial(backend.forward, q, *next(pairs), metadata))
        found = spans.milliseconds()
        ms = {name: statistics.median(found[name][SITES:]) for name in arms}
        streams = [(f"{backend.name} chunk", default, backend) for backend in backends]
        for name, cache, backend in [*streams, (f"{first} staged chunk", staged, backends[0])]:
            site = sites[backend.name]
            beside = [cache.chunk_beside(site, partial(without_cache, backend, site)) for _ in range(rounds + 1)][1:]
            ms[name] = statistics.median(chunk for chunk, _ in beside)
            written[name] = statistics.median(chunk - other for chunk, other in beside)
        rows = len(q) * (1 + 2 / FORWARDS)  # V in each forward, K and V that are set aside in each chunk
        copied_bytes = 2 * rows * size.heads * size.head_dim * size.dtype.itemsize  # read and written
        return {
            "read": batch.read,
            "block_size": default.cache.block_size,
            "cache_bytes": default.cache.memory_bytes,
            "rms_difference": differences,
            "median_ms": {name: round(found, 4) for name, found in ms.items()},
            "write_and_metadata_ms": {name: round(found, 4) for name, found in written.items()},
            "copied_by_bandwidth": round(copied_bytes / BYTES_PER_MS / ms[f"{first} read"], 6),
            "host_ms_per_forward": host_ms,
            "host_layers": {"auto": size.host_layers, "staged": size.layers},
        }


def goals(results: dict[str, dict], backends: list[str]) -> list[dict]:
    """What is to be reached and what was measured, for each backend; the first is the one that reads are held to."""
    found = []
    for point, result in results.items():
        ms, written = result["median_ms"], result["write_and_metadata_ms"]
        for name in backends:
            reading = ms[f"{name} read"]
            found += [
                (point, f"{name} read over {backends[0]} contiguous", reading / ms[f"{backends[0]} contiguous"] - 1),
                (point, f"{name} write and metadata by attention", written[f"{name} chunk"] / reading),
            ]
        found.append((point, "host ms a forward", result["host_ms_per_forward"]["auto"]))
    lines = []
    for point, what, value in found:
        limit = next(limit for word, limit in GOALS.items() if word in what)
        lines.append(
            {"point": point, "of": what, "value": round(value, 4), "at_most": limit, "reached": value <= limit}
        )
    return lines


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--backends", nargs="+", default=BACKENDS, help="the first serves the caches")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()

    size, names, rounds = (TOY, ["sdpa"], 1) if options.smoke else (FULL, options.backends, options.rounds)
    spec = AttentionSpec(
        "self", size.heads, size.head_dim, size.dtype, size.device, needs=frozenset({"extent_kv", "paged_kv", "varlen"})
    )
    backends = [select_backend(name, spec) for name in names]
    began_s = time.perf_counter()
    gpu = torch.cuda.get_device_name() if size.device == "cuda" else "none"
    result = {
        "command": " ".join(["python", "benchmarks/paged_attention.py", *sys.argv[1:]]),
        "versions": {"gpu": gpu, "torch": torch.__version__}
        | installed_versions(("flash-attn-4", "nvidia-cutlass-dsl", "flash-attn-3", "vllm", "sgl-kernel")),
        "backends": {backend.name: backend.selection.why for backend in backends},
        "auto_takes": select_backend("auto", spec).name,
        "conditions": f"{size.dtype}, {size.heads} heads of {size.head_dim}, {size.frame_tokens} tokens a frame, "
        f"chunks of {size.chunk_frames} frames and {FORWARDS} forwards, {size.layers} layers ({size.host_layers} for "
        f"the host's part); medians of {rounds} chunks, and of {rounds * SITES} calls of each kernel",
        "points": {},
    }
    for point in points(size):
        gc.collect()
        found = result["points"][point.name] = measure(size, point, backends, rounds)
        result["goals"] = goals(result["points"], names)
        result["seconds"] = round(time.perf_counter() - began_s, 1)
        print(f"{point.name}: {found['median_ms']}", file=sys.stderr, flush=True)
        save(result, options.output)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
