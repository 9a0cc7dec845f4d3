"""`visual-gen warmup`: compiles the kernels of a configuration, and its blocks if it says `compile`, before its first
video, and says what that took."""

from __future__ import annotations

import argparse
import dataclasses
import json

from visual_gen.commands.settings import config_from_arguments
from visual_gen.runtime.units import format_seconds
from visual_gen.runtime.warmup import WarmUp, warm_up


def run(arguments: argparse.Namespace) -> None:
    config = config_from_arguments(arguments)
    found = warm_up(config)
    if config.compile:
        from visual_gen.pipelines.compiled_blocks import warm_up_blocks

        found.variants.append(warm_up_blocks(config))
    if arguments.json:
        print(json.dumps(dataclasses.asdict(found) | {"compile_seconds": found.compile_seconds}, indent=2))
    else:
        _print_table(found)


def _print_table(found: WarmUp) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table()
    for column, justify in (("role", "left"), ("backend", "left"), ("call", "left"), ("first call", "right")):
        table.add_column(column, justify=justify)
    for variant in found.variants:
        seconds = "nothing to compile" if variant.seconds is None else format_seconds(variant.seconds)
        table.add_row(variant.role, variant.backend, variant.call, seconds)
    console.print(table)
    if all(variant.seconds is None for variant in found.variants):
        taken = " and ".join(dict.fromkeys(variant.backend for variant in found.variants))
        console.print(f"{taken}: kernels come compiled, nothing was called", highlight=False)
    else:
        console.print(f"first calls, together: {format_seconds(found.compile_seconds)}", highlight=False)
        console.print(f"importing the backends: {format_seconds(found.selection_seconds)}", highlight=False)
    for note in found.notes:
        console.print(note, soft_wrap=True, highlight=False)
