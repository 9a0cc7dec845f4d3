import dataclasses
import json
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import FlopCounterMode
from transformers import CLIPVisionConfig, CLIPVisionModel, UMT5Config, UMT5EncoderModel

from attention_backend import register_backend
from attention_backend.sdpa import SDPABackend
from attention_backend.selection import _classes
from visual_gen.checkpoint import PACKAGED_CHECKPOINTS
from visual_gen.config import ConfigError, RunConfig, load_config
from visual_gen.models.wan import WAN_PRESETS, WanConfig, WanTransformer
from visual_gen.pipelines import WanPipeline
from visual_gen.runtime.costs import activation_bytes, flops, text_kv_bytes, text_rows
from visual_gen.runtime.model import CLIP_VIT_H_VISION, UMT5_XXL_ENCODER, WAN21_VAE, WAN22_VAE, PartSize
from visual_gen.runtime.plan import plan

CONFIGS = Path(__file__).parents[3] / "configs"
SMALL = WanConfig(
    num_attention_heads=3, attention_head_dim=32, in_channels=8, out_channels=8, text_dim=24, ffn_dim=256, num_layers=2
)


def config_of(name: str, *overrides: str) -> RunConfig:
    return load_config(CONFIGS / f"{name}.yaml", overrides)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("wan2.1_t2v_1.3b", 1_418_996_800),
        ("wan2.1_t2v_14b", 14_288_491_584),
        ("wan2.1_i2v_14b_480p", 16_394_878_784),
        ("wan2.1_i2v_14b_720p", 16_394_878_784),
        ("wan2.1_flf2v_14b_720p", 16_395_536_704),
        ("wan2.2_t2v_a14b", 14_288_491_584),
        ("wan2.2_i2v_a14b", 14_288_901_184),
        ("wan2.2_ti2v_5b", 4_999_787_712),
    ],
)
def test_parameters_are_those_of_diffusers_model(name, parameters):
    config = config_of(name)
    with torch.device("meta"):
        theirs = WanTransformer3DModel(**dataclasses.asdict(WAN_PRESETS[config.model.preset]))
    assert plan(config).parameters == sum(parameter.numel() for parameter in theirs.parameters()) == parameters


@pytest.mark.parametrize(
    ("name", "latent_shape", "tokens"),
    [
        ("wan2.1_t2v_1.3b", (1, 16, 21, 60, 104), 21 * 1560),
        ("wan2.1_t2v_14b", (1, 16, 21, 90, 160), 21 * 3600),
        ("wan2.1_i2v_14b_480p", (1, 16, 21, 60, 104), 21 * 1560),
        ("wan2.2_ti2v_5b", (1, 48, 31, 44, 80), 31 * 880),
        ("wan_shapes_t2v", (1, 8, 9, 12, 12), 9 * 36),
    ],
)
def test_latents_and_tokens_follow_the_published_geometry(name, latent_shape, tokens):
    found = plan(config_of(name))
    assert (found.latent_shape, found.tokens) == (latent_shape, tokens)


def test_weights_take_the_bytes_that_the_loaded_model_takes():
    for dtype in ("float32", "bfloat16"):
        config = config_of("wan_shapes_t2v", f"dtype={dtype}")
        model = WanTransformer.from_pretrained("wan-shapes", dtype=config.torch_dtype())
        loaded = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        assert plan(config).memory_bytes["weights"] == loaded


def test_two_experts_stay_in_memory_unless_one_rests():
    one, two = plan(config_of("wan2.1_t2v_14b")), plan(config_of("wan2.2_t2v_a14b"))
    assert two.num_experts == 2
    assert two.memory_bytes["weights"] == 2 * one.memory_bytes["weights"]
    assert two.memory_bytes["text_kv"] == one.memory_bytes["text_kv"]  # of the one that runs
    assert any("one runs in each step; all stay" in note for note in two.notes)
    resting = plan(config_of("wan2.2_t2v_a14b", "offload=experts"))
    assert resting.memory_bytes["weights"] == one.memory_bytes["weights"]
    assert any("rests in host memory" in note for note in resting.notes)


