"""Trains wan-shapes-causal: the wan-shapes checkpoint, taught to make chunk after chunk of a video of any length.

    python -m examples.wan_shapes.train_causal --run runs/causal --start-from visual_gen/checkpoints/wan_shapes
    python -m examples.wan_shapes.train_causal --run runs/toy --toy --start-from FOLDER    # in seconds on a CPU

Stages as in `train.py`: `causal_latents` draws clips without end, `causal` learns chunks from the chunks before them,
`distil` makes that a matter of a few forwards without guidance, and `export` writes `pipeline/` with the two parts that
differ from wan-shapes, transformer and text encoder; `shares.json` says where the others are, `stream.json` how they
are run. `export_guided` writes what `causal` alone left, in `guided/`.
"""

import json
import sys

import torch

from .causal_latents import cache_causal_latents
from .causal_settings import CAUSAL_TOY, CausalSettings
from .causal_stage import CausalTrainer, causal_round, train_causal
from .distil_stage import distil_causal
from .models import FLOW_SHIFT, folder_bytes, save_model_index, save_text_and_transformer
from .run_folder import RunFolder
from .stages import Stage, run_stages

DEFAULT_STAGES = ("causal_latents", "causal", "causal", "distil", "export")
STREAM_FILE = "stream.json"
# Without distillation, noise is taken away in this many steps under guidance.
GUIDED_STEPS = 8


def stream_settings(settings: CausalSettings, distilled: bool) -> dict:
    """How the exported model is run: the fields of `visual_gen.config.CausalConfig`, and the guidance scale."""
    steps = settings.stream_steps if distilled else GUIDED_STEPS
    return {
        "causal": {
            "frames_per_chunk": settings.frames_per_chunk,
            "recent_frames": settings.recent_frames,
            "steps": even_steps(steps),
            "flow_shift": FLOW_SHIFT,
        },
        "guidance_scale": 1.0 if distilled else settings.guidance_scale,
    }


def even_steps(count: int) -> list[float]:
    """So many noise levels from 1000 down, evenly, before the shift."""
    return [1000.0 * (count - index) / count for index in range(count)]


def _export(run: RunFolder, device: torch.device, name: str, folder: str) -> bool:
    """Writes a folder from the moving averages of a round, of an unfinished one too."""
    state = run.load(name, device)
    if state is None:
        raise ValueError(f"stage {name!r} has left nothing in {run.path}; run it first")
    trainer = CausalTrainer(run.settings, causal_round(run.settings), device)
    trainer.start_from(state["averages"])
    path = run.path / folder
    save_text_and_transformer(path, run.settings, trainer.text_encoder, trainer.transformer)
    stream = stream_settings(run.settings, distilled=name == "distil")
    (path / STREAM_FILE).write_text(json.dumps(stream, indent=2) + "\n")
    save_model_index(path)
    shares = dict.fromkeys(("tokenizer", "vae", "scheduler"), "wan-shapes")
    (path / "shares.json").write_text(json.dumps(shares, indent=2) + "\n")
    run.log(f"export: {name} at step {state['steps']}, {folder_bytes(path) / 1e6:.1f} MB in {folder}/")
    return True


def export(run: RunFolder, device: torch.device, limit_s: float) -> bool:
    """The distilled model."""
    return _export(run, device, "distil", "pipeline")


def export_guided(run: RunFolder, device: torch.device, limit_s: float) -> bool:
    """The model before distillation, which needs guidance and more steps."""
    return _export(run, device, "causal", "guided")


STAGES: dict[str, Stage] = {
    "causal_latents": cache_causal_latents,
    "causal": train_causal,
    "distil": distil_causal,
    "export": export,
    "export_guided": export_guided,
}


def main(arguments: list[str] | None = None) -> int:
    """Runs the stages asked for; 0 when all finished, 3 when one stopped at its limit."""
    return run_stages(__doc__, STAGES, DEFAULT_STAGES, CausalSettings(), CAUSAL_TOY, arguments)


if __name__ == "__main__":
    sys.exit(main())
