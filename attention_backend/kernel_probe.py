"""Whether an optional kernel package and a device for it are here, asked without importing anything up front."""

from __future__ import annotations

import functools
import importlib

import torch

NOT_INSTALLED = "is not installed"


@functools.cache
def import_problem(module: str) -> str | None:
    """None if `module` imports, else why not; tried once per process, as a failing import can cost seconds.

    A kernel package can fail in ways other than ImportError: one built for another torch or CUTLASS DSL raises
    AttributeError or TypeError while it is imported, so every exception is a reason and none goes up.
    """
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and (module == error.name or module.startswith(error.name + ".")):
            return f"{module} {NOT_INSTALLED}"
        return f"importing {module} fails: {type(error).__name__}: {error}"
    except Exception as error:
        return f"importing {module} fails: {type(error).__name__}: {error}"
    return None


def device_problem(majors: tuple[int, ...]) -> str | None:
    """None if a CUDA device of one of the compute capability majors is here, else what is."""
    limit = "a CUDA device of compute capability " + " or ".join(f"{major}.x" for major in majors)
    if not torch.cuda.is_available():
        return f"no CUDA device; it needs {limit}"
    found = [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]
    if any(major in majors for major, _ in found):
        return None
    return f"the devices are of compute capability {', '.join(f'{a}.{b}' for a, b in found)}; it needs {limit}"


def kernel_spec_problems(spec, majors: tuple[int, ...]) -> list[str]:
    """What the flash kernels refuse of a spec's dtype and device, each with the value and the limit."""
    problems = []
    if spec.dtype not in (torch.bfloat16, torch.float16):
        problems.append(f"dtype is {spec.dtype}; it takes torch.bfloat16 or torch.float16")
    if spec.device.type != "cuda":
        problems.append(f"device is {spec.device}; it needs a CUDA device")
    elif torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability(spec.device)
        if major not in majors:
            limit = " or ".join(f"{m}.x" for m in majors)
            problems.append(f"{spec.device} is of compute capability {major}.{minor}; it needs {limit}")
    return problems
