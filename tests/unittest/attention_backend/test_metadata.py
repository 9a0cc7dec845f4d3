"""AttentionMetadataState: built once a layout, keyed by values, immutable, bounded."""

import dataclasses
import gc

import pytest
import torch

from attention_backend import AttentionMetadataState

BUILDERS = {
    "padded": lambda state, lens, role="cross_text": state.padded_kv(role, lens, 16, "cpu"),
    "packed": lambda state, lens, role="cross_text": state.packed_kv(role, lens, "cpu", max_seqlen_kv=16),
    "packed_q": lambda state, lens, role="cross_text": state.packed_kv(
        role, lens, "cpu", max_seqlen_kv=16, q_lens=[7] * len(lens)
    ),
    "packed_pad": lambda state, lens, role="cross_text": state.packed_pad_kv(role, lens, 16, "cpu"),
    "packed_pad_repeated": lambda state, lens, role="cross_text": state.packed_pad_kv(
        role, lens, 16, "cpu", formulation="repeated_key"
    ),
    "masked": lambda state, lens, role="cross_text": state.masked_kv(
        role, [[0] * (16 - n) + [1] * n for n in lens], "cpu"
    ),
    "extent": lambda state, lens, role="cross_text": state.extent_kv(
        role, [20 * i for i in range(len(lens))], lens, 99, "cpu", max_seqlen_kv=16
    ),
    "paged": lambda state, lens, role="cross_text": state.paged_kv(
        role, [[i, 0] for i in range(1, 1 + len(lens))], lens, 8, "cpu"
    ),
}


@pytest.fixture
def state():
    return AttentionMetadataState()


@pytest.fixture(params=BUILDERS)
def build(request):
    return BUILDERS[request.param]


def kv_lens_of(entry):
    return entry.packed.kv_lens if hasattr(entry, "packed") else entry.kv_lens


def test_three_layers_and_four_steps_share_one_object(state, build):
    entries = {id(build(state, [8, 3])) for _step in range(4) for _layer in range(3)}
    assert len(entries) == 1
    assert (state.builds, state.hits, state.device_copies) == (1, 11, 1)


def test_other_lengths_or_roles_are_other_entries(state, build):
    first = build(state, [5, 7])
    assert build(state, [7, 5]) is not first
    assert build(state, [5, 7], "self") is not first
    assert build(state, [5, 7]) is first
    assert (state.builds, state.hits, state.device_copies) == (3, 1, 3)


def test_a_list_changed_in_place_is_another_layout(state, build):
    lens = [5, 7]
    first = build(state, lens)
    lens[0] = 6
    second = build(state, lens)
    assert second is not first
    assert build(state, [5, 7]) is first and build(state, [6, 7]) is second


def test_entries_survive_the_collection_of_what_they_were_asked_with(state, build):
    """A key that were an address or an id would now hit for the wrong layout."""
    for step in range(50):
        lens = [1 + step % 7, 1 + step % 5]
        entry = build(state, lens)
        kv_lens = tuple(16 - n for n in entry.pad_lens) if hasattr(entry, "pad_lens") else kv_lens_of(entry)
        assert kv_lens == tuple(lens)
        del lens, entry
        gc.collect(0)


def test_entries_are_immutable(state, build):
    entry = build(state, [5, 7])
    for field in dataclasses.fields(entry):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(entry, field.name, None)
    kv_lens = kv_lens_of(entry)
    assert isinstance(kv_lens, tuple)


def test_the_least_recently_used_entry_leaves_first():
    state = AttentionMetadataState(max_entries=2)
    a = state.padded_kv("self", [1], 8, "cpu")
    b = state.padded_kv("self", [2], 8, "cpu")
    assert state.padded_kv("self", [1], 8, "cpu") is a  # now b is the older one
    state.padded_kv("self", [3], 8, "cpu")
    assert state.padded_kv("self", [1], 8, "cpu") is a
    assert state.padded_kv("self", [2], 8, "cpu") is not b
    assert (state.builds, state.hits) == (4, 2)
    with pytest.raises(ValueError, match="max_entries is 0"):
        AttentionMetadataState(max_entries=0)


def test_clear_forgets_entries(state, build):
    first = build(state, [5, 7])
    state.clear()
    assert state.signature() == ()
    assert build(state, [5, 7]) is not first


