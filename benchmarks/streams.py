"""Streams of a causal Wan of 1.3B's shape with random weights, through the engine that serves them.

    python benchmarks/streams.py [--parts batch sync host kernels] [--modes eager compiled graphs compiled_graphs]
                                 [--backend NAME] [--layers 30] [--rounds 2] [--out DIR] [--smoke]

bf16, text of 512 rows, no guidance, windows of 21 frames. Two shapes: chunks of one frame of 400 tokens, where the host
is what a forward waits for, and chunks of three frames of 1 560 tokens (480x832), where the device is.

- batch: one chunk of each of four streams, all in one forward at a time, and one stream after another, interleaved on
  the same streams with full windows. Wall time with the device's work done, and device events. Modes: eager; compiled
  (blocks, fullgraph); graphs (CUDA graphs of eager blocks); compiled_graphs (of compiled ones).
- sync: sixteen streams of uneven history and uneven steps in one forward; a host that waits for the device between two
  forwards is an error (torch.cuda.set_sync_debug_mode). Events may be waited for: the check of a finished chunk is read
  so when the device has the next forward.
- host: what the host spends on joining, leaving, forking and switching, on compiled blocks, and how many graphs are
  compiled anew meanwhile. The device is idle before each; a new text's check, which waits for it, is counted.
- kernels: matrix products and attention alone at 1 560 tokens, four rows in one forward and in four. Their ratio is
  what batching can win once nothing waits for the host.

--smoke runs all of it at toy size on a CPU, where there are no graphs and "compiled" is traced and not compiled.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from measure import save
from streams_kernels import kernels_part
from streams_setup import FULL, STREAMS, TOY, Bench, Shape
from torch._dynamo.utils import counters

from visual_gen.pipelines.stream import Stream
from visual_gen.pipelines.stream_engine import StreamEngine
from visual_gen.runtime.versions import installed_versions

SYNC_STREAMS, SYNC_FORWARDS = 16, 20
HOST_REPEATS = 5
MODES, PARTS = ("eager", "compiled", "graphs", "compiled_graphs"), ("batch", "sync", "host", "kernels")
GOAL_SPEEDUP, GOAL_HOST_MS = 1.5, 5.0


def median_of(times: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {key: round(statistics.median(t[key] for t in times), 3) for key in times[0]}


def step(engine: StreamEngine, streams: Sequence[Stream], forwards: int) -> None:
    for _ in range(forwards):
        engine.step(streams)


def fill(engine: StreamEngine, streams: Sequence[Stream], steps: Sequence[float]) -> None:
    """Windows filled and sliding, by chunks of a single step; then the streams have `steps`."""
    for stream in streams:
        stream.set(steps=steps[:1])
    for _ in range(engine.causal.recent_frames // engine.causal.frames_per_chunk + 1):
        engine.step(streams, until="chunk")
    for stream in streams:
        stream.set(steps=steps)
        stream.take_latents()


def batch_part(bench: Bench, modes: Sequence[str] | None) -> dict:
    found: dict[str, dict] = {}
    for name, shape in bench.size.shapes.items():
        found[name] = {"frame_tokens": shape.frame_tokens, "chunk_frames": shape.chunk_frames, "modes": {}}
        # Where the device is what takes the time, graphs have nothing to win.
        for mode in modes or [mode for mode in MODES if "graphs" not in mode or (bench.cuda and name == "short")]:
            found[name]["modes"][mode] = one_mode(bench, shape, mode)
    return found


def one_mode(bench: Bench, shape: Shape, mode: str) -> dict:
    with bench.engine(shape, mode) as engine:
        return together_or_apart(bench, engine)


def together_or_apart(bench: Bench, engine: StreamEngine) -> dict:
    """A chunk of each of four streams, in one batch and one after another."""
    streams = [engine.open(bench.text(i), seed=i) for i in range(STREAMS)]
    fill(engine, streams, engine.causal.steps)
    forwards = len(engine.causal.steps) + 1

    def apart() -> None:
        for stream in streams:
            step(engine, [stream], forwards)

    arms = {"together": (partial(step, engine, streams, forwards), STREAMS), "one_after_another": (apart, 1)}
    times: dict[str, list[dict]] = {arm: [] for arm in arms}
    for _ in range(bench.rounds + 1):
        for arm, (call, rows) in arms.items():
            before = [stream.chunk_index for stream in streams]
            times[arm].append(bench.timed(call))
            done = list(engine.record().timeline)[-forwards * STREAMS // rows :]
            if [stream.chunk_index for stream in streams] != [index + 1 for index in before]:
                raise RuntimeError(f"{arm}: the streams did not make one chunk each")
            if {(forward.rows, forward.pad_rows) for forward in done} != {(rows, 0)}:
                raise RuntimeError(f"{arm}: the forwards did not have {rows} rows each")
            for stream in streams:
                stream.take_latents()
    found = {arm: median_of(some[1:]) for arm, some in times.items()}
    frames = STREAMS * engine.causal.frames_per_chunk
    for arm in found.values():
        arm["latent_frames_per_second"] = round(1000 * frames / arm["wall_ms"], 2)
    found["throughput_ratio"] = round(found["one_after_another"]["wall_ms"] / found["together"]["wall_ms"], 3)
    found["forwards_a_chunk"], found["read"] = forwards, done[-1].read
    found["warm_up_ms"] = {arm: round(some[0]["wall_ms"]) for arm, some in times.items()}
    return found


def sync_part(bench: Bench) -> dict:
    shape = bench.size.shapes["short"]
    with bench.engine(shape, "eager", SYNC_STREAMS) as engine:
        for i in range(SYNC_STREAMS):  # the first has made twice as many chunks as there are streams, the last two
            engine.open(bench.text(i), seed=i, steps=engine.causal.steps[:1])
            for _ in range(2):
                engine.step(until="chunk")
        streams, steps = engine.streams, engine.causal.steps
        history = [stream.frames for stream in streams]
        for i, stream in enumerate(streams):
            stream.set(steps=steps[: 1 + i % len(steps)])
        step(engine, streams, 2 * len(steps) + 2)  # timesteps and kernels of first use are made here
        waited = None

        def run() -> None:
            nonlocal waited
            if bench.cuda:
                torch.cuda.set_sync_debug_mode("error")
            try:
                step(engine, streams, SYNC_FORWARDS)
            except RuntimeError as error:
                if "synchroniz" not in str(error):
                    raise
                waited = str(error)
            finally:
                if bench.cuda:
                    torch.cuda.set_sync_debug_mode("default")

        times = bench.timed(run)
        done = list(engine.record().timeline)[-SYNC_FORWARDS:]
        found = {
            "streams": SYNC_STREAMS, "frames_of_history": history, "forwards": SYNC_FORWARDS,
            "rows": sorted({forward.rows for forward in done}),
            "forwards_that_denoise_and_commit": sum(bool(f.denoising and f.committing) for f in done),
            "waits_are_errors": bench.cuda, "waited": waited,
            "host_ms_a_forward": round(1000 * statistics.median(forward.seconds for forward in done), 3),
            **{f"{key}_a_forward": round(value / SYNC_FORWARDS, 3) for key, value in times.items()},
        }  # fmt: skip
        finite = all(bool(x.isfinite().all()) for stream in streams for x in stream.take_latents())
    if found["rows"] != [SYNC_STREAMS] or not finite:
        raise RuntimeError(f"the forwards had {found['rows']} rows, and that all was finite is {finite}")
    return found


def host_part(bench: Bench) -> dict:
    times: dict[str, list[float]] = {what: [] for what in ("join", "fork", "switch", "leave")}

    def cycle(seed: int) -> None:
        """Each operation once, and a chunk between two of them, of one to three streams."""

        def timed(what: str, call: Callable[[], object]) -> object:
            ms, found = bench.host_ms(call)
            times[what].append(ms)
            engine.step(until="chunk")
            for stream in engine.streams:
                stream.take_latents()
            return found

        other = timed("join", lambda: engine.open(texts[0], seed=seed))
        fork = timed("fork", lambda: first.fork(seed=seed))
        timed("switch", lambda: first.switch_prompt(texts[1 + seed % 2]))
        timed("leave", other.close)
        timed("leave", fork.close)

    shape = dataclasses.replace(bench.size.shapes["long"], steps=1)
    with bench.engine(shape, "compiled") as engine:
        texts = [bench.text(i) for i in range(3)]
        first = engine.open(texts[1])
        fill(engine, [first], engine.causal.steps)
        for warm_up in range(2):  # everything is compiled: forwards of one to three rows
            cycle(warm_up)
        for some in times.values():
            some.clear()
        graphs = counters["stats"]["unique_graphs"]
        for repeat in range(HOST_REPEATS):
            cycle(repeat)
        recompiles = counters["stats"]["unique_graphs"] - graphs
        rows = sorted(engine.record().batch_sizes)
    return {
        "median_ms": {what: round(statistics.median(some), 3) for what, some in times.items()},
        "worst_ms": {what: round(max(some), 3) for what, some in times.items()},
        "times": {what: len(some) for what, some in times.items()},
        "rows_of_forwards": rows,
        "compiled_before": graphs,
        "recompiles": recompiles,
    }


def goals(parts: dict[str, dict]) -> list[dict]:
    """What was wanted and what was found. Without a device there is no wait that could be an error."""
    lines = []

    def goal(name: str, value: float, least: float | None = None, most: float | None = None) -> None:
        reached = (least is None or value >= least) and (most is None or value <= most)
        limit = {"at_least": least} if most is None else {"at_most": most}
        lines.append({"goal": name, "found": value} | limit | {"reached": reached})

    for name, shape in parts.get("batch", {}).items():
        for mode, found in shape["modes"].items():
            host_bound = name == "short" and "graphs" not in mode
            goal(f"throughput together, {name}, {mode}", found["throughput_ratio"], GOAL_SPEEDUP if host_bound else 1.0)
    if parts.get("sync", {}).get("waits_are_errors"):
        goal("waits between forwards of 16 streams", int(parts["sync"]["waited"] is not None), most=0)
    if "host" in parts:
        for what, ms in parts["host"]["median_ms"].items():
            goal(f"host ms to {what}", ms, most=GOAL_HOST_MS)
        goal("recompiles", parts["host"]["recompiles"], most=0)
    return lines


def table(result: dict) -> str:
    """What was found, for a reader."""
    parts, lines = result["parts"], [f"{result['versions']['device']}; {result['conditions']}", ""]
    if "batch" in parts:
        lines.append(f"{'shape':>8} {'mode':>15} {'together, ms':>14} {'one by one, ms':>16} {'ratio':>7}")
        for name, shape in parts["batch"].items():
            for mode, found in shape["modes"].items():
                together, apart = (found[arm]["wall_ms"] for arm in ("together", "one_after_another"))
                lines.append(f"{name:>8} {mode:>15} {together:>14.2f} {apart:>16.2f} {found['throughput_ratio']:>7.3f}")
    if "kernels" in parts:
        ms, ratio = parts["kernels"]["median_ms"], parts["kernels"]["ratio"]
        for what in ratio:
            together, apart = ms[f"{what}, together"], ms[f"{what}, one_after_another"]
            lines.append(f"{'kernels':>8} {what:>15} {together:>14.2f} {apart:>16.2f} {ratio[what]:>7.3f}")
    if "sync" in parts:
        sync = parts["sync"]
        lines.append(
            f"{sync['streams']} streams, {sync['forwards']} forwards: wall {sync['wall_ms_a_forward']} ms a forward, "
            f"host {sync['host_ms_a_forward']} ms; waited: {sync['waited'] or 'no'}"
            + ("" if sync["waits_are_errors"] else " (on a CPU nothing can)")
        )
    if "host" in parts:
        ms = ", ".join(f"{what} {value}" for what, value in parts["host"]["median_ms"].items())
        lines.append(f"host ms: {ms}; recompiles: {parts['host']['recompiles']}")
    lines += ["", *(f"{'yes' if g['reached'] else 'NO':>4}  {g['goal']}: {g['found']}" for g in result["goals"])]
    return "\n".join([*lines, f"{result['seconds']} s"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=MODES,
        default=None,
        help="of part batch; without it all, and graphs for the short chunks alone",
    )
    parser.add_argument("--backend", default="auto", help="of self-attention")
    parser.add_argument("--layers", type=int, help="of the model, instead of all 30")
    parser.add_argument("--rounds", type=int, default=2, help="that medians are over, after one to warm up")
    parser.add_argument("--out", type=Path, metavar="DIR", help="for streams.json")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    size = TOY if options.smoke else FULL
    if options.layers is not None:
        size = dataclasses.replace(size, config=dataclasses.replace(size.config, num_layers=options.layers))

    bench, began = Bench(size, options.backend, 1 if options.smoke else options.rounds), time.perf_counter()
    run = {
        "batch": partial(batch_part, bench, options.modes), "sync": partial(sync_part, bench),
        "host": partial(host_part, bench), "kernels": partial(kernels_part, bench),
    }  # fmt: skip
    result = {
        "command": " ".join(["python", "benchmarks/streams.py", *sys.argv[1:]]),
        "versions": {"device": torch.cuda.get_device_name() if bench.cuda else "CPU", "torch": torch.__version__}
        | installed_versions(("flash-attn-4", "nvidia-cutlass-dsl", "vllm", "triton")),
        "conditions": f"{size.dtype}, {size.config.num_layers} layers of {size.config.hidden_size}, {size.text_rows} "
        f"text rows, no guidance; medians of {bench.rounds} rounds",
        "shapes": {name: dataclasses.asdict(shape) for name, shape in size.shapes.items()},
        "parts": {},
        "seconds_of_parts": {},
    }
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
    for part in [part for part in PARTS if part in options.parts]:
        start = time.perf_counter()
        result["parts"][part] = run[part]()
        result["seconds_of_parts"][part] = round(time.perf_counter() - start, 1)
        result["self_attention"], result["goals"] = bench.choice, goals(result["parts"])
        result["seconds"] = round(time.perf_counter() - began, 1)
        print(f"{part}: {result['seconds_of_parts'][part]} s", file=sys.stderr, flush=True)
        save(result, options.out and options.out / "streams.json")
    print(table(result))


if __name__ == "__main__":
    main()
