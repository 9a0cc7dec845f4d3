"""Begin, commit, abort, rollback and close: what they leave, and what they refuse before anything is written."""

import pytest
import torch

from attention_backend.kv_cache import KVCacheError, OutOfBlocks

NAN = float("nan")
READS = ["extent", "block_table", "staged"]


@pytest.fixture(params=READS)
def read(request):
    return request.param


class Fails(Exception):
    pass


def forward_that_fails(harness, cache, chunk, inputs):
    """Raises in the last layer, after the others have written."""
    batch = cache.batch([chunk])
    for i, qkv in enumerate(inputs[:-1]):
        harness.attend(*qkv, batch.layer(i))
    raise Fails


@pytest.mark.parametrize("history", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("poison", [NAN, 0.0])
def test_a_failed_forward_leaves_the_session_as_it_was_and_the_retry_equals_a_clean_run(harness, read, history, poison):
    """History 0 and 1: the window fills; 2: it wraps inside the chunk; 3 and 5: the chunk overwrites."""
    outs = {}
    for fails in (False, True):
        cache = harness.cache(read=read, poison=poison)
        stream = harness.open(cache, recent_frames=3, max_chunk_frames=2, branches=1)
        for step in range(history):
            chunk = stream.session.begin(1)
            harness.commit([stream], harness.forward(cache, [chunk], inputs=harness.inputs(24, seed=step)))
        if fails:
            before, free = harness.window(stream), cache.free_blocks
            bad = harness.inputs(48, seed=77)
            bad[0][1][5], bad[0][2][30] = NAN, NAN
            with pytest.raises(Fails), stream.session.begin(2) as chunk:
                harness.forward(cache, [chunk], inputs=harness.inputs(48, seed=76))
                forward_that_fails(harness, cache, chunk, bad)
            assert chunk.over and stream.session.frames == history
            assert harness.same(before, harness.window(stream)) and cache.free_blocks == free
            if poison == 0.0:
                assert all(x.isfinite().all() for x in harness.contents(cache)), "an aborted chunk left NaN behind"
                if cache.staging:
                    assert all(x.isfinite().all() for layer in cache.staging.rows.layers for x in layer)
        chunk = stream.session.begin(2)
        forward = harness.forward(cache, [chunk], inputs=harness.inputs(48, seed=99))
        harness.check([stream], forward)
        harness.commit([stream], forward)
        harness.step(cache, [stream])
        outs[fails] = forward.outs
    assert all(torch.equal(a, b) for a, b in zip(outs[False], outs[True], strict=True))


def test_a_chunk_left_uncommitted_is_aborted(harness, read):
    cache = harness.cache(read=read)
    stream = harness.open(cache, recent_frames=2)
    for _ in range(3):
        harness.step(cache, [stream])
    before = harness.window(stream)
    with stream.session.begin(1) as chunk:
        harness.forward(cache, [chunk])
    assert chunk.over and stream.session.frames == 3 and harness.same(before, harness.window(stream))
    harness.step(cache, [stream])


def test_an_aborted_chunk_takes_its_extra_tokens_with_it(harness, read):
    """NaN in an action token would be in a kernel's last tile of the next forward."""
    cache = harness.cache(read=read, action_capacity=4)
    stream = harness.open(cache, recent_frames=2)
    for _ in range(3):
        harness.step(cache, [stream])
    before = harness.contents(cache)
    chunk = stream.session.begin(1)
    inputs = harness.inputs(28)
    inputs[1][2][26] = NAN
    harness.forward(cache, [chunk], inputs=inputs, extra_tokens=[4])
    harness.forward(cache, [chunk])
    chunk.abort()
    rows = cache.staging.rows.layers if cache.staging else []
    assert all(x.isfinite().all() for layer in rows for x in layer)
    journal = [b for branch in stream.session.branches for b in branch.journal]
    for was, now in zip(before, harness.contents(cache), strict=True):
        was[journal], now[journal] = 0, 0
        assert torch.equal(was, now)


@pytest.mark.parametrize("recent, chunks", [(3, 6), (4, 3), (None, 4)])
def test_rollback_brings_back_windows_and_lengths(harness, read, recent, chunks):
    cache = harness.cache(read=read, num_blocks=200)
    capacity = {"capacity_frames": 12} if recent is None else {}
    stream = harness.open(cache, recent_frames=recent, max_chunk_frames=2, branches=2, rollback_chunks=2, **capacity)
    windows = []
    for step in range(chunks):
        windows.append((stream.session.frames, harness.window(stream)))
        harness.step(cache, [stream], 1 + step % 2)
    for _ in range(2):  # again after the rollback: journal slots are used anew
        stream.session.rollback(2)
        frames, window = windows[-2]
        assert stream.session.frames == frames and harness.same(window, harness.window(stream))
        del stream.frames[frames:], windows[-2:]
        with pytest.raises(KVCacheError, match="1 chunks to take back, and 0 are kept"):
            stream.session.rollback(1)
        for step in range(2):
            windows.append((stream.session.frames, harness.window(stream)))
            harness.step(cache, [stream], 2 - step)
    stream.session.rollback(1)
    del stream.frames[stream.session.frames :]
    assert harness.same(windows[-1][1], harness.window(stream))
    harness.step(cache, [stream], 2)


@pytest.mark.parametrize("commits", [1, 2, 3, 4, 5, 6, 9])
def test_as_many_chunks_can_be_taken_back_as_were_asked_for(harness, commits):
    cache = harness.cache(num_blocks=200)
    stream = harness.open(cache, sink_frames=1, recent_frames=2, rollback_chunks=5)
    windows = []
    for _ in range(commits):
        windows.append(harness.window(stream))
        harness.step(cache, [stream], denoise=0)
    kept = min(commits, 5)
    with pytest.raises(KVCacheError, match=f"{kept + 1} chunks to take back, and {kept} are kept"):
        stream.session.rollback(kept + 1)
    stream.session.rollback(kept)
    assert stream.session.frames == commits - kept and harness.same(windows[-kept], harness.window(stream))


def test_what_is_set_aside_after_a_rollback_leaves_what_older_chunks_need(harness, read):
    cache = harness.cache(read=read)
    stream = harness.open(cache, recent_frames=2, rollback_chunks=2)
    windows = []
    for _ in range(5):
        windows.append(harness.window(stream))
        harness.step(cache, [stream])
    stream.session.rollback(1)
    del stream.frames[4:]
    harness.step(cache, [stream])
    with stream.session.begin(1) as chunk:
        harness.forward(cache, [chunk])
    stream.session.rollback(2)
    assert harness.same(windows[3], harness.window(stream))


def test_rollback_of_a_chunk_that_held_nan_leaves_none(harness, read):
    cache = harness.cache(read=read)
    stream = harness.open(cache, recent_frames=2, rollback_chunks=1)
    for _ in range(2):
        harness.step(cache, [stream])
    inputs = harness.inputs(24)
    inputs[0][2][3] = NAN
    with stream.session.begin(1) as chunk:
        assert harness.forward(cache, [chunk], inputs=inputs).batch.failed_rows([torch.tensor([NAN])]) == [0]
        chunk.commit()
    stream.session.rollback(1)
    harness.step(cache, [stream])
    others = [cache.pool.rows] + ([cache.staging.rows] if cache.staging else [])
    assert all(x.isfinite().all() for rows in others for layer in rows.layers for x in layer)


def test_failed_rows_names_the_rows_that_are_not_finite(harness):
    cache = harness.cache()
    streams = [harness.open(cache, recent_frames=2, branches=2) for _ in range(2)]
    chunks = [stream.session.begin(1) for stream in streams]
    inputs = harness.inputs(96)
    inputs[0][2][48 + 3] = NAN  # session 1, branch 0
    forward = harness.forward(cache, chunks, inputs=inputs)
    for output in (forward.outs[0], forward.outs[0].unflatten(0, (4, 24)), forward.rows(forward.outs[0])):
        assert forward.batch.failed_rows(output) == [2]
    one_value = torch.ones(4, 3, 5)
    one_value[3, 1, 2] = float("inf")
    assert forward.batch.failed_rows(one_value) == [3]
    for output in (forward.outs[0][:95], forward.rows(forward.outs[0])[:3]):
        with pytest.raises(KVCacheError, match="4 rows"):
            forward.batch.failed_rows(output)
    chunks[1].abort()
    chunks[0].commit()
    assert all(x.isfinite().all() for x in harness.contents(cache))


def test_a_session_whose_values_are_nan_fails_alone(harness, read):
    cache = harness.cache(read=read)
    a, b = (harness.open(cache, recent_frames=2) for _ in range(2))
    for _ in range(3):
        harness.step(cache, [a, b])
    inputs = harness.inputs(48)
    chunks = [a.session.begin(1), b.session.begin(1)]
    clean = harness.forward(cache, chunks, inputs=inputs)
    bad = [[x.clone() for x in qkv] for qkv in inputs]
    for qkv in bad:
        for x in qkv[1:]:
            x[24:] = NAN
    failed = harness.forward(cache, chunks, inputs=bad)
    for was, now in zip(clean.outs, failed.outs, strict=True):
        assert torch.equal(was[:24], now[:24]) and now[24:].isnan().all()
    assert failed.batch.failed_rows(failed.outs[-1]) == [1]
    chunks[0].abort()
    b.session.close()
    harness.step(cache, [a, harness.open(cache, recent_frames=2)])  # in the blocks that held NaN


def test_ten_sessions_in_a_pool_for_two_are_refused_and_closing_gives_all_back(harness, read):
    probe = harness.cache(read=read)
    options = {"recent_frames": 2, "branches": 2, "max_chunk_frames": 1}
    geometry = probe.open_session(**options).geometry
    per_session = 2 * (geometry.branch_blocks(16, run=read == "extent") + geometry.journal_blocks(16))
    cache = harness.cache(read=read, num_blocks=2 * per_session + 1)
    assert cache.free_blocks == 2 * per_session and cache.sessions_that_fit(**options) == 2
    sessions = [cache.open_session(**options) for _ in range(2)]
    assert cache.free_blocks == 0 == cache.sessions_that_fit(**options)
    for _ in range(8):
        with pytest.raises(OutOfBlocks, match=f"needs {per_session} blocks of 16 tokens.* 0 of .* close a session"):
            cache.open_session(**options)
    chunk = sessions[0].begin(1)
    harness.forward(cache, [chunk])
    with sessions[1]:
        sessions[0].close()
        sessions[0].close()  # nothing more to give
    assert cache.free_blocks == 2 * per_session and not cache.sessions and not cache._batches
    assert all(x.eq(0).all() for x in harness.contents(cache)), "freed blocks are zeroed"
    assert not cache.pool.holders
    assert cache.sessions_that_fit(**options) == 2


def test_an_open_that_fails_for_its_second_branch_takes_nothing(harness):
    cache = harness.cache(num_blocks=30, read="extent")
    with pytest.raises(OutOfBlocks, match="in one run, as the read asks for; the free are 1 to 29, and 29 of 29"):
        cache.open_session(recent_frames=2, branches=2, max_chunk_frames=1)
    assert cache.free_blocks == 29 and not cache.pool.holders


def test_blocks_of_a_session_that_held_nan_are_clean_for_the_next(harness, read):
    cache = harness.cache(read=read, num_blocks=40)
    outs = []
    for poisoned in (False, True):
        if poisoned:
            stream = harness.open(cache, recent_frames=2)
            inputs = [[torch.full_like(x, NAN) for x in qkv] for qkv in harness.inputs(24)]
            for _ in range(3):
                chunk = stream.session.begin(1)
                harness.forward(cache, [chunk], inputs=inputs)
                chunk.commit()
            stream.session.close()
        stream = harness.open(cache, recent_frames=2)
        chunk = stream.session.begin(1)
        outs.append(harness.forward(cache, [chunk], inputs=harness.inputs(24, seed=1)).outs)
        if read == "staged":
            rows = slice(0, cache.staging._regions[stream.session.branches[0]].num_rows)
            assert all(x[rows].isfinite().all() for layer in cache.staging.rows.layers for x in layer)
        stream.session.close()
        assert all(x.eq(0).all() for x in harness.contents(cache))
    assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))


