"""Sessions that fork: blocks held together until one of two writes, and what each then is."""

import pytest
import torch

from attention_backend.kv_cache import KVCacheError, OutOfBlocks

READS = ["auto", "extent", "block_table", "staged"]
NAN = float("nan")


@pytest.fixture(params=READS)
def read(request):
    return request.param


def fork(stream):
    return type(stream)(stream.session.fork(), list(stream.frames))


@pytest.mark.parametrize("branches", [1, 2])
@pytest.mark.parametrize("steps_before", [1, 2, 7])
def test_forks_diverge_without_touching_each_other(harness, read, branches, steps_before):
    """Blocks of 16 under frames of 24: the tail block, and one across the edge of the sink, are part one's, part the
    other's."""
    cache = harness.cache(read=read, poison=NAN, action_capacity=3, num_blocks=400)
    options = {"sink_frames": 1, "recent_frames": 3, "max_chunk_frames": 2, "branches": branches, "rollback_chunks": 1}
    parent = harness.open(cache, **options)
    for _ in range(steps_before):
        harness.step(cache, [parent])
    first = fork(parent)
    second = fork(first)
    for frames in ([2, 1, 2], [1, 2, 1], [2, 2, 2], [1, 1, 2]):
        harness.step(cache, [parent, first, second], frames, extra_tokens=[3, 0, 2])
        before = harness.window(second)
        harness.step(cache, [first, parent], frames[:2])
        assert harness.same(before, harness.window(second))
    for stream in (second, parent, first):
        chunk = stream.session.begin(1)
        harness.forward(cache, [chunk])
        chunk.abort()
        stream.session.rollback(1)
        del stream.frames[-stream_chunk(stream) :]
        harness.step(cache, [stream])
        stream.session.close()
    assert cache.free_blocks == cache.pool.num_blocks - 1 and not cache.pool.holders and not cache.pool.spares


def stream_chunk(stream):
    return len(stream.frames) - stream.session.frames


def test_blocks_are_held_together_until_one_writes_and_the_sinks_for_good(harness):
    cache = harness.cache(16, read="block_table")
    parent = harness.open(cache, sink_frames=4, recent_frames=2)
    for _ in range(7):
        harness.step(cache, [parent])
    free = cache.free_blocks
    other = fork(parent)
    (mine,), (its,) = parent.session.branches, other.session.branches
    assert free - cache.free_blocks == 2 + 1, "spares for the two blocks of the ring, and a journal"
    assert its.blocks == mine.blocks and its.journal != mine.journal
    harness.step(cache, [other])
    assert sum(a != b for a, b in zip(mine.blocks, its.blocks, strict=True)) == 1
    harness.step(cache, [parent])  # alone on its block by now: nothing moves
    harness.step(cache, [parent, other])
    assert mine.blocks[:4] == its.blocks[:4] and not set(mine.blocks[4:]) & set(its.blocks[4:])
    parent.session.close()
    harness.step(cache, [other])
    assert cache.free_blocks == free, "the sink is the fork's now"
    other.session.close()
    assert all(x.eq(0).all() for x in harness.contents(cache)), "freed blocks are zeroed"


@pytest.mark.parametrize("graph", [False, True])
def test_a_batch_whose_blocks_moved_is_refused_and_the_next_one_follows(harness, graph):
    """The parent, one run, writes a block that its fork sees in an open chunk: the fork moves."""
    cache = harness.cache(16, read="auto", poison=NAN)
    parent = harness.open(cache, recent_frames=3)
    for _ in range(3):
        harness.step(cache, [parent])
    other = fork(parent)
    harness.step(cache, [parent])
    chunk = other.session.begin(1)
    forward = harness.forward(cache, [chunk])
    stale = forward.batch.static() if graph else forward.batch
    harness.check([other], forward)
    assert cache.batch([chunk]) is forward.batch
    moves = other.session.branches[0].moves
    harness.step(cache, [parent])
    assert other.session.branches[0].moves == moves + 1
    for use in (lambda: stale.layer(0), forward.batch.static):
        with pytest.raises(KVCacheError, match="lies elsewhere since another forward was prepared"):
            use()
    again = harness.forward(cache, [chunk])
    assert again.batch is not forward.batch
    if graph:
        again.batch.copy_into(stale)
        assert torch.equal(stale.layer(0).metadata.block_table, again.batch.layer(0).metadata.block_table)
    harness.check([other], again)
    harness.commit([other], again)
    harness.step(cache, [parent, other])


