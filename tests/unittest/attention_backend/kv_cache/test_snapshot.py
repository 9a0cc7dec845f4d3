"""Sessions in host memory and back, and windows computed anew in blocks of their own."""

import dataclasses

import pytest
import torch

from attention_backend.kv_cache import KVCacheError, OutOfBlocks

READS = ["extent", "block_table", "staged"]
OPTIONS = {"sink_frames": 1, "recent_frames": 3, "max_chunk_frames": 2, "branches": 2, "rollback_chunks": 2}


@pytest.fixture(params=READS)
def read(request):
    return request.param


@pytest.mark.parametrize("steps", [0, 1, 6])
def test_a_restored_session_is_the_one_it_was(harness, read, steps):
    cache = harness.cache(read=read, num_blocks=200, staging_tokens=4000)
    stream = harness.open(cache, **OPTIONS)
    for i in range(steps):
        harness.step(cache, [stream], 1 + i % 2)
    snapshot = stream.session.snapshot()
    assert snapshot.num_bytes == sum(x.nbytes for x in (*snapshot.windows, *snapshot.journals))
    for block_size in (16, 5):
        other = harness.cache(
            read=read, num_blocks=600, staging_tokens=4000, block_size=block_size, poison=float("nan")
        )
        session = other.restore_session(snapshot)
        assert session.frames == stream.session.frames and session.branches[0].blocks
        restored = type(stream)(session, list(stream.frames))
        again = session.snapshot()
        assert all(map(torch.equal, snapshot.windows, again.windows))
        assert all(map(torch.equal, snapshot.journals, again.journals))
        harness.step(other, [restored], 2)
        if steps:
            session.rollback(2)
            del restored.frames[-2 - (1 + (steps - 1) % 2) :]
            harness.step(other, [restored], 1)
        assert other.sessions == [session]
    assert session.cache is other


def test_a_snapshot_that_fits_no_cache_is_refused_and_takes_nothing(harness, make_harness):
    cache = harness.cache()
    stream = harness.open(cache, recent_frames=2)
    harness.step(cache, [stream])
    snapshot = stream.session.snapshot()
    double = make_harness(dtype=torch.float64)
    for other, error, says in (
        (harness.cache(25), KVCacheError, r"tokens a frame, .*\) \(24, 2, 2, 8, torch.float32\), the cache of \(25, 2"),
        (double.cache(24), KVCacheError, "the cache of .*float64"),
        (make_harness(head_dim=16).cache(24), KVCacheError, r"the cache of \(24, 2, 2, 16"),
        (harness.cache(max_frames=1), KVCacheError, "a window of 2 frames in a cache for at most max_frames 1"),
        (harness.cache(num_blocks=3), OutOfBlocks, "needs .* blocks"),
    ):
        free = other.free_blocks
        with pytest.raises(error, match=says):
            other.restore_session(snapshot)
        assert other.free_blocks == free and not other.sessions
    short = dataclasses.replace(snapshot, windows=tuple(x[:, :, 1:] for x in snapshot.windows))
    with pytest.raises(KVCacheError, match="the snapshot's windows have shapes"):
        cache.restore_session(short)
    chunk = stream.session.begin(1)
    with pytest.raises(KVCacheError, match="is open; .* before a snapshot"):
        stream.session.snapshot()
    chunk.abort()
    stream.session.close()
    with pytest.raises(KVCacheError, match="the session is closed"):
        stream.session.snapshot()


def recompute(harness, stream, cache):
    """The window of a stream with new K/V, every frame checked against what is before it in the window."""
    chunk = stream.session.recompute()
    held = [f for first, count in chunk.frame_runs for f in range(first, first + count)]
    forward = harness.forward(cache, [chunk], frame_causal=True)
    c, kept = cache.frame_tokens, {}
    for branch in range(forward.batch.num_rows):
        rows = [
            [forward.rows(x)[branch] for x in (*qkv, out)]
            for qkv, out in zip(forward.inputs, forward.outs, strict=True)
        ]
        for layer, (q, k, v, got) in enumerate(rows):
            for i, f in enumerate(held):
                part = slice(i * c, (i + 1) * c)
                harness.compare(q[part], k[: part.stop], v[: part.stop], got[part])
                kept.setdefault(f, {})[branch, layer] = (k[part].clone(), v[part].clone())
    return chunk, kept


