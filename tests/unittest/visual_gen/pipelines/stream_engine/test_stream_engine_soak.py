"""Random lives of many streams with faults in random layers: every chunk that is made again has the same bits, and in
the end everything is free.

STREAM_SOAK_OPERATIONS in the environment makes the lives longer.
"""

import gc
import os
import random
from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from visual_gen.pipelines.errors import EngineFull, GenerationError
from visual_gen.pipelines.stream import Stream
from visual_gen.pipelines.stream_engine import StreamEngine
from visual_gen.pipelines.stream_state import stream_settings

OPERATIONS = int(os.environ.get("STREAM_SOAK_OPERATIONS", "220"))
PROMPTS = ["a", "b c", "d e f", "g h i j"]
STEPS = [[1000, 500], [700], [1000, 800, 300]]
WEIGHTS = {
    "open": 3, "step": 22, "chunk": 6, "fault": 5, "switch": 4, "set": 2, "abort": 1, "rollback": 3, "fork": 3,
    "snapshot": 3, "close": 2, "stop": 1,
}  # fmt: skip


class Life:
    """An engine under random operations. A Committed's key is all that came before it; `made` has each key's chunk."""

    def __init__(self, engine, model, monkeypatch, folder, seed, exact):
        self.engine, self.model, self.monkeypatch, self.folder = engine, model, monkeypatch, folder
        self.random, self.exact = random.Random(seed), exact
        self.keys, self.made, self.counts = (
            {},
            {},
            dict.fromkeys(("again", "faults", "refused", "recached", "spoilt"), 0),
        )
        commit, recompute = Stream._commit, Stream._recompute

        def keyed_commit(stream, finite, *rest):
            making, before = stream._making, self.keys[stream._now]
            key = (before, stream.prompt, making.guidance_scale, making.sigmas)
            commit(stream, finite, *rest)
            self.keys[stream._now] = key
            if bool(finite):
                self.compare(key, making.latents)

        def keyed_recompute(stream, text):
            key, prompt = self.keys[stream._now], stream._switch.prompt
            recompute(stream, text)
            stream._history = (replace(stream._now),)
            self.keys[stream._now] = (key, "recached", prompt)
            self.counts["recached"] += 1

        monkeypatch.setattr(Stream, "_commit", keyed_commit)
        monkeypatch.setattr(Stream, "_recompute", keyed_recompute)

    def compare(self, key, latents):
        if key in self.made:
            self.counts["again"] += 1
            off = (self.made[key] - latents).abs().max().item()
            assert off <= (0 if self.exact else 1e-4), f"chunk made again is off by {off}: {key}"
        else:
            self.made[key] = latents

    def run(self, operations):
        names, weights = list(WEIGHTS), list(WEIGHTS.values())
        for i in range(operations):
            getattr(self, self.random.choices(names, weights)[0])()
            for stream in list(self.engine.streams):
                stream.take_latents()
                if stream.error is not None and "rope_max_seq_len" in str(stream.error):
                    stream.close()
            if i % 10 == 0:
                self.check()
        self.check()

    def check(self):
        """Every block and text slot is somebody's, or free; streams and their sessions say the same."""
        engine, pool = self.engine, self.engine.cache.pool
        sessions = [stream.session for stream in engine.streams] + engine._run.pads
        assert set(engine.cache.sessions) == set(sessions)
        branches = [branch for session in sessions for branch in session.branches]
        owned = {block for branch in branches for block in (*branch.blocks, *branch.journal)}
        spares = [block for some in pool.spares.values() for block in some]
        assert pool.holders.keys() == owned and not owned & set(spares)
        assert engine.cache.free_blocks == pool.num_blocks - 1 - len(owned) - len(spares)
        used = [slot for stream in engine.streams for slot in stream._slots]
        assert {slot: text.users for slot, text in engine._texts._texts.items()} == {s: used.count(s) for s in used}
        for stream in engine.streams:
            assert stream.frames == stream.session.frames and (stream._making is None) == (stream.session.chunk is None)
            runs = stream.session.geometry.held(stream.frames)
            assert not runs or stream._now.latents(runs).shape[1] == sum(count for _, count in runs)

    def any(self, *, idle=False):
        streams = [s for s in self.engine.streams if not idle or s.state != "denoising"]
        return self.random.choice(streams) if streams else None

    def open(self):
        choice = self.random.choice
        try:
            stream = self.engine.open(
                choice(PROMPTS), negative_prompt="z", seed=(seed := choice([1, 2])),
                guidance_scale=(scale := choice([1.0, 1.0, 2.0])), sink_frames=(sink := choice([0, 1])),
                recent_frames=(recent := choice([2, 3])), steps=choice(STEPS),
            )  # fmt: skip
        except EngineFull:
            self.counts["refused"] += 1
            return
        self.keys[stream._now] = (seed, scale > 1, sink, recent)

    def step(self, **options):
        streams = [s for s in self.engine.streams if self.random.random() < 0.7]
        self.engine.step(streams or None, **options)

    def chunk(self):
        self.step(until="chunk")

    def fault(self):
        """An exception, Ctrl-C or NaN in a random layer of one of the next forwards, in whatever it is then."""
        sites = [site for block in self.model.blocks for site in (block.ffn, block.self_attn)]
        site, left = self.random.choice(sites), [self.random.randrange(1, 6)]
        what = self.random.choice([RuntimeError("injected"), KeyboardInterrupt("injected"), "NaN"])
        frame, forward = self.random.random(), site.forward

        def faulty(*args, **kwargs):
            out = forward(*args, **kwargs)
            left[0] -= 1
            if left[0]:
                return out
            if isinstance(what, BaseException):
                raise what
            out[int(frame * len(out))] = torch.nan
            return out

        with self.monkeypatch.context() as patch:
            patch.setattr(site, "forward", faulty)
            try:
                self.random.choice([self.chunk, self.switch])()
            except (RuntimeError, KeyboardInterrupt) as error:
                assert "injected" in str(error) or isinstance(error, GenerationError)
                self.counts["faults"] += 1
        # Where NaN reached a stream's chunk, its check says so at the latest now.
        self.counts["spoilt"] += sum(s.state == "failed" for s in self.engine.streams)

    def switch(self):
        if stream := self.any():
            try:
                stream.switch_prompt(self.random.choice(PROMPTS), recache=self.random.choice(["none", "window"]))
            except EngineFull:
                self.counts["refused"] += 1

    def set(self):
        if stream := self.any():
            scale = self.random.choice([1.5, 2.0]) if len(stream._text) == 2 else None
            stream.set(guidance_scale=scale, steps=self.random.choice(STEPS))

    def abort(self):
        if stream := self.any():
            stream.abort_chunk()

    def rollback(self):
        stream = self.any()
        if stream is not None and (held := min(self.engine.options.rollback_chunks, len(stream._history) - 1)):
            stream.rollback(self.random.randint(1, held))

    def fork(self):
        stream, seed = self.any(idle=True), self.random.choice([None, 3])
        if stream is None:
            return
        try:
            fork = stream.fork(seed=seed)
        except EngineFull:
            self.counts["refused"] += 1
            return
        if seed is not None:
            self.keys[fork._now] = (self.keys[stream._now], "seed", seed)

    def snapshot(self):
        stream = self.any(idle=True)
        if stream is None:
            return
        path = self.folder / "stream.safetensors" if self.random.random() < 0.5 else None
        snapshot = stream.snapshot(path)
        if self.random.random() < 0.7:
            stream.close()
        try:
            restored = self.engine.restore(path or snapshot)
        except EngineFull:
            self.counts["refused"] += 1
            return
        for old, new in zip(stream._history, restored._history, strict=True):
            self.keys[new] = self.keys[old]

    def close(self):
        if stream := self.any():
            stream.close()

    def stop(self):
        """A client that does not take: nothing is done for its stream."""
        if (stream := self.any()) is not None and self.engine.options.waiting_chunks == 2:
            for _ in range(3):
                self.engine.step([stream], until="chunk")
            assert stream.waiting_chunks <= 2


