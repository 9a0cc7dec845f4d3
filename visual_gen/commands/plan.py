"""`visual-gen plan`: what a configuration costs, as tables or JSON."""

from __future__ import annotations

import argparse
import json
import math

from visual_gen.commands.settings import config_from_arguments
from visual_gen.runtime.plan import Plan, plan
from visual_gen.runtime.stream_plan import StreamPlan
from visual_gen.runtime.units import format_bytes, format_count

MEMORY_ROWS = {
    "weights": "transformer weights",
    "lora": "LoRA, unfused",
    "text_encoder": "text encoder weights",
    "vae": "VAE weights",
    "image_encoder": "image encoder weights",
    "text_kv": "text keys and values",
    "kv_cache": "KV caches",
}


def run(arguments: argparse.Namespace) -> None:
    memory = None if arguments.memory_gib is None else round(arguments.memory_gib * 2**30)
    found = plan(config_from_arguments(arguments), arguments.text_lens, device_memory_bytes=memory)
    if arguments.json:
        print(json.dumps(found.to_dict(), indent=2))
    else:
        _print_tables(found)


def _print_tables(found: Plan) -> None:
    from rich.console import Console
    from rich.table import Table

    _, channels, frames, height, width = found.latent_shape
    total_flops = sum(found.flops_per_step.values())
    experts = f"{found.num_experts} × " if found.num_experts > 1 else ""
    shares = ", ".join(
        f"{name.replace('_', ' ')} {count / total_flops:.0%}" for name, count in found.flops_per_step.items()
    )
    size, forward_rows = f"{found.width}×{found.height}, {found.num_frames} frames", f"{found.rows_per_forward} row(s)"
    all_flops = format_count(total_flops * found.num_steps)
    if found.stream is None:
        what, forwards = ("video", size), ("forwards of a step", f"{found.forwards_per_step} with {forward_rows}")
        step, whole = "FLOPs of a step", (f"FLOPs of {found.num_steps} steps", all_flops)
    else:
        what = ("chunk", f"{size}, {frames} latent")
        forwards = ("forwards of a chunk", f"{found.num_steps}, the last to commit, with {forward_rows}")
        step, whole = "FLOPs of a forward", ("FLOPs of a chunk", f"{all_flops}, once the window is full")
    rows = [
        ("model", found.source),
        ("parameters", f"{experts}{found.parameters:,}"),
        what,
        ("latents", f"{channels} channels, {frames} × {height} × {width}"),
        ("tokens", f"{found.tokens:,} in each row"),
        forwards,
        (step, f"{format_count(total_flops)} ({shares})"),
        whole,
    ]
    console = Console()
    table = Table(show_header=False)
    for row in rows:
        table.add_row(*row)
    console.print(table)

    texts = f"{', '.join(map(str, found.text_lens))} tokens ({found.text_lens_from})"
    if found.stream is not None:
        texts += f", in {found.stream.text_slots} slots of a stream, each for the longest text"
    console.print(f"\nText keys and values, {texts}", highlight=False, soft_wrap=True)
    table = Table()
    for column, justify in (("cross_kv", "left"), ("bytes", "right"), ("", "left")):
        table.add_column(column, justify=justify)
    for mode, count in found.text_kv_bytes.items():
        table.add_row(mode, format_bytes(count), "chosen" if mode == found.cross_kv else "")
    console.print(table)

    console.print(f"\nExpected peak memory of a denoising step in {found.dtype}", highlight=False)
    table = Table()
    for column, justify in (("", "left"), ("bytes", "right"), ("share", "right")):
        table.add_column(column, justify=justify)
    for name, count in found.memory_bytes.items():
        share = count / math.fsum(v for k, v in found.memory_bytes.items() if k != "total")
        table.add_row(
            MEMORY_ROWS.get(name, name), format_bytes(count), f"{share:.0%}", end_section=name == "activations"
        )
    console.print(table)
    if found.stream is not None:
        _print_stream(found.stream)
    for note in found.notes:
        console.print(note, soft_wrap=True, highlight=False)


def _print_stream(stream: StreamPlan) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print("\nA causal stream", highlight=False)
    fit = "give --memory-gib" if stream.streams_that_fit is None else str(stream.streams_that_fit)
    table = Table(show_header=False)
    for row in (
        ("visible latent frames", str(stream.window_frames)),
        ("timesteps", ", ".join(f"{t:.1f}" for t in stream.timesteps) + ", then 0 to commit"),
        ("KV cache of a stream", f"{format_bytes(stream.kv_cache_bytes)}, in blocks of {stream.block_size} tokens"),
        ("read of a fresh session", f"{stream.read.replace('_', ' ')} ({stream.read_reason})"),
        ("streams that fit beside the weights", fit),
    ):
        table.add_row(*row)
    console.print(table)
