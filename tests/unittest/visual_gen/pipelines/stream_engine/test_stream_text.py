"""What a stream that joins, or switches its prompt, waits for."""

import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unittest.visual_gen.pipelines.stream_engine.tiny_model import CONFIG, TEXT_LEN, text
from visual_gen.models.wan import CausalWanTransformer
from visual_gen.pipelines.stream_text import TextSlots


class Calls(TorchDispatchMode):
    """Counts operators. In inference mode these are the calls that torch is given; else a CPU's list of what such a
    call is made of, which on a GPU is one kernel."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@torch.inference_mode()
@pytest.mark.parametrize(("n", "at_most"), [(5, 24), (TEXT_LEN, 18)])
def test_a_text_takes_six_calls_a_layer_and_a_few_for_all(n, at_most):
    """Each is some 10 µs of a GPU's host. With pads, their row lies in the same products, and only copies are more."""
    calls = {}
    for layers in (2, 4):
        slots = TextSlots(CausalWanTransformer(dataclasses.replace(CONFIG, num_layers=layers)), 1, TEXT_LEN, None)
        prompt = text(n)
        with Calls() as counted:
            slots.take(prompt)
        calls[layers] = counted.count
    assert calls[4] - calls[2] <= 2 * 6
    assert calls[2] <= 2 * 6 + at_most
