"""Trains the wan-shapes checkpoint from nothing: VAE, then text encoder and transformer, on clips that it draws.

    python -m examples.wan_shapes.train --run runs/wan_shapes            # every stage, on a GPU
    python -m examples.wan_shapes.train --run runs/toy --toy             # the same code in seconds on a CPU

Each stage goes on from what the last call left in the run folder, and stops after 480 seconds, or fewer as in
`--stages transformer=120`, so a call that says "not finished" is simply made again; a stage named twice has two goes.
The run folder keeps settings, log, states and, in `pipeline/`, the diffusers folder.
"""

import sys

import torch

from .latents_stage import cache_latents, cache_refining_latents
from .models import save_pipeline
from .run_folder import RunFolder
from .settings import TOY, Settings
from .stages import Stage, run_stages
from .transformer_stage import TransformerTrainer, first_round, refine_transformer, train_transformer
from .vae_stage import load_vae, train_vae

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


STAGES: dict[str, Stage] = {
    "vae": train_vae,
    "latents": cache_latents,
    "transformer": train_transformer,
    "refine_latents": cache_refining_latents,
    "refine": refine_transformer,
    "export": export,
}


def main(arguments: list[str] | None = None) -> int:
    """Runs the stages asked for; 0 when all finished, 3 when one stopped at its limit."""
    return run_stages(__doc__, STAGES, DEFAULT_STAGES, Settings(), TOY, arguments)


if __name__ == "__main__":
    sys.exit(main())
