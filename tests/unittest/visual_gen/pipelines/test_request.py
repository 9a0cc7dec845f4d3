"""Bad arguments of a pipeline call, which are refused before any work."""

import json
from dataclasses import asdict

import numpy as np
import pytest
import torch

from visual_gen.pipelines.request import Geometry

WAN = Geometry(spatial_scale=8, temporal_scale=4, patch_size=(1, 2, 2), channels=16, max_positions=1024)


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"height": 40}, r"height is 40; it must be a multiple of 16: the nearest are 32 and 48"),
        ({"width": 49}, r"width is 49; it must be a multiple of 16: the nearest are 48 and 64"),
        ({"height": 8}, r"height is 8; it must be a multiple of 16, and 16 is the smallest"),
        ({"width": 0}, r"width is 0; .*16 is the smallest"),
        ({"height": 32.0}, r"height is 32.0; it must be an integer"),
        ({"num_frames": 16}, r"num_frames is 16; it must be 4 · k \+ 1: the nearest are 13 and 17"),
        ({"num_frames": 0}, r"num_frames is 0; it must be 4 · k \+ 1, and 1 is the smallest"),
        ({"num_frames": -3}, r"num_frames is -3; .*1 is the smallest"),
        ({"num_frames": True}, r"num_frames is True; it must be an integer"),
        ({"num_frames": 4 * 1024 + 1}, r"num_frames is 4097, 1025 positions .* at most 4093"),
        ({"width": 16 * 1025}, r"width is 16400, 1025 positions .* at most 16384"),
        ({"num_inference_steps": 0}, r"num_inference_steps is 0; it must be an integer of at least 1"),
        ({"num_inference_steps": -1}, r"num_inference_steps is -1"),
        ({"num_inference_steps": 2.5}, r"num_inference_steps is 2.5"),
        ({"num_inference_steps": 1001}, r"num_inference_steps is 1001; it must be at most 1000"),
        ({"num_inference_steps": np.bool_(True)}, r"num_inference_steps is .*True"),
        ({"guidance_scale": -0.5}, r"guidance_scale is -0.5; it must be finite and 0 or above"),
        ({"guidance_scale": float("nan")}, r"guidance_scale is nan"),
        ({"guidance_scale": float("inf")}, r"guidance_scale is inf"),
        ({"guidance_scale": "4"}, r"guidance_scale is '4'; it must be a number"),
        ({"guidance_scale_2": 3.0}, r"guidance_scale_2 is 3.0, but this checkpoint has one transformer"),
        ({"guidance_scale_2": -1}, r"guidance_scale_2 is -1; it must be finite"),
        ({"image": "a.png"}, r"image is given, but this checkpoint makes videos from text alone"),
        ({"last_image": "a.png"}, r"last_image is given, but this checkpoint takes none"),
        ({"max_sequence_length": 0}, r"max_sequence_length is 0"),
        ({"max_sequence_length": 4097}, r"max_sequence_length is 4097; it must be at most 4096"),
        ({"prompt": "a \udcff"}, r"prompt is 'a \\udcff'; it must be whole characters"),
        ({"negative_prompt": "\udcff"}, r"negative_prompt is '\\udcff'; it must be whole characters"),
        ({"height": 16384, "width": 16384, "num_frames": 4093}, r"needs about .* TiB, and cpu has .* left: .*plan"),
        ({"cfg": "both"}, r"cfg is 'both'; it must be one of 'batched', 'sequential'"),
        ({"output_type": "mp4"}, r"output_type is 'mp4'; it must be one of 'np', 'pil', 'pt', 'latent'"),
        ({"callback_on_step_end": 3}, r"callback_on_step_end is 3; it must be callable"),
        ({"prompt": 3}, r"prompt is 3 \(int\); it must be a text or a list of texts"),
        ({"prompt": None}, r"prompt is None"),
        ({"prompt": []}, r"prompt is an empty list"),
        ({"prompt": ["a", 5]}, r"prompt\[1\] is 5 \(int\); it must be a text"),
        ({"negative_prompt": 3}, r"negative_prompt is 3 \(int\)"),
        ({"negative_prompt": ["a", "b"]}, r"negative_prompt has 2 texts for 1 prompt\(s\)"),
        ({"generator": [torch.Generator(), torch.Generator()]}, r"generator has 2 generators for 1 prompt\(s\)"),
        ({"generator": 7}, r"generator is 7; it must be a torch.Generator"),
        ({"generator": [7]}, r"generator is \[7\]"),
        ({"latents": torch.zeros(1, 8, 2, 4, 4)}, r"latents has shape \[1, 8, 2, 4, 4\]; .* shape \[1, 8, 2, 4, 6\]"),
        ({"latents": "noise"}, r"latents has 'noise'"),
        ({"latents": torch.full((1, 8, 2, 4, 6), float("nan"))}, r"latents hold NaN or infinity"),
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items())[:40] if isinstance(value, dict) else "",
)
def test_a_bad_argument_is_refused_before_any_work(pipe, counted, settings, said, monkeypatch):
    monkeypatch.setattr(pipe.text_encoder, "forward", lambda *_: pytest.fail("the text encoder ran"))
    call = {"prompt": "a red circle", "height": 32, "width": 48, "num_frames": 5, "num_inference_steps": 2}
    with pytest.raises(ValueError, match=said):
        pipe(**{**call, **settings}, progress=False)
    assert counted == {"batches": [], "text_lens": []}


def test_numbers_of_numpy_are_numbers(generate):
    sizes = {"height": np.int64(32), "width": np.int32(48), "num_frames": np.int64(5)}
    others = {"num_inference_steps": np.int64(3), "max_sequence_length": np.int16(48), "guidance_scale": np.float32(2)}
    record = generate(**sizes, **others).record
    assert json.dumps(asdict(record))
    assert record.settings == generate(guidance_scale=2.0).record.settings


@pytest.mark.parametrize(
    "frames, height, width, latent", [(1, 16, 16, (1, 2, 2)), (81, 480, 832, (21, 60, 104)), (5, 32, 48, (2, 4, 6))]
)
def test_sizes_become_latent_sizes(frames, height, width, latent):
    assert WAN.latent_shape(3, frames, height, width) == (3, 16, *latent)


def test_a_patch_over_time_asks_for_whole_patches_of_latent_frames():
    wide = Geometry(spatial_scale=8, temporal_scale=4, patch_size=(2, 2, 2), channels=16, max_positions=1024)
    assert wide.latent_shape(1, 13, 16, 16) == (1, 16, 4, 2, 2)
    with pytest.raises(ValueError, match=r"num_frames is 9; it must be 8 · k \+ 5: the nearest are 5 and 13"):
        wide.latent_shape(1, 9, 16, 16)
