"""A causal Wan of 1.3B's shape, random weights, chunk by chunk on one stream: ms of each chunk, and whether they drift.

    python benchmarks/rollout.py [--backend NAME] [--long-chunks 1000] [--long-steps 4] [--output FILE.json] [--smoke]

480x832, 3 latent frames a chunk, 4 denoising forwards and the committing one, text of 512 rows. First 7 chunks with 21
visible frames: eager, with the blocks compiled (fullgraph), and with those in CUDA graphs, interleaved. Each arm has a
stream engine that stands, and each rollout is a stream that is opened there. A chunk's time is by device events from
its noise to its commit (the first one's from the opening, the prompt's K/V included); what the host waits for is in it.
Then --long-chunks chunks of the compiled model with 9 visible frames, the last hundred against the second hundred in
time and memory. warm_up_ms is an arm's first rollout, compiling included; graphs find the blocks compiled already.
--smoke runs all of it at toy size on a CPU, where there are no CUDA graphs.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import torch
from measure import Spans, save

from visual_gen.config import CausalConfig
from visual_gen.models.wan import WAN_PRESETS, CausalWanTransformer, WanConfig
from visual_gen.pipelines.stream_engine import StreamEngine
from visual_gen.pipelines.text import TextRows
from visual_gen.runtime.versions import installed_versions

CHUNKS, LONG_RECENT_FRAMES = 7, 9
GRAPHS = "CUDA graphs of compiled blocks"
GOAL_MEAN_MS, GOAL_FIRST_MS, GOAL_DRIFT = 300, 250, 0.02


@dataclasses.dataclass(frozen=True)
class Size:
    config: WanConfig
    latent: tuple[int, int]
    text_rows: int
    dtype: torch.dtype
    device: str
    part: int  # chunks of the long run that are compared: a hundred


def full_size(long_chunks: int) -> Size:
    preset = WAN_PRESETS["wan2.1-t2v-1.3b"]
    frames = max(preset.rope_max_seq_len, 3 * long_chunks)  # as many frames as the long run has
    config = dataclasses.replace(preset, rope_max_seq_len=frames)
    return Size(config, (60, 104), 512, torch.bfloat16, "cuda", 100)


def toy_size(long_chunks: int) -> Size:
    config = WanConfig(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, text_dim=16, freq_dim=16,
        ffn_dim=32, num_layers=2, rope_max_seq_len=max(64, 3 * long_chunks),
    )  # fmt: skip
    return Size(config, (4, 6), 8, torch.float32, "cpu", max(1, long_chunks // 10))


def make_model(size: Size, backend: str, compile_with: dict | None) -> CausalWanTransformer:
    torch.manual_seed(0)
    model = CausalWanTransformer(size.config, attention={"self": backend}, dtype=size.dtype, device=size.device)
    model.requires_grad_(False)
    if compile_with is not None:
        model.compile_blocks(**compile_with)
    return model


def engine_of(model: CausalWanTransformer, size: Size, settings: CausalConfig, *, graphs: bool = False) -> StreamEngine:
    return StreamEngine(
        model, size.latent, causal=settings, max_streams=1, text_len=size.text_rows, text_slots=1, graphs=graphs
    )


def chunks_of(engine: StreamEngine, text: TextRows, count: int) -> Iterator[torch.Tensor]:
    """Latents of a new stream's chunks."""
    stream = engine.open(text, seed=0)
    try:
        for _ in range(count):
            engine.step(until="chunk")
            if stream.error is not None:
                raise stream.error
            (latents,) = stream.take_latents()
            yield latents
    finally:
        stream.close()


def timed(
    engine: StreamEngine, size: Size, count: int, after: Callable[[int], None] = lambda number: None
) -> list[float]:
    """Milliseconds of each chunk of a new stream; `after` is called with the number of chunks so far."""
    hidden = torch.randn(1, size.text_rows, size.config.text_dim, dtype=size.dtype, device=size.device)
    spans = Spans(size.device)
    with closing(chunks_of(engine, TextRows(hidden, [size.text_rows], [0]), count)) as chunks:
        for number in range(1, count + 1):
            spans("chunk", partial(next, chunks))
            after(number)
    return spans.milliseconds()["chunk"]


def short_run(engines: dict[str, StreamEngine], size: Size, rounds: int) -> dict[str, dict]:
    """Each arm's chunks, interleaved by whole rollouts; medians of each chunk over the rounds. One round warms up."""
    times: dict[str, list[list[float]]] = {name: [timed(engine, size, CHUNKS)] for name, engine in engines.items()}
    order = random.Random(0)  # another in each round: what ran before decides how fast a device's clock is
    for _ in range(rounds):
        for name in order.sample(list(engines), len(engines)):
            times[name].append(timed(engines[name], size, CHUNKS))
    found = {}
    for name, runs in times.items():
        by_chunk = [round(statistics.median(values), 2) for values in zip(*runs[1:], strict=True)]
        found[name] = {"chunk_ms": by_chunk, "mean_ms": round(statistics.mean(by_chunk), 2)}
        found[name]["warm_up_ms"] = round(sum(runs[0]))
    return found