@pytest.mark.parametrize(
    ("name", "override", "said"),
    [
        ("wan2.1_t2v_14b", "offload=experts", "offload = 'experts': is for a pair"),
        ("wan2.1_t2v_14b", "generation.guidance_scale_2=3", "generation.guidance_scale_2 = 3.0: is for a pair"),
        ("wan2.1_i2v_14b_480p", "generation.boundary_ratio=0.9", "generation.boundary_ratio = 0.9: is for a pair"),
        ("wan2.2_t2v_a14b", "generation.image=a.png", "image is given, but this checkpoint makes videos from text"),
        ("wan2.2_ti2v_5b", "generation.last_image=a.png", "last_image is given, but this checkpoint takes none"),
        ("wan2.1_i2v_14b_480p", "generation.last_image=a.png", "last_image is given"),
    ],
)
def test_settings_that_a_model_cannot_follow_are_refused(name, override, said):
    with pytest.raises(ValueError, match=said):
        plan(config_of(name, override))


@pytest.mark.parametrize("role", ["self", "cross_text", "cross_image"])
def test_a_backend_that_exists_nowhere_is_refused_whatever_its_role(role):
    with pytest.raises(ConfigError, match=f"attention.{role} = 'sdp': no attention backend.*did you mean 'sdpa'"):
        plan(config_of("wan2.1_i2v_14b_480p", f"attention.{role}=sdp"))


def test_a_backend_for_images_is_refused_where_the_model_sees_none():
    with pytest.raises(ValueError, match="attention.cross_image is 'sdpa', but this model has no image inputs"):
        plan(config_of("wan2.1_t2v_14b", "attention.cross_image=sdpa"))


def test_a_first_image_gives_tokens_their_own_timesteps():
    plain = plan(config_of("wan2.2_ti2v_5b"))
    shown = plan(config_of("wan2.2_ti2v_5b", "generation.image=a.png"))
    assert shown.memory_bytes["activations"] > plain.memory_bytes["activations"]
    assert shown.flops_per_step["linear"] > plain.flops_per_step["linear"]


def test_guidance_1_of_the_second_expert_is_told():
    found = plan(config_of("wan2.2_t2v_a14b", "generation.guidance_scale_2=1"))
    assert any("run one branch" in note for note in found.notes)
    assert not any("run one branch" in note for note in plan(config_of("wan2.2_t2v_a14b")).notes)


@pytest.mark.parametrize("mode", ["padded", "packed", "packed_pad_exact"])
@pytest.mark.parametrize("lens", [[5, 1], [12, 3], [12, 12]])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_text_kv_bytes_are_those_of_projected_text(mode, lens, dtype):
    config = config_of("wan_shapes_t2v", f"dtype={dtype}")
    model = WanTransformer(SMALL, attention={"cross_kv": mode}, dtype=config.torch_dtype())
    with torch.inference_mode():
        text_kv = model.project_text(torch.zeros(2, 12, SMALL.text_dim), lens)
    rows = text_rows(mode, lens, 12, repeated_key=False)
    assert text_kv_bytes(SMALL, rows, config.torch_dtype()) == text_kv.num_bytes


@pytest.fixture
def repeating():
    """A backend that says it counts a repeated last key, which is enough to project text for it."""

    class Repeating(SDPABackend):
        name = "repeating"
        capabilities = SDPABackend.capabilities | {"repeated_last_key"}

    register_backend(Repeating)
    yield
    del _classes["repeating"]


@pytest.mark.parametrize(
    ("lens", "formulation", "rows"),
    [
        ([300, 126], "repeated_key", 301 + 127),
        ([512, 126], "repeated_key", 512 + 127),
        ([512] * 7 + [126], "merge", 7 * 512 + 126 + 1),
        ([500, 400], "padded", 1024),
        ([512, 512], "padded", 1024),
    ],
)
def test_text_kv_bytes_follow_the_formulation_that_the_layout_takes(repeating, lens, formulation, rows):
    model = WanTransformer(SMALL, attention={"cross_text": "repeating", "cross_kv": "packed_pad_exact"})
    with torch.inference_mode():
        text_kv = model.project_text(torch.zeros(len(lens), 512, SMALL.text_dim), lens)
    assert (text_kv.formulation, model.repeats_last_key) == (formulation, True)
    assert text_rows("packed_pad_exact", lens, 512, repeated_key=True) == rows
    assert text_kv_bytes(SMALL, rows, torch.float32) == text_kv.num_bytes


