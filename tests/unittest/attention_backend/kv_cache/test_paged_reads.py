"""Every read of the paged cache against dense attention over what its window has, on the CPU through SDPA."""

import pytest
import torch

from attention_backend import ExtentKV, PackedKV, PagedKV
from attention_backend.kv_cache import KVCacheError, reads, rows

NAN = float("nan")
READS = ["extent", "block_table", "staged"]
METADATA = {"extent": ExtentKV, "block_table": PagedKV, "staged": ExtentKV}


@pytest.fixture(params=READS)
def read(request):
    return request.param


@pytest.mark.parametrize("frame_tokens, block_size", [(24, 16), (24, 8), (24, 1), (7, 16), (24, 24), (24, 100)])
@pytest.mark.parametrize("window", [(0, 1), (1, 2), (2, 3), (0, None)])
def test_windows_that_fill_are_full_and_slide_equal_dense(harness, read, frame_tokens, block_size, window):
    """One frame a chunk, then several: chunks that do not divide the window, and one that wraps inside."""
    sink, recent = window
    options = {"capacity_frames": 14} if recent is None else {}
    cache = harness.cache(
        frame_tokens, num_blocks=1200 // block_size + 20, block_size=block_size, poison=NAN, read=read
    )
    most = recent or 3
    stream = harness.open(cache, sink_frames=sink, recent_frames=recent, max_chunk_frames=most, **options)
    total = 0
    for frames in (1, 1, most, max(1, most - 1), 1, most, 1):
        (keys,) = harness.step(cache, [stream], frames)
        total += frames
        assert keys == frame_tokens * (total if recent is None else min(total, sink + recent))
    batch_of_next = cache.batch([stream.session.begin(1)])
    assert batch_of_next.read == read and isinstance(batch_of_next.layer(0).metadata, METADATA[read])


def test_the_frame_size_of_480p(harness, read):
    """c 1 560, bs 16."""
    cache = harness.cache(1560, num_blocks=340, read=read, staging_tokens=3400)
    stream = harness.open(cache, recent_frames=2)
    for keys in (1560, 3120):
        assert harness.step(cache, [stream], denoise=0) == [keys]


def test_a_denoising_forward_goes_on_in_the_historys_tail_block(harness):
    """c 24, bs 16: one committed frame, so the chunk's first token is at offset 8 of the second block."""
    cache = harness.cache(poison=NAN, read="block_table")
    stream = harness.open(cache, recent_frames=2)
    harness.step(cache, [stream])
    chunk = stream.session.begin(1)
    inputs = harness.inputs(24)
    denoised = harness.forward(cache, [chunk], inputs=inputs)
    harness.check([stream], denoised)
    first, layer = stream.session.branches[0].blocks[1], denoised.batch.layer(1)
    assert layer.slots[0] == first * 16 + 8
    assert torch.equal(layer.k[first, 8], inputs[1][1][0]) and torch.equal(layer.v[first, 8], inputs[1][2][0])
    committed = harness.forward(cache, [chunk], inputs=inputs)
    assert all(torch.equal(a, b) for a, b in zip(denoised.outs, committed.outs, strict=True))


def test_sink_and_recent_frames_are_exact_to_the_token(harness):
    """c 24, bs 16, sink 1 + recent 2: 72 tokens at every step once full, table width 5 (72 tokens) at every step."""
    cache = harness.cache(poison=NAN, read="block_table")
    stream = harness.open(cache, sink_frames=1, recent_frames=2)
    assert [harness.step(cache, [stream])[0] for _ in range(7)] == [24, 48, 72, 72, 72, 72, 72]
    metadata = cache.batch([stream.session.begin(1)]).layer(0).metadata
    assert metadata.block_table.shape == (1, 5) and metadata.max_seqlen_kv == 72


def test_the_window_of_480p_has_the_same_width_and_tokens_at_every_step(harness):
    """c 1 560, bs 16, sink 9 + recent 9, 3 frames a step: 28 080 tokens in 1 755 blocks. Bookkeeping alone."""
    cache = harness.cache(1560, num_blocks=1755 + 293 + 1, read="block_table")
    session = harness.open(cache, sink_frames=9, recent_frames=9, max_chunk_frames=3).session
    tokens = []
    for _ in range(9):
        with session.begin(3) as chunk:
            metadata = cache.batch([chunk]).layer(0).metadata
            assert metadata.block_table.shape == (1, 1755)
            tokens += metadata.seqused_kv.tolist()
            chunk.commit()
    assert tokens == [n * 4680 for n in (1, 2, 3, 4, 5, 6, 6, 6, 6)]


