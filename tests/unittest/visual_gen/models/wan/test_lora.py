"""LoRA files of every style against W + scale · (alpha / r) · up @ down, worked out plainly in diffusers' model."""

import json
import re

import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import save_file

from tests.unittest.visual_gen import authors_names
from visual_gen.checkpoint import CheckpointError
from visual_gen.models.wan import CausalWanTransformer, WanTransformer
from visual_gen.modules.lora import LoRALinear

CONFIG = {
    "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 10,
    "freq_dim": 16, "ffn_dim": 40, "num_layers": 2, "image_dim": 20, "added_kv_proj_dim": 24,
}  # fmt: skip
RANK, ALPHA = 3, 1.5
SCALE = 0.7


@pytest.fixture(scope="module")
def reference():
    torch.manual_seed(0)
    model = WanTransformer3DModel(**CONFIG).eval().requires_grad_(False)
    for parameter in model.parameters():
        fan_in = parameter[0].numel() if parameter.ndim > 1 else 1
        parameter.copy_(torch.randn(parameter.shape) / fan_in**0.5)
    return model


@pytest.fixture(scope="module")
def folder(reference, tmp_path_factory):
    path = tmp_path_factory.mktemp("reference")
    reference.save_pretrained(path)
    return path


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(1)
    return {
        "hidden_states": torch.randn(1, 4, 2, 4, 6, generator=generator),
        "timestep": torch.tensor([500.0]),
        # 512: diffusers takes what is beyond for the image's tokens
        "encoder_hidden_states": torch.randn(1, 512, 10, generator=generator),
        "encoder_hidden_states_image": torch.randn(1, 7, 20, generator=generator),
    }


@pytest.fixture
def pairs(reference):
    """Module → (down, up) of every linear layer, the patch embedding's convolution included."""
    generator = torch.Generator().manual_seed(2)
    found = {}
    for name, parameter in reference.named_parameters():
        if parameter.ndim < 2 or not name.endswith(".weight"):
            continue
        down = torch.randn(RANK, *parameter.shape[1:], generator=generator) / parameter[0].numel() ** 0.5
        up = torch.randn(len(parameter), RANK, *[1] * (parameter.ndim - 2), generator=generator)
        found[name.removesuffix(".weight")] = (down, up)
    assert {"blocks.1.attn2.add_v_proj", "patch_embedding", "proj_out", "condition_embedder.time_proj"} <= set(found)
    return found


@torch.no_grad()
def expected(reference, inputs, deltas):
    """The output with `deltas`, {parameter: difference}, added."""
    before = {name: reference.get_parameter(name).clone() for name in deltas}
    for name, delta in deltas.items():
        reference.get_parameter(name).add_(delta.reshape(before[name].shape))
    out = reference(**inputs).sample
    for name, x in before.items():
        reference.get_parameter(name).copy_(x)
    return out


def products(pairs, factor):
    return {f"{name}.weight": factor * (up.flatten(1) @ down.flatten(1)) for name, (down, up) in pairs.items()}


def close(out, reference, base):
    assert (base - reference).abs().max() > 0.05 * base.abs().max(), "the LoRA must matter"
    torch.testing.assert_close(out, reference, rtol=1e-5, atol=1e-5)


def authors(name):
    return authors_names.transformer_module(name)


# style → key of (module in diffusers' words, "down" | "up" | "alpha")
STYLES = {
    "diffusers": lambda m, kind: f"transformer.{m}.{ {'down': 'lora_A', 'up': 'lora_B'}[kind]}.weight",
    "peft": lambda m, kind: f"base_model.model.{m}.{ {'down': 'lora_A', 'up': 'lora_B'}[kind]}.default.weight",
    "peft, authors' names": lambda m, kind: (
        f"base_model.model.model.{authors(m)}.{ {'down': 'lora_A', 'up': 'lora_B'}[kind]}.weight"
    ),
    "community": lambda m, kind: f"diffusion_model.{authors(m)}."
    + {"down": "lora_down.weight", "up": "lora_up.weight", "alpha": "alpha"}[kind],
    "bare": lambda m, kind: f"{authors(m)}.{ {'down': 'lora_A', 'up': 'lora_B'}[kind]}.weight",
    "kohya": lambda m, kind: f"lora_unet_{authors(m).replace('.', '_')}."
    + {"down": "lora_down.weight", "up": "lora_up.weight", "alpha": "alpha"}[kind],
}
WITH_ALPHA = ("community", "kohya")