def take_over(stream, kept):
    for f, values in kept.items():
        for (branch, layer), kv in values.items():
            stream.frames[f][branch][layer] = kv


@pytest.mark.parametrize("steps", [1, 3, 4, 5, 9])
def test_a_window_computed_anew_takes_the_place_of_the_old_one(harness, read, steps):
    cache = harness.cache(read=read, num_blocks=300, staging_tokens=4000)
    stream, other = (harness.open(cache, **OPTIONS) for _ in range(2))
    for _ in range(steps):
        harness.step(cache, [stream, other])
    free, before = cache.free_blocks, harness.window(other)
    for repeat in range(2):
        chunk, kept = recompute(harness, stream, cache)
        assert sorted(kept) == sorted(
            {*range(min(1, steps)), *range(max(len(stream.frames) - 3, 0), len(stream.frames))}
        )
        assert cache.free_blocks < free
        chunk.commit()
        take_over(stream, kept)
        assert cache.free_blocks == free and stream.session.frames == len(stream.frames)
        with pytest.raises(KVCacheError, match="0 are kept"):
            stream.session.rollback(1)
        for frames in (1, 2, 2)[repeat:]:
            harness.step(cache, [stream], frames)
        stream.session.rollback(1)
        del stream.frames[-2:]
    assert harness.same(before, harness.window(other))
    harness.step(cache, [other, stream])


def test_a_window_that_is_not_taken_over_leaves_all_as_it_was(harness, read):
    cache = harness.cache(read=read, num_blocks=300, staging_tokens=4000)
    stream = harness.open(cache, **OPTIONS)
    for _ in range(6):
        harness.step(cache, [stream])
    free, before = cache.free_blocks, harness.window(stream)
    with pytest.raises(RuntimeError, match="broken"), stream.session.recompute() as chunk:
        harness.forward(cache, [chunk], frame_causal=True)
        with pytest.raises(KVCacheError, match="is open"):
            stream.session.begin(1)
        raise RuntimeError("broken")
    with stream.session.recompute() as chunk, pytest.raises(KVCacheError, match=r"no forward for branches \[0, 1\]"):
        chunk.commit()
    with pytest.raises(KVCacheError, match="over"):
        chunk.abort()
    assert cache.free_blocks == free and harness.same(before, harness.window(stream))
    stream.session.rollback(2)
    del stream.frames[-2:]
    harness.step(cache, [stream], 2)
    stream.session.recompute()
    stream.session.close()
    assert not cache.pool.holders and not cache.sessions
    if cache.staging:
        assert not cache.staging._regions


def test_a_window_cannot_be_computed_anew_without_frames_or_room(harness):
    cache = harness.cache(num_blocks=20)
    session = cache.open_session(recent_frames=2, max_chunk_frames=1)
    with pytest.raises(KVCacheError, match="no frame is committed"):
        session.recompute()
    stream = type(harness.open(harness.cache(), recent_frames=1))(session)
    harness.step(cache, [stream])
    with pytest.raises(OutOfBlocks):
        session.recompute()
    assert session.chunk is None


def test_forks_and_snapshots_of_a_window_in_its_new_order(harness):
    cache = harness.cache(read="block_table", num_blocks=300)
    stream = harness.open(cache, sink_frames=1, recent_frames=3, max_chunk_frames=2, rollback_chunks=1)
    for _ in range(6):
        harness.step(cache, [stream])
    chunk, kept = recompute(harness, stream, cache)
    chunk.commit()
    take_over(stream, kept)
    others = [type(stream)(make(), list(stream.frames)) for make in (
        stream.session.fork, lambda: cache.restore_session(stream.session.snapshot())
    )]  # fmt: skip
    assert stream.session.geometry.ring_turn == 2 == others[1].session.geometry.ring_turn
    for frames in ([1, 2, 1], [2, 1, 2], [1, 1, 1]):
        harness.step(cache, [stream, *others], frames)