def test_a_ragged_tail_block_is_copied_when_the_fork_writes_behind_it(harness):
    cache = harness.cache(24, read="block_table")
    parent = harness.open(cache, recent_frames=None, capacity_frames=4)
    harness.step(cache, [parent])
    other = fork(parent)
    (mine,), (its,) = parent.session.branches, other.session.branches
    chunk = other.session.begin(1)
    batch = cache.batch([chunk])
    assert batch.layer(0).slots[0] == its.blocks[1] * 16 + 8
    assert its.blocks[0] == mine.blocks[0] and its.blocks[1] != mine.blocks[1]
    for k in (x for layer in cache.pool.rows.layers for x in layer):
        assert torch.equal(k[its.blocks[1], :8], k[mine.blocks[1], :8])


def test_a_run_stays_where_it_is_and_its_forks_move(harness):
    cache = harness.cache(read="auto")
    parent = harness.open(cache, recent_frames=2)
    harness.step(cache, [parent])
    others = [fork(parent), fork(parent)]
    blocks = parent.session.branches[0].blocks
    harness.step(cache, [parent])
    assert parent.session.branches[0].blocks == blocks
    moved = [other.session.branches[0].blocks for other in others]
    assert moved[0] == moved[1] != blocks, "still together"
    harness.step(cache, others)
    assert others[0].session.branches[0].blocks != others[1].session.branches[0].blocks
    chunks = [stream.session.begin(1) for stream in (parent, *others)]
    assert cache.batch(chunks[:1]).read == "extent"
    together = cache.batch(chunks)
    assert (together.read, together.read_reason) == ("block_table", "2 of 3 rows lie in scattered blocks")


def test_a_batch_made_before_a_block_moved_is_made_anew(harness):
    """The parent, a run, writes a block that its fork reads, between two forwards of the fork's chunk."""
    cache = harness.cache(24, read="auto")
    parent = harness.open(cache, recent_frames=2)
    harness.step(cache, [parent]), harness.step(cache, [parent])
    other = fork(parent)
    chunk = other.session.begin(1)
    before = cache.batch([chunk])
    assert cache.batch([chunk]) is before
    harness.step(cache, [parent])
    harness.step(cache, [parent])
    forward = harness.forward(cache, [chunk])
    assert forward.batch is not before
    harness.check([other], forward)


def test_what_can_be_rolled_back_can_be_in_a_fork(harness, read):
    cache = harness.cache(read=read, num_blocks=300)
    parent = harness.open(cache, recent_frames=2, rollback_chunks=3)
    for _ in range(5):
        harness.step(cache, [parent])
    other = fork(parent)
    harness.step(cache, [parent])
    other.session.rollback(3)
    del other.frames[2:]
    harness.step(cache, [other, parent])
    with pytest.raises(KVCacheError, match="3 chunks to take back, and 1 are kept"):
        other.session.rollback(3)
    parent.session.rollback(3)
    del parent.frames[4:]
    harness.step(cache, [other, parent])


def test_forks_that_cannot_be_take_nothing(harness):
    cache = harness.cache(num_blocks=15, read="block_table")
    session = cache.open_session(recent_frames=3, max_chunk_frames=1)
    chunk = session.begin(1)
    with pytest.raises(KVCacheError, match=r"a chunk of 1 frames is open; commit\(\) or abort\(\) it before a fork"):
        session.fork()
    chunk.abort()
    session.fork().close()
    held = cache.free_blocks
    fork = session.fork()
    with pytest.raises(OutOfBlocks, match="needs 7 blocks of 16 tokens for what the two will write apart, and 0 of 14"):
        session.fork()
    assert cache.sessions == [session, fork]
    session.close()
    fork.close()
    assert cache.free_blocks == 14 and held == 7
    with pytest.raises(KVCacheError, match="the session is closed"):
        session.fork()