def write(path, style, pairs, **extra):
    key = STYLES[style]
    state = {}
    for name, (down, up) in pairs.items():
        state[key(name, "down")], state[key(name, "up")] = down, up
        if style in WITH_ALPHA:
            state[key(name, "alpha")] = torch.tensor(ALPHA)
    save_file(state | extra, path)
    return path


@torch.no_grad()
@pytest.mark.parametrize("style", STYLES)
def test_every_style_gives_the_plain_product(reference, folder, inputs, pairs, tmp_path, style):
    model = WanTransformer.from_pretrained(folder)
    base = model(**inputs)
    name = model.load_lora(write(tmp_path / "style.safetensors", style, pairs), scale=SCALE)
    assert name == "style" and model.lora_scales == {"style": SCALE}
    ratio = ALPHA / RANK if style in WITH_ALPHA else 1.0
    close(model(**inputs), expected(reference, inputs, products(pairs, SCALE * ratio)), base)
    assert {type(model.blocks[0].self_attn.to_qkv), type(model.blocks[1].cross_image.to_kv)} == {LoRALinear}


@torch.no_grad()
@pytest.mark.parametrize("part", ["to_q", "to_k", "to_v", "add_k_proj", "add_v_proj"])
def test_parts_of_a_fused_projection_reach_their_own_rows(reference, folder, inputs, pairs, tmp_path, part):
    """Each alone, as in a LoRA that leaves the others out; of both attentions and one layer."""
    only = {name: pair for name, pair in pairs.items() if name.endswith(part) and name.startswith("blocks.1.")}
    assert only
    model = WanTransformer.from_pretrained(folder)
    base = model(**inputs)
    model.load_lora(write(tmp_path / "part.safetensors", "diffusers", only), scale=20.0)
    torch.testing.assert_close(
        model(**inputs), expected(reference, inputs, products(only, 20.0)), rtol=1e-5, atol=1e-5
    )
    assert not torch.equal(model(**inputs), base)
    assert isinstance(model.blocks[1].self_attn.to_qkv, LoRALinear) == part.startswith("to_")
    assert not isinstance(model.blocks[0].self_attn.to_qkv, LoRALinear)


def differences(reference):
    """Whole differences as lightx2v's distillation LoRAs carry them: key → (parameter of diffusers' model, value)."""
    generator = torch.Generator().manual_seed(3)
    wanted = {
        "diffusion_model.patch_embedding.diff": "patch_embedding.weight",
        "diffusion_model.patch_embedding.diff_b": "patch_embedding.bias",
        "diffusion_model.blocks.0.self_attn.k.diff_b": "blocks.0.attn1.to_k.bias",
        "diffusion_model.blocks.1.cross_attn.v.diff_b": "blocks.1.attn2.to_v.bias",
        "diffusion_model.blocks.0.self_attn.norm_k.diff": "blocks.0.attn1.norm_k.weight",
        "diffusion_model.blocks.0.cross_attn.norm_q.diff": "blocks.0.attn2.norm_q.weight",
        "diffusion_model.blocks.1.norm3.diff": "blocks.1.norm2.weight",
        "diffusion_model.blocks.1.norm3.diff_b": "blocks.1.norm2.bias",
        "diffusion_model.blocks.1.diff_m": "blocks.1.scale_shift_table",
        "diffusion_model.head.head.diff": "proj_out.weight",
        "diffusion_model.head.diff_m": "scale_shift_table",
        "diffusion_model.time_embedding.2.diff_b": "condition_embedder.time_embedder.linear_2.bias",
    }
    return {
        key: (name, 0.3 * torch.randn(reference.get_parameter(name).shape, generator=generator))
        for key, name in wanted.items()
    }