def free_memory(size: Size) -> None:
    """Of what nobody holds any more: the rows that fill up a graph's batch keep a closed engine's cache."""
    gc.collect()
    if size.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def long_run(model: CausalWanTransformer, size: Size, chunks: int, steps: int) -> dict:
    """Time and memory of the second and of the last `part` chunks of one stream."""
    settings = CausalConfig(recent_frames=LONG_RECENT_FRAMES, steps=CausalConfig().steps[:steps])
    memory = []

    def look(number: int) -> None:
        if size.device == "cuda" and number % size.part == 0:
            peak, held = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
            memory.append({"peak_bytes": peak, "held_bytes": held})
            torch.cuda.reset_peak_memory_stats()

    with closing(engine_of(model, size, settings)) as engine:
        ms = timed(engine, size, chunks, after=look)
    parts = [ms[i : i + size.part] for i in range(0, len(ms), size.part)]
    second, last = (statistics.median(part) for part in (parts[1], parts[-1]))
    return {
        "chunks": chunks,
        "forwards_a_chunk": steps + 1,
        "visible_frames": LONG_RECENT_FRAMES,
        "median_ms_of_each_part": [round(statistics.median(part), 3) for part in parts],
        "memory_of_each_part": memory,
        "last_over_second": {
            "time": round(last / second, 4),
            **{key: round(memory[-1][key] / memory[1][key], 4) for key in (memory[0] if memory else ())},
        },
    }


def goals(short: dict[str, dict], long: dict) -> list[dict]:
    wanted = []
    for arm in (GRAPHS, "compiled"):
        if arm in short:
            wanted.append((f"mean ms of a chunk, {arm}", short[arm]["mean_ms"], GOAL_MEAN_MS))
            slowest = max(short[arm]["chunk_ms"][:3])
            wanted.append((f"slowest of the first three chunks, {arm}", slowest, GOAL_FIRST_MS))
    wanted += [(f"last over second, {key}", value, 1 + GOAL_DRIFT) for key, value in long["last_over_second"].items()]
    return [{"goal": name, "found": x, "at_most": limit, "reached": x <= limit} for name, x, limit in wanted]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="auto", help="of self-attention")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--long-chunks", type=int, default=1000)
    parser.add_argument("--long-steps", type=int, default=4, help="denoising forwards of each chunk of the long run")
    parser.add_argument("--mode", default="default", help="of torch.compile, without CUDA graphs of its own")
    parser.add_argument("--smoke", action="store_true", help="toy size on a CPU, two rounds, 20 chunks, no compiler")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.smoke:
        options.rounds, options.long_chunks, options.long_steps = 1, 20, 1

    size = (toy_size if options.smoke else full_size)(options.long_chunks)
    if options.long_chunks < 2 * size.part:
        parser.error(f"--long-chunks is {options.long_chunks}; the last {size.part} are compared with the second "
                     f"{size.part}: at least {2 * size.part}")  # fmt: skip
    began = time.perf_counter()
    compile_with = {"eager": None, "compiled": {"backend": "eager"} if options.smoke else {"mode": options.mode}}
    models = {name: make_model(size, options.backend, how) for name, how in compile_with.items()}
    device = "CPU" if size.device == "cpu" else torch.cuda.get_device_name()
    choice = models["compiled"].attention_choices["self"]
    result = {
        "command": " ".join(["python", "benchmarks/rollout.py", *sys.argv[1:]]),
        "versions": {"device": device, "torch": torch.__version__}
        | installed_versions(("flash-attn-4", "nvidia-cutlass-dsl", "triton")),
        "self_attention": {"backend": choice.name, "why": choice.why},
        "conditions": f"{size.dtype}, latents {size.latent}, {size.config.num_layers} layers of "
        f"{size.config.hidden_size}, {size.text_rows} text rows, one stream without guidance; medians of "
        f"{options.rounds} rollouts, each a stream of an engine that stands",
    }
    with ExitStack() as stack:
        engines = {name: engine_of(model, size, CausalConfig()) for name, model in models.items()}
        if size.device == "cuda":
            engines[GRAPHS] = engine_of(models["compiled"], size, CausalConfig(), graphs=True)
        for engine in engines.values():
            stack.enter_context(closing(engine))
        result["short"] = short_run(engines, size, options.rounds)
    print(json.dumps(result["short"]), file=sys.stderr, flush=True)
    save(result, options.output)
    del models["eager"], engines, engine
    free_memory(size)
    result["long"] = long_run(models["compiled"], size, options.long_chunks, options.long_steps)
    result["goals"] = goals(result["short"], result["long"])
    result["seconds"] = round(time.perf_counter() - began, 1)
    print(json.dumps(result, indent=2))
    save(result, options.output)


if __name__ == "__main__":
    main()