def test_a_plan_counts_one_pad_row_for_each_short_text_where_the_kernel_repeats_it(repeating):
    def rows(*overrides, lens=(300, 126)):
        found = plan(config_of("wan2.1_t2v_14b", "attention.cross_kv=packed_pad_exact", *overrides), lens)
        keys = found.flops_per_step["cross_attention"] / (40 * 4 * found.tokens * 5120)
        return found.text_kv_bytes["packed_pad_exact"] / (2 * 5120 * 40 * 2), keys

    merged, repeated = (427, 428), (428, 428)
    assert rows("attention.cross_text=sdpa") == merged
    assert rows("attention.cross_text=repeating") == rows("attention.cross_text=flash_attn4") == repeated
    assert rows("device=cuda") == repeated and rows("device=cuda", "dtype=float32")[1] == 428
    assert rows("device=cpu") == merged
    assert rows("attention.cross_text=repeating", lens=(500, 400)) == (1024, 1024)
    # Each branch alone: the prompt's forward keeps its pads where few keys could be left out.
    assert rows("attention.cross_text=repeating", "generation.cfg=sequential", lens=(500, 126)) == (639, 639)
    assert rows("attention.cross_text=sdpa", "generation.cfg=sequential") == (428, 428)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("mode", ["padded", "packed", "packed_pad_exact"])
def test_flops_are_those_that_torch_counts(mode, per_token):
    config = config_of("wan_shapes_t2v", f"attention.cross_kv={mode}")
    model = WanTransformer(SMALL, attention={"self": "sdpa", "cross_text": "sdpa", "cross_kv": mode})
    tokens, lens = 3 * 4 * 5, [6, 2]
    latents = torch.zeros(2, 8, 3, 8, 10)
    timestep = torch.full((2, tokens) if per_token else (2,), 500.0)
    with torch.inference_mode():
        text_kv = model.project_text(torch.zeros(2, 12, SMALL.text_dim), lens)
        with FlopCounterMode(display=False) as counter:
            model(latents, timestep, text_kv=text_kv)
    counts = {str(op).rpartition(".")[2]: count for op, count in counter.get_flop_counts()["Global"].items()}
    expected = flops(SMALL, tokens, lens, 12, config, per_token, keys=tokens)
    linear = sum(count for op, count in counts.items() if op in ("addmm", "mm"))
    assert linear == expected["linear"]
    # torch counts no attention kernel of the CPU; what a kernel does over N × L scores is 2 matrix products of N·L·d.
    assert expected["self_attention"] == 2 * SMALL.num_layers * 2 * (2 * tokens * tokens * SMALL.hidden_size)
    keys = {"padded": 24, "packed": 8, "packed_pad_exact": 10}[mode]
    assert expected["cross_attention"] == SMALL.num_layers * 2 * (2 * tokens * keys * SMALL.hidden_size)