@pytest.mark.parametrize(
    ("read", "deterministic"), [("auto", False), ("extent", True), ("block_table", True), ("staged", True)]
)
def test_a_long_life_with_faults_makes_the_same_chunks_again_and_ends_free(
    tiny, monkeypatch, tmp_path, read, deterministic
):
    engine = tiny.engine(
        read=read, deterministic=deterministic, sink_frames=1, recent_frames=3, max_streams=5, batch_rows=5,
        guidance_scale=2.0, rollback_chunks=2, waiting_chunks=2, block_size=4, text_slots=20,
        policy="evict_lru" if read == "block_table" else "refuse",
    )  # fmt: skip
    life = Life(engine, tiny.model, monkeypatch, tmp_path, seed=len(read), exact=deterministic)
    life.run(OPERATIONS)
    counts = life.counts | {"evicted": engine.record().evicted, "chunks": len(life.made)}
    print(f"{read}: {OPERATIONS} operations, {engine.record().forwards} forwards, {counts}")
    assert min(counts[name] for name in ("again", "faults", "recached", "spoilt")) > 0, counts
    assert counts["refused"] or counts["evicted"]
    engine.close()
    if engine.cache.staging is not None:
        assert len(engine.cache.staging._regions) <= len(engine._run.pads)


def test_five_hundred_chunks_take_constant_memory(tiny):
    """A thousand latent frames, past the model's own positions; what is alive after each hundred chunks is as much."""
    model = deepcopy(tiny.model)
    causal = stream_settings(tiny.engine().causal, rope_max_seq_len=1000, sink_frames=1, steps=[1000])
    engine = StreamEngine(model, tiny.SIZE, causal=causal, encode=tiny.encode, text_len=7, rollback_chunks=1)
    stream, held = engine.open("a red circle", seed=1), []
    for _ in range(5):
        for _ in range(100):
            engine.step(until="chunk")
            (latents,) = stream.take_latents()
        assert latents.isfinite().all()
        del latents
        gc.collect()
        tensors = [x for x in gc.get_objects() if type(x) is torch.Tensor]  # not fake ones that a compiler keeps
        held.append((len(tensors), sum(x.nbytes for x in tensors), engine.used_blocks, len(stream._history)))
        del tensors
    assert stream.frames == 1000 and len(set(held)) == 1, held
