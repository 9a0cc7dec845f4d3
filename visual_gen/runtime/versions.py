"""Versions of installed packages."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata


def installed_versions(packages: Sequence[str]) -> dict[str, str | None]:
    """Version of each package; None where it is not installed."""
    versions: dict[str, str | None] = {}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return versions
