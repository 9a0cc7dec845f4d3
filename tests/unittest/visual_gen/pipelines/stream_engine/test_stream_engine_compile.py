"""Compiled blocks under an engine whose batch changes."""

import copy

import torch
from torch._dynamo.testing import CompileCounterWithBackend

from visual_gen.pipelines.stream_engine import StreamEngine


def test_streams_that_join_and_leave_compile_nothing_anew(tiny):
    """Up to ten in a batch, which is more sizes than torch compiles a function for before it gives up."""
    torch._dynamo.reset()
    model, counter = copy.deepcopy(tiny.model), CompileCounterWithBackend("eager")
    model.compile_blocks(backend=counter)
    engine = StreamEngine(
        model, tiny.SIZE, causal=tiny.engine().causal, encode=tiny.encode, text_len=7, max_streams=10,
        waiting_chunks=99,
    )  # fmt: skip
    for i in range(2):
        engine.open("a", seed=i)
        engine.step(until="chunk")
    made = counter.frame_count
    for i in range(2, 10):
        engine.open("b" if i % 2 else "a", seed=i)
        engine.step(until="chunk")
    for stream in engine.streams[::2]:
        stream.close()
        engine.step(until="chunk")
    assert counter.frame_count == made <= 3
    assert set(engine.record().batch_sizes) == set(range(1, 11))
    last = engine.streams[-1]
    expected = tiny.by_hand(["b"] * last.chunk_index, 9)
    assert torch.allclose(torch.cat(last.take_latents(), dim=2), expected, rtol=0, atol=1e-5)