def test_a_window_of_the_chunk_alone(harness, read):
    """c 24, bs 16, sink 0, recent 1: what was committed before is no longer there."""
    cache = harness.cache(poison=NAN, read=read)
    stream = harness.open(cache, recent_frames=1)
    for _ in range(4):
        assert harness.step(cache, [stream]) == [24]


def test_a_thousand_chunks_at_constant_memory_and_entries(harness, read):
    cache = harness.cache(poison=NAN, read=read)
    stream = harness.open(cache, sink_frames=1, recent_frames=2)
    blocks, free = stream.session.branches[0].blocks, cache.free_blocks
    for step in range(1000):
        chunk = stream.session.begin(1)
        assert chunk.frame_start == step
        forward = harness.forward(cache, [chunk])
        if step % 100 > 96:
            harness.check([stream], forward)
        harness.commit([stream], forward)
    assert stream.session.branches[0].blocks == blocks and cache.free_blocks == free
    state = cache.attention_metadata_state
    assert state.builds == 3, "once the window is full, the metadata are the same for ever"
    assert len(cache._batches) == 0 and len(stream.session._records) == 0


def test_forwards_of_a_chunk_after_the_first_build_and_copy_nothing(harness, read, monkeypatch):
    cache = harness.cache(read=read)
    streams = [harness.open(cache, recent_frames=3, branches=2) for _ in range(2)]
    worked = []

    def noting(name, function):
        return lambda *arguments, **options: worked.append(name) or function(*arguments, **options)

    places = [(reads, "row_index"), (rows, "row_index"), (cache.pool, "own"), (cache, "set_aside"), (cache, "_build")]
    for where, name in places + ([(cache.staging, "prepare")] if cache.staging else []):
        monkeypatch.setattr(where, name, noting(name, getattr(where, name)))
    for _ in range(5):
        chunks = [stream.session.begin(1) for stream in streams]
        worked.clear()
        first = cache.batch(chunks)
        assert {"row_index", "_build", "prepare" if read == "staged" else "own"} <= set(worked)
        worked.clear()
        state = cache.attention_metadata_state
        before = (state.builds, state.device_copies, state.hits)
        for _ in range(4):
            assert cache.batch(chunks) is first
        assert (state.builds, state.device_copies, state.hits) == before and not worked
        layers = [first.layer(i) for i in range(2)]
        assert layers[0].metadata is layers[1].metadata and layers[0].slots is layers[1].slots
        for chunk in chunks:
            chunk.commit()


def test_a_batch_of_sessions_with_other_windows_lengths_chunks_and_branches(harness, read):
    cache = harness.cache(poison=NAN, read=read, num_blocks=200)
    long = harness.open(cache, recent_frames=4, max_chunk_frames=3, branches=2)
    short = harness.open(cache, sink_frames=1, recent_frames=2, max_chunk_frames=2, branches=2)
    fresh = harness.open(cache, recent_frames=None, capacity_frames=5, branches=2)
    for frames in (3, 1, 2):
        harness.step(cache, [long], frames)
    harness.step(cache, [short])
    assert harness.step(cache, [long, short, fresh], [3, 2, 1]) == [96, 96, 72, 72, 24, 24]
    assert harness.step(cache, [fresh, long], [1, 2]) == [48, 48, 96, 96]


def test_branches_are_apart_and_may_run_in_forwards_of_their_own(harness, read):
    cache = harness.cache(poison=NAN, read=read)
    stream = harness.open(cache, recent_frames=2, branches=2)
    harness.step(cache, [stream])
    chunk = stream.session.begin(1)
    both = harness.forward(cache, [chunk])
    for branch in (1, 0):
        one = [[both.rows(x)[branch] for x in qkv] for qkv in both.inputs]
        alone = harness.forward(cache, [chunk], inputs=one, branches=[branch])
        for together, apart in zip(both.outs, alone.outs, strict=True):
            torch.testing.assert_close(both.rows(together)[branch], apart, atol=1e-6, rtol=0)
    harness.commit([stream], both)
    harness.step(cache, [stream])


def test_a_row_alone_equals_the_row_in_a_batch_bit_for_bit(harness, read):
    """A0 B0 A1 B1 with other lengths, and A with B in one forward."""

    def run(together):
        cache = harness.cache(poison=NAN, read=read, max_frames=4)
        a = harness.open(cache, recent_frames=3, max_chunk_frames=2)
        b = harness.open(cache, sink_frames=1, recent_frames=3)
        outs = {a: [], b: []}
        for step in range(5):
            for group in [[a, b]] if together else [[a], [b]]:
                inputs = [harness.inputs(24 * n, seed=10 * step + n) for n in (2, 1) if (a if n == 2 else b) in group]
                merged = [
                    [torch.cat(parts) for parts in zip(*layers, strict=True)] for layers in zip(*inputs, strict=True)
                ]
                chunks = [stream.session.begin(2 if stream is a else 1) for stream in group]
                forward = harness.forward(cache, chunks, inputs=merged)
                harness.check(group, forward)
                for i, stream in enumerate(group):
                    outs[stream] += [forward.rows(out)[i].clone() for out in forward.outs]
                harness.commit(group, forward)
        return outs[a] + outs[b]

    for alone, shared in zip(run(False), run(True), strict=True):
        assert torch.equal(alone, shared)


