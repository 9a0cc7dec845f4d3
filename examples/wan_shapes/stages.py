"""The command line of a training: which stages, in which run folder, for how long."""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from .run_folder import RunFolder
from .settings import ModelSettings
from .start_from import start_from_pipeline, start_from_vae

MAX_STAGE_S = 480.0
Stage = Callable[[RunFolder, torch.device, float], bool]  # True when it is finished


def _setting(text: str) -> tuple[str, object]:
    name, _, value = text.partition("=")
    return name, json.loads(value)


def run_stages(
    description: str, stages: dict[str, Stage], default: Sequence[str], settings: ModelSettings, toy: ModelSettings,
    arguments: list[str] | None,
) -> int:
    """Runs the stages asked for; 0 when all finished, 3 when one stopped at its limit."""

    def stage_with_limit(text: str) -> tuple[str, float]:
        """ "vae" or "vae=120"."""
        name, _, limit = text.partition("=")
        limit_s = float(limit) if limit else MAX_STAGE_S
        if name not in stages or not 0 < limit_s <= MAX_STAGE_S:
            raise argparse.ArgumentTypeError(
                f"{text!r} is no stage out of {', '.join(stages)} with a limit of at most {MAX_STAGE_S:.0f} seconds"
            )
        return name, limit_s

    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="folder of the run; made if missing")
    parser.add_argument("--stages", type=stage_with_limit, nargs="*", metavar="STAGE[=SECONDS]",
                        default=[(name, MAX_STAGE_S) for name in default],
                        help=f"default {' '.join(default)}; none: only change settings")
    start = parser.add_mutually_exclusive_group()
    start.add_argument("--start-from", type=Path, metavar="FOLDER",
                       help="a folder that `export` wrote: its weights stand for the stages up to the transformer")
    start.add_argument("--vae-from", type=Path, metavar="FOLDER", help="likewise, but of its weights the VAE alone")
    parser.add_argument("--toy", action="store_true", help="a tiny model for a few steps")
    parser.add_argument("--set", type=_setting, nargs="+", default=[], metavar="NAME=JSON", help="change settings")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    settings = toy if options.toy else settings
    run = RunFolder(options.run, settings, dict(options.set))
    if options.start_from is not None:
        start_from_pipeline(run, options.start_from)
    if options.vae_from is not None:
        start_from_vae(run, options.vae_from)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    chosen = [stage for stage, _ in options.stages]
    run.log(f"stages {', '.join(chosen) or 'none'} on {name}, torch {torch.__version__}")
    for index, (stage, limit_s) in enumerate(options.stages):
        # Opened anew, since settings may have been changed meanwhile: the number of steps, for the time that is left.
        run = RunFolder(options.run, settings)
        if not stages[stage](run, device, limit_s) and stage not in chosen[index + 1 :]:
            run.log(f"{stage} is not finished; call again to go on")
            return 3
    return 0
