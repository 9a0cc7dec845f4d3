"""padded, packed and packed_pad_exact text K/V on whole models: results, the path taken, and one build per layout."""

import pytest
import torch

from attention_backend import AttentionBackend, PackedKV, PackedPadKV, register_backend
from attention_backend.sdpa import SDPABackend
from attention_backend.selection import _classes
from visual_gen.models.wan import WanTransformer

CONFIG = {
    "num_attention_heads": 3, "attention_head_dim": 20, "in_channels": 4, "out_channels": 4, "text_dim": 24,
    "freq_dim": 16, "ffn_dim": 80, "num_layers": 3, "rope_max_seq_len": 32,
}  # fmt: skip
LENS = (7, 1, 32)
INPUTS = {"latent": (3, 4, 6), "text_lens": LENS, "text_len": 32}


@pytest.fixture
def load(make_reference):
    _, folder = make_reference(**CONFIG)

    def load_with(**attention) -> WanTransformer:
        return WanTransformer.from_pretrained(folder, attention=attention)

    return load_with


@torch.no_grad()
def test_packed_pad_exact_equals_padded_and_packed_does_not(load, make_inputs):
    padded = load(cross_kv="padded")
    inputs = make_inputs(padded.config, **INPUTS)
    expected = padded(**inputs, text_lens=LENS)
    exact = load(cross_kv="packed_pad_exact")(**inputs, text_lens=LENS)
    assert (exact - expected).abs().max() <= 1e-5
    packed = load(cross_kv="packed")(**inputs, text_lens=LENS)
    assert (packed - expected).abs().amax(dim=(1, 2, 3, 4))[:2].min() > 1e-2
    assert (packed - expected)[2].abs().max() <= 1e-5  # a row without pads is the same in every mode


@torch.no_grad()
def test_each_mode_keeps_the_rows_that_it_says(load, make_inputs):
    sizes = {}
    for mode, metadata in (("padded", None), ("packed", PackedKV), ("packed_pad_exact", PackedPadKV)):
        model = load(cross_kv=mode)
        text_kv = model.project_text(make_inputs(model.config, **INPUTS)["encoder_hidden_states"], LENS)
        assert all(kv.metadata is None if metadata is None else type(kv.metadata) is metadata for kv in text_kv.text)
        sizes[mode] = text_kv.num_bytes / (3 * 2 * 60 * 4)  # rows: 3 layers, K and V, 60 channels of 4 bytes
    assert sizes == {"padded": 3 * 32, "packed": 40, "packed_pad_exact": 41}


@torch.no_grad()
@pytest.mark.parametrize("mode", ["packed", "packed_pad_exact"])
def test_one_build_and_one_copy_for_all_layers_and_steps_of_a_layout(load, make_inputs, mode):
    model = load(cross_kv=mode)
    state = model.attention_metadata_state
    inputs = make_inputs(model.config, **INPUTS)
    text_kv = model.project_text(inputs["encoder_hidden_states"], LENS)
    for _ in range(4):
        model(inputs["hidden_states"], inputs["timestep"], text_kv=text_kv)
    assert (state.builds, state.device_copies) == (1, 1)
    assert len({id(kv.metadata) for kv in text_kv.text}) == 1
    assert all(b.cross_text.attention_metadata_state is state for b in model.blocks)
    other = model.project_text(inputs["encoder_hidden_states"], (1, 7, 32))
    again = model.project_text(inputs["encoder_hidden_states"], LENS)
    assert (state.builds, state.device_copies) == (2, 2)
    assert other.text[0].metadata is not again.text[0].metadata is text_kv.text[2].metadata


@torch.no_grad()
@pytest.mark.parametrize("mode", ["padded", "packed", "packed_pad_exact"])
def test_each_row_of_a_cfg_batch_equals_its_own_run(load, make_inputs, mode):
    model = load(cross_kv=mode)
    inputs = make_inputs(model.config, **INPUTS)
    batch = model(**inputs, text_lens=LENS)
    for b, n in enumerate(LENS):
        row = {name: value[b : b + 1] for name, value in inputs.items()}
        assert (model(**row, text_lens=(n,)) - batch[b : b + 1]).abs().max() <= 1e-5


@torch.no_grad()
@pytest.mark.parametrize("mode", ["padded", "packed", "packed_pad_exact"])
def test_a_rows_bits_do_not_depend_on_its_neighbours_lengths(load, make_inputs, mode):
    model = load(cross_kv=mode)
    inputs = make_inputs(model.config, **INPUTS)
    inputs["timestep"] = inputs["timestep"][:1].expand(3)
    for b in range(3):
        results = []
        for other in (1, 2, 5, 17, 31):
            lens = [other, other + 1, other // 2 + 1]
            lens[b] = LENS[b]
            results.append(model(**inputs, text_lens=lens)[b])
        assert all(torch.equal(result, results[0]) for result in results[1:])


@torch.no_grad()
def test_no_text_at_all_gives_finite_results(load, make_inputs):
    model = load(cross_kv="packed")
    inputs = make_inputs(model.config, **INPUTS)
    assert model(**inputs, text_lens=(0, 3, 0)).isfinite().all()
    exact = load(cross_kv="packed_pad_exact")(**inputs, text_lens=(0, 3, 0))
    assert (exact - load()(**inputs, text_lens=(0, 3, 0))).abs().max() <= 1e-5


@pytest.fixture
def counting_backend():
    class Counting(SDPABackend):
        name = "counting"
        calls: list = []

        def attend(self, q, k, v, metadata, *, causal, return_lse):
            self.calls.append((self.spec.role, type(metadata).__name__, return_lse))
            return super().attend(q, k, v, metadata, causal=causal, return_lse=return_lse)

    register_backend(Counting)
    yield Counting
    del _classes["counting"]


@torch.no_grad()
def test_each_role_goes_through_the_backend_that_was_named_for_it(load, make_inputs, counting_backend):
    model = load(cross_text="counting", cross_kv="packed_pad_exact")
    other = load()
    inputs = make_inputs(model.config, **INPUTS)
    expected = other(**inputs, text_lens=LENS)
    for _ in range(2):  # two models with different backends, interleaved
        assert (model(**inputs, text_lens=LENS) - expected).abs().max() <= 1e-5
        assert torch.equal(other(**inputs, text_lens=LENS), expected)
    assert counting_backend.calls == [("cross_text", "PackedKV", True)] * 3 * 2
    assert {role: choice.name for role, choice in model.attention_choices.items()} == {
        "self": "sdpa",
        "cross_text": "counting",
    }


def test_a_backend_that_cannot_pack_is_refused_when_the_model_is_made(load):
    class DenseOnly(AttentionBackend):
        name = "dense_only"

        def attend(self, q, k, v, metadata, *, causal, return_lse):
            raise AssertionError("must not be reached")

    register_backend(DenseOnly)
    try:
        with pytest.raises(ValueError, match=r"dense_only.*lse.*varlen.*would serve: auto, sdpa"):
            load(cross_text="dense_only", cross_kv="packed_pad_exact")
    finally:
        del _classes["dense_only"]