@pytest.mark.parametrize("poison", [NAN, 1e4])
def test_what_nobody_wrote_changes_nothing(harness, read, poison):
    """The null block, the rest of the last block, blocks that are free, and a table's tail."""
    outs = {}
    for value in (0.0, poison):
        cache = harness.cache(poison=value, read=read)
        stream = harness.open(cache, recent_frames=3)
        outs[value] = []
        for step in range(5):
            chunk = stream.session.begin(1)
            forward = harness.forward(cache, [chunk], inputs=harness.inputs(24, seed=step))
            outs[value] += forward.outs
            harness.commit([stream], forward)
    for clean, poisoned in zip(outs[0.0], outs[poison], strict=True):
        assert torch.equal(clean, poisoned) and poisoned.isfinite().all()


@pytest.mark.parametrize("frame_tokens, block_size", [(24, 16), (32, 16), (24, 24)])
def test_extra_tokens_lie_right_behind_the_frames_and_are_seen_once(harness, read, frame_tokens, block_size):
    """3 action tokens, then none, then 5, in forwards of one chunk; after a ragged tail and after a full block."""
    cache = harness.cache(frame_tokens, block_size=block_size, poison=NAN, read=read, action_capacity=5)
    stream = harness.open(cache, sink_frames=1, recent_frames=2)
    for step in range(5):
        chunk = stream.session.begin(1)
        visible = frame_tokens * min(step + 1, 3)
        for extra in (3, 0, 5, 0):
            forward = harness.forward(cache, [chunk], extra_tokens=[extra])
            assert harness.check([stream], forward) == [visible + extra]
            assert forward.batch.q_lens == (frame_tokens + extra,)
            metadata = forward.batch.layer(0).metadata
            assert metadata.max_seqlen_kv == 3 * frame_tokens + 5, "a constant, whatever the forward has"
        before = harness.contents(cache)
        with pytest.raises(KVCacheError, match="6 extra tokens in a cache with action_capacity 5"):
            cache.batch([chunk], extra_tokens=[6])
        assert harness.same(before, harness.contents(cache))
        harness.commit([stream], forward)


@pytest.mark.parametrize("history", [0, 2])
def test_frame_causal_equals_frames_one_by_one(harness, read, history):
    cache = harness.cache(poison=NAN, read=read)
    at_once, one_by_one = (harness.open(cache, sink_frames=1, recent_frames=4, max_chunk_frames=3) for _ in range(2))
    for stream in (at_once, one_by_one):
        for step in range(history):
            chunk = stream.session.begin(1)
            harness.commit([stream], harness.forward(cache, [chunk], inputs=harness.inputs(24, seed=step)))
    inputs = harness.inputs(72, seed=9)
    forward = harness.forward(cache, [at_once.session.begin(3)], inputs=inputs, frame_causal=True)
    harness.check([at_once], forward, frame_causal=True)
    harness.commit([at_once], forward)
    for f in range(3):
        part = [[x[24 * f : 24 * (f + 1)] for x in qkv] for qkv in inputs]
        single = harness.forward(cache, [one_by_one.session.begin(1)], inputs=part)
        for whole, frame in zip(forward.outs, single.outs, strict=True):
            torch.testing.assert_close(whole[24 * f : 24 * (f + 1)], frame, atol=1e-6, rtol=0)
        harness.commit([one_by_one], single)
    assert harness.step(cache, [at_once, one_by_one]) == [24 * min(history + 4, 5)] * 2


def test_one_chunk_with_and_without_frame_causal(harness, read):
    cache = harness.cache(read=read)
    stream = harness.open(cache, recent_frames=4, max_chunk_frames=3)
    harness.step(cache, [stream])
    chunk = stream.session.begin(3)
    for frame_causal in (False, True, False, True):
        forward = harness.forward(cache, [chunk], frame_causal=frame_causal)
        harness.check([stream], forward, frame_causal=frame_causal)


def test_frame_causal_where_the_ring_wraps_inside_the_chunk_is_refused(harness):
    cache = harness.cache(action_capacity=1)
    stream = harness.open(cache, recent_frames=3, max_chunk_frames=2)
    for _ in range(2):
        harness.step(cache, [stream])
    chunk = stream.session.begin(2)
    with pytest.raises(KVCacheError, match="frames 2 to 3, some of which take the place .* chunks of one frame"):
        cache.batch([chunk], frame_causal=True)
    chunk.abort()
    one = stream.session.begin(1)
    with pytest.raises(KVCacheError, match="frame_causal with 1 extra tokens"):
        cache.batch([one], frame_causal=True, extra_tokens=[1])
    cache.batch([one], frame_causal=True)


