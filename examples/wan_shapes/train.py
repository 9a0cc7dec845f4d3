"""Trains the wan-shapes checkpoint from nothing: VAE, then text encoder and transformer, on clips that it draws.

    python -m examples.wan_shapes.train --run runs/wan_shapes            # every stage, on a GPU
    python -m examples.wan_shapes.train --run runs/toy --toy             # the same code in seconds on a CPU

Each stage goes on from what the last call left in the run folder, and stops after 480 seconds, or fewer as in
`--stages transformer=120`, so a call that says "not finished" is simply made again; a stage named twice has two goes.
The run folder keeps settings, log, states and, in `pipeline/`, the diffusers folder.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from .latents_stage import cache_latents, cache_refining_latents
from .models import save_pipeline
from .run_folder import RunFolder
from .settings import TOY, Settings
from .start_from import start_from_pipeline
from .transformer_stage import TransformerTrainer, first_round, refine_transformer, train_transformer
from .vae_stage import load_vae, train_vae

MAX_STAGE_S = 480.0
DEFAULT_STAGES = ("vae", "latents", "transformer", "transformer", "refine_latents", "refine", "export")


def export(run: RunFolder, device: torch.device, limit_s: float) -> bool:
    """Writes the diffusers folder from the moving averages of the last round, of an unfinished one too."""
    name, state = "refine", run.load("refine", device)
    if state is None:
        name, state = "transformer", run.load("transformer", device)
    if state is None:
        raise ValueError(f"stage 'transformer' has left nothing in {run.path}; run it first")
    trainer = TransformerTrainer(run.settings, first_round(run.settings), device)
    trainer.start_from(state["averages"])
    size = save_pipeline(run.path / "pipeline", run.settings, load_vae(run, device), trainer.text_encoder,
                         trainer.transformer)
    run.log(f"export: {name} at step {state['steps']}, {size / 1e6:.1f} MB in pipeline/")
    return True


STAGES: dict[str, Callable[[RunFolder, torch.device, float], bool]] = {
    "vae": train_vae,
    "latents": cache_latents,
    "transformer": train_transformer,
    "refine_latents": cache_refining_latents,
    "refine": refine_transformer,
    "export": export,
}


def setting(text: str) -> tuple[str, object]:
    name, _, value = text.partition("=")
    return name, json.loads(value)


def stage_with_limit(text: str) -> tuple[str, float]:
    """ "vae" or "vae=120"."""
    name, _, limit = text.partition("=")
    limit_s = float(limit) if limit else MAX_STAGE_S
    if name not in STAGES or not 0 < limit_s <= MAX_STAGE_S:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no stage out of {', '.join(STAGES)} with a limit of at most {MAX_STAGE_S:.0f} seconds"
        )
    return name, limit_s


def main(arguments: list[str] | None = None) -> int:
    """Runs the stages asked for; 0 when all finished, 3 when one stopped at its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="folder of the run; made if missing")
    parser.add_argument("--stages", type=stage_with_limit, nargs="*", metavar="STAGE[=SECONDS]",
                        default=[(name, MAX_STAGE_S) for name in DEFAULT_STAGES],
                        help=f"default {' '.join(DEFAULT_STAGES)}; none: only change settings")
    parser.add_argument("--start-from", type=Path, metavar="FOLDER",
                        help="a folder that `export` wrote: its weights stand for the stages up to the transformer")
    parser.add_argument("--toy", action="store_true", help="a tiny model for a few steps")
    parser.add_argument("--set", type=setting, nargs="+", default=[], metavar="NAME=JSON", help="change settings")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    settings = TOY if options.toy else Settings()
    run = RunFolder(options.run, settings, dict(options.set))
    if options.start_from is not None:
        start_from_pipeline(run, options.start_from)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    stages = [stage for stage, _ in options.stages]
    run.log(f"stages {', '.join(stages) or 'none'} on {name}, torch {torch.__version__}")
    for index, (stage, limit_s) in enumerate(options.stages):
        # Opened anew, since settings may have been changed meanwhile: the number of steps, for the time that is left.
        run = RunFolder(options.run, settings)
        if not STAGES[stage](run, device, limit_s) and stage not in stages[index + 1 :]:
            run.log(f"{stage} is not finished; call again to go on")
            return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
