"""`visual-gen generate`: prompts to mp4 files and a report."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from visual_gen.commands.settings import config_from_arguments
from visual_gen.config import ConfigError, RunConfig
from visual_gen.runtime.files import check_writable

# Presets that `plan` knows and the pipeline does not serve yet, with what is missing.
NOT_YET = {
    "wan2.1-i2v-14b": "the image-to-video pipeline",
    "wan2.1-flf2v-14b": "the first-and-last-frame pipeline",
    "wan2.2-t2v-a14b": "the switch between its two transformers",
    "wan2.2-i2v-a14b": "the image-to-video pipeline, and the switch between its two transformers",
    "wan2.2-ti2v-5b": "the pipeline that gives each token its own timestep",
}


def run(arguments: argparse.Namespace) -> None:
    config = config_from_arguments(arguments)
    files = output_files(config)
    missing = NOT_YET.get(config.model.preset or "")
    if missing:
        raise ConfigError(
            f"{arguments.config}: model.preset = {config.model.preset!r} cannot generate yet: {missing} is not written "
            "(`visual-gen plan` works for it)"
        )
    written = generate(config, files)
    for file in written:
        print(file)


def output_files(config: RunConfig) -> list[Path]:
    """One mp4 path for each prompt, found to be writable. Raises ValueError and OSError otherwise."""
    path = Path(config.output.path).expanduser()
    prompts = config.generation.prompts
    if not prompts:
        raise ConfigError("there is no prompt; give --prompt TEXT, or generation.prompt in the configuration")
    if path.suffix.lower() != ".mp4":
        raise ConfigError(f"output.path = {str(path)!r}: wants a name that ends in .mp4")
    files = [path] if len(prompts) == 1 else [path.with_stem(f"{path.stem}-{i}") for i in range(len(prompts))]
    for file in files:
        check_writable(file)
    return files


def generate(config: RunConfig, files: list[Path]) -> list[Path]:
    """Make the clips of `config` and write each to its file; returns every file written, the report's included."""
    device, dtype = config.torch_device(), config.torch_dtype()

    import torch

    from visual_gen.pipelines import WanPipeline
    from visual_gen.runtime.report import write_report
    from visual_gen.runtime.video import write_video

    generation = config.generation
    pipeline = WanPipeline.from_pretrained(
        config.model.path,
        dtype=dtype,
        device=device,
        attention=config.attention,
        scheduler=generation.scheduler,
        flow_shift=generation.flow_shift,
    )
    output = pipeline(
        prompt=list(generation.prompts),
        negative_prompt=generation.negative_prompt,
        height=generation.height,
        width=generation.width,
        num_frames=generation.num_frames,
        num_inference_steps=generation.num_inference_steps,
        guidance_scale=generation.guidance_scale,
        # On the CPU whatever the device, so that a seed gives one noise everywhere.
        generator=[torch.Generator("cpu").manual_seed(seed) for seed in generation.seeds],
        max_sequence_length=generation.max_sequence_length,
        cfg=generation.cfg,
        output_type="np",
    )
    start = time.perf_counter()
    for file, clip in zip(files, output.frames, strict=True):
        write_video(file, clip, generation.fps, crf=config.output.crf)
    record = output.record
    record.stage_seconds["write"] = time.perf_counter() - start
    if not config.output.report:
        return files
    return [*files, *write_report(Path(config.output.path).expanduser(), config, record, output.frames, files)]
