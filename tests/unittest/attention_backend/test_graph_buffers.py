"""GraphBuffers: fixed addresses, the numbers of the entry copied last, nothing of any one layout on the host."""

import dataclasses
from dataclasses import dataclass

import pytest
import torch

from attention_backend import AttentionMetadataState, AttentionSpec, GraphBuffers, merge_pad_rows
from attention_backend.sdpa import SDPABackend

LAYOUTS = ([12, 5], [3, 1], [0, 12], [12, 5])
Q_LENS = ([4, 6], [1, 6], [6, 0], [4, 6])
ENTRIES = {
    "padded": lambda state, lens, q: state.padded_kv("self", lens, 12, "cpu"),
    "packed": lambda state, lens, q: state.packed_kv("self", lens, "cpu", max_seqlen_kv=12),
    "merge": lambda state, lens, q: state.packed_pad_kv("self", lens, 12, "cpu"),
    "repeated_key": lambda state, lens, q: state.packed_pad_kv("self", lens, 12, "cpu", formulation="repeated_key"),
    "packed_q": lambda state, lens, q: state.packed_kv("self", lens, "cpu", max_seqlen_kv=12, q_lens=q),
    "paged": lambda state, lens, q: state.paged_kv("self", [[3, 1 + lens[0]], [2, lens[1]]], lens, 6, "cpu"),
    "extent": lambda state, lens, q: state.extent_kv("self", [20, lens[0]], lens, 40, "cpu", max_seqlen_kv=12),
}


def tensors(entry):
    for field in dataclasses.fields(entry):
        value = getattr(entry, field.name)
        if dataclasses.is_dataclass(value):
            yield from tensors(value)
        elif isinstance(value, torch.Tensor):
            yield value


def host_values(entry):
    """Every value that is no tensor, by name."""
    for field in dataclasses.fields(entry):
        value = getattr(entry, field.name)
        if dataclasses.is_dataclass(value):
            yield from host_values(value)
        elif not isinstance(value, torch.Tensor):
            yield field.name, value


@pytest.fixture(params=ENTRIES)
def make(request):
    state = AttentionMetadataState()
    return lambda layout: ENTRIES[request.param](state, LAYOUTS[layout], Q_LENS[layout])


def test_they_hold_the_numbers_of_the_layout_copied_last_where_they_always_were(make):
    buffers = GraphBuffers(make(0))
    addresses = [x.data_ptr() for x in tensors(buffers.entry)]
    for layout in (0, 1, 2, 3, 1):
        entry = make(layout)  # the fourth and fifth are hits in the state
        buffers.copy_from(entry)
        assert [x.data_ptr() for x in tensors(buffers.entry)] == addresses
        for own, value in zip(tensors(buffers.entry), tensors(entry), strict=True):
            assert torch.equal(own, value) and own.data_ptr() != value.data_ptr()


def test_an_entry_of_the_state_is_never_written(make):
    first = make(0)
    before = [x.clone() for x in tensors(first)]
    GraphBuffers(first).copy_from(make(1))
    assert all(torch.equal(a, b) for a, b in zip(tensors(first), before, strict=True))


def test_no_host_value_of_a_layout_is_left(make):
    """What is left on the host is equal for all layouts of the signature, so it may be part of a graph."""
    found = [dict(host_values(GraphBuffers(make(layout)).entry)) for layout in range(3)]
    assert found[0] == found[1] == found[2]
    assert found[0].get("kv_lens", None) is None and found[0].get("pad_lens", None) is None


def test_another_signature_is_refused_before_anything_is_written(make):
    state, buffers = AttentionMetadataState(), GraphBuffers(make(0))
    before = [x.clone() for x in tensors(buffers.entry)]
    for other in (state.padded_kv("self", [1, 2, 3], 12, "cpu"), state.packed_kv("self", [1, 2], "cpu")):
        with pytest.raises(ValueError, match="signature is .* capture another graph"):
            buffers.copy_from(other)
    assert all(torch.equal(a, b) for a, b in zip(tensors(buffers.entry), before, strict=True))


@pytest.mark.parametrize("kind", ["packed", "merge"])
def test_attention_over_the_buffers_follows_the_layouts(kind):
    """K/V too: one buffer of fixed capacity for all layouts, as a graph has them."""
    torch.manual_seed(0)
    state, backend = AttentionMetadataState(), SDPABackend(AttentionSpec("cross_text", 2, 8, torch.float32, "cpu"))
    q, pad = torch.randn(2, 3, 2, 8), torch.randn(2, 2, 8)

    def attend(kv):
        if kind == "packed":
            return backend.forward(q, kv.k, kv.v, kv.metadata)
        out, lse = backend.forward(q, kv.k, kv.v, kv.metadata.packed, return_lse=True)
        return merge_pad_rows(q, out, lse, *pad, kv.metadata, 8**-0.5)

    def entry(lens):
        k, v = torch.zeros(2, 24, 2, 8).unbind()
        k[: sum(lens)], v[: sum(lens)] = torch.randn(2, sum(lens), 2, 8).unbind()
        return KV(k, v, ENTRIES[kind](state, lens, None))

    entries = [entry(lens) for lens in LAYOUTS]
    buffers = GraphBuffers(entries[0])
    for kv in (*entries, entries[1]):
        buffers.copy_from(kv)
        torch.testing.assert_close(attend(buffers.entry), attend(kv), rtol=0, atol=1e-6)


@dataclass(frozen=True, eq=False)
class KV:
    k: torch.Tensor
    v: torch.Tensor
    metadata: object

    def signature(self):
        return ("kv", self.metadata.signature())


@dataclass(frozen=True, eq=False)
class Layers:
    layers: tuple[KV, ...]

    def signature(self):
        return ("layers", self.layers[0].signature())


def test_metadata_that_all_layers_share_are_one_buffer():
    state = AttentionMetadataState()

    def model(lens):
        metadata = state.packed_kv("cross_text", lens, "cpu", max_seqlen_kv=4)
        return Layers(tuple(KV(torch.full((8,), i), torch.full((8,), -i), metadata) for i in range(3)))

    buffers = GraphBuffers(model([1, 2]))
    own = buffers.entry.layers
    assert own[0].metadata is own[1].metadata is own[2].metadata
    buffers.copy_from(model([4, 3]))
    assert own[2].metadata.cu_seqlens_kv.tolist() == [0, 4, 7]
    assert [int(kv.v[0]) for kv in own] == [0, -1, -2]


def test_rows_that_do_not_fill_the_capacity_are_refused():
    state = AttentionMetadataState()
    a, b = (KV(torch.zeros(n), torch.zeros(n), state.packed_kv("self", [n], "cpu", max_seqlen_kv=9)) for n in (3, 4))
    with pytest.raises(ValueError, match="fixed_capacity=True"):
        GraphBuffers(a).copy_from(b)


def test_they_are_made_and_rewritten_under_inference_mode_and_read_outside_it():
    state = AttentionMetadataState()
    with torch.inference_mode():
        kv = KV(torch.ones(4), torch.ones(4), state.packed_kv("self", [4], "cpu"))
        buffers = GraphBuffers(kv)
        buffers.copy_from(kv)
    assert not any(x.is_inference() for x in (buffers.entry.k, buffers.entry.metadata.cu_seqlens_kv))
    buffers.copy_from(KV(torch.zeros(4, requires_grad=True), torch.zeros(4), kv.metadata))
    assert not buffers.entry.k.requires_grad and buffers.entry.k.sum() == 0
