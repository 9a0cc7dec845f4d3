"""A chunk is a transaction: whatever ends it leaves the stream as before it, and a retry is a clean run."""

import itertools
import signal
import sys

import pytest
import torch

from visual_gen.pipelines.errors import EngineFull, GenerationError

READS = ["extent", "block_table", "staged"]


def contents(engine, stream):
    """All bits that a stream's session has committed, its length, and what is free."""
    return stream.session.snapshot().windows, (stream.session.frames, engine.cache.free_blocks)


def same(before, after):
    return before[1] == after[1] and all(map(torch.equal, before[0], after[0]))


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("what", [RuntimeError("out of memory"), KeyboardInterrupt()], ids=["exception", "Ctrl-C"])
@pytest.mark.parametrize("forward", [1, 3], ids=["denoising", "commit"])
@pytest.mark.parametrize("layer", [0, 1])
def test_an_exception_in_a_layer_leaves_streams_as_before_and_a_retry_is_a_clean_run(
    tiny, fault, read, what, forward, layer
):
    options = {"read": read, "recent_frames": 3, "deterministic": True}
    clean_engine = tiny.engine(**options)
    clean_engine.open("a", seed=1), clean_engine.open("b", seed=2)
    clean = tiny.run(clean_engine, 4)
    engine = tiny.engine(**options)
    streams = [engine.open("a", seed=1), engine.open("b", seed=2)]
    engine.step(until="chunk"), engine.step(until="chunk")
    before = [contents(engine, stream) for stream in streams]
    fault.at(forward, what, layer)
    with pytest.raises(type(what)):
        engine.step(until="chunk")
    fault.heal()
    assert [stream.state for stream in streams] == ["idle"] * 2
    assert all(same(x, contents(engine, stream)) for x, stream in zip(before, streams, strict=True))
    assert all(map(torch.equal, tiny.run(engine, 4), clean))


@pytest.mark.parametrize("forward", [1, 3], ids=["denoising", "commit"])
def test_numbers_that_are_not_finite_fail_their_stream_alone(tiny, fault, forward):
    options = {"deterministic": True, "recent_frames": 3, "rollback_chunks": 1}
    clean_engine = tiny.engine(**options)
    clean_engine.open("a", seed=1), clean_engine.open("b", seed=2)
    clean = tiny.run(clean_engine, 5)
    engine = tiny.engine(**options)
    a, b = engine.open("a", seed=1), engine.open("b", seed=2)
    engine.step(until="chunk"), engine.step(until="chunk")
    before = contents(engine, b)
    fault.at(forward, torch.nan, rows=slice(1, 2))
    events = engine.step(until="chunk")
    fault.heal()
    (failed,) = [event for event in events if event.kind == "failed"]
    assert failed.stream is b and failed.chunk_index == 2 and isinstance(failed.error, GenerationError)
    assert "chunk 2 of stream 1 gave NaN or infinity and was not kept" in str(failed.error)
    assert (a.state, b.state, b.frames) == ("idle", "failed", 4) and same(before, contents(engine, b))
    assert {event.stream for event in engine.step()} == {a}, "a stream that failed is stepped only by name"
    made = tiny.run(engine, 5)
    assert torch.equal(made[0], clean[0]) and torch.equal(made[1], clean[1])
    assert b.error is None and engine.record().failed_chunks == 1


def test_a_bad_chunk_that_the_next_was_begun_on_takes_that_with_it(tiny, fault):
    engine = tiny.engine(recent_frames=3)
    stream = engine.open("a", seed=1)
    engine.step(until="chunk"), engine.step(until="chunk")
    before = contents(engine, stream)
    fault.at(3, torch.inf)
    engine.step(), engine.step(), engine.step()
    assert stream.session.frames == 6, "on trust"
    assert [event.kind for event in engine.step()] == ["denoised", "failed"]
    fault.heal()
    assert stream.state == "failed" and stream.session.chunk is None and same(before, contents(engine, stream))
    (made,) = tiny.run(engine, 4)
    torch.testing.assert_close(made, tiny.by_hand(["a"] * 4, 1, recent_frames=3), rtol=0, atol=1e-5)


