"""Images on their way into a request: one for all prompts or one for each, files, shapes, and what they change."""

import numpy as np
import pytest
import torch
from PIL import Image

from visual_gen.config import RunConfig
from visual_gen.pipelines import WanPipeline
from visual_gen.pipelines import images as images_module
from visual_gen.pipelines.conditioning import ChannelCondition, FirstFrameCondition
from visual_gen.pipelines.images import open_images
from visual_gen.pipelines.latents import encode_clip
from visual_gen.pipelines.request import check_request
from visual_gen.runtime.plan import plan

SMALL = {"height": 32, "width": 64, "num_frames": 5, "num_inference_steps": 2, "progress": False}


def run(pipe, prompt="a red circle", seeds=(0,), **settings):
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    return pipe(prompt, generator=generators, **{**SMALL, "output_type": "latent", **settings})


@pytest.mark.parametrize("name", ["i2v", "flf2v", "i2v_a14b", "ti2v_5b"])
def test_each_prompt_may_have_its_own_image(opened, pictures, name):
    pipe = opened(name)
    last = {"last_image": pictures.last} if name == "flf2v" else {}
    both = [pictures.first, pictures.other]
    alone = [run(pipe, seeds=[i], image=image, **last).frames for i, image in enumerate(both)]
    together = run(
        pipe, ["a red circle"] * 2, [0, 1], image=both,
        **{key: [value] * 2 for key, value in last.items()},
    ).frames  # fmt: skip
    assert (torch.cat(alone) - together).abs().max() < 1e-3
    swapped = run(pipe, seeds=[0], image=pictures.other, **last).frames
    assert (swapped - alone[0]).abs().max() > 0.01


@pytest.mark.parametrize("name", ["flf2v", "i2v_a14b"])
def test_the_last_image_changes_the_video(opened, pictures, name):
    a, b = (run(opened(name), image=pictures.first, last_image=last).frames for last in (pictures.last, pictures.other))
    assert (a - b).abs().max() > 0.01


def test_an_image_that_rows_share_is_encoded_once(opened, pictures, monkeypatch):
    pipe, clips, shown = opened("i2v"), [], []
    encode, look = pipe.vae.encode, pipe.image_encoder.forward
    monkeypatch.setattr(pipe.vae, "encode", lambda clip: clips.append(tuple(clip.shape)) or encode(clip))
    monkeypatch.setattr(pipe.image_encoder, "forward", lambda **inputs: shown.append(1) or look(**inputs))
    record = run(pipe, ["a", "b", "c"], [0, 1, 2], image=pictures.first).record
    assert clips == [(1, 3, 5, 32, 64)] and len(shown) == 1
    assert record.stage_seconds["image"] > 0
    assert record.settings["image"] == ["70x40"] * 3


def test_a_first_frame_stays_as_it_was_given(opened, pictures):
    pipe = opened("ti2v_5b")
    frames = run(pipe, image=pictures.first).frames
    given = pipe._encode_images(_request(pipe, image=pictures.first), _NoBars())
    assert isinstance(given, FirstFrameCondition)
    pixels = torch.tensor(np.asarray(pictures.first.resize((64, 32), Image.Resampling.LANCZOS))).permute(2, 0, 1)
    expected = encode_clip(pipe.vae, (pixels / 255 * 2 - 1)[None, :, None])
    assert (frames[:, :, :1] - expected).abs().max() < 1e-4
    timesteps = given.timestep(torch.tensor(500), 3)
    assert timesteps.shape == (3, 2 * 1 * 2) and timesteps.tolist() == [[0.0, 0.0, 500.0, 500.0]] * 3
    assert timesteps.stride(0) == 0  # so that the transformer embeds them once


def test_the_mask_counts_every_frame_of_a_latent_frame(opened, pictures):
    pipe = opened("flf2v")
    given = pipe._encode_images(_request(pipe, image=pictures.first, last_image=pictures.last), _NoBars())
    assert isinstance(given, ChannelCondition)
    mask = given.model_input(torch.zeros(1, 16, 2, 4, 8))[0, 16:20, :, 0, 0]
    assert mask.tolist() == [[1, 0], [1, 0], [1, 0], [1, 1]]
    assert given.image_tokens.shape == (2, 5, 32)


