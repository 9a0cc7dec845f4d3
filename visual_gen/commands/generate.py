"""`visual-gen generate`: prompts to mp4 files and a report."""

from __future__ import annotations

import argparse
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from visual_gen.commands.settings import config_from_arguments
from visual_gen.config import ConfigError, RunConfig
from visual_gen.runtime.files import check_writable, expanded, report_paths

if TYPE_CHECKING:
    from visual_gen.pipelines import WanPipelineOutput


def run(arguments: argparse.Namespace) -> None:
    config = config_from_arguments(arguments)
    files = output_files(config)
    refuse_what_cannot_generate(config)
    generate(config, files)


def output_files(config: RunConfig) -> list[Path]:
    """One mp4 path for each prompt, found to be writable, as are the report's. Raises ValueError and OSError else."""
    path = expanded(config.output.path)
    prompts = config.generation.prompts
    if not prompts:
        raise ConfigError("there is no prompt; give --prompt TEXT, or generation.prompt in the configuration")
    if path.suffix.lower() != ".mp4":
        raise ConfigError(f"output.path = {str(path)!r}: wants a name that ends in .mp4")
    files = [path] if len(prompts) == 1 else [path.with_stem(f"{path.stem}-{i}") for i in range(len(prompts))]
    for file in (*files, *(report_paths(path) if config.output.report else ())):
        check_writable(file)
    return files


def refuse_what_cannot_generate(config: RunConfig) -> None:
    """Raises ConfigError on a preset that is unknown or contradicts the folder, and ValueError on images and settings
    that its model cannot follow. What no preset tells, the folder's own files do when the pipeline opens it. Raises
    ConfigError on causal and stream settings too, which a whole video would not follow."""
    for section in ("causal", "stream"):
        if getattr(config, section) is not None:
            raise ConfigError(
                f"{section}: generate makes whole videos at once; leave this section out, or make a stream of chunks "
                "with `visual-gen stream` (`visual-gen plan` says what its cache takes)"
            )
    if config.model.preset is None:
        return
    from visual_gen.runtime.model import check_settings, find_model

    model, generation = find_model(config), config.generation
    if model is not None:
        check_settings(model, config)
        model.task.check_images(image=generation.image is not None, last_image=generation.last_image is not None)


def refuse_what_does_not_fit(config: RunConfig) -> None:
    """Raises ValueError if a step, weights included, needs more memory than is free: by what `visual-gen plan` says, so
    only where that can say it."""
    from visual_gen.runtime.memory import check_memory
    from visual_gen.runtime.model import find_model
    from visual_gen.runtime.plan import plan

    if find_model(config) is not None:
        check_memory(plan(config).memory_bytes["total"], config.torch_device(), "a denoising step with the weights")


def generate(config: RunConfig, files: list[Path]) -> None:
    """Make the clips of `config`, write each to its file, and print the name of every file written, the report's too.

    Raises ValueError on what cannot be served, before weights are read; GenerationError if a clip is no usable video:
    the others are written then.
    """
    generation = config.generation
    settings = {
        "dtype": config.torch_dtype(),
        "device": config.torch_device(),
        "attention": config.attention,
        "scheduler": generation.scheduler,
        "flow_shift": generation.flow_shift,
        "boundary_ratio": generation.boundary_ratio,
        "offload": config.offload,
        "compile": config.compile,
    }
    call = {
        "prompt": list(generation.prompts),
        "negative_prompt": generation.negative_prompt,
        "height": generation.height,
        "width": generation.width,
        "num_frames": generation.num_frames,
        "num_inference_steps": generation.num_inference_steps,
        "guidance_scale": generation.guidance_scale,
        "guidance_scale_2": generation.guidance_scale_2,
        "image": generation.image,
        "last_image": generation.last_image,
        "max_sequence_length": generation.max_sequence_length,
        "cfg": generation.cfg,
    }

    import torch

    from visual_gen.pipelines import GenerationError, WanPipeline
    from visual_gen.pipelines.lora import check_loras

    WanPipeline.check(config.model.path, settings, call)
    refuse_what_does_not_fit(config)
    check_loras(config.model.path, config.lora)
    pipeline = WanPipeline.from_pretrained(config.model.path, **settings)
    for lora in config.lora:
        pipeline.load_lora(lora.file, name=lora.path, scale=lora.scale, transformer=lora.transformer)
    announce(config.model.path, pipeline.recommended.get("label"), pipeline.transformer.attention_choices)
    # On the CPU whatever the device, so that a seed gives one noise everywhere.
    generators = [torch.Generator("cpu").manual_seed(seed) for seed in generation.seeds]
    try:
        output = pipeline(**call, generator=generators, output_type="np")
    except GenerationError as error:
        if error.output is None or len(error.output.record.bad_clips) == len(files):
            raise
        _write(config, error.output, files)
        say("the other clips were written")
        raise
    _write(config, output, files)


def announce(path: str, label: str | None, attention_choices: Mapping[str, Any]) -> None:
    """What the checkpoint is and which backend each role took, on stderr: a run can be long, so before it."""
    if label:
        say(f"{path}: {label}")
    for role, choice in attention_choices.items():
        say(f"{role} attention: {choice.name} ({textwrap.shorten(choice.why, 160, placeholder=' …')})")


def say(text: str) -> None:
    print(f"visual-gen: {text}", file=sys.stderr)


def _write(config: RunConfig, output: WanPipelineOutput, files: list[Path]) -> None:
    """Every good clip, then the report."""
    from visual_gen.runtime.report import write_report
    from visual_gen.runtime.video import write_video

    record = output.record
    written = [None if row in record.bad_clips else file for row, file in enumerate(files)]
    start = time.perf_counter()
    for file, clip in zip(written, output.frames, strict=True):
        if file is None:
            continue
        with writing(file):
            write_video(file, clip, config.generation.fps, crf=config.output.crf)
    record.stage_seconds["write"] = time.perf_counter() - start
    reports: tuple[Path, ...] = ()
    if config.output.report:
        path = expanded(config.output.path)
        with writing(report_paths(path)[0]):
            reports = write_report(path, config, record, output.frames, written)
    # At the end: a reader of this output that has gone stops us here, and must not cost a clip.
    for file in (*written, *reports):
        if file is not None:
            print(file)


@contextmanager
def writing(file: Path) -> Iterator[None]:
    """Its path was writable when the run began: what fails now, a full disk say, is no bad input."""
    try:
        yield
    except OSError as error:
        raise RuntimeError(f"writing {file} failed: {error.strerror or error}") from error
