"""Begins a run with the weights of an exported folder, so that the shipped checkpoint can be trained further."""

from pathlib import Path

import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from transformers import UMT5EncoderModel

from .models import make_text_encoder, make_transformer, make_vae
from .run_folder import RunFolder


def _weights(module: torch.nn.Module, loaded: torch.nn.Module, part: str) -> dict[str, torch.Tensor]:
    """The loaded weights in fp32; ValueError where they are not those of the run's settings."""
    expected = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    state = {name: value.float() for name, value in loaded.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in state.items()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise ValueError(f"{part} has {name} of shape {found.get(name)}, the run's settings say "
                             f"{expected.get(name)}; start from a folder that training with these settings wrote")
    return state


def _refuse_if_present(run: RunFolder, folder: Path, *names: str) -> None:
    present = [name for name in names if run.load(name) is not None]
    if present:
        raise ValueError(f"{run.path} has {' and '.join(present)} already; start from {folder} in a new run")


def _vae_state(run: RunFolder, folder: Path) -> dict:
    loaded = AutoencoderKLWan.from_pretrained(folder / "vae", torch_dtype=torch.float32)
    return {"vae": _weights(make_vae(run.settings), loaded, "vae"), "latents_mean": loaded.config.latents_mean,
            "latents_std": loaded.config.latents_std, "done": True}


def start_from_vae(run: RunFolder, folder: Path) -> None:
    """Leaves the folder's VAE in the run as finished stage "vae".

    Raises ValueError if the run has that stage already, or if the weights do not fit its settings.
    """
    _refuse_if_present(run, folder, "vae")
    run.save("vae", _vae_state(run, folder))
    run.log(f"start from the VAE in {folder}")


def start_from_pipeline(run: RunFolder, folder: Path) -> None:
    """Leaves the folder's weights in the run as finished stages "vae" and "transformer".

    Raises ValueError if the run has either stage already, or if the weights do not fit its settings.
    """
    _refuse_if_present(run, folder, "vae", "transformer")
    settings, how = run.settings, {"torch_dtype": torch.float32}
    vae = _vae_state(run, folder)
    transformer, text_encoder = make_transformer(settings), make_text_encoder(settings)
    transformer.load_state_dict(
        _weights(transformer, WanTransformer3DModel.from_pretrained(folder / "transformer", **how), "transformer"))
    text_encoder.load_state_dict(
        _weights(text_encoder, UMT5EncoderModel.from_pretrained(folder / "text_encoder", dtype=torch.float32),
                 "text_encoder"))
    averages = [parameter.detach() for module in (transformer, text_encoder) for parameter in module.parameters()]
    run.save("vae", vae)
    run.save("transformer", {"averages": averages, "steps": 0, "done": True})
    run.log(f"start from the weights in {folder}")