class PeakBytes(TorchDispatchMode):
    """The most bytes that tensors made under it hold at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor)}
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in given and key not in self.live:
                    self.live[key] = storage.nbytes()
                    weakref.finalize(storage, self.live.pop, key, None)
        self.peak = max(self.peak, sum(self.live.values()))
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ffn_dim", [96, 256, 1536])
@pytest.mark.parametrize("per_token", [False, True])
def test_activations_are_near_what_a_forward_holds(dtype, ffn_dim, per_token):
    config = dataclasses.replace(SMALL, ffn_dim=ffn_dim)
    model = WanTransformer(config, dtype=dtype)
    rows, tokens = 2, 3 * 8 * 8
    timestep = torch.full((1, tokens) if per_token else (1,), 500.0).expand(rows, *[-1] * per_token)  # as pipelines do
    latents = torch.zeros(rows, 8, 3, 16, 16)
    with torch.inference_mode():
        text_kv = model.project_text(torch.zeros(rows, 8, config.text_dim, dtype=dtype))
        model(latents, timestep, text_kv=text_kv)  # builds the rotary table, which stays
        with PeakBytes() as held:
            model(latents, timestep, text_kv=text_kv)
    expected = activation_bytes(config, rows, tokens, dtype, per_token, on_gpu=False)
    assert 0.7 < held.peak / expected < 1.3


def test_peak_memory_is_the_sum_of_its_parts_and_follows_the_cross_mode():
    padded = plan(config_of("wan2.1_t2v_14b"), [300, 126])
    packed = plan(config_of("wan2.1_t2v_14b", "attention.cross_kv=packed"), [300, 126])
    for found in (padded, packed):
        parts = {name: count for name, count in found.memory_bytes.items() if name != "total"}
        assert found.memory_bytes["total"] == sum(parts.values())
        assert parts["text_kv"] == found.text_kv_bytes[found.cross_kv]
    assert packed.memory_bytes["text_kv"] == padded.memory_bytes["text_kv"] * 426 / 1024
    assert packed.flops_per_step["cross_attention"] < padded.flops_per_step["cross_attention"]


def test_text_keys_of_compiled_blocks_take_the_padded_size_in_every_mode():
    plain, compiled = (
        plan(config_of("wan2.1_t2v_14b", "attention.cross_kv=packed", f"compile={compile}"), [300, 126])
        for compile in ("false", "true")
    )
    assert compiled.memory_bytes["text_kv"] == plain.text_kv_bytes["padded"] > plain.memory_bytes["text_kv"]
    said = [[note for note in found.notes if note.startswith("compile: ")] for found in (plain, compiled)]
    assert said[0] == [] and "the first step compiles the blocks" in said[1][0]


def test_guidance_and_cfg_decide_rows_and_forwards():
    batched = plan(config_of("wan2.1_t2v_1.3b"))
    sequential = plan(config_of("wan2.1_t2v_1.3b", "generation.cfg=sequential"))
    unguided = plan(config_of("wan2.1_t2v_1.3b", "generation.guidance_scale=1"))
    found = [(p.rows_per_forward, p.forwards_per_step) for p in (batched, sequential, unguided)]
    assert found == [(2, 1), (1, 2), (1, 1)]
    assert batched.flops_per_step == sequential.flops_per_step
    assert sum(unguided.flops_per_step.values()) * 2 == sum(batched.flops_per_step.values())
    assert sequential.memory_bytes["activations"] * 2 == batched.memory_bytes["activations"]


def test_text_lengths_come_from_the_tokenizer_where_there_is_one():
    found = plan(config_of("wan_shapes_t2v", "generation.prompt=[a red ball, a Red ball moving left]"))
    assert found.text_lens == (4, 6, 2, 2)  # the end token included; "anything" is the recipe's negative prompt
    assert found.text_lens_from == "counted by the tokenizer"
    long = plan(config_of("wan_shapes_t2v", f"generation.prompt={'red ' * 100}"))
    assert long.text_lens == (64, 2)


def test_text_lengths_are_guessed_or_taken_as_given_elsewhere():
    assert plan(config_of("wan2.1_t2v_14b", "generation.prompt=a red ball")).text_lens == (5, 1)
    assert plan(config_of("wan2.1_t2v_14b")).text_lens == (512, 1)
    assert plan(config_of("wan2.1_t2v_14b"), [300, 126]).text_lens == (300, 126)
    for lens in ([300], [300, 126, 1], [0, 126], [300, 513]):
        with pytest.raises(ValueError, match=r"1 prompt\(s\) and the negative prompt need 2, each from 1 to 512"):
            plan(config_of("wan2.1_t2v_14b"), lens)


@pytest.mark.parametrize(("key", "value", "near"), [("height", 490, "480 and 496"), ("num_frames", 82, "81 and 85")])
def test_a_size_that_does_not_divide_names_the_nearest(key, value, near):
    with pytest.raises(ValueError, match=rf"{key} is {value}; .*the nearest are {near}"):
        plan(config_of("wan2.1_t2v_1.3b", f"generation.{key}={value}"))


def test_a_model_that_is_nowhere_is_an_error_with_the_way_out():
    with pytest.raises(ConfigError, match=r"model.path = 'a/b': there is no such folder here.*wan2.1-t2v-1.3b"):
        plan(config_of("wan2.1_t2v_1.3b", "model={path: a/b}"))
    with pytest.raises(ConfigError, match=r"model.preset = 'wan9': wants one of wan2.1-t2v-1.3b"):
        plan(config_of("wan2.1_t2v_1.3b", "model.preset=wan9"))


def test_a_local_folder_decides_and_needs_no_weights(tmp_path):
    shutil.copytree(
        PACKAGED_CHECKPOINTS["wan-shapes"], tmp_path / "copy", ignore=shutil.ignore_patterns("*.safetensors")
    )
    index = tmp_path / "copy" / "model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"expand_timesteps": True}))
    found = plan(config_of("wan_shapes_t2v", f"model.path={tmp_path / 'copy'}", "generation.image=a.png"))
    whole = plan(config_of("wan_shapes_t2v"))
    assert found.parameters == whole.parameters
    assert found.memory_bytes["activations"] > whole.memory_bytes["activations"]  # one timestep for each token
    assert "text_encoder" not in found.memory_bytes
    assert any("the weights of text encoder and VAE" in note for note in found.notes)
    assert not any("the weights of" in note for note in whole.notes)


def test_a_preset_that_contradicts_the_folder_is_an_error_that_names_both():
    with pytest.raises(ConfigError) as caught:
        plan(config_of("wan2.1_t2v_14b", "model.path=wan-shapes"))
    for text in ("'wan2.1-t2v-14b'", "'wan-shapes'", "num_layers 40 against 8 in the folder"):
        assert text in str(caught.value)


def test_a_preset_that_fits_the_folder_is_no_error(tmp_path):
    folder = tmp_path / "wan"
    shutil.copytree(PACKAGED_CHECKPOINTS["wan-shapes"], folder, ignore=shutil.ignore_patterns("*.safetensors"))
    preset = dataclasses.asdict(WAN_PRESETS["wan2.1-t2v-1.3b"])
    (folder / "transformer" / "config.json").write_text(json.dumps(preset))
    found = plan(config_of("wan2.1_t2v_1.3b", f"model.path={folder}"))
    assert found.source == f"folder {folder}" and found.parameters == 1_418_996_800
    (folder / "transformer_2").mkdir()  # the 14B presets with one and with two transformers differ in nothing else
    with pytest.raises(ConfigError, match="transformers 1 against 2 in the folder"):
        plan(config_of("wan2.1_t2v_1.3b", f"model.path={folder}"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_text_encoder_and_vae_take_the_bytes_that_the_loaded_ones_take(dtype):
    config = config_of("wan_shapes_t2v", f"dtype={dtype}")
    pipe = WanPipeline.from_pretrained("wan-shapes", dtype=config.torch_dtype(), progress=False)
    found = plan(config).memory_bytes
    for name in ("text_encoder", "vae"):
        parameters = getattr(pipe, name).parameters()
        assert found[name] == sum(parameter.numel() * parameter.element_size() for parameter in parameters)


def test_the_sizes_of_published_text_encoder_and_vaes_are_counted():
    umt5_xxl = UMT5Config(
        d_model=4096, d_ff=10240, d_kv=64, num_heads=64, num_layers=24, vocab_size=256384,
        feed_forward_proj="gated-gelu",
    )  # fmt: skip
    wan22 = {"base_dim": 160, "decoder_base_dim": 256, "z_dim": 48, "is_residual": True, "in_channels": 12,
             "out_channels": 12, "patch_size": 2, "scale_factor_spatial": 16}  # fmt: skip
    vit_h = CLIPVisionConfig(
        hidden_size=1280, intermediate_size=5120, num_hidden_layers=32, num_attention_heads=16, patch_size=14
    )
    with torch.device("meta"):
        vision = CLIPVisionModel(vit_h)
        encoder, vaes = UMT5EncoderModel(umt5_xxl), (AutoencoderKLWan(), AutoencoderKLWan(**wan22))
    sizes = {name: parameter.numel() for name, parameter in encoder.named_parameters()}
    kept = sum(size for name, size in sizes.items() if ".wo." in name)
    assert PartSize(sum(sizes.values()), kept) == UMT5_XXL_ENCODER
    assert [PartSize(sum(p.numel() for p in vae.parameters())) for vae in vaes] == [WAN21_VAE, WAN22_VAE]
    plans = [plan(config_of(name)).memory_bytes for name in ("wan2.1_t2v_14b", "wan2.2_t2v_a14b", "wan2.2_ti2v_5b")]
    assert [found["vae"] for found in plans] == [2 * WAN21_VAE.parameters] * 2 + [2 * WAN22_VAE.parameters]
    assert {found["text_encoder"] for found in plans} == {2 * UMT5_XXL_ENCODER.parameters}
    assert PartSize(sum(p.numel() for p in vision.parameters())) == CLIP_VIT_H_VISION
    seen = {name: plan(config_of(name)).memory_bytes for name in ("wan2.1_i2v_14b_480p", "wan2.2_i2v_a14b")}
    assert seen["wan2.1_i2v_14b_480p"]["image_encoder"] == 2 * CLIP_VIT_H_VISION.parameters
    assert "image_encoder" not in seen["wan2.2_i2v_a14b"]
