"""Memory that runs out inside the cache's own copies: the session is as it was, and the call goes through later."""

import pytest
import torch

from attention_backend.kv_cache import KVCacheError

READS = ["extent", "block_table", "staged"]


class Memory:
    """Fails in the n-th tensor that the cache's copies and zeroes are about to write."""

    def __init__(self, monkeypatch):
        self.left = None
        for name in ("index_copy_", "index_fill_"):
            monkeypatch.setattr(torch.Tensor, name, self._failing(getattr(torch.Tensor, name)))

    def _failing(self, write):
        def failing(*arguments):
            if self.left is not None:
                self.left -= 1
                if self.left < 0:
                    raise torch.OutOfMemoryError("no memory is left")
            return write(*arguments)

        return failing


def fails_after(memory, writes, call):
    """Whether `call` runs out of memory after so many writes."""
    memory.left = writes
    try:
        call()
    except torch.OutOfMemoryError:
        return True
    finally:
        memory.left = None
    return False


@pytest.fixture
def filled(harness):
    """filled(read, **options) → a cache and a stream whose window is full."""

    def make(read, **options):
        cache = harness.cache(5, block_size=4, read=read)
        stream = harness.open(cache, sink_frames=1, recent_frames=2, max_chunk_frames=2, **options)
        for _ in range(3):
            harness.step(cache, [stream], 2, denoise=0)
        return cache, stream

    return make


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("what", ["commit", "abort", "rollback"])
def test_a_call_that_runs_out_of_memory_leaves_the_session_as_it_was(harness, filled, monkeypatch, read, what):
    memory = Memory(monkeypatch)
    for writes in range(100):
        cache, stream = filled(read, rollback_chunks=int(what == "rollback"))
        session = stream.session
        chunk = None if what == "rollback" else session.begin(2)
        if chunk is not None:
            harness.forward(cache, [chunk])
        call = (lambda: session.rollback(1)) if chunk is None else getattr(chunk, what)  # noqa: B023
        failed = fails_after(memory, writes, call)
        if not failed:
            break
        if chunk is None:
            session.rollback(1)
            del stream.frames[-2:]
        else:
            chunk.abort()
        harness.step(cache, [stream], 1)  # sees a frame that the failed chunk was to overwrite
    writes_of_call = 0 if (what, read) in (("commit", "extent"), ("commit", "block_table")) else 2 * 2
    assert writes_of_call <= writes < 100


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("branches", [1, 2])
def test_a_close_that_runs_out_of_memory_is_asked_for_again(harness, filled, monkeypatch, read, branches):
    memory = Memory(monkeypatch)
    for writes in range(100):
        cache, stream = filled(read, branches=branches)
        stream.session.begin(1)
        if not fails_after(memory, writes, stream.session.close):
            break
        assert cache.sessions == [stream.session] and cache.free_blocks < 127
        stream.session.close()
        assert cache.sessions == [] and cache.free_blocks == 127 and stream.session.closed
        assert not any(x.any() for x in harness.contents(cache))
    assert writes == 2 * 2


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("what", ["commit", "abort", "close"])
def test_a_recomputed_window_that_runs_out_of_memory_at_its_end_loses_no_blocks(
    harness, filled, monkeypatch, read, what
):
    memory = Memory(monkeypatch)
    inputs = harness.inputs(3 * 5, seed=1)
    for writes in range(100):
        cache, stream = filled(read)
        before, free = harness.window(stream), cache.free_blocks
        chunk = stream.session.recompute()
        harness.forward(cache, [chunk], inputs=inputs, frame_causal=True)
        if not fails_after(memory, writes, stream.session.close if what == "close" else getattr(chunk, what)):
            break
        assert stream.session.chunk is chunk and cache.sessions == [stream.session]
        if what != "close":  # the window is the old one or the new one, whole
            new = [x for k_and_v in inputs for x in k_and_v[1:]]
            assert harness.same(harness.window(stream), before) or harness.same(harness.window(stream), new)
            chunk.abort()
            assert cache.free_blocks == free
            assert harness.same(harness.window(stream), before) or harness.same(harness.window(stream), new)
        stream.session.close()
        assert cache.free_blocks == 127 and not any(x.any() for x in harness.contents(cache))
    assert 2 * 2 <= writes < 100


@pytest.mark.parametrize("read", READS)
def test_a_batch_that_runs_out_of_memory_is_asked_for_again_and_abort_brings_all_back(
    harness, filled, monkeypatch, read
):
    memory = Memory(monkeypatch)
    for writes in range(100):
        cache, stream = filled(read)
        before, chunk = harness.window(stream), stream.session.begin(2)
        if read == "staged":
            cache.staging.drop(stream.session.branches[0])  # its copy is to be made anew
            for layer in cache.staging.rows.layers:
                for x in layer:
                    x.fill_(float("nan"))
        if not fails_after(memory, writes, lambda: cache.batch([chunk])):  # noqa: B023
            break
        harness.check([stream], harness.forward(cache, [chunk]))
        chunk.abort()
        assert harness.same(harness.window(stream), before)
        harness.step(cache, [stream], 2)
    assert writes == (2 * 2 if read != "staged" else 2 * 2 * 2)


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("what", ["commit", "abort"])
def test_a_chunk_whose_end_ran_out_of_memory_may_go_on(harness, filled, monkeypatch, read, what):
    """Its batch serves no more; the next one is prepared anew."""
    memory = Memory(monkeypatch)
    cache, stream = filled(read)
    chunk = stream.session.begin(2)
    batch = harness.forward(cache, [chunk]).batch
    failed = fails_after(memory, 1, getattr(chunk, what))
    assert failed == (what == "abort" or read == "staged")  # a commit in the pool writes nothing
    if not failed:
        return
    with pytest.raises(KVCacheError, match="out of date: .* failed midway"):
        batch.layer(0)
    if what == "commit":
        forward = harness.forward(cache, [chunk])
        assert forward.batch is not batch
        harness.check([stream], forward)
        harness.commit([stream], forward)
    else:
        chunk.abort()
    harness.step(cache, [stream], 1)
