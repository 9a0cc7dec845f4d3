"""Checkpoints that fit, in one file or in shards, and those that do not: errors name the tensor or the key."""

import json
from dataclasses import asdict

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file, save_file

from attention_backend.sdpa import SDPABackend
from visual_gen.models.wan import WAN_PRESETS, WanConfig, WanTransformer
from visual_gen.models.wan.weights import source_slots

CONFIG = {
    "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 10,
    "freq_dim": 16, "ffn_dim": 40, "num_layers": 2, "rope_max_seq_len": 32,
}  # fmt: skip
WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture
def folder(make_reference):
    return make_reference(**CONFIG)[1]


def rewrite(folder, change):
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


@torch.no_grad()
def test_shards_give_what_one_file_gives(make_reference, make_inputs, tmp_path):
    reference, folder = make_reference(**CONFIG)
    reference.save_pretrained(tmp_path / "pipeline" / "transformer", max_shard_size="20KB")
    assert len(list((tmp_path / "pipeline" / "transformer").glob("*.safetensors"))) > 1
    whole, sharded = WanTransformer.from_pretrained(folder), WanTransformer.from_pretrained(tmp_path / "pipeline")
    inputs = make_inputs(whole.config, latent=(1, 4, 4))
    assert torch.equal(whole(**inputs), sharded(**inputs))


def test_every_parameter_comes_from_the_checkpoint(folder):
    model = WanTransformer.from_pretrained(folder)
    slots = source_slots(model)
    assert slots.keys() == load_file(folder / WEIGHTS).keys()
    rows = {name: 0 for name, _ in model.named_parameters()}
    for slot in slots.values():
        rows[slot.parameter] += slot.rows
    assert rows == {name: parameter.shape[0] for name, parameter in model.named_parameters()}


def test_missing_unexpected_and_misshapen_tensors_are_all_named(folder):
    def change(tensors):
        del tensors["blocks.1.attn2.norm_k.weight"]
        tensors["blocks.0.attn1.to_z.weight"] = torch.zeros(2)
        tensors["blocks.0.ffn.net.2.bias"] = torch.zeros(23)

    rewrite(folder, change)
    with pytest.raises(ValueError) as error:
        WanTransformer.from_pretrained(folder)
    for name in ("blocks.1.attn2.norm_k.weight", "blocks.0.attn1.to_z.weight", "blocks.0.ffn.net.2.bias", "23", "24"):
        assert name in str(error.value)


@pytest.mark.parametrize("name", ["patch_embedding_wancamctrl.weight", "vace_blocks.0.proj_in.weight"])
def test_a_relative_of_wan_is_refused_by_what_its_extra_layers_are_for(folder, name):
    rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(2)}))
    with pytest.raises(ValueError, match=f"has '{name}', a layer for (camera moves|control videos) .*not served"):
        WanTransformer.from_pretrained(folder)


def test_the_norm_that_published_checkpoints_carry_unused_is_allowed(folder):
    rewrite(folder, lambda tensors: tensors.update({"blocks.0.attn2.norm_added_q.weight": torch.ones(24)}))
    WanTransformer.from_pretrained(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"_class_name": "WanVACETransformer3DModel"}, "WanVACETransformer3DModel; only WanTransformer3DModel"),
        ({"num_layer": 3}, "'num_layer' = 3.*did you mean 'num_layers'"),
        ({"num_layers": 0}, "num_layers is 0"),
        ({"num_layers": "2"}, "num_layers is '2'"),
        ({"qk_norm": "layer_norm"}, "qk_norm is 'layer_norm'"),
        ({"image_dim": 10}, "image_dim is 10 and added_kv_proj_dim None"),
        ({"attention_head_dim": 13}, "attention_head_dim is 13"),
        ({"patch_size": [2, 2]}, "patch_size"),
        ({"patch_size": [1, 1.5, 2]}, "patch_size"),
        ({"num_layers": True}, "num_layers is True"),
        ({"eps": None}, "eps is None"),
        ({"pos_embed_seq_len": 0}, "pos_embed_seq_len is 0"),
    ],
)
def test_a_config_that_is_no_wan_is_refused_with_the_key(folder, change, message):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        WanTransformer.from_pretrained(folder)


def test_a_null_option_of_a_later_diffusers_is_allowed(folder):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"new_option": None}))
    WanConfig.from_folder(folder)


def test_broken_or_missing_config_names_the_file(folder):
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json is not valid JSON"):
        WanConfig.from_folder(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match="config.json is missing"):
        WanConfig.from_folder(folder)


def test_casting_keeps_what_wan_keeps_in_fp32_exactly(folder):
    model = WanTransformer.from_pretrained(folder)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    model.to(torch.bfloat16)
    kept = {name for name, parameter in model.named_parameters() if parameter.dtype == torch.float32}
    assert {"scale_shift_table", "blocks.0.scale_shift_table", "blocks.1.norm2.weight"} <= kept
    assert {"time_embedding.linear_1.weight", "time_embedding.linear_2.bias"} <= kept
    assert "time_embedding.proj.weight" not in kept and model.dtype == torch.bfloat16
    for name in kept:
        assert torch.equal(dict(model.named_parameters())[name], before[name])
    assert {b.spec.dtype for b in (model.blocks[0].self_attn.backend, model.blocks[1].cross_text.backend)} == {
        torch.bfloat16
    }


def test_presets_have_the_published_sizes():
    """Against diffusers' model of the same configuration, and the sizes that the family is known by."""
    billions = {}
    for name, config in WAN_PRESETS.items():
        model = WanTransformer(config, init_weights=False)
        with torch.device("meta"):
            reference = WanTransformer3DModel(**asdict(config))
        count = sum(p.numel() for p in model.parameters())
        assert count == sum(p.numel() for p in reference.parameters()), name
        billions[name] = round(count / 1e9, 1)
    assert billions == {
        "wan2.1-t2v-1.3b": 1.4,
        "wan2.1-t2v-14b": 14.3,
        "wan2.1-i2v-14b": 16.4,
        "wan2.1-flf2v-14b": 16.4,
        "wan2.2-t2v-a14b": 14.3,
        "wan2.2-i2v-a14b": 14.3,
        "wan2.2-ti2v-5b": 5.0,
    }


def test_a_backend_that_somebody_wrapped_stays_when_the_model_moves(folder):
    model = WanTransformer.from_pretrained(folder)
    wrapped = SDPABackend(model.blocks[0].self_attn.spec())
    model.blocks[0].self_attn.backend = wrapped
    model.to("cpu").to(torch.bfloat16)
    assert model.blocks[0].self_attn.backend is wrapped
    assert model.blocks[1].self_attn.backend.spec.dtype == torch.bfloat16