@torch.no_grad()
def test_whole_differences_beside_low_rank_ones(reference, folder, inputs, pairs, tmp_path):
    whole = differences(reference)
    low = {name: pair for name, pair in pairs.items() if "blocks" in name}
    path = write(tmp_path / "distil.safetensors", "community", low, **{key: x for key, (_, x) in whole.items()})
    model = WanTransformer.from_pretrained(folder)
    base, before = model(**inputs), {name: x.clone() for name, x in model.state_dict().items()}
    for scale in (SCALE, -0.5):
        if scale == SCALE:
            model.load_lora(path, name="a", scale=scale)
        else:
            model.set_lora_scale("a", scale)
        deltas = products(low, scale * ALPHA / RANK) | {name: scale * x for name, x in whole.values()}
        close(model(**inputs), expected(reference, inputs, deltas), base)
    model.unload_lora("a")
    assert model.lora_scales == {} and not any(isinstance(m, LoRALinear) for m in model.modules())
    after = model.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(after[name], x) for name, x in before.items())
    assert torch.equal(model(**inputs), base)


@torch.no_grad()
def test_a_bias_of_the_up_half_is_scaled_as_its_product(reference, folder, inputs, pairs, tmp_path):
    name = "blocks.0.attn1.to_v"
    bias = torch.randn(24)
    path = write(tmp_path / "b.safetensors", "kohya", {name: pairs[name]},
                 **{"lora_unet_blocks_0_self_attn_v.lora_up.bias": bias})  # fmt: skip
    model = WanTransformer.from_pretrained(folder)
    base = model(**inputs)
    model.load_lora(path, scale=3.0)
    factor = 3.0 * ALPHA / RANK
    deltas = products({name: pairs[name]}, factor) | {f"{name}.bias": factor * bias}
    close(model(**inputs), expected(reference, inputs, deltas), base)


@torch.no_grad()
def test_several_at_once_add_up_and_leave_one_by_one(reference, folder, inputs, pairs, tmp_path):
    half = list(pairs)[::2]
    first = write(tmp_path / "a.safetensors", "community", pairs,
                  **{"diffusion_model.head.head.diff_b": torch.ones(16)})  # fmt: skip
    second = write(tmp_path / "b.safetensors", "diffusers", {name: pairs[name] for name in half},
                   **{"transformer.proj_out.diff_b": torch.full((16,), 2.0)})  # fmt: skip
    model = WanTransformer.from_pretrained(folder)
    base = model(**inputs)
    model.load_lora(first, scale=0.5)
    model.load_lora(second, scale=0.25)
    one = products(pairs, 0.5 * ALPHA / RANK) | {"proj_out.bias": torch.full((16,), 0.5)}
    two = products({name: pairs[name] for name in half}, 0.25) | {"proj_out.bias": torch.full((16,), 0.5)}
    both = {name: one.get(name, 0) + two.get(name, 0) for name in one | two}
    close(model(**inputs), expected(reference, inputs, both), base)
    model.unload_lora("a")
    close(model(**inputs), expected(reference, inputs, two), base)
    model.unload_lora()
    assert torch.equal(model(**inputs), base)


@torch.no_grad()
def test_fused_is_the_sum_and_stays(reference, folder, inputs, pairs, tmp_path):
    path = write(tmp_path / "a.safetensors", "community", pairs, **{"diffusion_model.head.head.diff_b": torch.ones(16)})
    model = WanTransformer.from_pretrained(folder)
    base = model(**inputs)
    model.load_lora(path, scale=SCALE)
    beside = model(**inputs)
    model.fuse_lora()
    assert not any(isinstance(m, LoRALinear) for m in model.modules()) and model.lora_scales == {}
    deltas = products(pairs, SCALE * ALPHA / RANK) | {"proj_out.bias": torch.full((16,), SCALE)}
    close(model(**inputs), expected(reference, inputs, deltas), base)
    torch.testing.assert_close(model(**inputs), beside, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="no LoRA is loaded"):
        model.fuse_lora()