def test_auto_takes_extents_where_all_rows_are_runs_else_block_tables(harness):
    cache = harness.cache(num_blocks=75)
    streams = [harness.open(cache, recent_frames=2) for _ in range(4)]  # each 14 blocks in a run and 2 of journal
    first = cache.batch([streams[0].session.begin(1)])
    assert (first.read, first.read_reason) == ("extent", "every row is one run of blocks")
    streams[1].session.close()
    streams[3].session.close()
    big = harness.open(cache, recent_frames=20)  # 46 blocks: more than any run of free ones
    assert not big.session.branches[0].is_run and streams[2].session.branches[0].is_run
    batch = cache.batch([streams[2].session.begin(1), big.session.begin(1)])
    assert batch.read == "block_table" and "1 of 2 rows lie in scattered blocks" in batch.read_reason
    for chunk in batch.chunks:
        chunk.abort()
    for _ in range(4):
        harness.step(cache, [streams[2], big])
    expected = {(first.read, first.read_reason): 1, (batch.read, batch.read_reason): 1 + 4 * 2}
    assert cache.read_counts == expected, "one for each forward, whatever the layers and rows"


@pytest.mark.parametrize(
    "capabilities, staging, expected",
    [({"varlen", "paged_kv"}, 0, "block_table"), ({"varlen"}, 600, "staged"), ({"extent_kv"}, 0, "extent")],
)
def test_auto_takes_what_the_backend_can_do(make_harness, register_narrowed, capabilities, staging, expected):
    harness = make_harness(backend=register_narrowed("narrow", capabilities))
    cache = harness.cache(staging_tokens=staging, poison=NAN)
    stream = harness.open(cache, recent_frames=2)
    for _ in range(4):
        harness.step(cache, [stream])
    batch = cache.batch([stream.session.begin(1)])
    assert batch.read == expected
    assert isinstance(
        batch.layer(0).metadata, {"block_table": PagedKV, "staged": PackedKV, "extent": ExtentKV}[expected]
    )
    assert cache.read_counts == {(expected, "the only one that narrow and this cache can do"): 4 * 2 + 1}


def test_reads_that_cannot_be_are_refused_when_the_cache_is_made(make_harness, register_narrowed):
    harness = make_harness(backend=register_narrowed("narrow2", {"varlen"}))
    for read, reason in [
        ("extent", "reads no extents"),
        ("block_table", "reads no block tables"),
        ("staged", "staging_tokens is 0"),
        ("auto", "give staging_tokens"),
        ("fast", "must be one of auto, extent, block_table, staged"),
    ]:
        with pytest.raises(KVCacheError, match=reason):
            harness.cache(read=read, staging_tokens=0)


@pytest.mark.parametrize("last", ["extent", "staged"])
@pytest.mark.parametrize("end", ["commit", "abort"])
def test_forwards_of_one_chunk_may_read_in_other_ways(make_harness, register_narrowed, last, end):
    """A row that is a run, alone and beside one that is scattered, through a backend that knows no block tables."""
    harness = make_harness(backend=register_narrowed("mixed", {"varlen", "extent_kv"}))
    cache = harness.cache(num_blocks=90, staging_tokens=1200, poison=NAN)
    run = harness.open(cache, recent_frames=2)
    spacers = [harness.open(cache, recent_frames=1).session for _ in range(4)]
    for session in spacers[::2]:
        session.close()
    scattered = harness.open(cache, recent_frames=12)
    assert run.session.branches[0].is_run and not scattered.session.branches[0].is_run
    for step in range(5):
        before = harness.window(run)
        chunk, other = run.session.begin(1), scattered.session.begin(1)
        order = [[run], [run, scattered]] if last == "staged" else [[run, scattered], [run]]
        for group in order:
            forward = harness.forward(cache, [chunk, other][: len(group)])
            assert forward.batch.read == ("staged" if len(group) == 2 else "extent")
            harness.check(group, forward)
        if end == "abort" and step % 2:
            chunk.abort()
            other.abort()
            assert harness.same(before, harness.window(run))
            continue
        if last == "staged":
            harness.commit([run, scattered], forward)
        else:
            assert cache.staging._regions[scattered.session.branches[0]].holds_chunk
            assert not cache.staging._regions[run.session.branches[0]].holds_chunk
            harness.commit([run], forward)
            other.abort()
        assert not any(region.holds_chunk for region in cache.staging._regions.values())
