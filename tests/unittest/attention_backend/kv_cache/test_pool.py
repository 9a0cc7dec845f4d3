"""Blocks: which are free, who has which, how many sessions fit; and the arithmetic of windows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_backend.kv_cache import KVCacheError, OutOfBlocks, SessionGeometry
from attention_backend.kv_cache.free_runs import FreeRuns, runs
from attention_backend.kv_cache.geometry import GUARD_ROWS
from attention_backend.kv_cache.rows import LayerRows, TokenRows, row_index


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(["run", "any", "at", "give"]), st.integers(1, 9)), max_size=25))
def test_free_places_follow_a_plain_set(steps):
    free, plain, taken = FreeRuns(3, 20), set(range(3, 23)), []
    for what, count in steps:
        if what == "give" and taken:
            places = taken.pop(count % len(taken))
            free.give(places)
            plain |= set(places)
        elif what == "at" and plain:
            start, length = runs(sorted(plain))[count % len(runs(sorted(plain)))]
            places = range(start + length // 3, start + length)
            free.take(places.start, len(places))
            plain -= set(places)
            taken.append(list(places))
        elif what in ("run", "any"):
            got = free.take_run(count) if what == "run" else free.take_any(count)
            if got is None:
                longest = max((n for _, n in runs(sorted(plain))), default=0)
                assert count > (longest if what == "run" else len(plain))
                continue
            places = list(range(got, got + count)) if what == "run" else got
            assert len(set(places)) == count and set(places) <= plain and places == sorted(places)
            plain -= set(places)
            taken.append(places)
        assert free.free == len(plain) and free._runs == runs(sorted(plain))


def test_scattered_places_come_out_of_the_shortest_runs():
    free = FreeRuns(0, 30)
    assert free.take_run(30) == 0
    for start, length in ((20, 8), (2, 2), (10, 3)):
        free.give_run(start, length)
    assert free.take_any(4) == [2, 3, 10, 11] and str(free) == "12 to 12, 20 to 27"


def test_segments_of_blocks_join_neighbours():
    rows = TokenRows([7, 8, 3, 4, 9], 10)
    assert rows.segments(5, 38) == [(75, 15), (30, 20), (90, 3)] and rows.segments(20, 20) == [(30, 20)]
    assert rows.segments(49, 1) == [(99, 1)] and rows.segments(0, 0) == []
    index = row_index([(75, 3), (30, 1), (90, 2)], torch.device("cpu"))
    assert index.tolist() == [75, 76, 77, 30, 90, 91] and index.dtype == torch.int64


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(0, 3), st.integers(1, 5), st.integers(0, 30), st.integers(1, 5))
def test_positions_of_a_window_are_a_prefix_and_a_chunk_takes_the_place_of_what_leaves(sink, recent, first, count):
    """Against a plain list of which frame is at which position."""
    count = min(count, recent)
    geometry = SessionGeometry(frame_tokens=2, sink_frames=sink, recent_frames=recent, max_chunk_frames=recent)
    at = {}
    for f in range(first):
        ((start, length),) = geometry.segments(f, 1)
        assert length == 2
        at[start // 2] = f
    assert sorted(at) == list(range(min(first, sink + recent)))
    before = set(at.values())
    segments = geometry.segments(first, count)
    positions = [p for start, length in segments for p in range(start // 2, (start + length) // 2)]
    over, number = geometry.overwriting(first, count)
    assert [p in at for p in positions] == [f >= over for f in range(first, first + count)]
    assert number == sum(p in at for p in positions)
    for f, p in enumerate(positions, start=first):
        at[p] = f
    end = first + count
    assert set(at.values()) == {f for f in range(end) if f < sink or f >= end - recent}
    assert before - set(at.values()) == before - {f for f in range(end) if f < sink or f >= end - recent}
    assert geometry.visible_tokens(end) == 2 * len(at)


def test_a_run_has_guard_rows_that_nobody_else_gets(harness):
    cache = harness.cache(read="extent", num_blocks=70)
    sessions = [harness.open(cache, recent_frames=2).session for _ in range(3)]
    owned = []
    for session in sessions:
        (branch,) = session.branches
        assert branch.is_run and branch.blocks == tuple(range(branch.blocks[0], branch.blocks[0] + len(branch.blocks)))
        assert len(branch.blocks) * 16 - session.geometry.capacity_tokens >= GUARD_ROWS >= 192
        owned += [*branch.blocks, *branch.journal]
    assert len(set(owned)) == len(owned) and 0 not in owned
    guards = [range(s.geometry.capacity_tokens, len(s.branches[0].blocks) * 16) for s in sessions]
    for s in sessions:
        with s.begin(1) as chunk:
            harness.forward(cache, [chunk])
            chunk.commit()
    for s, guard in zip(sessions, guards, strict=True):
        rows = [s.branches[0].first_row + t for t in guard]
        assert all(x.view(-1, *x.shape[2:])[rows].eq(0).all() for layer in cache.pool.rows.layers for x in layer)


def test_versions_tell_a_block_that_was_given_to_another_session(harness):
    cache = harness.cache(num_blocks=40)
    first = harness.open(cache, recent_frames=2)
    harness.step(cache, [first])
    blocks = first.session.branches[0].blocks
    before = [cache.pool.versions[b] for b in blocks]
    first.session.close()
    second = harness.open(cache, recent_frames=2)
    assert second.session.branches[0].blocks == blocks
    assert all(cache.pool.versions[b] > was for b, was in zip(blocks, before, strict=True))


@pytest.mark.parametrize("end", ["commit", "abort", "rollback", "staged commit"])
def test_versions_tell_blocks_whose_kept_tokens_changed(harness, end):
    cache = harness.cache(read="staged" if end == "staged commit" else "extent", staging_tokens=600)
    stream = harness.open(cache, sink_frames=1, recent_frames=2, rollback_chunks=1)
    for _ in range(4):
        harness.step(cache, [stream])
    (branch,) = stream.session.branches
    chunk = stream.session.begin(1)  # frame 4, at tokens 48 to 71: blocks 3 and 4
    harness.forward(cache, [chunk])
    if end == "rollback":
        chunk.commit()
    before = list(cache.pool.versions), branch.changes
    {"abort": chunk.abort, "rollback": lambda: stream.session.rollback(1)}.get(end, chunk.commit)()
    changed = {b for b, was in enumerate(before[0]) if cache.pool.versions[b] != was}
    assert changed == set(branch.blocks[3:5]) and branch.changes > before[1]


def test_memory_that_is_asked_for_is_memory_that_is_held(harness):
    row_bytes = 2 * 2 * 2 * 8 * 4  # K and V, layers, heads, head_dim, fp32
    for budget, staging in ((100_000, 0), (400_000, 300), (400_001, 300)):
        cache = harness.cache(num_blocks=None, memory_bytes=budget, staging_tokens=staging)
        tensors = [cache.pool.rows] + ([cache.staging.rows] if cache.staging else [])
        held = sum(x.nbytes for rows in tensors for layer in rows.layers for x in layer)
        assert cache.memory_bytes == held and budget - 16 * row_bytes < held <= budget
        assert cache.free_blocks == (budget - staging * row_bytes) // (16 * row_bytes) - 1


def test_k_and_v_of_every_layer_are_tensors_apart():
    rows = LayerRows(2, (3, 4, 2, 8), torch.float32, torch.device("cpu"))
    assert len({x.untyped_storage().data_ptr() for layer in rows.layers for x in layer}) == 4


@pytest.mark.parametrize(
    "options",
    [
        {"recent_frames": 2},
        {"recent_frames": 3, "sink_frames": 1, "branches": 2, "max_chunk_frames": 3},
        {"recent_frames": 2, "rollback_chunks": 3},
        {"recent_frames": None, "capacity_frames": 5},
    ],
)
@pytest.mark.parametrize("read", ["auto", "extent", "block_table", "staged"])
def test_as_many_sessions_open_as_are_said_to_fit(harness, options, read):
    cache = harness.cache(read=read, num_blocks=150)
    harness.open(cache, recent_frames=4)
    options = {"max_chunk_frames": 1, **options}
    fit = cache.sessions_that_fit(**options)
    sessions = [cache.open_session(**options) for _ in range(fit)]
    with pytest.raises(OutOfBlocks):
        cache.open_session(**options)
    assert fit >= 2 and len(sessions) == fit


def test_misspelt_options_are_refused(harness):
    with pytest.raises(TypeError, match="recent"):
        harness.cache().sessions_that_fit(recent=2, max_chunk_frames=1)


def test_an_unlimited_window_and_a_cache_without_rollback_need_no_journal():
    options = {"frame_tokens": 24, "max_chunk_frames": 2}
    assert SessionGeometry(recent_frames=None, capacity_frames=9, **options).journal_blocks(16) == 0
    assert SessionGeometry(recent_frames=4, **options).journal_blocks(16) == 3
    assert SessionGeometry(recent_frames=4, rollback_chunks=2, **options).journal_blocks(16) == 9


@pytest.mark.parametrize(
    "preferred, frame_tokens, expected", [(128, 1560, 128), (128, 36, 64), (16, 1560, 16), (16, 7, 8)]
)
def test_block_size_follows_the_backend_and_the_frame(
    make_harness, register_narrowed, preferred, frame_tokens, expected
):
    backend = register_narrowed("prefers", {"extent_kv"}, block_size=preferred)
    cache = make_harness(backend=backend).cache(frame_tokens, block_size="auto", num_blocks=4)
    assert cache.block_size == expected
    assert cache.pool.rows.layers[0][0].shape == (4, expected, 2, 8)


# Staging


def test_only_blocks_that_changed_are_copied_again(harness):
    """Commits go through the copy, so it stays current; what other reads or an abort change is copied anew."""
    cache = harness.cache(read="auto", staging_tokens=1000)
    a, b = (harness.open(cache, recent_frames=3) for _ in range(2))

    def staged(streams, **options):
        cache._reads = ("staged",)
        before = cache.staging.blocks_copied
        harness.step(cache, streams, **options)
        cache._reads = ("extent",)
        return cache.staging.blocks_copied - before

    assert [staged([a]), staged([b])] == [2, 2]  # tokens 0 to 23, of blocks of 16, when they are first seen
    assert [staged([a]), staged([b])] == [0, 0]
    assert [staged([a, b]), staged([a, b]), staged([b, a])] == [0, 0, 0]
    harness.step(cache, [a])  # through the pool: frame 5, at tokens 48 to 71, blocks 3 and 4
    assert staged([a, b]) == 2
    chunk = a.session.begin(1)
    cache._reads = ("staged",)
    harness.forward(cache, [chunk])
    chunk.abort()
    assert staged([b]) == 0
    assert staged([a]) == 2


def test_a_copy_of_one_session_does_not_serve_another_in_the_same_blocks(harness):
    cache = harness.cache(read="staged", num_blocks=20)
    for _ in range(2):
        stream = harness.open(cache, recent_frames=2)
        blocks = stream.session.branches[0].blocks
        for _ in range(3):
            harness.step(cache, [stream])
        stream.session.close()
    assert blocks == tuple(range(1, 4)) and not cache.staging._regions


def test_least_recently_used_copies_make_room_and_open_chunks_keep_theirs(harness):
    cache = harness.cache(read="staged", staging_tokens=2 * (48 + GUARD_ROWS) + 20)
    a, b, c = (harness.open(cache, recent_frames=2) for _ in range(3))
    for stream in (a, b, c, a, b, c, c, b):
        harness.step(cache, [stream])
    assert set(cache.staging._regions) == {c.session.branches[0], b.session.branches[0]}
    harness.step(cache, [a, b])
    chunk_a = a.session.begin(1)
    forward_a = harness.forward(cache, [chunk_a])
    harness.step(cache, [b])
    harness.step(cache, [c])  # takes b's place, though a was used before b: a's chunk is nowhere else
    harness.check([a], forward_a)
    harness.commit([a], forward_a)
    harness.step(cache, [a])


def test_too_small_a_staging_buffer_is_told_before_any_write(harness):
    room = 48 + GUARD_ROWS
    cache = harness.cache(read="staged", staging_tokens=2 * room)
    streams = [harness.open(cache, recent_frames=2) for _ in range(3)]
    for stream in streams:
        harness.step(cache, [stream])
    chunks = [stream.session.begin(1) for stream in streams]
    staged = [x.clone() for layer in cache.staging.rows.layers for x in layer]
    before = harness.contents(cache)
    with pytest.raises(
        KVCacheError, match=f"needs {3 * room} staging rows and the cache has {2 * room}, 0 of them held"
    ):
        cache.batch(chunks)
    harness.forward(cache, chunks[:1])
    regions = dict(cache.staging._regions)
    with pytest.raises(KVCacheError, match=f"{room} of them held by other open chunks; raise staging_tokens"):
        cache.batch(chunks[1:])
    assert cache.staging._regions == regions and harness.same(before, harness.contents(cache))
    assert len(staged) == 4
    chunks[0].commit()
    harness.forward(cache, chunks[1:])


def test_copies_in_pieces_are_placed_anew(harness):
    """Two free places of half the size that a batch needs."""
    room = 48 + GUARD_ROWS
    cache = harness.cache(read="staged", staging_tokens=4 * room)
    small = [harness.open(cache, recent_frames=2) for _ in range(4)]
    harness.step(cache, small)
    small[0].session.close()
    small[2].session.close()
    large = harness.open(cache, recent_frames=4)  # more rows than one place has
    for _ in range(5):
        harness.step(cache, [large, small[1]])
    harness.step(cache, [small[3]])


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_sequences_known_by_their_ends_follow_the_order_of_the_batch(make_harness, register_narrowed, order):
    harness = make_harness(backend=register_narrowed("packed_only", {"varlen"}))
    cache = harness.cache(staging_tokens=1200, poison=float("nan"))
    streams = [harness.open(cache, recent_frames=2 + i, branches=1) for i in range(3)]
    for _ in range(3):
        harness.step(cache, streams)
    for _ in range(3):
        harness.step(cache, [streams[i] for i in order])
    copied = cache.staging.blocks_copied
    harness.step(cache, [streams[i] for i in order])
    assert cache.staging.blocks_copied == copied
    harness.step(cache, [streams[2]])
    chunk = streams[0].session.begin(1)
    with pytest.raises(KVCacheError, match="staged through packed_only has none; commit the frames one by one"):
        cache.batch([chunk], frame_causal=True)


def test_a_forward_follows_a_copy_that_moved_within_its_chunk(harness):
    """And a batch that was made before the move is refused."""
    cache = harness.cache(read="staged", staging_tokens=3 * (48 + GUARD_ROWS))
    small = [harness.open(cache, recent_frames=2) for _ in range(3)]
    harness.step(cache, small)
    small[0].session.close()
    small[2].session.close()
    stream, large = small[1], harness.open(cache, recent_frames=4)
    chunks = [stream.session.begin(1), large.session.begin(1)]
    starts, stale = [], None
    for group in ([stream], [stream, large], [stream]):
        forward = harness.forward(cache, chunks[: len(group)])
        if stale is not None:
            assert forward.batch is not stale
            with pytest.raises(KVCacheError, match="lies elsewhere since another forward was prepared"):
                stale.layer(0)
        stale = stale or forward.batch
        harness.check(group, forward)
        starts.append(cache.staging._regions[stream.session.branches[0]].start)
    assert starts[0] != starts[1] == starts[2]
    harness.commit([stream], forward)
    with pytest.raises(KVCacheError, match="is over"):
        stale.layer(0)
