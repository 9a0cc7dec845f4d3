"""Folders that a pipeline loads, and those it refuses before any weights are read."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from visual_gen.checkpoint import CheckpointError, WeightFiles
from visual_gen.models.wan import WanTransformer
from visual_gen.pipelines import WanPipeline
from visual_gen.pipelines.components import load_text_encoder, load_tokenizer, load_vae
from visual_gen.pipelines.recommended import read_recommended

CPU = torch.device("cpu")
VAE, TEXT = "vae/diffusion_pytorch_model.safetensors", "text_encoder/model.safetensors"
ROW = ["diffusers", "WanTransformer3DModel"]


@pytest.fixture(autouse=True)
def transformer_stays_unread(monkeypatch):
    monkeypatch.setattr(WanTransformer, "from_pretrained", lambda *_, **__: pytest.fail("the transformer was loaded"))


def rewrite_weights(path, change):
    """Replace a safetensors file by one whose tensors `change` has edited in place."""
    tensors = load_file(path)
    change(tensors)
    path.unlink()
    save_file(tensors, path)


@pytest.mark.parametrize(
    "file, changes, said",
    [
        (
            "model_index.json",
            {"_class_name": "WanImageToVideoPipeline"},
            "'WanImageToVideoPipeline', but the in_channels and out_channels of .* are those of a WanPipeline",
        ),
        ("model_index.json", {"_class_name": "WanVACEPipeline"}, "Wan VACE .* does not serve"),
        ("model_index.json", {"_class_name": "FluxPipeline"}, "a FluxPipeline, which is not a Wan .*DiffusionPipeline"),
        ("model_index.json", {"_class_name": None}, "not a Wan text-to-video"),
        (
            "model_index.json",
            {"transformer_2": ROW},
            "names a second transformer .*Wan 2.2 A14B.*transformer_2 is missing: download it",
        ),
        ("model_index.json", {"boundary_ratio": 0.875}, r"boundary_ratio 0.875 \(two experts.* names no transformer_2"),
        ("model_index.json", {"boundary_ratio": 1}, "boundary_ratio is 1; it must be a number between 0 and 1"),
        ("model_index.json", {"text_encoder": ["transformers", "T5EncoderModel"]}, "'T5EncoderModel' as text_encoder"),
        ("model_index.json", {"vae": [None, None]}, "None as vae; a Wan pipeline needs AutoencoderKLWan"),
        ("transformer/config.json", {"_class_name": "FluxTransformer2DModel"}, "needs 'WanTransformer3DModel'"),
        ("transformer/config.json", {"text_dim": 7}, "text_dim 7, but the text_encoder's d_model is"),
        ("transformer/config.json", {"in_channels": 36}, "'WanPipeline', but .* those of a WanImageToVideoPipeline"),
        ("transformer/config.json", {"in_channels": 9, "out_channels": 9}, "in_channels 9, but the vae's z_dim is"),
        ("transformer/config.json", {"image_dim": 1280}, "image_dim is 1280 and added_kv_proj_dim None"),
        ("vae/config.json", {"_class_name": "AutoencoderKL"}, "needs 'AutoencoderKLWan'"),
        ("vae/config.json", {"latents_mean": [0.0]}, "1 latents_mean for"),
        (
            "model_index.json",
            {"vae": "AutoencoderKLWan"},
            r"'AutoencoderKLWan' as vae; it must be a pair \[library, class",
        ),
        ("model_index.json", {"transformer_2": [None]}, r"\[None\] as transformer_2; it must be a pair"),
        ("vae/config.json", {"scale_factor_spatial": 16}, "scale_factor_spatial 16, but its dim_mult .* make 8"),
        ("vae/config.json", {"scale_factor_temporal": 8}, "scale_factor_temporal 8, but .* make 4"),
        ("vae/config.json", {"patch_size": 2}, "scale_factor_spatial 8, but .* patch_size 2 make 16"),
        ("vae/config.json", {"temperal_downsample": [True] * 3}, "scale_factor_temporal 4, but .* make 8"),
        ("vae/config.json", {"dim_mult": "wide"}, "vae/config.json describes no VAE"),
        ("vae/config.json", {"latents_mean": None}, "latents_mean None; it must be a list"),
        ("vae/config.json", {"latents_mean": ["0"] * 8}, "'0' in latents_mean; they must be finite numbers"),
        ("vae/config.json", {"latents_std": [1.0] * 7 + [0]}, "0 in latents_std; they must be numbers above 0"),
        ("text_encoder/config.json", {"num_layers": "two"}, "text_encoder/config.json describes no text encoder"),
        ("text_encoder/config.json", {"feed_forward_proj": "x-y-z"}, "text_encoder/config.json describes no text enc"),
        ("text_encoder/config.json", {"vocab_size": 5}, "tokens, but the text encoder only 5"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_folder_that_is_not_wans_is_refused_with_the_reason(copied, file, changes, said):
    folder = copied.edit(file, **changes)
    with pytest.raises(CheckpointError, match=said) as error:
        WanPipeline.from_pretrained(folder, progress=False)
    assert str(folder) in str(error.value)


@pytest.mark.parametrize(
    "missing",
    [
        "model_index.json",
        "text_encoder/config.json",
        TEXT,
        "vae/config.json",
        VAE,
        "transformer/config.json",
        "transformer/diffusion_pytorch_model.safetensors.index.json",
        "scheduler/scheduler_config.json",
        "tokenizer/tokenizer.json",
        "tokenizer/tokenizer_config.json",
    ],
)
def test_a_missing_file_is_named(copied, missing):
    (copied.folder / missing).unlink()
    with pytest.raises(CheckpointError, match="download|give a folder") as error:
        WanPipeline.from_pretrained(copied.folder, progress=False)
    assert missing in str(error.value) or missing == "tokenizer/tokenizer.json"


def test_statistics_that_the_vae_leaves_out_are_not_those_of_another(copied):
    content = json.loads((copied.folder / "vae/config.json").read_text())
    del content["latents_std"]
    (copied.folder / "vae/config.json").unlink()
    (copied.folder / "vae/config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="latents_std None; it must be a list"):
        WanPipeline.from_pretrained(copied.folder, progress=False)


@pytest.mark.parametrize("content", ["[]", "{", '{"sizes": 3, "num_frames": ["x"], "max_sequence_length": [1]}'])
def test_advice_that_is_damaged_is_a_warning(copied, caplog, content):
    (copied.folder / "recommended.json").unlink()
    (copied.folder / "recommended.json").write_text(content)
    assert read_recommended(copied.folder) == {}
    assert str(copied.folder / "recommended.json") in caplog.text


def test_a_tokenizer_config_that_is_a_list_is_named(copied):
    file = copied.folder / "tokenizer/tokenizer_config.json"
    file.unlink()
    file.write_text("[]")
    with pytest.raises(CheckpointError, match="tokenizer_config.json holds a JSON list"):
        load_tokenizer(copied.folder / "tokenizer", 96)


def test_quantised_weights_of_text_encoder_and_vae_are_refused(copied):
    name = "encoder.final_layer_norm.weight"
    rewrite_weights(copied.folder / TEXT, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))
    with pytest.raises(CheckpointError, match=f"{TEXT} stores '{name}' as int8"):
        load_text_encoder(copied.folder / "text_encoder", dtype=torch.float32, device=CPU)
    name = "post_quant_conv.bias"
    rewrite_weights(copied.folder / VAE, lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)}))
    with pytest.raises(CheckpointError, match=f"{VAE} stores '{name}' as float8_e4m3fn"):
        load_vae(copied.folder / "vae", dtype=torch.float32, device=CPU)


def test_a_missing_or_truncated_shard_is_named_before_anything_is_loaded(copied, monkeypatch):
    monkeypatch.setattr("visual_gen.pipelines.components.load_text_encoder", lambda *_, **__: pytest.fail("loaded"))
    shard = sorted((copied.folder / "transformer").glob("*.safetensors"))[0]
    content = shard.read_bytes()
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        WanPipeline.from_pretrained(copied.folder, progress=False)
    shard.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=f"{shard.name} is truncated"):
        WanPipeline.from_pretrained(copied.folder, progress=False)


def test_a_second_transformer_that_the_index_does_not_name_is_refused(copied):
    (copied.folder / "transformer_2").mkdir()
    with pytest.raises(CheckpointError, match="transformer_2 is there, but .* does not name it"):
        WanPipeline.from_pretrained(copied.folder, progress=False)


def test_a_transformers_own_folder_says_to_go_up(copied):
    with pytest.raises(CheckpointError, match="holds a lone WanTransformer3DModel, so give the folder above"):
        WanPipeline.from_pretrained(copied.folder / "transformer", progress=False)


def test_vae_tensors_that_do_not_fit_are_all_named(copied):
    def damage(tensors):
        tensors["decoder.conv_in.bias"] = torch.zeros(3)
        tensors["stray"] = torch.zeros(1)
        del tensors["post_quant_conv.weight"]

    rewrite_weights(copied.folder / VAE, damage)
    said = r"missing: post_quant_conv.weight; unexpected: stray; wrongly shaped: decoder.conv_in.bias \[3\] where"
    with pytest.raises(CheckpointError, match=said):
        load_vae(copied.folder / "vae", dtype=torch.float32, device=CPU)


def test_text_encoder_tensors_that_do_not_fit_are_all_named(copied):
    def damage(tensors):
        del tensors["encoder.block.0.layer.0.SelfAttention.q.weight"]
        del tensors["shared.weight"]
        tensors["stray"] = torch.zeros(1)

    rewrite_weights(copied.folder / TEXT, damage)
    said = r"missing: encoder.block.0.layer.0.SelfAttention.q.weight, shared.weight; unexpected: stray"
    with pytest.raises(CheckpointError, match=said):
        load_text_encoder(copied.folder / "text_encoder", dtype=torch.float32, device=CPU)


def test_a_tied_embedding_may_be_stored_under_either_name_or_both(copied, pipe):
    expected = pipe.text_encoder.state_dict()
    for names in (["encoder.embed_tokens.weight"], ["encoder.embed_tokens.weight", "shared.weight"]):

        def store(tensors, names=names):
            embedding = tensors.pop("shared.weight", None)
            embedding = tensors.pop("encoder.embed_tokens.weight", None) if embedding is None else embedding
            tensors.update({name: embedding.clone() for name in names})

        rewrite_weights(copied.folder / TEXT, store)
        loaded = load_text_encoder(copied.folder / "text_encoder", dtype=torch.float32, device=CPU).state_dict()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


def test_a_whole_t5s_decoder_is_left_aside(copied):
    rewrite_weights(copied.folder / TEXT, lambda tensors: tensors.update({"decoder.final.weight": torch.zeros(2)}))
    load_text_encoder(copied.folder / "text_encoder", dtype=torch.float32, device=CPU)


def test_no_weight_is_random_or_a_view_of_the_file(copied):
    stored = dict(WeightFiles.open(copied.folder / "vae").tensors())
    vae = load_vae(copied.folder / "vae", dtype=torch.float32, device=CPU)
    (copied.folder / VAE).unlink()
    for name, tensor in vae.state_dict().items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, stored[name].float())
    assert not any(parameter.requires_grad for parameter in vae.parameters())


def test_a_tokenizer_that_does_not_load_names_its_folder(copied):
    file = copied.folder / "tokenizer/tokenizer.json"
    file.unlink()
    file.write_text("{}")
    with pytest.raises(CheckpointError, match=re.escape(str(copied.folder / "tokenizer"))):
        load_tokenizer(copied.folder / "tokenizer", 96)


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"dtype": torch.float64}, "dtype is torch.float64; it must be one of torch.float32"),
        ({"dtype": "float32"}, "dtype is 'float32'"),
        ({"vae_dtype": torch.int8}, "vae_dtype is torch.int8"),
        ({"device": "gpu"}, "device is 'gpu'; it must be 'auto', 'cpu', 'cuda' or 'cuda:N'"),
        ({"device": "meta"}, "device is 'meta'"),
        ({"device": "cuda:99"}, "device is 'cuda:99'; torch .* sees .* CUDA device"),
        ({"scheduler": "ddim"}, "scheduler is 'ddim'"),
        ({"flow_shift": 0}, "flow_shift is 0"),
        ({"boundary_ratio": 0.9}, "boundary_ratio is 0.9, but .* has no transformer_2"),
        ({"boundary_ratio": "0.9"}, "boundary_ratio is '0.9'; it must be a number between 0 and 1"),
        ({"offload": "all"}, "offload is 'all'; it must be one of 'none', 'experts'"),
        ({"offload": "experts"}, "offload is 'experts', but this checkpoint has one transformer"),
        ({"attention": {"cross_kv": "ragged"}}, "cross_kv"),
        ({"attention": {"selff": "sdpa"}}, "selff"),
        ({"attention": {"self": "FA9"}}, "no attention backend 'FA9'"),
        ({"attention": {"cross_text": "flash_attn4"}}, "'flash_attn4' cannot serve cross_text"),
        ({"attention": {"cross_image": "sdpa"}}, "no image inputs"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_settings_are_refused_before_anything_is_loaded(settings, said, monkeypatch):
    monkeypatch.setattr("visual_gen.pipelines.wan.load_components", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(ValueError, match=said):
        WanPipeline.from_pretrained("wan-shapes", progress=False, **settings)


def test_what_a_hub_pipeline_cannot_do_is_refused_before_its_weights_are_fetched(copied, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download",
        lambda hub_id, allow_patterns, **_: asked.append(allow_patterns) or copied.folder,
    )
    with pytest.raises(ValueError, match="no attention backend 'FA9'"):
        WanPipeline.from_pretrained("Some/Wan", attention={"self": "FA9"}, progress=False)
    call = {"prompt": "a", "negative_prompt": None, "height": 90, "width": 96, "num_frames": 5, "cfg": "batched",
            "num_inference_steps": 1, "guidance_scale": 1.0, "max_sequence_length": 48}  # fmt: skip
    with pytest.raises(ValueError, match="height is 90"):
        WanPipeline.check("Some/Wan", {}, call)
    WanPipeline.check("Some/Wan", {}, call | {"height": 96})
    assert len(asked) == 3 and not any("safetensors" in p for patterns in asked for p in patterns if "json" not in p)


def test_a_hub_pipeline_of_another_class_is_refused_before_its_weights_are_fetched(copied, monkeypatch):
    folder = copied.edit("model_index.json", _class_name="FluxPipeline")
    asked = []
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda hub_id, allow_patterns, **_: asked.append(allow_patterns) or folder
    )
    with pytest.raises(CheckpointError, match="FluxPipeline"):
        WanPipeline.from_pretrained("Some/Flux", progress=False)
    assert len(asked) == 1 and not any("safetensors" in pattern for pattern in asked[0])