def test_ctrl_c_at_any_line_leaves_all_as_before_a_chunk_or_after_it(tiny):
    """A real SIGINT at many lines of a life with every operation; afterwards the same life again must be a clean run,
    and everything can be given back."""
    options = {"recent_frames": 3, "deterministic": True, "rollback_chunks": 1, "max_streams": 4, "read": "block_table"}

    def life(engine):
        a = engine.open("a", seed=1)
        b = engine.open("b", seed=2)
        engine.step(until="chunk"), engine.step(until="chunk")
        fork = a.fork(seed=5)
        b.switch_prompt("c d", recache="window")
        engine.step(until="chunk")
        a.rollback(1)
        restored = engine.restore(b.snapshot())
        fork.close()
        return a, b, restored

    def interrupted(at):
        """Whether the life was interrupted at its at-th line in our files."""
        lines = itertools.count()

        def trace(frame, event, arg):
            name = frame.f_code.co_filename
            if not ("/kv_cache/" in name or "/pipelines/stream" in name) or "interrupts" in name:
                return None
            if event == "line" and next(lines) == at:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
            return trace

        sys.settrace(trace)
        try:
            life(engine)
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
        return False

    engine = tiny.engine(**options)
    expected = [torch.cat(stream.take_latents(), dim=2) for stream in life(engine)[:2]]
    engine.close()
    free, at, hits = engine.cache.free_blocks, 3, 0
    while interrupted(at):
        hits += 1
        at += 131 + at // 6
        for stream in list(engine.streams):  # each goes on or can be closed
            stream.abort_chunk()
            assert stream.frames == stream.session.frames and stream.session.chunk is None
            for first, x in stream._now.clean:
                assert first + x.shape[1] <= stream.frames
        if engine.streams:
            assert any(event.kind == "committed" for event in engine.step(until="chunk"))
        engine.close()
        assert engine.cache.free_blocks == free and not engine._texts.used
        assert len(engine.cache.sessions) == len(engine._run.pads)
        if hits % 4 == 0:
            again = [torch.cat(stream.take_latents(), dim=2) for stream in life(engine)[:2]]
            assert all(map(torch.equal, again, expected))
            engine.close()
    assert hits > 15


