"""What a member of the family cannot do is refused before weights are read or anything is denoised."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from visual_gen.checkpoint import CheckpointError
from visual_gen.models.wan import WanTransformer
from visual_gen.pipelines import WanPipeline
from visual_gen.pipelines.components import load_image_encoder

SMALL = {"height": 32, "width": 64, "num_frames": 5, "num_inference_steps": 2, "max_sequence_length": 24}
ENCODER = "image_encoder/model.safetensors"


@pytest.fixture
def copied(member, tmp_path):
    """copied(name, file=None, **changes) → a copy of the member's folder, with a JSON file rewritten."""

    def copy(name, file=None, **changes):
        folder = tmp_path / name
        shutil.copytree(member(name), folder)
        if file:
            path = folder / file
            path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        return folder

    return copy


@pytest.fixture
def nothing_loads(monkeypatch):
    monkeypatch.setattr(WanTransformer, "from_pretrained", lambda *_, **__: pytest.fail("a transformer was loaded"))
    monkeypatch.setattr("visual_gen.pipelines.components.load_vae", lambda *_, **__: pytest.fail("the VAE was loaded"))


@pytest.mark.parametrize(
    "name, settings, said",
    [
        ("i2v", {}, "image is missing: this checkpoint makes a video that starts with a given image"),
        ("i2v_a14b", {}, "image is missing"),
        ("i2v", {"image": "first", "last_image": "last"}, "last_image is given, but this checkpoint takes none"),
        ("flf2v", {"image": "first"}, "last_image is missing: this checkpoint fills in between"),
        ("flf2v", {"last_image": "last"}, "image is missing"),
        ("flf2v", {"image": "first", "last_image": "last", "num_frames": 1}, "num_frames is 1, but there are a first"),
        ("ti2v_5b", {"image": "first", "last_image": "last"}, "last_image is given, but"),
        ("ti2v_5b", {"height": 48}, r"height is 48; it must be a multiple of 32: the nearest are 32 and 64"),
        ("ti2v_5b", {"guidance_scale_2": 2}, "guidance_scale_2 is 2, but this checkpoint has one transformer"),
        ("t2v_a14b", {"image": "first"}, "image is given, but this checkpoint makes videos from text alone"),
        ("t2v_a14b", {"guidance_scale_2": "3"}, "guidance_scale_2 is '3'; it must be a number"),
        ("i2v", {"image": ["first", "other"]}, r"image has 2 images for 1 prompt\(s\)"),
        ("i2v", {"image": np.zeros((4, 4, 3))}, "image is a ndarray; it must be a PIL image or the path"),
        ("i2v", {"image": "/nowhere.png"}, "image is '/nowhere.png': there is no such file"),
        ("i2v", {"image": ["first", 3], "prompt": ["a", "b"]}, r"image\[1\] is a int; it must be a PIL image"),
        ("i2v", {"image": __file__}, "this file is no image"),
        ("i2v", {"image": str(Path(__file__).parent)}, "it cannot be read"),
    ],
    ids=str,
)
def test_a_call_is_refused_before_any_work(opened, pictures, monkeypatch, name, settings, said):
    pipe = opened(name)
    monkeypatch.setattr(pipe.text_encoder, "forward", lambda *_: pytest.fail("the text encoder ran"))
    monkeypatch.setattr(pipe.vae, "encode", lambda *_: pytest.fail("the VAE ran"))
    call = {"prompt": "a", **SMALL, **settings}
    for key in ("image", "last_image"):
        if isinstance(call.get(key), str) and hasattr(pictures, call[key]):
            call[key] = getattr(pictures, call[key])
        elif isinstance(call.get(key), list):
            call[key] = [getattr(pictures, one) if isinstance(one, str) else one for one in call[key]]
    with pytest.raises(ValueError, match=said):
        pipe(**call, progress=False)


def test_images_are_checked_without_weights(member, tmp_path, nothing_loads):
    call = {"prompt": "a", "negative_prompt": None, "guidance_scale": 2.0, "cfg": "batched", **SMALL}
    with pytest.raises(ValueError, match="image is missing"):
        WanPipeline.check(member("i2v"), {}, call)
    Image.new("RGB", (8, 8), "red").save(tmp_path / "a.png")
    whole = (tmp_path / "a.png").read_bytes()
    WanPipeline.check(member("i2v"), {}, call | {"image": tmp_path / "a.png"})
    (tmp_path / "a.png").write_bytes(whole[:50])
    with pytest.raises(ValueError, match="it cannot be read"):
        WanPipeline.check(member("i2v"), {}, call | {"image": str(tmp_path / "a.png")})


