"""Compiled blocks under an engine whose batch changes."""

import copy

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from visual_gen.pipelines.stream_engine import StreamEngine


@pytest.fixture
def compiled(tiny):
    """compiled(**options): an engine over the tiny model with compiled blocks, and what counts their graphs."""
    torch._dynamo.reset()
    engines = []

    def make(**options):
        model, counter = copy.deepcopy(tiny.model), CompileCounterWithBackend("eager")
        model.compile_blocks(backend=counter)
        given = {"causal": tiny.engine().causal, "encode": tiny.encode, "text_len": 7, "waiting_chunks": 99}
        engines.append(StreamEngine(model, tiny.SIZE, **(given | options)))
        return engines[-1], counter

    yield make
    for engine in engines:
        engine.close()


def test_streams_that_join_and_leave_compile_nothing_anew(tiny, compiled):
    """Up to ten in a batch, which is more sizes than torch compiles a function for before it gives up."""
    engine, counter = compiled(max_streams=10)
    for i in range(2):
        engine.open("a", seed=i)
        engine.step(until="chunk")
    assert counter.frame_count == 2, "one graph for one row, one for several"
    for i in range(2, 10):
        engine.open("b" if i % 2 else "a", seed=i)
        engine.step(until="chunk")
    for stream in engine.streams[::2]:
        stream.close()
        engine.step(until="chunk")
    assert counter.frame_count == 2
    assert set(engine.record().batch_sizes) == set(range(1, 11))
    last = engine.streams[-1]
    expected = tiny.by_hand(["b"] * last.chunk_index, 9)
    assert torch.allclose(torch.cat(last.take_latents(), dim=2), expected, rtol=0, atol=1e-5)


def test_all_that_streams_do_has_a_graph_and_no_more_the_second_time(tiny, compiled):
    """Which is more than the eight that torch would make of a function; the latents are those of a plain engine."""
    options = {"max_streams": 6, "guidance_scale": 2.0, "action_capacity": 3}
    (engine, counter), plain = compiled(**options), tiny.engine(waiting_chunks=99, **options)
    made = []
    for each in (plain, engine):
        counts, latents = [], []
        for seed in (1, 4):
            a = each.open("a", seed=seed, guidance_scale=1.0)
            each.step(until="chunk")
            b = each.open("b", negative_prompt="not", seed=seed + 1)
            first = torch.ones(tiny.C, 3, *tiny.SIZE)
            c = each.open("c", seed=seed + 2, guidance_scale=1.0, initial_latents=first)
            each.step(until="chunk")
            a.set_extra(torch.ones(2, 24))
            each.step([a], until="chunk")
            each.step(until="chunk")
            a.set_extra(None)
            forks = [a.fork(), b.fork()]
            each.step(forks[:1], until="chunk")
            each.step(until="chunk")
            for stream in (a, b):
                stream.switch_prompt("d e", recache="window")
            each.step(until="chunk")
            latents += [torch.cat(stream.take_latents(), dim=2) for stream in (a, b, c, *forks)]
            each.close()
            counts.append(counter.frame_count)
        made.append(latents)
    assert 8 < counts[0] == counts[1]
    assert {forward.read for forward in engine.record().timeline} == {"extent", "block_table"}
    for x, y in zip(*made, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-4)
