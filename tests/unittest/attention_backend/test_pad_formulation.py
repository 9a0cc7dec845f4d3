"""Which formulation of the pad rows a layout takes."""

import pytest

from attention_backend import pad_formulation


@pytest.mark.parametrize(
    "kv_lens, expected",
    [
        ((512, 126), "repeated_key"),
        ((512,) * 4 + (126,), "merge"),
        ((512,) * 7 + (126,), "merge"),  # one row has pads, and the others' many scores would all be touched
        ((300, 126), "repeated_key"),
        ((120, 1), "repeated_key"),
        ((126, 1), "repeated_key"),
        ((1, 1, 1, 1), "repeated_key"),
        ((500, 400), "padded"),  # no key tile would be saved
        ((512, 511), "padded"),
        ((512, 512, 512, 126), "repeated_key"),
        ((256, 256), "repeated_key"),  # although the kept row opens a third tile
        ((512, 384), "padded"),  # one tile less: less than a merge costs, and a kept row would open it again
        ((0, 0), "repeated_key"),
    ],
)
def test_the_layout_chooses(kv_lens, expected):
    assert pad_formulation(kv_lens, 512, repeated_key=True) == expected


@pytest.mark.parametrize("kv_lens", [(512, 126), (120, 1), (500, 400)])
def test_a_backend_that_cannot_repeat_a_key_merges(kv_lens):
    assert pad_formulation(kv_lens, 512, repeated_key=False) == "merge"


def test_short_texts_are_not_worth_packing():
    """All rows of wan-shapes' text fit in one key tile."""
    assert pad_formulation((7, 1), 32, repeated_key=True) == "padded"