def test_a_chunk_that_is_aborted_is_made_again_the_same(tiny):
    engine = tiny.engine()
    stream = engine.open("a", seed=1)
    engine.step(until="chunk")
    engine.step(), engine.step()
    assert stream.state == "denoising"
    stream.abort_chunk()
    stream.abort_chunk()
    assert stream.state == "idle"
    (made,) = tiny.run(engine, 3)
    torch.testing.assert_close(made, tiny.by_hand(["a"] * 3, 1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("read", READS)
def test_chunks_that_are_taken_back_are_made_again_the_same(tiny, read):
    engine = tiny.engine(recent_frames=3, rollback_chunks=2, read=read)
    stream = engine.open("a", seed=1)
    expected = tiny.by_hand(["a"] * 6, 1, recent_frames=3)
    with pytest.raises(ValueError, match="has none that can be taken back"):
        stream.rollback(1)
    (made,) = tiny.run(engine, 4)
    with pytest.raises(ValueError, match=r"chunks is 3; of stream 0 1 to 2 can be taken back"):
        stream.rollback(3)
    for wrong in (0, True, "1"):
        with pytest.raises(ValueError, match="chunks is"):
            stream.rollback(wrong)
    engine.step()  # into chunk 4, which is dropped too
    stream.rollback(2)
    assert (stream.frames, stream.chunk_index, stream.state) == (4, 2, "idle")
    (again,) = tiny.run(engine, 6)
    torch.testing.assert_close(torch.cat([made[:, :, :4], again], dim=2), expected, rtol=0, atol=1e-5)


def test_chunks_taken_back_are_not_offered_any_more(tiny):
    engine = tiny.engine(rollback_chunks=2)
    stream = engine.open("a", seed=1)
    for _ in range(3):
        engine.step(until="chunk")
    stream.rollback(2)
    assert stream.waiting_chunks == 1 and len(stream.take_latents()) == 1


@pytest.mark.parametrize(
    ("read", "deterministic"), [("auto", False), ("auto", True), ("block_table", True), ("staged", True)]
)
def test_forks_go_on_apart_without_touching_each_other(tiny, read, deterministic):
    options = {"recent_frames": 3, "sink_frames": 1, "rollback_chunks": 1, "read": read, "block_size": 4}
    options |= {"deterministic": deterministic, "max_streams": 4}
    alone = tiny.engine(**options)
    alone.open("a", seed=1)
    (expected,) = tiny.run(alone, 7)
    engine = tiny.engine(**options)
    parent = engine.open("a", seed=1)
    (begun,) = tiny.run(engine, 3)
    used = engine.used_blocks
    same_noise, other = parent.fork(), parent.fork(seed=9)
    assert (other.frames, other.chunk_index, other.prompt, other.waiting_chunks) == (6, 3, "a", 0)
    of_fork = other.fork()
    if read == "block_table":
        assert engine.used_blocks - used < 3 * used, "what is never written again is held together"
    made = tiny.run(engine, 7)
    made[0] = torch.cat([begun, made[0]], dim=2)
    made[1] = torch.cat([begun, made[1]], dim=2)
    exact = {"rtol": 0, "atol": 0 if deterministic else 1e-5}
    torch.testing.assert_close(made[0], expected, **exact)
    torch.testing.assert_close(made[1], expected, **exact)
    torch.testing.assert_close(made[2], made[3], **exact)
    assert (made[2] - made[1][:, :, 6:]).abs().amax() > 0.1
    reads = {forward.read for forward in engine.record().timeline if len(forward.streams) == 4}
    assert reads == {"auto": {"extent"} if deterministic else {"block_table"}}.get(read, {read})
    parent.rollback(1), other.rollback(1)
    again = tiny.run(engine, 7, [parent, other])
    torch.testing.assert_close(again[0], expected[:, :, 12:], **exact)
    torch.testing.assert_close(again[1], made[2][:, :, 6:], **exact)
    for stream in (same_noise, parent, of_fork, other):
        stream.close()
    assert not engine.used_blocks and not engine.cache.pool.holders.keys() - {
        block for pad in engine._run.pads for branch in pad.branches for block in (*branch.blocks, *branch.journal)
    }
    assert not engine.cache.pool.spares


def test_a_parent_keeps_its_run_and_reads_by_extent_when_its_fork_is_gone(tiny):
    engine = tiny.engine(recent_frames=3)
    parent = engine.open("a", seed=1)
    tiny.run(engine, 2)
    fork = parent.fork()
    tiny.run(engine, 4)
    batch = engine.cache.batch([parent.session.begin(2), fork.session.begin(2)])
    assert batch.read == "block_table" and batch.read_reason == "1 of 2 rows lie in scattered blocks"
    parent.abort_chunk(), fork.abort_chunk()
    fork.close()
    tiny.run(engine, 6)
    assert engine.record().timeline[-1].read == "extent"
    # Two chunks alone, two of both streams, two alone again; each two steps and a commit. The batch above makes one.
    assert engine.record().read_counts == {
        ("extent", "every row is one run of blocks"): 12, ("block_table", "1 of 2 rows lie in scattered blocks"): 7
    }  # fmt: skip


def test_forks_that_cannot_be_are_refused_and_take_nothing(tiny):
    engine = tiny.engine(max_streams=2)
    stream = engine.open("a")
    engine.step()
    with pytest.raises(ValueError, match="in the middle of chunk 0: step it until 'chunk', or abort_chunk"):
        stream.fork()
    engine.step(until="chunk")
    with pytest.raises(ValueError, match="seed is -1"):
        stream.fork(seed=-1)
    fork = stream.fork()
    used = engine.used_blocks, engine._texts.used
    with pytest.raises(EngineFull, match="max_streams"):
        stream.fork()
    assert (engine.used_blocks, engine._texts.used) == used
    fork.close()
    stream.close()
    with pytest.raises(ValueError, match="stream 0 is closed"):
        stream.fork()


def test_a_stream_closed_in_the_middle_of_a_chunk_gives_everything_back(tiny):
    engine = tiny.engine()
    stream = engine.open("a")
    engine.step(until="chunk"), engine.step()
    stream.switch_prompt("b")
    stream.close()
    stream.close()
    assert stream.state == "closed" and not engine.used_blocks and not engine._texts.used and not engine.streams
    assert len(stream.take_latents()) == 1