def test_capacity_for_seven_chunks_refuses_the_eighth_before_any_write(harness, read):
    cache = harness.cache(read=read)
    stream = harness.open(cache, recent_frames=None, capacity_frames=7)
    for _ in range(7):
        harness.step(cache, [stream], denoise=0)
    before = harness.contents(cache)
    with pytest.raises(KVCacheError, match="7 frames are committed and 1 more exceed capacity_frames 7"):
        stream.session.begin(1)
    assert stream.session.frames == 7 and harness.same(before, harness.contents(cache))


def test_uses_out_of_order_are_refused(harness):
    cache = harness.cache()
    stream = harness.open(cache, recent_frames=3, max_chunk_frames=2, branches=2)
    session = stream.session
    chunk = session.begin(2)
    with pytest.raises(KVCacheError, match="a chunk of 2 frames is open"):
        session.begin(1)
    with pytest.raises(KVCacheError, match=r"no forward for branches \[0, 1\]"):
        chunk.commit()
    harness.forward(cache, [chunk], branches=[0])
    with pytest.raises(KVCacheError, match=r"no forward for branches \[1\]"):
        chunk.commit()
    with pytest.raises(KVCacheError, match="abort\\(\\) it before a rollback"):
        session.rollback(1)
    batch = harness.forward(cache, [chunk]).batch
    for index in (2, -1):
        with pytest.raises(KVCacheError, match=f"layer {index} of a cache of 2 layers"):
            batch.layer(index)
    static = batch.static()
    chunk.commit()
    for use in (
        chunk.commit,
        chunk.abort,
        lambda: cache.batch([chunk]),
        lambda: batch.layer(0),
        lambda: static.layer(0),
        batch.static,
        lambda: batch.copy_into(static),
    ):
        with pytest.raises(KVCacheError, match="is over"):
            use()
    with pytest.raises(KVCacheError, match="3 frames, and the session was opened for at most 2"):
        session.begin(3)
    last = session.begin(1)
    session.close()
    for use in (lambda: session.frames, lambda: session.begin(1), lambda: session.rollback(1), last.commit, last.abort):
        with pytest.raises(KVCacheError, match="the session is closed"):
            use()
    with pytest.raises(KVCacheError, match="the session is closed"):
        cache.batch([last])
    with pytest.raises(KVCacheError, match="the session is closed"), session:
        pass


