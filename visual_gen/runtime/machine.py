"""What a run computed on, and the most memory that it took there."""

from __future__ import annotations

import os
import platform
import re
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def peak_rss_bytes() -> int:
    """The most resident memory that this process has had since its program started.

    Linux's ru_maxrss outlives exec: a child begins at the size of the process that started it. VmHWM does not.
    """
    status = Path("/proc/self/status")
    found = re.search(r"^VmHWM:\s*(\d+) kB", status.read_text(), re.MULTILINE) if status.exists() else None
    if found:
        return int(found[1]) * 1024
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes


def machine(device: torch.device) -> dict[str, Any]:
    """Processor, memory or cores, and what torch makes of them."""
    import torch

    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {
            "processor": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
        }
    return {"processor": cpu_name(), "cores": os.cpu_count(), "torch_threads": torch.get_num_threads()}


def cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.MULTILINE) if cpuinfo.exists() else None
    return found[1].strip() if found else platform.processor() or platform.machine()
