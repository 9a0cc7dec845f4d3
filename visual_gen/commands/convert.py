"""`visual-gen convert`: the authors' checkpoint as a diffusers folder."""

from __future__ import annotations

import argparse

from visual_gen.runtime.files import expanded


def run(arguments: argparse.Namespace) -> None:
    from visual_gen.pipelines.convert import convert

    dest = convert(
        expanded(arguments.source),
        expanded(arguments.dest),
        base=None if arguments.base is None else expanded(arguments.base),
        state_dict=arguments.state_dict,
        max_shard_bytes=round(arguments.max_shard_gb * 1e9),
        progress=True,
    )
    print(dest)
