"""`visual-gen backends`: every attention backend, what it can do, and why it cannot run here."""

from __future__ import annotations

import argparse
import json
from typing import Any

from attention_backend import AUTO_ORDER, CAPABILITIES, available_backends, backend_classes, broken_entry_points
from visual_gen.runtime.versions import kernel_versions


def run(arguments: argparse.Namespace) -> None:
    rows = describe_backends()
    if arguments.json:
        print(json.dumps(rows, indent=2))
    else:
        _print_table(rows)


def describe_backends() -> list[dict[str, Any]]:
    """One entry for each backend, those that "auto" considers first and in its order."""
    classes, reasons = backend_classes(), available_backends()
    order = [name for name in AUTO_ORDER if name in reasons] + [name for name in reasons if name not in AUTO_ORDER]
    rows = []
    for name in order:
        row: dict[str, Any] = {"name": name, "available": reasons[name] is None, "reason": reasons[name]}
        cls = classes.get(name)
        if cls is not None:  # an entry point that failed to load has a reason and no class
            # One that its module registered all the same.
            row["entry_point_problem"] = broken_entry_points().get(name)
            row["versions"] = kernel_versions(name)
            row["kernels_from"] = cls.kernels_from()
            row["capabilities"] = {need: getattr(cls, f"supports_{need}")() for need in sorted(CAPABILITIES)}
            row["preferred_layout"] = cls.preferred_layout.value
        rows.append(row)
    return rows


def _print_table(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    console.print("Attention backends, in the order that auto tries them")
    table = Table(show_lines=True)
    # In 80 columns too, names are folded at worst, and none is shortened.
    for column, width in (("", None), ("here", None), ("can", 18), ("layout", None), ("kernel packages", 16)):
        table.add_column(column, min_width=width, overflow="fold")
    for row in rows:
        here = Text("yes", "green") if row["available"] else Text("no", "red")
        able = row.get("capabilities", {})
        kernels = [f"{name} {version}" for name, version in row.get("versions", {}).items()]
        kernels += [f"from {row['kernels_from']}"] if row.get("kernels_from") else []
        can = ", ".join(need for need in able if able[need])
        if cannot := [need for need in able if not able[need]]:
            can += f"\nnot: {', '.join(cannot)}"
        table.add_row(row["name"], here, can or "?", row.get("preferred_layout", "?"), "\n".join(kernels) or "–")
    console.print(table)
    for row in rows:
        if row["reason"]:
            console.print(Text.assemble((row["name"], "bold"), f" is not available: {row['reason']}"), soft_wrap=True)
        if row.get("entry_point_problem"):
            console.print(Text.assemble((row["name"], "bold"), f": {row['entry_point_problem']}"), soft_wrap=True)
