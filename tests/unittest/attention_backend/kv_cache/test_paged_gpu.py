"""The paged cache through the flash kernels on a device: every read, rows that must not meet, graphs, no waiting.

Rows that nobody has written hold 1e4, and NaN where the read tolerates that. Kernels multiply rows behind an extent by
zero, so those, and freed blocks, are kept finite by the cache; NaN elsewhere, where a test says so, lies where the
reads must not reach.
"""

import gc

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from attention_backend.kv_cache import LayerKV

pytestmark = pytest.mark.gpu

DEVICE, DTYPE, HEAD_DIM, NAN = "cuda", torch.bfloat16, 128, float("nan")
# The block-table read by TMA at 128 in FA4, by cp.async otherwise; blocks of 104 divide 480p's frame.
READS = [("extent", 128), ("block_table", 128), ("block_table", 104), ("block_table", 16), ("staged", 128)]
LOADED_BY_TILES = {"flash_attn4": (128,)}  # block sizes whose rows past a length are multiplied by zero


@pytest.fixture
def harness(make_harness, flash_kernel, check_sequence):
    harness = make_harness(head_dim=HEAD_DIM, dtype=DTYPE, device=DEVICE, backend=flash_kernel)

    def compare(q, keys, values, got):
        some = slice(None, None, 1 + len(q) // 400)
        check_sequence(f"{len(keys)} keys", q[some], keys, values, HEAD_DIM**-0.5, False, got[some])

    harness.compare = compare
    return harness


def worst_poison(harness, read, block_size):
    """What rows that nobody has written may hold at worst: see docs/kv_caches.md."""
    tolerates_nan = read == "block_table" and block_size not in LOADED_BY_TILES.get(harness.backend.name, ())
    return NAN if tolerates_nan else 1e4


def make_cache(harness, read, block_size, frame_tokens=100, pool_tokens=8000, **options):
    if read == "staged":
        options.setdefault("staging_tokens", 10 * (5 * frame_tokens + 200))
    given = {"num_blocks": pool_tokens // block_size, "poison": worst_poison(harness, read, block_size)}
    return harness.cache(frame_tokens, read=read, block_size=block_size, **(given | options))


@pytest.mark.parametrize("read, block_size", READS)
@pytest.mark.parametrize("frame_tokens", [100, 128, 31])
def test_windows_that_fill_are_full_and_slide_equal_dense(harness, read, block_size, frame_tokens):
    cache = make_cache(harness, read, block_size, frame_tokens, action_capacity=3)
    stream = harness.open(cache, sink_frames=1, recent_frames=3, max_chunk_frames=3)
    for frames in (1, 1, 3, 2, 1, 3):
        harness.step(cache, [stream], frames)
        harness.step(cache, [stream], extra_tokens=[3])


@pytest.mark.parametrize("read, block_size", READS)
def test_a_window_of_the_chunk_alone(harness, read, block_size):
    """P18: sink 0, recent 1. What was committed before is no longer there."""
    cache = make_cache(harness, read, block_size, 24)
    stream = harness.open(cache, recent_frames=1)
    for _ in range(4):
        assert harness.step(cache, [stream]) == [24]


@pytest.mark.parametrize("read, block_size", READS)
def test_a_denoising_forward_goes_on_right_behind_the_history_and_a_commit_gives_the_same(harness, read, block_size):
    """P2: one committed frame of 24, which ends inside a block."""
    cache = make_cache(harness, read, block_size, 24)
    stream = harness.open(cache, recent_frames=2)
    harness.step(cache, [stream])
    chunk, inputs = stream.session.begin(1), harness.inputs(24)
    denoised = harness.forward(cache, [chunk], inputs=inputs)
    harness.check([stream], denoised)
    if read != "staged":
        block, offset = divmod(24, block_size)
        first = stream.session.branches[0].blocks[block] * block_size + offset
        assert denoised.batch.layer(0).slots[0] == first
    committed = harness.forward(cache, [chunk], inputs=inputs)
    assert all(torch.equal(a, b) for a, b in zip(denoised.outs, committed.outs, strict=True))


@pytest.mark.parametrize("read, block_size", READS)
def test_what_nobody_wrote_changes_no_bit(harness, read, block_size):
    """P12: the null block, the rest of the last block, the table's tail, guard rows, and blocks that are free."""
    outs = []
    for poison in (0.0, 1e4, worst_poison(harness, read, block_size)):
        cache = make_cache(harness, read, block_size, poison=poison)
        stream = harness.open(cache, recent_frames=3)
        outs.append([])
        for step in range(5):
            forward = harness.forward(cache, [stream.session.begin(1)], inputs=harness.inputs(100, seed=step))
            harness.commit([stream], forward)
            outs[-1] += forward.outs
    for clean, large, worst in zip(*outs, strict=True):
        assert torch.equal(clean, large) and torch.equal(clean, worst) and clean.isfinite().all()


@pytest.mark.parametrize("read, block_size", READS)
def test_480p_sessions_with_uneven_histories(harness, read, block_size):
    cache = make_cache(harness, read, block_size, 1560, 40_000)
    streams = [harness.open(cache, sink_frames=1, recent_frames=3, max_chunk_frames=2) for _ in range(3)]
    for i, stream in enumerate(streams):
        for _ in range(3 * i):
            harness.commit([stream], harness.forward(cache, [stream.session.begin(1)]))
    assert harness.step(cache, streams, [2, 1, 2], denoise=0) == [3120, 4 * 1560, 4 * 1560]


@pytest.mark.parametrize("read, block_size", READS)
def test_frame_causal_and_branches(harness, read, block_size):
    cache = make_cache(harness, read, block_size)
    stream = harness.open(cache, recent_frames=5, max_chunk_frames=3, branches=2)
    harness.step(cache, [stream])
    harness.step(cache, [stream], 3, frame_causal=True)
    harness.step(cache, [stream], 3)


@pytest.mark.parametrize("read, block_size", READS)
def test_a_session_whose_values_are_nan_fails_alone(harness, read, block_size):
    cache = make_cache(harness, read, block_size)
    streams = [harness.open(cache, recent_frames=3) for _ in range(3)]
    for _ in range(2):  # windows that fill: behind their extents lie their own unwritten rows
        harness.step(cache, streams)
    for window in ("fills", "slides"):
        chunks = [stream.session.begin(1) for stream in streams]
        inputs = harness.inputs(300)
        clean = harness.forward(cache, chunks, inputs=inputs)
        harness.check(streams, clean)
        bad = [[x.clone() for x in qkv] for qkv in inputs]
        for qkv in bad:
            for x in qkv[1:]:
                x[100:200] = NAN
        failed = harness.forward(cache, chunks, inputs=bad)
        for was, now in zip(clean.outs, failed.outs, strict=True):
            for row, (a, b) in enumerate(zip(clean.rows(was), failed.rows(now), strict=True)):
                assert b.isnan().all() if row == 1 else torch.equal(a, b), (window, row)
        assert failed.batch.failed_rows(failed.outs[-1]) == [1]
        chunks[1].abort()
        assert all(x.isfinite().all() for i in (0, 2) for x in harness.window(streams[i]))
        harness.commit(
            [streams[0], streams[2]], harness.forward(cache, [chunks[0], chunks[2]], inputs=harness.inputs(200))
        )
        harness.step(cache, [streams[1]])  # the retry
        harness.step(cache, streams)


@pytest.mark.parametrize("read, block_size", READS)
def test_nan_in_whatever_no_session_has_changes_nothing(harness, read, block_size):
    """The null block, free blocks, and the blocks of another session, which lie right behind the guard rows."""
    cache = make_cache(harness, read, block_size)
    streams = [harness.open(cache, recent_frames=3) for _ in range(2)]
    others = [harness.open(cache, recent_frames=3).session for _ in range(1)]
    others[0].close()
    owned = {b for s in streams for branch in s.session.branches for b in (*branch.blocks, *branch.journal)}
    rest = [b for b in range(cache.pool.num_blocks) if b not in owned]
    for layer in cache.pool.rows.layers:
        for x in layer:
            x[rest] = NAN
    for _ in range(5):
        harness.step(cache, streams)
    for layer in cache.pool.rows.layers:
        for x in layer:
            assert x[rest].isnan().all(), "a block that no session has was written"


@pytest.mark.parametrize("read, block_size", READS)
def test_a_block_that_held_nan_is_clean_for_the_next_session(harness, read, block_size):
    cache = make_cache(harness, read, block_size)
    stream = harness.open(cache, recent_frames=3)
    inputs = [[torch.full_like(x, NAN) for x in qkv] for qkv in harness.inputs(100)]
    for _ in range(4):
        with stream.session.begin(1) as chunk:
            harness.forward(cache, [chunk], inputs=inputs)
            chunk.commit()
    blocks = stream.session.branches[0].blocks
    stream.session.close()
    stream = harness.open(cache, recent_frames=3)
    assert stream.session.branches[0].blocks == blocks
    for _ in range(5):
        harness.step(cache, [stream])


@pytest.mark.parametrize("read, block_size", READS)
def test_a_row_alone_equals_the_row_in_a_batch_bit_for_bit(harness, read, block_size):
    """Histories of 0 to 3 frames, chunks of unequal lengths, sessions at other places of the pool."""
    frames = (1, 3, 2, 1)
    seeds = {(stream, step): 10 * stream + step for stream in range(4) for step in range(4)}

    def run(groups):
        cache = make_cache(harness, read, block_size, max_frames=4)
        streams = {
            i: harness.open(cache, sink_frames=1, recent_frames=3, max_chunk_frames=3) for g in groups for i in g
        }
        outs = {}
        for step in range(4):
            for group in groups:
                some = [i for i in group if step >= i]
                if not some:
                    continue
                parts = [harness.inputs(100 * frames[i], seed=seeds[i, step]) for i in some]
                inputs = [[torch.cat(x) for x in zip(*layer, strict=True)] for layer in zip(*parts, strict=True)]
                chunks = [streams[i].session.begin(frames[i]) for i in some]
                forward = harness.forward(cache, chunks, inputs=inputs)
                for row, i in enumerate(some):
                    outs[i, step] = [forward.rows(out)[row].clone() for out in forward.outs]
                for chunk in chunks:
                    chunk.commit()
        return outs

    together = run([[3, 1, 0, 2]])
    alone = run([[0], [1], [2], [3]])
    assert together.keys() == alone.keys()
    for key, outs in together.items():
        assert all(torch.equal(a, b) for a, b in zip(outs, alone[key], strict=True)), key


@pytest.mark.parametrize("read, block_size", READS)
def test_a_captured_graph_follows_chunks_lengths_and_sessions(harness, read, block_size):
    """Captured with one visible frame, replayed with 9 and 24, and for another session with a window that slides."""
    cache = make_cache(harness, read, block_size, 30, max_frames=24, staging_tokens=6000)
    first = harness.open(cache, recent_frames=24)
    other = harness.open(cache, sink_frames=1, recent_frames=2)
    own = harness.inputs(30)

    def run(batch):
        return [harness.attend(*qkv, batch.layer(i)) for i, qkv in enumerate(own)]

    chunk = first.session.begin(1)
    static = cache.batch([chunk]).static()
    run(static)  # compiles the kernel, which a capture must not do
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = run(static)
    chunk.abort()

    def replay(stream):
        chunk = stream.session.begin(1)
        for _ in range(2):
            for qkv, new in zip(own, harness.inputs(30), strict=True):
                for x, y in zip(qkv, new, strict=True):
                    x.copy_(y)
            batch = cache.batch([chunk])
            batch.copy_into(static)
            graph.replay()
        forward = type("Replayed", (), {"batch": batch, "inputs": own, "outs": outs})()
        forward.rows = lambda x: x.split(batch.q_lens)
        if len(stream.frames) in (0, 1, 8, 23, 26):
            harness.check([stream], forward)
            replayed = [out.clone() for out in outs]
            assert all(torch.equal(a, b) for a, b in zip(replayed, run(batch), strict=True))
        harness.commit([stream], forward)

    for step in range(27):
        replay(first)
        if step % 5 == 0:
            replay(other)


@pytest.mark.parametrize("read, block_size", READS)
def test_a_chunk_of_a_sliding_window_waits_for_nothing(harness, read, block_size):
    """Begin, set aside, forwards, commit, abort and rollback; only failed_rows waits, and says so."""
    cache = make_cache(harness, read, block_size)
    streams = [harness.open(cache, recent_frames=2, rollback_chunks=1) for _ in range(2)]
    for _ in range(3):
        harness.step(cache, streams)
    inputs = harness.inputs(200)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for end in ("commit", "abort", "commit"):
            chunks = [stream.session.begin(1) for stream in streams]
            for _ in range(2):
                harness.forward(cache, chunks, inputs=inputs)
            for chunk in chunks:
                getattr(chunk, end)()
        streams[0].session.rollback(1)
        streams[1].session.close()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def block(attend):
    def run(q, k, v, layer):
        return attend(q * 1.0, k * 1.0, v * 1.0, layer) + 0.0

    return run


@pytest.mark.parametrize("read, block_size", READS)
def test_one_graph_of_inductor_serves_all_chunks(harness, read, block_size):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(block(harness.attend), backend=counter, fullgraph=True)
    cache = make_cache(harness, read, block_size, max_frames=4)
    streams = [harness.open(cache, recent_frames=4), harness.open(cache, sink_frames=1, recent_frames=1)]
    with torch.no_grad():
        for _ in range(6):
            for stream in streams:
                harness.step(cache, [stream], attend=compiled)
    assert counter.frame_count == 1


def test_compiled_calls_copy_no_pool(harness):
    torch._dynamo.reset()
    pools = [torch.zeros(4000, 128, 2, HEAD_DIM, dtype=DTYPE, device=DEVICE) for _ in "kv"]
    state = make_cache(harness, "extent", 128).attention_metadata_state
    metadata = state.extent_kv("self", [128], [100], 4000 * 128, DEVICE, max_seqlen_kv=100, q_lens=[100])
    layer = LayerKV(*pools, torch.arange(128, 228, device=DEVICE), metadata)
    compiled = torch.compile(block(harness.attend), backend="inductor", fullgraph=True)
    (q, k, v), last = harness.inputs(100)
    with torch.no_grad():
        compiled(q, k, v, layer)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = compiled(*last, layer)
        torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < pools[0].nbytes / 10
    harness.compare(*last, out)
    for pool, new in zip(pools, last[1:], strict=True):
        assert torch.equal(pool.view(-1, 2, HEAD_DIM)[128:228], new)


def test_many_chunks_take_no_more_memory(harness):
    cache = make_cache(harness, "extent", 128)
    stream = harness.open(cache, sink_frames=1, recent_frames=2)

    def chunks(count):
        for _ in range(count):
            with stream.session.begin(1) as chunk:
                harness.forward(cache, [chunk], inputs=inputs)
                chunk.commit()
        torch.cuda.synchronize()
        gc.collect()  # of what other tests left
        return torch.cuda.memory_allocated()

    inputs = harness.inputs(100)
    chunks(10)
    assert chunks(10) == chunks(300)
