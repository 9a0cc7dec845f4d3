"""Prompts, guidance and steps that change while a stream runs."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from visual_gen.pipelines.errors import EngineFull, GenerationError

CLOSE = {"rtol": 0, "atol": 1e-5}


def test_a_prompt_switched_before_chunk_3_counts_from_there_and_for_no_other_stream(tiny):
    """Of as many tokens, so that nothing but the K/V can tell."""
    options = {"deterministic": True, "recent_frames": 3}
    undisturbed = tiny.engine(**options)
    undisturbed.open("other", seed=2)
    (expected_other,) = tiny.run(undisturbed, 6)
    engine = tiny.engine(**options)
    stream, _ = engine.open("a red circle", seed=1), engine.open("other", seed=2)
    first = tiny.run(engine, 3)
    stream.switch_prompt("a blue square")
    assert stream.prompt == "a blue square"
    rest = tiny.run(engine, 6)
    made, made_by_other = (torch.cat(parts, dim=2) for parts in zip(first, rest, strict=True))
    prompts = ["a red circle"] * 3 + ["a blue square"] * 3
    torch.testing.assert_close(made, tiny.by_hand(prompts, 1, recent_frames=3), **CLOSE)
    assert (made - tiny.by_hand(prompts[:1] * 6, 1, recent_frames=3))[:, :, 6:8].abs().amax() > 0.01
    assert torch.equal(made_by_other, expected_other)
    assert engine._texts.used == 2, "the old prompt's slot is free"


def test_a_switch_in_the_middle_of_a_chunk_counts_from_the_next(tiny):
    engine = tiny.engine()
    stream = engine.open("a red circle", seed=1)
    tiny.run(engine, 1)
    engine.step()
    stream.switch_prompt("never shown")
    stream.switch_prompt("a blue square")
    assert (stream.prompt, engine._texts.used) == ("a red circle", 2)
    (made,) = tiny.run(engine, 3)
    expected = tiny.by_hand(["a red circle"] * 2 + ["a blue square"], 1)[:, :, 2:]
    torch.testing.assert_close(made, expected, **CLOSE)
    assert (stream.prompt, engine._texts.used) == ("a blue square", 1)


def test_guided_streams_keep_their_negative_prompt_over_a_switch(tiny):
    engine = tiny.engine(guidance_scale=3.0)
    stream = engine.open("a red circle", negative_prompt="not", seed=1)
    tiny.run(engine, 1)
    stream.switch_prompt("a blue square")
    (made,) = tiny.run(engine, 3)
    prompts = ["a red circle", "a blue square", "a blue square"]
    expected = tiny.by_hand(prompts, 1, scale=3.0, negative="not")[:, :, 2:]
    torch.testing.assert_close(made, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("read", ["extent", "block_table"])
def test_a_window_computed_anew_is_as_if_its_frames_had_been_given_under_the_new_prompt(tiny, read):
    """While all frames are visible."""
    engine = tiny.engine(recent_frames=8, read=read)
    stream = engine.open("a red circle", seed=1)
    (first,) = tiny.run(engine, 3)
    state = stream._now.generator_state
    stream.switch_prompt("a blue square", recache="window")
    assert (stream.prompt, stream.frames) == ("a blue square", 6)
    (made,) = tiny.run(engine, 4)
    generator = torch.Generator()
    generator.set_state(state)
    expected = tiny.by_hand(["a blue square"], generator, recent_frames=8, given=first[0])
    torch.testing.assert_close(made, expected, **CLOSE)
    without = tiny.by_hand(["a red circle"] * 3 + ["a blue square"], 1, recent_frames=8)[:, :, 6:]
    assert (made - without).abs().amax() > 1e-3, "recomputing makes a difference"


def dense_step(tiny, clean, positions, noisy, first_noisy, timestep, prompt, visible):
    """Flow of `noisy` frames behind clean ones that each see those up to itself, without a cache.

    positions: of the clean frames in the stream; visible: which of them the noisy ones see.
    """
    model, frames = tiny.model, clean.shape[1] + noisy.shape[1]
    rotary = model._rotary.frames
    at = [(p, 1) for p in positions] + [(first_noisy, noisy.shape[1])]

    def seen(batch, head, q, k):
        q, k = q // tiny.S, k // tiny.S
        shown = torch.tensor([p in visible for p in positions] + [True] * noisy.shape[1])
        return torch.where(q < len(positions), k <= q, shown[k])

    mask = create_block_mask(seen, None, None, frames * tiny.S, frames * tiny.S, device="cpu")
    times = torch.tensor([[0.0] * clean.shape[1] + [timestep] * noisy.shape[1]])
    text = tiny.encode(prompt)
    model._rotary.frames = lambda runs, *rest: rotary(at, *rest)
    try:
        flow = model.forward_masked(
            torch.cat([clean, noisy], dim=1)[None], times, block_mask=mask,
            text_kv=model.project_text(text.hidden, text.lens),
        )  # fmt: skip
    finally:
        del model._rotary.frames
    return flow[0, :, clean.shape[1] :]


@pytest.mark.parametrize(
    ("read", "sink", "recent", "chunks"), [("extent", 1, 5, 5), ("block_table", 0, 3, 4), ("staged", 2, 4, 6)]
)
def test_a_slid_window_computed_anew_is_what_dense_attention_says(tiny, read, sink, recent, chunks):
    engine = tiny.engine(sink_frames=sink, recent_frames=recent, read=read, steps=[1000])
    stream = engine.open("a red circle", seed=1)
    (made,) = tiny.run(engine, chunks)
    made, n = made[0], 2 * chunks
    generator = torch.Generator()
    generator.set_state(stream._now.generator_state)
    for repeat, prompt in enumerate(["a blue square", "green", "green"]):
        if repeat < 2:
            stream.switch_prompt(prompt, recache="window")
            held = sorted({*range(sink), *range(n - recent, n)})
            held_latents = made[:, held]
        noise = torch.randn(tiny.C, 2, *tiny.SIZE, generator=generator)
        (chunk,) = tiny.run(engine, chunks + repeat + 1)
        if repeat < 2:
            visible = {*range(sink), *range(n + 2 - recent, n)}
            flow = dense_step(tiny, held_latents, held, noise, n, 1000.0, prompt, visible)
            torch.testing.assert_close(chunk[0], noise - flow, rtol=0, atol=1e-4)
        made, n = torch.cat([made, chunk[0]], dim=1), n + 2


@pytest.mark.parametrize("what", [RuntimeError("out of memory"), KeyboardInterrupt(), torch.nan], ids=str)
def test_a_recache_that_fails_leaves_prompt_and_window_as_they_were(tiny, fault, what):
    options = {"recent_frames": 3, "deterministic": True, "rollback_chunks": 1}
    clean = tiny.engine(**options)
    clean.open("a red circle", seed=1)
    (expected,) = tiny.run(clean, 6)
    engine = tiny.engine(**options)
    stream = engine.open("a red circle", seed=1)
    (first,) = tiny.run(engine, 4)
    used = engine.used_blocks
    fault.at(1, what, None if what is torch.nan else 1)
    with pytest.raises(type(what) if isinstance(what, BaseException) else GenerationError):
        stream.switch_prompt("a blue square", recache="window")
    fault.heal()
    assert (stream.prompt, stream.state, engine.used_blocks) == ("a red circle", "idle", used)
    assert engine._texts.used == 1
    stream.rollback(1)
    (rest,) = tiny.run(engine, 6)
    assert torch.equal(torch.cat([first[:, :, :6], rest], dim=2), expected)


def test_a_recache_without_room_for_a_second_window_is_refused_or_makes_some(tiny):
    engine = tiny.engine(max_streams=1)
    stream = engine.open("a red circle")
    tiny.run(engine, 1)
    with pytest.raises(EngineFull, match="blocks of .* are free"):
        stream.switch_prompt("a blue square", recache="window")
    assert stream.prompt == "a red circle" and stream.state == "idle"
    stream.switch_prompt("a blue square")
    engine.step()
    stream.switch_prompt("green", recache="window")  # later, where it fails the stream
    events = [event for _ in range(4) for event in engine.step()]
    (failed,) = [event for event in events if event.kind == "failed"]
    assert isinstance(failed.error, EngineFull)
    assert stream.prompt == "a blue square" and stream.chunk_index == 2
    evicting = tiny.engine(max_streams=2, policy="evict_lru")
    stays, goes = evicting.open("a"), evicting.open("b")
    tiny.run(evicting, 1)
    stays.switch_prompt("c", recache="window")
    assert goes.state == "closed" and stays.prompt == "c"


def test_nothing_before_a_recache_can_be_rolled_back_and_chunks_after_it_can(tiny):
    engine = tiny.engine(recent_frames=3, rollback_chunks=2)
    stream = engine.open("a red circle", seed=1)
    tiny.run(engine, 3)
    stream.switch_prompt("a blue square", recache="window")
    with pytest.raises(ValueError, match="none that can be taken back"):
        stream.rollback(1)
    (made,) = tiny.run(engine, 5)
    stream.rollback(2)
    assert stream.chunk_index == 3
    (again,) = tiny.run(engine, 5)
    torch.testing.assert_close(made, again, **CLOSE)


def test_guidance_and_steps_change_between_chunks(tiny):
    engine = tiny.engine(guidance_scale=2.0)
    stream = engine.open("a red circle", negative_prompt="not", seed=1)
    tiny.run(engine, 1)
    engine.step()
    stream.set(steps=[1000, 900, 300])  # the chunk being made keeps its own
    (made,) = tiny.run(engine, 3)
    steps = [[1000, 500], [1000, 500], [1000, 900, 300]]
    expected = tiny.by_hand(["a red circle"] * 3, 1, scale=2.0, negative="not", steps=steps)[:, :, 2:]
    torch.testing.assert_close(made, expected, rtol=0, atol=1e-4)


def test_another_guidance_is_another_chunk_and_the_old_one_the_old_chunk(tiny):
    engine = tiny.engine(guidance_scale=2.0, rollback_chunks=1)
    stream = engine.open("a red circle", negative_prompt="not", seed=1)
    (first,) = tiny.run(engine, 2)
    stream.rollback(1)
    stream.set(guidance_scale=5.0)
    assert (tiny.run(engine, 2)[0] - first[:, :, 2:]).abs().amax() > 0.01
    stream.rollback(1)
    stream.set(guidance_scale=2.0)
    torch.testing.assert_close(tiny.run(engine, 2)[0], first[:, :, 2:], **CLOSE)


def test_steering_that_cannot_be_is_refused_and_changes_nothing(tiny):
    engine = tiny.engine(text_slots=1)
    stream = engine.open("a red circle")
    for change, says in (
        ({"guidance_scale": 2.0}, "opened without guidance, with memory for one branch"),
        ({"guidance_scale": float("inf")}, "guidance_scale is inf"),
        ({"steps": [1000, 0]}, "greater than 0"),
        ({"steps": [250, 500]}, "noise levels that fall"),
        ({"steps": [1000], "guidance_scale": 9}, "opened without guidance"),
    ):
        with pytest.raises(ValueError, match=says):
            stream.set(**change)
    assert (stream.settings, stream.guidance_scale) == (engine.causal, 1.0)
    with pytest.raises(ValueError, match="recache is 'all'; it must be one of none, window"):
        stream.switch_prompt("b", recache="all")
    with pytest.raises(ValueError, match="all 1 text slots are in use"):
        stream.switch_prompt("b")
    with pytest.raises(ValueError, match="prompt is None"):
        stream.switch_prompt(None)
    assert stream.prompt == "a red circle" and engine._texts.used == 1
    stream.switch_prompt("a red circle", recache="window")
    assert tiny.run(engine, 1)[0].shape[2] == 2


def test_forward_only_tokens_steer_their_own_stream_and_only_while_they_are_there(tiny):
    options = {"recent_frames": 3, "action_capacity": 3, "guidance_scale": 2.0}
    plain = tiny.engine(**options)
    plain.open("a", seed=1, guidance_scale=1.0), plain.open("b", seed=2)
    expected = tiny.run(plain, 3)
    engine = tiny.engine(**options)
    a, b = engine.open("a", seed=1, guidance_scale=1.0), engine.open("b", seed=2)
    first = tiny.run(engine, 1)
    before = b.fork()
    tokens = torch.randn(3, 24, generator=tiny.seeded(3))
    b.set_extra(tokens)
    engine.step([a, b])
    assert a.extra_output is None and b.extra_output.shape == (2, 3, 24)
    b.set_extra(tokens[:1])  # another number in the next forward
    second = tiny.run(engine, 2, [a, b])
    assert b.extra_output.shape == (2, 1, 24)
    b.set_extra(None)
    torch.testing.assert_close(torch.cat([first[0], second[0]], dim=2), expected[0][:, :, :4], **CLOSE)
    assert (second[1] - expected[1][:, :, 2:4]).abs().amax() > 1e-3
    (as_if_none,) = tiny.run(engine, 3, [before])
    torch.testing.assert_close(as_if_none, expected[1][:, :, 2:], **CLOSE)
    for wrong in (tokens[:0], torch.zeros(4, 24), torch.zeros(2, 25), torch.zeros(24)):
        with pytest.raises(ValueError, match=r"expected 1 to 3 \(the engine's action_capacity\) by 24"):
            b.set_extra(wrong)
    with pytest.raises(ValueError, match="action_capacity is 1 in a deterministic engine"):
        tiny.engine(deterministic=True, action_capacity=1)
