"""Every member of the Wan family gives the frames that diffusers' pipeline of the same folder gives."""

import numpy as np
import pytest
import torch

SMALL = {"height": 32, "width": 64, "num_frames": 5, "num_inference_steps": 4, "max_sequence_length": 24}
RED = "a red circle moving left"


def seeded(seeds):
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    return generators[0] if len(generators) == 1 else generators


@pytest.mark.parametrize(
    "name, images, seeds, settings",
    [
        ("t2v_a14b", "", [0], {"guidance_scale_2": 3.0, "guidance_scale": 4.0, "negative_prompt": "a star"}),
        ("t2v_a14b", "", [1], {}),
        ("t2v_a14b", "", [2, 3], {"guidance_scale": 3.5, "guidance_scale_2": 1.0}),
        ("t2v_a14b", "", [4], {"guidance_scale": 3.5, "guidance_scale_2": 0.5, "cfg": "sequential"}),
        ("ti2v_5b", "", [0], {}),
        ("ti2v_5b", "i", [0], {"num_frames": 9}),
        ("ti2v_5b", "i", [1, 2], {"cfg": "sequential"}),
        ("i2v", "i", [0], {"negative_prompt": "a star", "num_frames": 9}),
        ("i2v", "i", [1, 2], {"cfg": "sequential"}),
        ("i2v", "i", [3], {"guidance_scale": 1.0, "num_frames": 1}),
        ("flf2v", "il", [0], {"num_frames": 9}),
        ("flf2v", "il", [1, 2], {}),
        ("i2v_a14b", "i", [0], {"guidance_scale": 3.5, "guidance_scale_2": 2.5}),
        ("i2v_a14b", "il", [1], {"guidance_scale": 3.5}),
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else None,
)
def test_frames_are_those_of_diffusers(opened, reference, pictures, name, images, seeds, settings):
    theirs = reference(name, with_image=bool(images))
    shown = {key: getattr(pictures, key) for key in ("first", "last")[: len(images)]}
    shown = {{"first": "image", "last": "last_image"}[key]: value for key, value in shown.items()}
    prompts = RED if len(seeds) == 1 else [RED, "a green star"]
    settings = SMALL | settings
    if name in ("i2v", "flf2v"):
        # diffusers tells text and image tokens apart by it: with another length it takes some for the others.
        settings["max_sequence_length"] = 512
    kept = []
    ours = opened(name)(
        prompt=prompts, generator=seeded(seeds), progress=False, **shown, **settings,
        callback_on_step_end=lambda pipe, step, timestep, tensors: kept.append(tensors["latents"].clone()),
    )  # fmt: skip
    settings.pop("cfg", None)
    if isinstance(prompts, list) and isinstance(settings.get("negative_prompt"), str):
        settings["negative_prompt"] = [settings["negative_prompt"]] * len(prompts)
    theirs_kept = []

    def keep(pipe, step, timestep, tensors):
        theirs_kept.append(tensors["latents"].clone())
        return {}

    expected = theirs(prompt=prompts, generator=seeded(seeds), callback_on_step_end=keep, **shown, **settings).frames
    for latents, expected_latents in zip(kept, theirs_kept, strict=True):
        assert (latents - expected_latents).abs().max() <= 1e-4 * expected_latents.std()
    assert ours.frames.shape == expected.shape == (len(seeds), settings["num_frames"], 32, 64, 3)
    assert expected.std() > 0.01
    assert np.abs(ours.frames - expected).max() <= 1e-4
    if name.endswith("a14b"):
        assert set(ours.record.expert_steps) == {0, 1}
