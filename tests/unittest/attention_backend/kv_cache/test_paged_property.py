"""Random lives of several sessions against a plain dense model: outputs, lengths, free blocks."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attention_backend.kv_cache import KVCacheError, OutOfBlocks

NAN = float("nan")


@st.composite
def windows(draw):
    """Options of open_session."""
    branches, rollback = draw(st.integers(1, 2)), draw(st.integers(0, 2))
    common = {"branches": branches, "rollback_chunks": rollback}
    if draw(st.integers(0, 4)) == 0:
        return common | {"recent_frames": None, "capacity_frames": draw(st.integers(3, 6)), "max_chunk_frames": 3}
    recent = draw(st.integers(1, 4))
    most = draw(st.integers(1, recent))
    return common | {"sink_frames": draw(st.integers(0, 2)), "recent_frames": recent, "max_chunk_frames": most}


caches = st.fixed_dictionaries(
    {
        "frame_tokens": st.sampled_from([1, 5, 6, 8]),
        "block_size": st.sampled_from([1, 3, 4, 8, 50]),
        "read": st.sampled_from(["auto", "extent", "block_table", "staged"]),
        "action_capacity": st.integers(0, 3),
        "staging_tokens": st.sampled_from([400, 2000]),
        "capacity": st.integers(300, 2000),  # tokens in the pool
    }
)
OPERATIONS = [
    "open",
    "begin",
    "begin",
    "forward",
    "forward",
    "forward",
    "commit",
    "commit",
    "abort",
    "rollback",
    "fork",
    "snapshot",
    "recompute",
    "close",
]


class World:
    """A cache, its streams, and what the dense model says of them."""

    def __init__(self, harness, options):
        options = dict(options)
        num_blocks = 1 + options.pop("capacity") // options["block_size"]
        self.harness, self.extra_limit = harness, options["action_capacity"]
        self.cache = harness.cache(poison=NAN, num_blocks=num_blocks, **options)
        self.streams, self.chunks, self.last, self.kept = [], {}, {}, {}
        self.free = self.cache.free_blocks

    def run(self, draw, name):
        getattr(self, name)(draw)
        pool = self.cache.pool
        branches = [branch for stream in self.streams for branch in stream.session.branches]
        owned = [block for branch in branches for block in (*branch.blocks, *branch.journal)]
        spares = [block for some in pool.spares.values() for block in some]
        assert len(set(spares)) == len(spares) and not set(spares) & set(owned)
        assert self.cache.free_blocks == self.free - len(set(owned)) - len(spares)
        for block in set(owned):
            assert sorted(map(id, pool.holders[block])) == sorted(
                id(branch) for branch in branches if block in branch.blocks or block in branch.journal
            )
        for stream in self.streams:
            assert stream.session.frames == len(stream.frames)

    def open(self, draw):
        options = draw(windows())
        fit = self.cache.sessions_that_fit(**options)
        try:
            stream = self.harness.open(self.cache, **options)
        except OutOfBlocks:
            assert fit == 0
            return
        assert fit > 0
        self.streams.append(stream)
        self.kept[stream] = []

    def pick(self, draw, wanted):
        some = [stream for stream in self.streams if (stream in self.chunks) == wanted]
        return draw(st.sampled_from(some)) if some else None

    def begin(self, draw):
        stream = self.pick(draw, False)
        if stream is None:
            return self.open(draw)
        geometry = stream.session.geometry
        most = geometry.max_chunk_frames
        if geometry.recent_frames is None:
            most = min(most, geometry.capacity_frames - len(stream.frames))
        if most > 0:
            self.chunks[stream] = stream.session.begin(draw(st.integers(1, most)))

    def forward(self, draw):
        open_ones = list(self.chunks)
        if not open_ones:
            return self.begin(draw)
        group = draw(st.lists(st.sampled_from(open_ones), min_size=1, unique=True))
        # A batch with one number of branches, which is what the dense model's rows are told by.
        branches = len(group[0].session.branches)
        group = [stream for stream in group if len(stream.session.branches) == branches]
        extra = [draw(st.integers(0, self.extra_limit)) for _ in group]
        chunks = [self.chunks[stream] for stream in group]
        before = self.harness.contents(self.cache)
        try:
            forward = self.harness.forward(self.cache, chunks, extra_tokens=extra)
        except KVCacheError as error:  # the copies of these rows, and of other open chunks, do not fit together
            assert "raise staging_tokens" in str(error) and self.cache.staging.rows.num_rows == 400
            assert self.harness.same(before, self.harness.contents(self.cache))
            return
        self.harness.check(group, forward)
        row = 0
        for stream in group:
            parts = [[forward.rows(x)[row : row + branches] for x in qkv[1:]] for qkv in forward.inputs]
            self.last[stream] = [[[x[b] for x in kv] for kv in parts] for b in range(branches)]
            row += branches

    def commit(self, draw):
        stream = draw(st.sampled_from(list(self.last))) if self.last else None
        if stream is None:
            return self.forward(draw)
        chunk, c = self.chunks.pop(stream), self.cache.frame_tokens
        rows = self.last.pop(stream)
        self.kept[stream].append(len(stream.frames))
        chunk.commit()
        for f in range(chunk.frames):
            part = slice(f * c, (f + 1) * c)
            stream.frames.append([[tuple(x[part].clone() for x in kv) for kv in layers] for layers in rows])

    def abort(self, draw):
        stream = self.pick(draw, True)
        if stream is not None:
            self.chunks.pop(stream).abort()
            self.last.pop(stream, None)

    def rollback(self, draw):
        stream = self.pick(draw, False)
        if stream is None:
            return
        possible = min(stream.session.geometry.rollback_chunks, len(self.kept[stream]))
        assert len(stream.session._records) <= possible
        if stream.session._records:
            count = draw(st.integers(1, len(stream.session._records)))
            stream.session.rollback(count)
            del stream.frames[self.kept[stream][-count] :], self.kept[stream][-count:]

    def join(self, session, stream):
        """A session that is where a stream is."""
        other = type(stream)(session, list(stream.frames))
        self.streams.append(other)
        self.kept[other] = list(self.kept[stream])

    def fork(self, draw):
        stream = self.pick(draw, False)
        if stream is not None and len(self.streams) < 6:
            try:
                self.join(stream.session.fork(), stream)
            except OutOfBlocks:
                return

    def snapshot(self, draw):
        stream = self.pick(draw, False)
        if stream is None:
            return
        snapshot = stream.session.snapshot()
        if draw(st.booleans()):
            stream.session.close()
            self.streams.remove(stream)
        try:
            self.join(self.cache.restore_session(snapshot), stream)
        except OutOfBlocks:
            return

    def recompute(self, draw):
        stream = self.pick(draw, False)
        if stream is None or not stream.frames:
            return
        before = self.harness.contents(self.cache)
        try:
            chunk = stream.session.recompute()
            forward = self.harness.forward(self.cache, [chunk], frame_causal=True)
        except OutOfBlocks:
            return
        except KVCacheError as error:
            assert "raise staging_tokens" in str(error)
            assert self.harness.same(before, self.harness.contents(self.cache))
            return chunk.abort()
        c, commits = self.cache.frame_tokens, draw(st.integers(0, 3)) > 0
        held = [f for first, count in chunk.frame_runs for f in range(first, first + count)]
        for branch in range(forward.batch.num_rows):
            for layer, (qkv, out) in enumerate(zip(forward.inputs, forward.outs, strict=True)):
                q, k, v, got = (forward.rows(x)[branch] for x in (*qkv, out))
                for i, f in enumerate(held):
                    part = slice(i * c, (i + 1) * c)
                    self.harness.compare(q[part], k[: part.stop], v[: part.stop], got[part])
                    if commits:
                        # Forks have the same lists for the same frames: a frame is put in place, not changed.
                        layers = [list(kv) for kv in stream.frames[f]]
                        layers[branch][layer] = (k[part].clone(), v[part].clone())
                        stream.frames[f] = layers
        if commits:
            chunk.commit()
            self.kept[stream] = []
        else:
            chunk.abort()

    def close(self, draw):
        if self.streams:
            stream = draw(st.sampled_from(self.streams))
            stream.session.close()
            self.streams.remove(stream)
            self.chunks.pop(stream, None)
            self.last.pop(stream, None)


@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(caches, st.lists(st.sampled_from(OPERATIONS), min_size=10, max_size=40), st.data())
def test_any_life_of_any_sessions_equals_the_dense_model(harness, options, operations, data):
    world = World(harness, options)
    for name in operations:
        world.run(data.draw, name)
    for stream in list(world.streams):
        stream.session.close()
    assert world.cache.free_blocks == world.free and not world.cache._batches
    if world.cache.staging:
        assert not world.cache.staging._regions


def test_the_dense_model_would_notice_a_wrong_key(harness):
    """One committed key changed behind the cache's back."""
    cache = harness.cache()
    stream = harness.open(cache, recent_frames=3)
    harness.step(cache, [stream])
    row = stream.session.branches[0].first_row
    cache.pool.rows.layers[1][0].view(-1, 2, 8)[row + 23] += 1.0
    with pytest.raises(AssertionError, match="off by"):
        harness.step(cache, [stream])
    assert torch.isfinite(cache.pool.rows.layers[1][0]).all()