def test_files_and_turned_photos_are_opened(tmp_path):
    image = Image.new("RGBA", (6, 4), (255, 0, 0, 255))
    image.save(tmp_path / "a.png")
    exif = Image.Exif()
    exif[274] = 6  # lies on its side
    Image.new("RGB", (6, 4), "blue").save(tmp_path / "b.jpg", exif=exif)
    a, b = open_images("image", [str(tmp_path / "a.png"), tmp_path / "b.jpg"], 2)
    assert (a.mode, a.size, b.mode, b.size) == ("RGB", (6, 4), "RGB", (4, 6))
    assert open_images("image", None, 2) == []
    both = open_images("image", image, 2)
    assert both[0] is both[1]


def test_an_image_far_too_large_is_refused(tmp_path, monkeypatch):
    Image.new("RGB", (20, 20)).save(tmp_path / "a.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(ValueError, match="it cannot be read"):
        images_module.open_images("image", tmp_path / "a.png", 1)


def test_a_shape_that_distorts_the_image_is_warned_about(opened, pictures):
    warned = [w for w in run(opened("ti2v_5b"), image=pictures.first).record.warnings if "stretched" in w]
    assert warned == [
        "image is 70x40 (width x height) and is stretched to 64x32: crop it, or ask for a height and width of its shape"
    ]
    fitting = pictures.first.resize((80, 41))
    assert not any("stretched" in w for w in run(opened("ti2v_5b"), image=fitting).record.warnings)


def test_text_alone_needs_no_timestep_for_each_token(opened, monkeypatch):
    pipe, shapes = opened("ti2v_5b"), []
    forward = pipe.transformer.forward

    def noted(x, t, text_kv):
        shapes.append(tuple(t.shape))
        return forward(x, t, text_kv=text_kv)

    monkeypatch.setattr(pipe.transformer, "forward", noted)
    monkeypatch.setattr(pipe.vae, "encode", None)  # nothing of an image is computed either
    run(pipe)
    assert set(shapes) == {(2,)}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["i2v", "flf2v", "ti2v_5b"])
def test_no_step_waits_for_the_gpu(member, pictures, name):
    pipe = WanPipeline.from_pretrained(member(name), dtype=torch.bfloat16, device="cuda", progress=False)
    images = {"image": pictures.first} | ({"last_image": pictures.last} if name == "flf2v" else {})
    settings = SMALL | {"num_inference_steps": 4, **images}
    pipe("a red circle", **settings)  # kernels and tables are made

    def strict_from_here(pipe, step, *_):
        torch.cuda.set_sync_debug_mode("error" if step < 3 else "default")

    try:
        record = pipe("a red circle", callback_on_step_end=strict_from_here, **settings).record
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(record.step_seconds) == 4


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["i2v", "flf2v", "i2v_a14b", "ti2v_5b"])
def test_latents_on_a_gpu_are_those_of_the_cpu(member, opened, pictures, name):
    images = {"image": pictures.first} | ({"last_image": pictures.last} if name == "flf2v" else {})
    attention = {"self": "sdpa", "cross_text": "sdpa"}
    there = WanPipeline.from_pretrained(member(name), device="cuda", attention=attention, progress=False)
    latents = run(there, **images).frames.cpu()
    expected = run(opened(name), **images).frames
    assert ((latents - expected).norm() / expected.norm()) < 1e-2


@pytest.mark.parametrize("name, shown", [("i2v", True), ("ti2v_5b", False), ("ti2v_5b", True), ("t2v_a14b", False)])
def test_what_a_request_needs_is_what_plan_says(opened, member, pictures, tmp_path, monkeypatch, name, shown):
    needed = []
    monkeypatch.setattr("visual_gen.pipelines.wan.check_memory", lambda count, device: needed.append(count))
    pictures.first.save(tmp_path / "a.png")
    run(opened(name), **({"image": tmp_path / "a.png"} if shown else {}))
    sizes = {key: value for key, value in SMALL.items() if key != "progress"}
    image = {"image": str(tmp_path / "a.png")} if shown else {}
    generation = {"prompt": "a red circle", **sizes, **image}
    memory = plan(RunConfig(model={"path": str(member(name))}, generation=generation)).memory_bytes
    assert needed == [memory["text_kv"] + memory["activations"]]


class _NoBars:
    def stage(self, name, total):
        return self

    def advance(self):
        pass


def _request(pipe, **images):
    return check_request(
        pipe.geometry, 1000, pipe.task, 1, prompt="a", negative_prompt=None, height=32, width=64, num_frames=5,
        num_inference_steps=2, guidance_scale=5.0, guidance_scale_2=None, max_sequence_length=24, cfg="batched",
        output_type="np", callback_on_step_end=None, **{"image": None, "last_image": None, **images},
    )  # fmt: skip
