"""Same weights, same inputs, diffusers' WanTransformer3DModel as the oracle."""

from dataclasses import dataclass, field

import pytest
import torch

from visual_gen.models.wan import WanTransformer


@dataclass
class Case:
    config: dict
    inputs: dict = field(default_factory=dict)


BASE = {"in_channels": 5, "out_channels": 5, "text_dim": 20, "freq_dim": 32, "num_layers": 2, "rope_max_seq_len": 64}
CASES = {
    "3 heads of 36": Case(
        {**BASE, "num_attention_heads": 3, "attention_head_dim": 36, "ffn_dim": 100}, {"text_lens": (4, 1)}
    ),
    "5 heads of 22, odd token grid": Case(
        {**BASE, "num_attention_heads": 5, "attention_head_dim": 22, "ffn_dim": 130},
        {"latent": (5, 14, 6), "text_lens": (1,), "text_len": 1},
    ),
    "512 text rows, batch 3": Case(
        {**BASE, "num_attention_heads": 2, "attention_head_dim": 24, "ffn_dim": 70},
        {"text_lens": (512, 126, 1), "text_len": 512},
    ),
    "7 heads of 12, one frame": Case(
        {**BASE, "num_attention_heads": 7, "attention_head_dim": 12, "ffn_dim": 90, "num_layers": 3},
        {"latent": (1, 2, 10), "text_lens": (3, 77), "text_len": 77},
    ),
    "no cross-attention norm": Case(
        {**BASE, "num_attention_heads": 3, "attention_head_dim": 20, "ffn_dim": 64, "cross_attn_norm": False},
        {"text_lens": (6, 2, 9)},
    ),
    "patch of 2, 3, 1": Case(
        {**BASE, "num_attention_heads": 2, "attention_head_dim": 30, "ffn_dim": 50, "patch_size": (2, 3, 1)},
        {"latent": (4, 9, 5), "text_lens": (3,)},
    ),
    "one timestep per token (TI2V)": Case(
        {**BASE, "num_attention_heads": 3, "attention_head_dim": 28, "ffn_dim": 96, "in_channels": 7},
        {"per_token": True, "text_lens": (9, 4)},
    ),
    "image to video": Case(
        {**BASE, "num_attention_heads": 3, "attention_head_dim": 16, "ffn_dim": 60, "in_channels": 11,
         "image_dim": 18, "added_kv_proj_dim": 48},
        {"text_lens": (30, 1), "text_len": 512, "image_tokens": 13},
    ),
    "first and last frame to video": Case(
        {**BASE, "num_attention_heads": 3, "attention_head_dim": 16, "ffn_dim": 60, "image_dim": 18,
         "added_kv_proj_dim": 48, "pos_embed_seq_len": 22},
        {"text_lens": (512, 40), "text_len": 512, "image_tokens": 11},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_fp32_equals_diffusers(name, make_reference, make_inputs):
    case = CASES[name]
    reference, folder = make_reference(seed=len(name), **case.config)
    model = WanTransformer.from_pretrained(folder)
    inputs = make_inputs(model.config, **case.inputs)
    expected = reference(**inputs, return_dict=False)[0]
    out = model(**inputs, text_lens=case.inputs["text_lens"])
    assert out.shape == expected.shape
    assert expected.abs().max() > 0.5  # a comparison of zeros would prove nothing
    assert (out - expected).abs().max() <= 2e-5


@torch.no_grad()
def test_text_projected_once_gives_what_text_in_the_forward_gives(make_reference, make_inputs):
    case = CASES["image to video"]
    _, folder = make_reference(**case.config)
    model = WanTransformer.from_pretrained(folder)
    inputs = make_inputs(model.config, **case.inputs)
    text_lens = case.inputs["text_lens"]
    whole = model(**inputs, text_lens=text_lens)
    text_kv = model.project_text(inputs["encoder_hidden_states"], text_lens, inputs["encoder_hidden_states_image"])
    assert torch.equal(whole, model(inputs["hidden_states"], inputs["timestep"], text_kv=text_kv))


@torch.no_grad()
def test_rows_past_text_lens_count_as_zeros(make_reference, make_inputs):
    case = CASES["3 heads of 36"]
    _, folder = make_reference(**case.config)
    inputs = make_inputs(WanTransformer.from_pretrained(folder).config, **case.inputs)
    poisoned = {**inputs, "encoder_hidden_states": inputs["encoder_hidden_states"].clone()}
    poisoned["encoder_hidden_states"][0, 4:] = float("nan")
    for mode in ("padded", "packed", "packed_pad_exact"):
        model = WanTransformer.from_pretrained(folder, attention={"cross_kv": mode})
        clean = model(**inputs, text_lens=(4, 1))
        assert torch.equal(model(**poisoned, text_lens=(4, 1)), clean)


@torch.no_grad()
def test_an_expanded_timestep_gives_what_a_full_one_gives(make_reference, make_inputs):
    case = CASES["512 text rows, batch 3"]
    _, folder = make_reference(**case.config)
    model = WanTransformer.from_pretrained(folder)
    inputs = make_inputs(model.config, **case.inputs)
    inputs["timestep"] = torch.full((3,), 321.5)
    expected = model(**inputs)
    inputs["timestep"] = torch.tensor(321.5).expand(3)
    torch.testing.assert_close(model(**inputs), expected, rtol=0, atol=1e-5)


@torch.no_grad()
def test_bf16_error_is_no_worse_than_diffusers(make_reference, make_inputs):
    """RMS over all configurations at most 1.05 of diffusers' own, on none over 1.25."""
    squares = torch.zeros(2, dtype=torch.float64)
    for seed, (name, case) in enumerate(CASES.items()):
        reference, folder = make_reference(seed=seed, **case.config)
        model = WanTransformer.from_pretrained(folder, dtype=torch.bfloat16)
        inputs = make_inputs(model.config, **case.inputs, seed=seed)
        expected = reference(**inputs, return_dict=False)[0]
        low = type(reference).from_pretrained(folder, torch_dtype=torch.bfloat16)
        assert low.scale_shift_table.dtype == model.scale_shift_table.dtype == torch.float32
        cast = {k: v if k == "timestep" else v.bfloat16() for k, v in inputs.items()}
        theirs = (low(**cast, return_dict=False)[0].double() - expected.double()).square().mean()
        ours = (model(**cast, text_lens=case.inputs["text_lens"]).double() - expected.double()).square().mean()
        assert ours.sqrt() <= 1.25 * theirs.sqrt(), (name, ours.sqrt().item(), theirs.sqrt().item())
        scale = expected.double().square().mean()
        squares += torch.stack([ours, theirs]) / scale
    assert squares[0].sqrt() <= 1.05 * squares[1].sqrt(), squares.sqrt().tolist()