@torch.no_grad()
def test_a_bf16_model_keeps_its_bits_and_the_lora_its_weight(folder, inputs, pairs, tmp_path):
    model = WanTransformer.from_pretrained(folder)
    path = write(tmp_path / "a.safetensors", "community", pairs, **{"diffusion_model.head.head.diff_b": torch.ones(16)})
    model.load_lora(path, scale=SCALE)
    exact = model(**inputs)
    model.to(torch.bfloat16)  # the fp32 layers' additions stay fp32 too
    linear = model.time_embedding.linear_1
    assert {linear.weight.dtype, linear.down_0.dtype} == {torch.float32}
    assert {model.proj_out.weight.dtype, model.proj_out.down_0.dtype} == {torch.bfloat16}
    error = (model(**inputs) - exact).abs().max() / exact.abs().max()
    assert error < 0.05
    fresh = WanTransformer.from_pretrained(folder, dtype=torch.bfloat16)
    before = {name: x.clone() for name, x in fresh.state_dict().items()}
    fresh.load_lora(path, scale=SCALE)
    error = (fresh(**inputs) - exact).abs().max() / exact.abs().max()
    assert error < 0.05
    fresh.unload_lora()
    assert all(torch.equal(fresh.state_dict()[name], x) for name, x in before.items())


@torch.no_grad()
def test_alphas_beside_the_tensors_are_read(reference, folder, inputs, pairs, tmp_path):
    """diffusers writes peft's settings into the header, peft into adapter_config.json."""
    name = "blocks.1.ffn.net.2"
    special = "blocks.0.attn1.to_q"
    two = {key: pairs[key] for key in (name, special)}
    state = {STYLES["diffusers"](m, kind): x for m, pair in two.items() for kind, x in zip(("down", "up"), pair,
             strict=True)}  # fmt: skip
    config = {"lora_alpha": 6.0, "r": RANK, "alpha_pattern": {"blocks.0.attn1.to_q": 12.0}}
    deltas = products({name: two[name]}, 6.0 / RANK) | products({special: two[special]}, 12.0 / RANK)
    header = {"format": "pt",
              "lora_adapter_metadata": json.dumps({f"transformer.{k}": v for k, v in config.items()})}  # fmt: skip
    save_file(state, tmp_path / "header.safetensors", metadata=header)
    (tmp_path / "peft").mkdir()
    save_file({k.replace("transformer.", "base_model.model."): x for k, x in state.items()},
              tmp_path / "peft" / "adapter_model.safetensors")  # fmt: skip
    (tmp_path / "peft" / "adapter_config.json").write_text(json.dumps(config))
    for path in (tmp_path / "header.safetensors", tmp_path / "peft"):
        model = WanTransformer.from_pretrained(folder)
        base = model(**inputs)
        model.load_lora(path)
        close(model(**inputs), expected(reference, inputs, deltas), base)
    for key in ("use_dora", "use_rslora"):
        (tmp_path / "peft" / "adapter_config.json").write_text(json.dumps(config | {key: True}))
        with pytest.raises(CheckpointError, match=f"{key}, which is not served"):
            WanTransformer.from_pretrained(folder).load_lora(tmp_path / "peft")


@torch.no_grad()
def test_a_pickled_lora_of_a_causal_model(folder, pairs, tmp_path):
    """LongLive's file: peft's keys under generator_lora."""
    config = {key: value for key, value in CONFIG.items() if key not in ("image_dim", "added_kv_proj_dim")}
    WanTransformer3DModel(**config).save_pretrained(tmp_path / "t2v")
    model = CausalWanTransformer.from_pretrained(tmp_path / "t2v")
    weight = model.blocks[0].self_attn.to_out.weight.clone()
    down, up = pairs["blocks.0.attn1.to_out.0"]
    state = {f"base_model.model.blocks.0.self_attn.o.lora_{half}.weight": x for half, x in (("A", down), ("B", up))}
    torch.save({"generator_lora": state, "step": 1}, tmp_path / "lora.pt")
    model.load_lora(tmp_path / "lora.pt")
    model.fuse_lora()
    torch.testing.assert_close(model.blocks[0].self_attn.to_out.weight, weight + up @ down)


