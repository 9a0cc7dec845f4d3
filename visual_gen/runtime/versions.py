"""Versions of installed packages."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata

from attention_backend import backend_classes

# The distributions that carry the kernels of our own backends; one from elsewhere carries its own.
KERNEL_PACKAGES = {
    "sdpa": ("torch",),
    "flash_attn4": ("flash-attn-4", "nvidia-cutlass-dsl"),
    "paged_flash_attn3": ("flash-attn-3", "vllm", "sgl-kernel"),
}


def installed_versions(packages: Sequence[str]) -> dict[str, str | None]:
    """Version of each package; None where it is not installed."""
    versions: dict[str, str | None] = {}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def kernel_versions(backend: str) -> dict[str, str]:
    """Version of each installed package that may carry a registered backend's kernels."""
    packages = KERNEL_PACKAGES.get(backend)
    if packages is None:
        module = backend_classes()[backend].__module__.partition(".")[0]
        packages = metadata.packages_distributions().get(module, ())
    return {package: version for package, version in installed_versions(packages).items() if version}
