"""Many streams in one forward: each as it is alone, in a fair order, as far as there is room."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from attention_backend.kv_cache import KVCacheError
from visual_gen.models.wan import CausalWanTransformer
from visual_gen.pipelines.errors import EngineFull
from visual_gen.pipelines.stream_engine import StreamEngine
from visual_gen.pipelines.stream_state import Unread, stream_settings

CLOSE = {"rtol": 0, "atol": 1e-5}


def test_streams_that_join_and_leave_are_what_each_is_alone(tiny):
    engine = tiny.engine(sink_frames=1, max_streams=4, batch_rows=8)
    a = engine.open("a red circle", seed=1)
    engine.step()
    b = engine.open("a blue square", seed=2, recent_frames=3, steps=[1000, 800, 400])
    engine.step()
    engine.step()
    c = engine.open("green", negative_prompt="not", seed=3, guidance_scale=3.0, sink_frames=0)
    made_by_a, made_by_b, made_by_c = tiny.run(engine, 4)
    a.close()
    more_b, more_c = tiny.run(engine, 7, [b, c])
    torch.testing.assert_close(made_by_a, tiny.by_hand(["a red circle"] * 4, 1, sink_frames=1), **CLOSE)
    expected = tiny.by_hand(["a blue square"] * 7, 2, sink_frames=1, recent_frames=3, steps=[[1000, 800, 400]] * 7)
    torch.testing.assert_close(torch.cat([made_by_b, more_b], dim=2), expected, **CLOSE)
    expected = tiny.by_hand(["green"] * 7, 3, scale=3.0, negative="not")
    torch.testing.assert_close(torch.cat([made_by_c, more_c], dim=2), expected, rtol=0, atol=1e-4)
    assert (b.frames, b.chunk_index) == (14, 7)
    record = engine.record()
    assert record.batch_sizes.keys() >= {1, 2, 4, 3}, "rows of one to three streams, one of them with two branches"
    mixed = [forward for forward in record.timeline if forward.denoising and forward.committing]
    assert mixed, "streams that denoise and streams that commit share forwards"
    assert {forward.read for forward in record.timeline} == {"extent"}


@pytest.mark.parametrize("read", ["extent", "block_table", "staged"])
@pytest.mark.parametrize("first_chunk_frames", [None, 1])
def test_deterministic_streams_have_the_bits_that_they_have_alone(tiny, read, first_chunk_frames):
    options = {"read": read, "first_chunk_frames": first_chunk_frames, "deterministic": True, "max_streams": 3}
    options |= {"recent_frames": 3, "batch_rows": 4, "guidance_scale": 3.0}  # memory for two branches each
    prompts = [("a red circle", 1, 1.0), ("a blue square", 2, 3.0), ("green", 3, 1.0)]
    alone = []
    for prompt, seed, scale in prompts:
        engine = tiny.engine(**options)
        engine.open(prompt, seed=seed, guidance_scale=scale)
        alone += tiny.run(engine, 5)
    engine = tiny.engine(**options)
    streams = []
    for prompt, seed, scale in prompts:
        streams.append(engine.open(prompt, seed=seed, guidance_scale=scale))
        engine.step()
    together = tiny.run(engine, 5)
    for i in range(3):
        assert torch.equal(alone[i], together[i]), f"stream {i} differs by {(alone[i] - together[i]).abs().max()}"
    assert {(f.rows + f.pad_rows, f.frames, f.read) for f in engine.record().timeline} >= {(4, 8, read)}
    assert {f.frames for f in engine.record().timeline} == {8}


@pytest.mark.parametrize("read", ["extent", "block_table", "staged"])
def test_a_read_that_is_named_serves_given_frames_steps_and_a_window_computed_anew(tiny, read):
    engine = tiny.engine(read=read, max_streams=2)
    stream = engine.open("a", initial_latents=torch.zeros(tiny.C, 2, *tiny.SIZE))
    tiny.run(engine, 1)
    stream.switch_prompt("b", recache="window")
    tiny.run(engine, 2)
    assert engine.record().forwards == 6 and {f.read for f in engine.record().timeline} == {read}
    assert engine.record().read_counts == {(read, "named when the cache was made"): 1 + 6 + 1}


def test_a_generator_is_its_seed_in_forks_too(tiny):
    made = []
    for seed in (5, tiny.seeded(5)):
        engine = tiny.engine()
        stream = engine.open("a", seed=seed)
        engine.step(until="chunk")
        stream.fork(), stream.fork(seed=9)
        made.append(tiny.run(engine, 2))
    for by_seed, by_generator in zip(*made, strict=True):
        assert torch.equal(by_seed, by_generator)
    assert not torch.equal(made[0][1], made[0][2])


def test_without_pins_bits_may_differ_and_forwards_have_no_pads(tiny):
    engine = tiny.engine()
    engine.open("a"), engine.open("b")
    tiny.run(engine, 1)
    assert engine.record().pad_rows == 0 and not engine._run.pads


def test_chunks_come_with_events_in_order_and_their_latents_once(tiny):
    engine = tiny.engine()
    stream = engine.open("a red circle", seed=5)
    kinds = [[(event.kind, event.chunk_index) for event in engine.step()] for _ in range(7)]
    # A commit is known to be good one forward later, when the device has other work.
    assert kinds[:4] == [[("denoised", 0)], [("denoised", 0)], [], [("denoised", 1), ("committed", 0)]]
    assert [x.shape for x in stream.take_latents()] == [(1, tiny.C, 2, *tiny.SIZE)] * 2
    assert stream.take_latents() == []
    events = engine.step(until="chunk")
    assert [event.kind for event in events if event.chunk_index == 2] == ["denoised", "committed"]
    assert all(event.stream is stream and event.error is None for event in events)


def test_a_check_is_read_when_the_next_forward_has_been_launched(tiny, monkeypatch):
    engine, read = tiny.engine(), []
    failed = Unread.failed

    def noting(unread):
        read.append((unread.forward, engine._scheduler.forwards))
        return failed(unread)

    monkeypatch.setattr(Unread, "failed", noting)
    streams = [engine.open("a"), engine.open("b")]
    for _ in range(12):
        engine.step()
        for stream in streams:
            stream._waiting.clear()
    assert read == [(3, 4), (3, 4), (6, 7), (6, 7), (9, 10), (9, 10)]


def test_until_chunk_all_streams_finish_one_each_whatever_their_steps(tiny):
    engine = tiny.engine(batch_rows=2)
    streams = [engine.open("a"), engine.open("b", steps=[1000, 900, 800, 700]), engine.open("c", steps=[700])]
    for chunks in (1, 2):
        events = engine.step(until="chunk")
        assert [stream.chunk_index for stream in streams] == [chunks] * 3
        assert sum(event.kind == "committed" for event in events) == 3
        assert {stream.state for stream in streams} == {"idle"}


def test_streams_take_turns_in_a_bounded_batch(tiny):
    engine = tiny.engine(max_streams=5, batch_rows=3, waiting_chunks=100, guidance_scale=2.0)
    streams = [engine.open("a", seed=i, guidance_scale=2.0 if i == 4 else 1.0) for i in range(5)]
    for _ in range(20):
        engine.step()
    served = [sum(s.id in f.streams for f in engine.record().timeline) for s in streams]
    assert max(served) - min(served) <= 2 and sum(served) >= 45, served
    assert all(f.rows <= 3 for f in engine.record().timeline)


def test_a_client_that_does_not_take_stops_its_own_stream_alone(tiny):
    engine = tiny.engine(waiting_chunks=2)
    slow, quick = engine.open("a", seed=1), engine.open("b", seed=2)
    parts = []
    for _ in range(18):
        engine.step()
        parts += quick.take_latents()
    assert slow.waiting_chunks == 2 and slow.chunk_index == 2 and quick.chunk_index >= 5
    forwards = engine.record().forwards
    engine.step([slow]), engine.step([slow], until="chunk")
    assert engine.record().forwards == forwards
    made = tiny.take(slow)
    engine.step([slow], until="chunk")
    assert torch.allclose(tiny.take(slow, made), tiny.by_hand(["a"] * 3, 1), rtol=0, atol=1e-5)


def test_more_streams_than_fit_are_refused_and_closing_gives_all_back(tiny):
    engine = tiny.engine(max_streams=2)
    free = engine.cache.free_blocks
    engine.open("a")
    engine.step()
    engine.open("b", seed=1)
    before = engine.cache.free_blocks
    for _ in range(8):
        with pytest.raises(EngineFull, match=r"2 streams are open \(max_streams\)"):
            engine.open("c")
    assert engine.cache.free_blocks == before and len(engine.streams) == 2 and engine._texts.used == 2
    tiny.run(engine, 2)
    engine.close()
    assert engine.cache.free_blocks == free and not engine.streams


def test_memory_bounds_streams_too(tiny):
    two = tiny.engine(max_streams=2).cache.memory_bytes
    engine = tiny.engine(max_streams=10, memory_bytes=two)
    engine.open("a"), engine.open("b")
    with pytest.raises(EngineFull, match="blocks of .* tokens.* close a session"):
        engine.open("c")
    guided = tiny.engine(max_streams=10, memory_bytes=two, batch_rows=4)
    guided.open("a", guidance_scale=2.0)
    with pytest.raises(EngineFull):
        guided.open("b")


def test_the_least_recently_stepped_stream_is_evicted_where_the_policy_says_so(tiny):
    engine = tiny.engine(max_streams=2, policy="evict_lru")
    a, b = engine.open("a", seed=1), engine.open("b", seed=2)
    engine.step([b], until="chunk")
    engine.step([a], until="chunk")
    c = engine.open("c", seed=3)
    assert (a.state, b.state, c.state) == ("idle", "closed", "idle") and engine.record().evicted == 1
    assert len(b.take_latents()) == 1, "what was finished can still be taken"
    for use in (lambda: engine.step([b]), b.fork, b.snapshot, b.abort_chunk, lambda: b.switch_prompt("x"), b.set):
        with pytest.raises(ValueError, match=r"stream 1 is closed \(evicted to make room\)"):
            use()
    b.close()
    for i in range(8):
        engine.open("d", seed=i)
    assert len(engine.streams) == 2 and a.state == c.state == "closed"


def test_a_stream_continues_given_frames_as_if_they_were_committed_one_by_one(tiny):
    first = torch.randn(tiny.C, 9, *tiny.SIZE, generator=tiny.seeded(9))
    engine = tiny.engine(sink_frames=1)
    stream = engine.open("a red circle", seed=4, initial_latents=first[None])
    assert (stream.frames, stream.chunk_index, stream.take_latents()) == (9, 0, [])
    (made,) = tiny.run(engine, 3)
    expected = tiny.by_hand(["a red circle"] * 3, 4, sink_frames=1, given=first)
    torch.testing.assert_close(made, expected, **CLOSE)


def test_a_stream_at_the_end_of_the_positions_fails_alone_and_keeps_what_it_has(tiny):
    engine = tiny.engine()
    first = torch.randn(tiny.C, 61, *tiny.SIZE, generator=tiny.seeded(9))
    long, other = engine.open("a", initial_latents=first), engine.open("b")
    engine.step([long], until="chunk")
    events = engine.step(until="chunk")
    (failed,) = [event for event in events if event.kind == "failed"]
    assert failed.stream is long and "ends at latent frame 65 and the engine knows 64" in str(failed.error)
    assert long.state == "failed" and long.error is failed.error and len(long.take_latents()) == 1
    assert other.chunk_index == 1 and engine.step()[0].stream is other
    long.close()


@pytest.mark.parametrize("end", [40, 70])
def test_a_stream_ends_where_the_settings_say_whatever_the_checkpoint_does(tiny, end):
    """Below and above the 64 positions of the checkpoint; past them as if the checkpoint had them."""
    longer = CausalWanTransformer(replace(tiny.model.config, rope_max_seq_len=100)).requires_grad_(False)
    longer.load_state_dict(tiny.model.state_dict())
    made, given = [], {"encode": tiny.encode, "text_len": 7}
    few = tiny.engine().causal
    first = torch.randn(tiny.C, end - 10, *tiny.SIZE, generator=tiny.seeded(9))
    for model, causal in ((deepcopy(tiny.model), stream_settings(few, rope_max_seq_len=end)), (longer, few)):
        engine = StreamEngine(model, tiny.SIZE, causal=causal, **given)
        stream = engine.open("a", seed=1, initial_latents=first)
        made += tiny.run(engine, 5)
        assert model.max_frames == (100 if model is longer else max(end, 64))
        if model is not longer:
            engine.step(until="chunk")
            says = f"ends at latent frame {end + 2} and the engine knows {end} (causal.rope_max_seq_len)"
            assert stream.state == "failed" and says in str(stream.error)
    assert torch.equal(*made)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"policy": "oldest"}, "policy is 'oldest'; it must be one of refuse, evict_lru"),
        ({"max_streams": 0}, "max_streams is 0"),
        ({"batch_rows": True}, "batch_rows is True"),
        ({"waiting_chunks": 0}, "waiting_chunks is 0"),
        ({"rollback_chunks": -1}, "rollback_chunks is -1"),
        ({"guidance_scale": float("nan")}, "guidance_scale is nan"),
        ({"graphs": True}, "graphs are CUDA graphs and the model is on cpu"),
        ({"steps": [500, 1000]}, "noise levels that fall"),
        ({"steps": [1000, 0]}, "greater than 0"),
    ],
)
def test_engines_that_cannot_be(tiny, options, says):
    with pytest.raises(ValueError, match=says):
        tiny.engine(**options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"seed": -1}, "seed is -1"),
        ({"guidance_scale": -1}, "guidance_scale is -1"),
        ({"guidance_scale": 2.0}, "2 branches and a forward 1 rows: raise batch_rows"),
        ({"recent_frames": 1}, "recent_frames of at least 2"),
        ({"sink_frames": 1}, "a window of 7 frames in a cache for at most max_frames 6"),
        ({"steps": [1000, 0]}, "greater than 0"),
        ({"steps": []}, "noise levels that fall"),
        ({"initial_latents": torch.zeros(4, 1, 4, 5)}, "initial_latents has shape"),
        ({"initial_latents": torch.full((4, 1, 4, 6), torch.nan)}, "initial_latents hold NaN"),
        ({"initial_latents": torch.zeros(4, 65, 4, 6)}, "ends at latent frame 65"),
        ({"prompt": 3}, "prompt is 3"),
    ],
)
def test_streams_that_cannot_be_take_nothing(tiny, options, says):
    engine = tiny.engine(batch_rows=1)
    free = engine.cache.free_blocks
    with pytest.raises((ValueError, KVCacheError), match=says):
        engine.open(**({"prompt": "a"} | options))
    assert engine.cache.free_blocks == free and not engine.streams and not engine._texts.used


def test_texts_that_do_not_fit_and_steps_of_other_engines_are_refused(tiny):
    engine, other = tiny.engine(max_streams=1), tiny.engine(encode=None)
    with pytest.raises(ValueError, match="this engine has no text encoder: give TextRows"):
        other.open("a")
    stream = other.open(tiny.text())
    with pytest.raises(ValueError, match="another engine's: step it there"):
        engine.step([stream])
    with pytest.raises(ValueError, match="another engine's: close it there"):
        engine.close(stream)
    with pytest.raises(ValueError, match="until is 'frame'"):
        engine.step(until="frame")
    long = tiny.text()
    long = type(long)(torch.zeros(1, 9, 10), [9], [0])
    with pytest.raises(ValueError, match=r"expected one row of at most 7 by 10"):
        engine.open(long)


def test_equal_prompts_share_their_keys_and_values(tiny):
    engine = tiny.engine(guidance_scale=2.0, text_slots=3)
    a, b = engine.open("a red circle", seed=1), engine.open("a blue square", seed=2)
    assert engine._texts.used == 3, "the negative prompt once"
    with pytest.raises(ValueError, match="all 3 text slots are in use"):
        engine.open("green")
    a.close()
    assert engine._texts.used == 2
    assert engine.open("green").state == b.state == "idle"


def test_an_engine_of_a_folder_has_its_encoder_and_its_vae(random_causal_folder):
    options = {"height": 32, "width": 32, "max_sequence_length": 48, "max_streams": 1, "guidance_scale": 2.0}
    engine = StreamEngine.from_pretrained(
        random_causal_folder, causal={"frames_per_chunk": 1, "steps": [1000]}, **options
    )
    stream = engine.open("a red circle", seed=1)
    engine.step(until="chunk")
    (latents,) = stream.take_latents()
    assert latents.isfinite().all() and latents.shape[:3] == (1, engine.vae.config.z_dim, 1)
    assert latents.shape[3:] == engine.latent_size
    engine.close()
    for wrong, says in (({"max_streams": 0}, "max_streams is 0"), ({"height": 33}, "height is 33")):
        with pytest.raises(ValueError, match=says):
            StreamEngine.from_pretrained(random_causal_folder, **(options | wrong))
