"""The device that a name stands for on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def find_device(name: str | torch.device) -> torch.device:
    """`name` is "auto" (CUDA if there is one, else the CPU), "cpu", "cuda", "cuda:N", or a torch.device of these.

    Raises ValueError on anything else, and on a GPU that this machine lacks.
    """
    import torch  # here, so that settings can be read without it

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda" if count else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {str(name)!r}; it must be 'auto', 'cpu', 'cuda' or 'cuda:N'")
    if device.type == "cuda" and (device.index or 0) >= count:
        have = f"{count} CUDA device(s)" if count else "no CUDA device"
        raise ValueError(f"device is {str(name)!r}; torch {torch.__version__} sees {have} here: use 'cpu' or 'auto'")
    return torch.device("cpu") if device.type == "cpu" else device  # "cpu:0" is no other device
