"""`visual-gen backends`: every attention backend, what it can do, and why it cannot run here."""

from __future__ import annotations

import argparse
import json
from importlib import metadata
from typing import Any

from attention_backend import AUTO_ORDER, available_backends, backend_classes
from visual_gen.runtime.versions import installed_versions

CAPABILITIES = ("varlen", "lse", "paged_kv", "extent_kv", "causal", "padding_mask")
# The distributions that carry the kernels of our own backends; one from elsewhere carries its own.
KERNEL_PACKAGES = {
    "sdpa": ("torch",),
    "flash_attn4": ("flash-attn-4", "nvidia-cutlass-dsl"),
    "paged_flash_attn3": ("flash-attn-3", "vllm", "sgl-kernel"),
}


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
            packages = KERNEL_PACKAGES.get(name) or _distributions(cls)
            versions = installed_versions(packages)
            row["versions"] = {package: version for package, version in versions.items() if version}
            row["kernels_from"] = cls.kernels_from()
            row["capabilities"] = {need: getattr(cls, f"supports_{need}")() for need in CAPABILITIES}
            row["preferred_layout"] = cls.preferred_layout.value
        rows.append(row)
    return rows


def _distributions(cls: type) -> tuple[str, ...]:
    return tuple(metadata.packages_distributions().get(cls.__module__.split(".")[0], ()))


def _print_table(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    console.print("Attention backends, in the order that auto tries them")
    table = Table()
    for column in ("", *(row["name"] for row in rows)):
        table.add_column(column)
    table.add_row("here", *(Text("yes", "green") if row["available"] else Text("no", "red") for row in rows))
    table.add_row(
        "kernel packages",
        *("\n".join(f"{name} {version}" for name, version in row.get("versions", {}).items()) or "–" for row in rows),
    )
    table.add_row("kernels from", *(row.get("kernels_from") or "–" for row in rows))
    for need in CAPABILITIES:
        able = (row.get("capabilities", {}).get(need) for row in rows)
        table.add_row(need, *({True: "yes", False: "no", None: "?"}[value] for value in able))
    table.add_row("layout", *(row.get("preferred_layout", "?") for row in rows))
    console.print(table)
    for row in rows:
        if row["reason"]:
            console.print(Text.assemble((row["name"], "bold"), f" is not available: {row['reason']}"), soft_wrap=True)
