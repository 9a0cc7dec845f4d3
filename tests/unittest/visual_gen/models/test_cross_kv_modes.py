"""padded, packed and packed_pad_exact text K/V on whole models: results, the path taken, and one build per layout."""

from dataclasses import replace

import pytest
import torch

from attention_backend import AttentionBackend, GraphBuffers, PackedKV, PackedPadKV, register_backend
from attention_backend.sdpa import SDPABackend
from attention_backend.selection import _classes
from visual_gen.models.wan import WanTransformer
from visual_gen.modules.cross_kv import CrossKV

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
def test_text_is_shown_by_its_shapes_and_not_by_its_numbers(load, make_inputs):
    model = load(cross_kv="packed_pad_exact")
    text_kv = model.project_text(make_inputs(model.config, **INPUTS)["encoder_hidden_states"], LENS)
    assert repr(text_kv) == (
        "TextKV(text_lens=(7, 1, 32), batch=3, padded_len=32, cross_kv='packed_pad_exact', text=3 layers of CrossKV("
        "k=[40, 3, 20], v=[40, 3, 20], k_pad=[3, 20], v_pad=[3, 20], torch.float32, cpu, metadata=PackedPadKV))"
    )
    with_image = replace(text_kv, image=(CrossKV(torch.zeros(3, 5, 3, 20), torch.zeros(3, 5, 3, 20)),))
    assert "image=1 layers of CrossKV(k=[3, 5, 3, 20], v=[3, 5, 3, 20], torch.float32, cpu, metadata=None)" in repr(
        with_image
    )


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


MASK = [[1, 0, 1, 1, 0, 0, 1] + [0] * 25, [0] * 31 + [1], [1, 1, 1] + [0] * 29]


@torch.no_grad()
def test_a_mask_that_is_no_prefix_marks_the_real_rows_in_every_mode(make_reference, make_inputs):
    """padded: diffusers' own model, whose unmarked rows are zeros. packed: attention to the marked rows alone."""
    reference, folder = make_reference(**CONFIG)
    models = {
        mode: WanTransformer.from_pretrained(folder, attention={"cross_kv": mode})
        for mode in ("padded", "packed", "packed_pad_exact")
    }
    inputs = make_inputs(models["padded"].config, latent=(3, 4, 6), text_lens=(32, 32, 32), text_len=32)
    text, keep = inputs.pop("encoder_hidden_states"), torch.tensor(MASK, dtype=torch.bool)
    expected = reference(**inputs, encoder_hidden_states=text * keep[..., None], return_dict=False)[0]
    poisoned = text.masked_fill(~keep[..., None], float("nan"))
    gathered = torch.zeros_like(text)
    for b, row in enumerate(keep):
        gathered[b, : row.sum()] = text[b, row]
    for mode, model in models.items():
        for mask in (MASK, keep):
            text_kv = model.project_text(poisoned, text_mask=mask)
            assert text_kv.text_lens == (4, 1, 3)
            out = model(**inputs, text_kv=text_kv)
            if mode != "packed":
                assert (out - expected).abs().max() <= 2e-5
            else:
                assert (out - expected).abs().max() > 1e-2
            # Text rows have no position: the marked ones moved to the front are the same text, bit for bit.
            assert torch.equal(out, model(**inputs, text_kv=model.project_text(gathered, (4, 1, 3))))
    prefix = models["padded"](**inputs, text_kv=models["padded"].project_text(text, (4, 1, 3)))
    assert (prefix - expected).abs().max() > 1e-2  # what reading the mask as lengths would give


@torch.no_grad()
def test_masks_that_do_not_fit_are_refused(load, make_inputs):
    model = load()
    text = make_inputs(model.config, **INPUTS)["encoder_hidden_states"]
    for mask, message in (
        (torch.ones(3, 32, dtype=torch.bool, device="meta"), "text_mask is a tensor on meta; .*text_mask.cpu"),
        ([[1] * 31] * 3, r"text_mask has 3 rows of \[31\] entries; expected 3 rows of 32"),
    ):
        with pytest.raises(ValueError, match=message):
            model.project_text(text, text_mask=mask)
    with pytest.raises(ValueError, match="text_lens and text_mask are both given"):
        model.project_text(text, LENS, text_mask=[[1] * 32] * 3)
    assert model.attention_metadata_state.builds == 0


@torch.no_grad()
@pytest.mark.parametrize("mode", ["padded", "packed", "packed_pad_exact"])
def test_batch_rows_of_one_text_share_its_projection_and_nothing_else_changes(load, make_inputs, mode):
    model = load(cross_kv=mode)
    inputs = make_inputs(model.config, latent=(3, 4, 6), text_lens=(7, 1, 32, 7), text_len=32)
    text, index = inputs.pop("encoder_hidden_states")[:3], (0, 1, 0, 1)
    counts = []
    for block in model.blocks:
        block.cross_text.to_kv.register_forward_hook(lambda *_: counts.append(1))
    model.text_embedding.register_forward_hook(lambda *_: counts.append(100))
    shared = model.project_text(text, LENS, text_index=index)
    pad = mode != "packed"  # its pad row is embedded all the same
    assert sum(counts) == (2 + pad) * len(model.blocks) + 300
    assert (shared.batch, shared.text_lens) == (4, (7, 1, 7, 1))
    each = model.project_text(text[list(index)], shared.text_lens)
    assert torch.equal(model(**inputs, text_kv=shared), model(**inputs, text_kv=each))
    with pytest.raises(ValueError, match=r"text_index\[1\] is 3; it must be between 0 and 2"):
        model.project_text(text, LENS, text_index=(0, 3))


@torch.no_grad()
@pytest.mark.parametrize("mode", ["padded", "packed", "packed_pad_exact"])
def test_a_models_text_in_the_buffers_of_a_graph_follows_the_layouts(load, make_inputs, mode):
    model = load(cross_kv=mode)
    inputs = make_inputs(model.config, **INPUTS)
    text = inputs.pop("encoder_hidden_states")
    layouts = [LENS, (31, 2, 5), (1, 7, 31), LENS]
    texts = [model.project_text(text, lens, fixed_capacity=True) for lens in layouts]
    assert len({kv.signature() for kv in texts}) == 1
    buffers = GraphBuffers(texts[0])
    for text_kv in (*texts, texts[1]):
        buffers.copy_from(text_kv)
        out = model(**inputs, text_kv=buffers.entry)
        torch.testing.assert_close(out, model(**inputs, text_kv=text_kv), rtol=0, atol=1e-5)
    other = load(cross_kv="packed" if mode != "packed" else "padded").project_text(text, LENS, fixed_capacity=True)
    for kv in (other, model.project_text(text[:2], LENS[:2], fixed_capacity=True)):
        with pytest.raises(ValueError, match="capture another graph"):
            buffers.copy_from(kv)


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