def test_numbers(state):
    padded = state.padded_kv("cross_text", [8, 3], 16, "cpu")
    assert padded.seqused_kv.tolist() == [8, 3] and padded.max_seqlen_kv == 16 and padded.kv_lens == (8, 3)

    packed = state.packed_kv("cross_text", [8, 0, 3], "cpu", q_lens=[2, 5, 1])
    assert packed.cu_seqlens_kv.tolist() == [0, 8, 8, 11] and packed.max_seqlen_kv == 8
    assert packed.cu_seqlens_q.tolist() == [0, 2, 7, 8] and packed.max_seqlen_q == 5 and packed.q_lens == (2, 5, 1)

    pads = state.packed_pad_kv("cross_text", [8, 16], 16, "cpu")
    assert pads.pad_lens == (8, 0)
    assert pads.log_pad_lens.tolist() == torch.tensor([8.0, 0.0]).double().log().tolist()

    repeated = state.packed_pad_kv("cross_text", [8, 16, 0, 15], 16, "cpu", formulation="repeated_key")
    assert repeated.pad_lens == (8, 0, 16, 1) and repeated.packed.last_key_repeats_to == 16
    assert repeated.packed.kv_lens == (9, 16, 1, 16), "a sequence without pads gets no pad row"
    assert repeated.packed.cu_seqlens_kv.tolist() == [0, 9, 25, 26, 42]

    paged = state.paged_kv("self", [[3, 1], [2, 0]], [12, 4], 8, "cpu")
    assert paged.block_table.tolist() == [[3, 1], [2, 0]] and paged.seqused_kv.tolist() == [12, 4]
    assert paged.max_seqlen_kv == 16 and paged.block_size == 8

    masked = state.masked_kv("cross_text", [[1, 0, 1, 1], [0, 0, 0, 0], [0, 1, 0, 0]], "cpu")
    assert masked.gather_index.tolist() == [0, 2, 3, 9] and masked.packed.max_seqlen_kv == 4
    assert masked.packed.cu_seqlens_kv.tolist() == [0, 3, 3, 4] and masked.packed.kv_lens == (3, 0, 1)
    rows = torch.arange(24).view(3, 4, 2)
    assert masked.gather(rows).tolist() == [[0, 1], [4, 5], [6, 7], [18, 19]]

    for entry in (padded, packed, pads.packed, repeated.packed, masked, masked.packed, paged):
        for x in vars(entry).values():
            if isinstance(x, torch.Tensor):
                assert x.dtype == torch.int32 and x.is_contiguous()
                assert x.storage_offset() % 4 == 0, "kernels load lengths by 16-byte vectors"


def test_the_signature_does_not_depend_on_lengths(state, build):
    signatures = set()
    for lens in ([5, 7], [7, 5], [16, 1]):
        build(state, lens)
        signatures.add(state.signature())
    assert len(signatures) == 1
    build(state, [5, 7, 7])
    signatures.add(state.signature())
    assert len(signatures) == 2, "the batch is part of it"


def test_the_signature_names_kind_and_bounds(state):
    signatures = []
    for build in BUILDERS.values():
        build(state, [5, 7])
        signatures.append(state.signature())
    state.padded_kv("cross_text", [5, 7], 17, "cpu")
    signatures.append(state.signature())
    for shape in ((2, 16), (2, 17), (3, 16)):
        state.dense_kv("cross_text", *shape)
        signatures.append(state.signature())
    assert len(set(signatures)) == len(signatures)


@pytest.mark.parametrize(
    "lens, message",
    [
        (
            torch.tensor([5, 7]),
            r"kv_lens is a tensor on cpu.*convert it once, before the steps, with kv_lens.tolist\(\)",
        ),
        ([torch.tensor(5), 7], r"kv_lens\[0\] is tensor\(5\); lengths must be host ints"),
        ([5, 7.0], r"kv_lens\[1\] is 7.0; lengths must be host ints"),
        ([5, True], r"kv_lens\[1\] is True"),
        ([5, -1], r"kv_lens\[1\] is -1; it must be between 0 and 16"),
        ([5, 17], r"kv_lens\[1\] is 17; it must be between 0 and 16"),
        ([], "kv_lens is empty; it needs one length for each sequence"),
    ],
)
@pytest.mark.parametrize("kind", ["padded", "packed", "packed_pad", "packed_pad_repeated"])
def test_bad_lengths_are_refused_with_the_value(state, kind, lens, message):
    with pytest.raises(ValueError, match=message):
        BUILDERS[kind](state, lens)
    assert (state.builds, state.device_copies) == (0, 0)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(block_tables=[[1, 2], [3]], kv_lens=[4, 4], block_size=8), r"block tables have widths \[2, 1\]"),
        (dict(block_tables=[[1], [3]], kv_lens=[4], block_size=8), "2 block tables but 1 kv_lens"),
        (dict(block_tables=[[1]], kv_lens=[9], block_size=8), r"kv_lens\[0\] is 9; it must be between 0 and 8"),
        (dict(block_tables=[[1]], kv_lens=[0], block_size=0), "block_size is 0"),
        (dict(block_tables=[[1]], kv_lens=[4], block_size=8, q_lens=[1, 2]), "1 kv_lens but 2 q_lens"),
    ],
)
def test_bad_block_tables_are_refused(state, arguments, message):
    with pytest.raises(ValueError, match=message):
        state.paged_kv("self", device="cpu", **arguments)


def test_an_unknown_formulation_is_refused(state):
    with pytest.raises(ValueError, match="formulation is 'padded'; it must be 'merge' or 'repeated_key'"):
        state.packed_pad_kv("cross_text", [5], 16, "cpu", formulation="padded")


def test_it_holds_no_keys_or_values(state, build):
    entry = build(state, [5, 7])
    parts = vars(entry) | (vars(entry.packed) if hasattr(entry, "packed") else {})
    assert sum(x.numel() for x in parts.values() if isinstance(x, torch.Tensor)) < 20


def test_block_ids_are_checked_on_the_host():
    state = AttentionMetadataState()
    with pytest.raises(ValueError, match=r"block_tables row\[1\] is -1"):
        state.paged_kv("self", [[2, -1]], [3], 4, "cpu")
    assert state.builds == 0
    assert state.paged_kv("self", [[2, 0], [5, 1]], [3, 4], 4, "cpu").max_block_id == 5
