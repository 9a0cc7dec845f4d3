"""Rows of the cache that are nobody's, or a bad neighbour's, reach no stream: P1, P12 and P16 to P18 on the engine."""

import pytest
import torch

CLOSE = {"rtol": 0, "atol": 1e-5}
READS = ["extent", "block_table", "staged"]
# Tokens of a frame: 24 and 32, over blocks of 16.
SIZES = {24: (8, 12), 32: (8, 16)}


def poisoned(engine, value):
    """The engine, before anything is written: the null block, the tails of blocks and tables, the pads' blocks and the
    staging buffer hold `value`."""
    for rows in (engine.cache.pool.rows, *([engine.cache.staging.rows] if engine.cache.staging else [])):
        for layer in rows.layers:
            for tensor in layer:
                tensor.fill_(value)
    return engine


@pytest.mark.parametrize("value", [torch.nan, 1e4])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("recent_frames", [2, 3, 6])
@pytest.mark.parametrize("read", READS)
def test_rows_that_were_not_written_reach_no_stream(tiny, read, recent_frames, deterministic, value):
    """P12, P18: with 2 frames nothing but the chunk itself is resident."""
    options = {"read": read, "recent_frames": recent_frames, "deterministic": deterministic}
    engine = poisoned(tiny.engine(**options), value)
    engine.open("a red circle", seed=1)
    engine.step()
    engine.open("green", seed=2)
    for made, prompt, seed in zip(tiny.run(engine, 6), ["a red circle", "green"], [1, 2], strict=True):
        torch.testing.assert_close(made, tiny.by_hand([prompt] * 6, seed, recent_frames=recent_frames), **CLOSE)
    assert {forward.read for forward in engine.record().timeline} == {read}


@pytest.mark.parametrize("window", [(1, 2), (0, 1)], ids=["sink and two frames", "the frame alone"])
@pytest.mark.parametrize("frame_tokens", [24, 32])
@pytest.mark.parametrize("read", READS)
def test_frames_over_blocks_of_another_length_with_extra_tokens_behind_them(tiny, read, frame_tokens, window):
    """P1, P17, P18: 3, 1 and no extra tokens in turn, on one of two streams. The oracle has other blocks and another
    read."""
    size, (sink, recent) = SIZES[frame_tokens], window
    settings = {"sink_frames": sink, "recent_frames": recent, "frames_per_chunk": 1}
    engine = tiny.engine(size=size, read=read, block_size=16, action_capacity=3, waiting_chunks=100, **settings)
    plain, acting = poisoned(engine, torch.nan).open("a b", seed=1), engine.open("c", seed=2)
    extra = [torch.randn(3, 24, generator=tiny.seeded(5)), torch.randn(1, 24, generator=tiny.seeded(6)), None] * 2
    for tokens in extra:
        acting.set_extra(tokens)
        engine.step(until="chunk")
        out = acting.extra_output
        assert out is None if tokens is None else out.shape == (1, *tokens.shape) and out.isfinite().all()
    settings |= {"read": "block_table" if read == "extent" else "extent", "block_size": 8, "size": size}
    torch.testing.assert_close(tiny.take(plain), tiny.by_hand(["a b"] * 6, 1, **settings), **CLOSE)
    made, without = tiny.take(acting), tiny.by_hand(["c"] * 6, 2, **settings)
    torch.testing.assert_close(made, tiny.by_hand(["c"] * 6, 2, extra=extra, **settings), **CLOSE)
    assert (made - without)[:, :, 0].abs().amax() > 1e-3, "the tokens are seen"
    assert {forward.read for forward in engine.record().timeline} == {read}


@pytest.mark.parametrize("read", READS)
def test_a_stream_that_turned_nan_harms_neither_its_neighbour_nor_who_gets_its_blocks(tiny, fault, read):
    """P16: the bits are those of an engine in which nothing failed; each stream has a window of its own."""
    options = {"read": read, "deterministic": True}
    made = []
    for fails in (False, True):
        engine = tiny.engine(**options)
        a, b = engine.open("a", seed=1, recent_frames=3), engine.open("b", seed=2, recent_frames=6)
        engine.step(until="chunk")
        used = engine.used_blocks
        if fails:
            fault.at(1, torch.nan, rows=slice(1, 2))  # so that all that follows in its chunk is NaN, K/V too
        engine.step(until="chunk")
        fault.heal()
        assert (a.state, b.state, engine.used_blocks) == ("idle", "failed" if fails else "idle", used)
        b.close()
        engine.open("c", seed=3, recent_frames=4)
        made.append(tiny.run(engine, 5))
    for clean, found in zip(*made, strict=True):
        assert clean.shape[2] == 10 and torch.equal(clean, found)