def test_what_does_not_fit_is_named_before_anything_is_changed(folder, pairs, tmp_path):
    model = WanTransformer.from_pretrained(folder)
    before = {name: (x.data_ptr(), x.clone()) for name, x in model.state_dict().items()}
    down, up = pairs["blocks.0.attn1.to_q"]
    good = {"blocks.0.attn1.to_q": (down, up)}
    q = "diffusion_model.blocks.0.self_attn.k"
    cases = (
        ({f"{q}.lora_down.weight": torch.zeros(2, 32), f"{q}.lora_up.weight": torch.zeros(24, 2)},
         r"self_attn.k.lora_up.weight \[24, 2\] and .*lora_down.weight \[2, 32\], where \[24, r\] and \[r, 24\]"),
        ({f"{q}.lora_down.weight": torch.zeros(2, 24), f"{q}.lora_up.weight": torch.zeros(24, 3)}, "where"),
        ({f"{q}.lora_down.weight": torch.zeros(2, 24)}, "self_attn.k.lora_down.weight lacks the other half"),
        ({f"{q}.alpha": torch.tensor(1.0)}, "self_attn.k.alpha lacks the other half"),
        ({"diffusion_model.blocks.7.ffn.0.diff": torch.zeros(40, 24), "x.lora_A.weight": torch.zeros(1)},
         "unknown: diffusion_model.blocks.7.ffn.0.diff, x.lora_A.weight"),
        ({f"{q}.dora_scale": torch.zeros(24)}, "unknown: .*dora_scale"),
        ({f"{q}.diff": torch.zeros(24, 23)}, r"self_attn.k.diff \[24, 23\], where \[24, 24\] is needed"),
        ({"diffusion_model.blocks.0.norm3.lora_A.weight": torch.zeros(2, 24),
          "diffusion_model.blocks.0.norm3.lora_B.weight": torch.zeros(24, 2)}, "unknown: .*norm3.lora_B"),
        ({"blocks.0.self_attn.q.lora_down.weight": down.clone()}, "for one tensor: remove one"),
    )  # fmt: skip
    for extra, says in cases:
        path = write(tmp_path / "bad.safetensors", "diffusers", good, **extra)
        with pytest.raises(CheckpointError, match=says):
            model.load_lora(path)
    assert model.lora_scales == {} and not any(isinstance(m, LoRALinear) for m in model.modules())
    for name, x in model.state_dict().items():
        assert x.data_ptr() == before[name][0] and torch.equal(x, before[name][1])


def test_bad_arguments_and_files(folder, pairs, tmp_path):
    model = WanTransformer.from_pretrained(folder)
    path = write(tmp_path / "a.safetensors", "diffusers", pairs)
    for scale in (float("nan"), "1", True):
        with pytest.raises(ValueError, match=f"scale is {re.escape(repr(scale))}; it must be a finite number"):
            model.load_lora(path, scale=scale)
    model.load_lora(path)
    with pytest.raises(ValueError, match="a LoRA 'a' is loaded: give another name"):
        model.load_lora(path)
    for call in (model.unload_lora, lambda name: model.set_lora_scale(name, 1.0)):
        with pytest.raises(ValueError, match="no LoRA 'b' is loaded; loaded are 'a'"):
            call("b")
    (tmp_path / "folder").mkdir()
    (tmp_path / "half.safetensors").write_bytes(path.read_bytes()[:-9])
    for file, says in (("folder", "neither pytorch_lora_weights"), ("none.safetensors", "is missing"),
                       ("half.safetensors", "truncated")):  # fmt: skip
        with pytest.raises(CheckpointError, match=says):
            model.load_lora(tmp_path / file)


@torch.no_grad()
def test_compiled_blocks_follow_a_lora_and_its_scale(reference, folder, inputs, pairs, tmp_path):
    model = WanTransformer.from_pretrained(folder)
    model.compile_blocks(backend="eager")
    base = model(**inputs)
    path = write(tmp_path / "a.safetensors", "community", pairs)
    model.load_lora(path, scale=SCALE)
    close(model(**inputs), expected(reference, inputs, products(pairs, SCALE * ALPHA / RANK)), base)
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    model.set_lora_scale("a", 0.2)
    out = model(**inputs)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled
    torch.testing.assert_close(out, expected(reference, inputs, products(pairs, 0.2 * ALPHA / RANK)), rtol=1e-5,
                               atol=1e-5)  # fmt: skip
    model.unload_lora()
    torch.testing.assert_close(model(**inputs), base)
