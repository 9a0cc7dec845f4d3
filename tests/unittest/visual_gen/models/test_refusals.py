"""What a WanTransformer refuses, with the value and the way out."""

import pytest
import torch

from visual_gen.models.wan import WanConfig, WanTransformer

CONFIG = WanConfig(
    num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=10, freq_dim=16, ffn_dim=40,
    num_layers=1, rope_max_seq_len=16,
)  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return WanTransformer(CONFIG).requires_grad_(False)


@pytest.fixture
def inputs(make_inputs):
    return make_inputs(CONFIG, text_lens=(3, 5))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_states": torch.zeros(2, 4, 3, 7, 10)}, "latent H is 7.*patch size 2.*nearest sizes are 6 and 8"),
        ({"hidden_states": torch.zeros(2, 5, 3, 6, 10)}, r"expected \[B, 4, F, H, W\]"),
        ({"hidden_states": torch.zeros(2, 4, 17, 6, 10)}, "frames is 17 tokens; the rotary table ends .* 16"),
        ({"timestep": torch.zeros(3)}, r"timestep has shape \(3,\)"),
        ({"timestep": torch.zeros(2, 44)}, r"\(2, 45\)"),
        ({"encoder_hidden_states": None}, "either encoder_hidden_states or text_kv"),
        ({"encoder_hidden_states": torch.zeros(2, 16, 11)}, "text_dim 10"),
        ({"encoder_hidden_states": torch.zeros(3, 16, 10)}, "projected for 3 rows, hidden_states has 2"),
        ({"text_lens": (3, 17)}, r"text_lens\[1\] is 17; it must be between 0 and 16"),
        ({"text_lens": (3, -1)}, r"text_lens\[1\] is -1"),
        ({"text_lens": (3,)}, "1 lengths for .* batch 2"),
        ({"text_lens": torch.tensor([3, 5])}, "must be host ints"),
        ({"text_lens": (3, 5.0)}, "5.0; lengths must be host ints"),
        ({"encoder_hidden_states_image": torch.zeros(2, 3, 8)}, "no image inputs"),
    ],
)
def test_bad_inputs_are_refused(model, inputs, change, message):
    with pytest.raises(ValueError, match=message):
        model(**(inputs | change))


def test_text_given_twice_is_refused(model, inputs):
    text_kv = model.project_text(inputs["encoder_hidden_states"], (3, 5))
    with pytest.raises(ValueError, match="not both"):
        model(**inputs, text_kv=text_kv)
    with pytest.raises(ValueError, match="give them to project_text"):
        model(inputs["hidden_states"], inputs["timestep"], text_lens=(3, 5), text_kv=text_kv)


def test_text_of_another_model_is_refused(model, inputs):
    text = inputs.pop("encoder_hidden_states")
    packed = WanTransformer(CONFIG, attention={"cross_kv": "packed"}).requires_grad_(False)
    with pytest.raises(ValueError, match="1 layers in mode 'packed', this model has 1 in mode 'padded'"):
        model(inputs["hidden_states"], inputs["timestep"], text_kv=packed.project_text(text, (3, 5)))
    deeper = WanTransformer(WanConfig(**{**CONFIG.__dict__, "num_layers": 2})).requires_grad_(False)
    with pytest.raises(ValueError, match="2 layers in mode 'padded', this model has 1"):
        model(inputs["hidden_states"], inputs["timestep"], text_kv=deeper.project_text(text, (3, 5)))


def test_a_dtype_that_no_wan_runs_in_is_refused():
    with pytest.raises(ValueError, match="dtype is torch.float64"):
        WanTransformer(CONFIG, dtype=torch.float64)


def test_an_image_model_without_its_image_is_refused(inputs):
    config = {**CONFIG.__dict__, "image_dim": 8, "added_kv_proj_dim": 24}
    model = WanTransformer(WanConfig(**config))
    with pytest.raises(ValueError, match="give encoder_hidden_states_image"):
        model(**inputs)


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        ({"self": "FA9"}, "no attention backend 'FA9'"),
        ({"cross_text": "flash_attn4"}, "'flash_attn4' cannot serve cross_text.*would serve: auto, sdpa"),
        ({"cross_kv": "ragged"}, r"attention.cross_kv = 'ragged': wants .*packed_pad_exact"),
        ({"crosskv": "packed"}, r"attention.crosskv: unknown key; did you mean cross_kv\?"),
        ("packed", "attention = 'packed'"),
        ({"cross_image": "sdpa"}, "cross_image is 'sdpa', but this model has no image inputs"),
    ],
)
def test_bad_attention_settings_are_refused_when_the_model_is_made(attention, message):
    with pytest.raises(ValueError, match=message):
        WanTransformer(CONFIG, attention=attention, init_weights=False)