@pytest.mark.parametrize(
    "name, file, changes, said",
    [
        ("t2v_a14b", "model_index.json", {"boundary_ratio": None}, "no boundary_ratio says where it takes over: give"),
        ("t2v_a14b", "model_index.json", {"transformer_2": [None, None]}, "transformer_2 is there, but .* not name it"),
        ("t2v_a14b", "model_index.json", {"transformer_2": ["diffusers", "X"]}, "names 'X' as transformer_2"),
        ("t2v_a14b", "model_index.json", {"expand_timesteps": True}, "expand_timesteps .* goes neither with a second"),
        ("t2v_a14b", "transformer_2/config.json", {"num_layers": 3}, "describes another model than transformer/"),
        ("t2v_a14b", "model_index.json", {"_class_name": "WanImageToVideoPipeline"}, "are those of a WanPipeline"),
        ("i2v_a14b", "model_index.json", {"_class_name": "WanPipeline"}, "are those of a WanImageToVideoPipeline"),
        ("i2v", "transformer/config.json", {"in_channels": 32}, "in_channels 32, but the vae's z_dim, twice, .* is 36"),
        ("i2v", "image_encoder/config.json", {"hidden_size": 48}, "image_dim 32, but the image_encoder's hidden_size"),
        ("i2v", "image_encoder/config.json", {"patch_size": "x"}, "describes no image encoder that can be made"),
        ("i2v", "model_index.json", {"image_encoder": [None, None]}, "names None as image_encoder; .* CLIPVisionModel"),
        ("i2v", "model_index.json", {"image_processor": ["transformers", "Y"]}, "names 'Y' as image_processor"),
        ("flf2v", "image_encoder/config.json", {"image_size": 42}, "pos_embed_seq_len 10, but .* two images is 20"),
        ("ti2v_5b", "vae/config.json", {"patch_size": None}, "scale_factor_spatial 16, but .* make 8"),
    ],
    ids=str,
)
def test_a_folder_whose_parts_do_not_fit_is_refused(copied, nothing_loads, name, file, changes, said):
    folder = copied(name, file, **changes)
    with pytest.raises(CheckpointError, match=said) as error:
        WanPipeline.from_pretrained(folder, progress=False)
    assert str(folder) in str(error.value)


@pytest.mark.parametrize(
    "name, missing, said",
    [
        ("t2v_a14b", "transformer_2", "transformer_2 is missing: download it"),
        ("t2v_a14b", "transformer_2/config.json", "transformer_2/config.json is missing"),
        ("i2v", ENCODER, "image_encoder/model.safetensors is missing"),
        ("i2v", "image_processor/preprocessor_config.json", "preprocessor_config.json is missing"),
    ],
)
def test_a_missing_part_is_named(copied, nothing_loads, name, missing, said):
    folder = copied(name)
    path = folder / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(CheckpointError, match=said):
        WanPipeline.from_pretrained(folder, progress=False)


def test_a_shard_that_the_second_expert_misses_is_named_before_anything_is_loaded(copied, monkeypatch):
    monkeypatch.setattr("visual_gen.pipelines.components.load_text_encoder", lambda *_, **__: pytest.fail("loaded"))
    folder = copied("t2v_a14b")
    shard = sorted((folder / "transformer_2").glob("*.safetensors"))[-1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=re.escape(f"{folder / 'transformer_2'} lacks 1 of the")):
        WanPipeline.from_pretrained(folder, progress=False)


def test_offloading_on_the_cpu_is_refused(member, nothing_loads):
    with pytest.raises(ValueError, match="offload is 'experts', which rests a transformer in host memory, but the dev"):
        WanPipeline.from_pretrained(member("t2v_a14b"), offload="experts", progress=False)


def test_image_encoder_tensors_are_those_of_the_file_under_old_and_new_names(copied):
    folder = copied("i2v")
    tensors = load_file(folder / ENCODER)
    bare = {name.removeprefix("vision_model."): tensor for name, tensor in tensors.items()}
    extra = {"visual_projection.weight": torch.zeros(3, 32), "vision_model.embeddings.position_ids": torch.arange(5)}
    for named in (bare, {f"vision_model.{name}": tensor for name, tensor in bare.items()} | extra):
        save_file(named, folder / ENCODER, metadata={"format": "pt"})
        encoder = load_image_encoder(folder / "image_encoder", dtype=torch.float32, device=torch.device("cpu"))
        loaded = {name.removeprefix("vision_model."): tensor for name, tensor in encoder.named_parameters()}
        assert loaded.keys() == bare.keys()
        assert all(torch.equal(loaded[name], tensor.float()) for name, tensor in bare.items())
    del bare["post_layernorm.weight"]
    save_file(bare, folder / ENCODER, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="missing: post_layernorm.weight"):
        load_image_encoder(folder / "image_encoder", dtype=torch.float32, device=torch.device("cpu"))