@pytest.mark.parametrize(
    "options", [{"recent_frames": 2, "sink_frames": 1}, {"recent_frames": None, "capacity_frames": 2}]
)
def test_without_a_limit_a_chunk_may_fill_the_window(harness, read, options):
    cache = harness.cache(read=read)
    assert cache.sessions_that_fit(**options) > 0
    stream = harness.open(cache, max_chunk_frames=None, rollback_chunks=1, **options)
    harness.step(cache, [stream], 2)
    if options["recent_frames"]:
        harness.step(cache, [stream], 2)
    with pytest.raises(KVCacheError, match="a chunk of 3 frames, and the session was opened for at most 2"):
        stream.session.begin(3)
    stream.session.rollback()
    del stream.frames[-2:]
    harness.step(cache, [stream], 2)


def test_batches_that_contradict_themselves_are_refused(harness):
    cache, other = harness.cache(), harness.cache()
    chunk = harness.open(cache, recent_frames=2, branches=2).session.begin(1)
    foreign = harness.open(other, recent_frames=2).session.begin(1)
    before = harness.contents(cache)
    for call, message in [
        (lambda: cache.batch([]), "at least one chunk"),
        (lambda: cache.batch([chunk, chunk]), "given twice"),
        (lambda: cache.batch([chunk, foreign]), "another cache's"),
        (lambda: cache.batch([chunk.session]), "a list of what begin"),
        (lambda: cache.batch([chunk], branches=[2]), "branch 2 of a session with 2"),
        (lambda: cache.batch([chunk], branches=[-1]), "branch -1"),
        (lambda: cache.batch([chunk], branches=[0, 0]), "each once"),
        (lambda: cache.batch([chunk], branches=[]), "at least one"),
        (lambda: cache.batch([chunk], extra_tokens=[1, 1]), "1 chunks and 2 extra_tokens"),
        (lambda: cache.batch([chunk], extra_tokens=[-1]), "extra_tokens is -1"),
    ]:
        with pytest.raises(KVCacheError, match=message):
            call()
    assert harness.same(before, harness.contents(cache))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"recent_frames": 2, "max_chunk_frames": 3}, "recent_frames is 2, smaller than a chunk of 3"),
        ({"recent_frames": 0, "sink_frames": 3}, "larger than its 3 sink frames"),
        ({"recent_frames": None}, "give capacity_frames"),
        ({"recent_frames": None, "capacity_frames": 2, "max_chunk_frames": 3}, "capacity_frames is 2, smaller"),
        ({"recent_frames": None, "capacity_frames": 4, "sink_frames": 1}, "all frames stay; give 0"),
        ({"recent_frames": 3, "capacity_frames": 4}, "has no end"),
        ({"recent_frames": 2.0}, "recent_frames is 2.0"),
        ({"recent_frames": 3, "sink_frames": -1}, "sink_frames is -1"),
        ({"recent_frames": 3, "branches": 0}, "branches is 0"),
        ({"recent_frames": 3, "max_chunk_frames": True}, "max_chunk_frames is True"),
        ({"recent_frames": 3, "rollback_chunks": -1}, "rollback_chunks is -1"),
        ({"recent_frames": 5}, "a window of 5 frames in a cache for at most max_frames 4"),
    ],
)
def test_windows_that_contradict_themselves_are_refused(harness, options, message):
    cache = harness.cache(max_frames=4)
    with pytest.raises(KVCacheError, match=message):
        harness.open(cache, **options)
    assert cache.free_blocks == 127 and not cache.sessions


@pytest.mark.parametrize(
    "options, message",
    [
        ({"num_blocks": None}, "num_blocks is None and memory_bytes None"),
        ({"memory_bytes": 2**20}, "give one of them"),
        ({"num_blocks": None, "memory_bytes": 100}, "two blocks of 16 tokens take"),
        ({"num_blocks": 1}, "num_blocks is 1"),
        ({"block_size": 0}, "block_size is 0"),
        ({"block_size": "large"}, "block_size is 'large'"),
        ({"dtype": torch.bfloat16}, "for 2 key/value heads of 8, torch.bfloat16 on cpu, and the backend sdpa"),
        ({"action_capacity": -1}, "action_capacity is -1"),
        ({"staging_tokens": 1.5}, "staging_tokens is 1.5"),
    ],
)
def test_caches_that_contradict_themselves_are_refused(harness, options, message):
    with pytest.raises(KVCacheError, match=message):
        harness.cache(**options)
