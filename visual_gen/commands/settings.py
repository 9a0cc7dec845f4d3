"""The settings of a command: its file, then --set, then the options that stand for one setting each."""

from __future__ import annotations

import argparse

from visual_gen.config import Override, RunConfig, load_config


def config_from_arguments(arguments: argparse.Namespace) -> RunConfig:
    """Raises FileNotFoundError and ConfigError, like `load_config`."""
    options = {
        "prompt": "generation.prompt",
        "image": "generation.image",
        "last_image": "generation.last_image",
        "seed": "generation.seed",
        "output": "output.path",
        "chunks": "stream.chunks",
        "recache": "stream.recache",
    }
    overrides: list[str | Override] = list(arguments.overrides)
    for option, key in options.items():
        value = getattr(arguments, option, None)
        if value is not None:
            overrides.append(Override(key, value, f"--{option.replace('_', '-')}"))
    return load_config(arguments.config, overrides)
