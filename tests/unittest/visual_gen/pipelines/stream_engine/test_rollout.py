"""A stream of a causal model against the plain formula, and what it leaves behind when it ends early."""

import copy
import dataclasses
import itertools

import pytest
import torch

from tests.unittest.visual_gen.pipelines.stream_engine.tiny_model import (
    FEW,
    SIZE,
    TEXT_LEN,
    C,
    S,
    cache_for,
    seeded,
    text,
)
from visual_gen.config import CausalConfig
from visual_gen.models.wan import CausalWanTransformer
from visual_gen.modules.block_causal import ChunkWindow, teacher_forcing_mask
from visual_gen.pipelines import rollout as rollout_module
from visual_gen.pipelines.errors import GenerationError
from visual_gen.pipelines.rollout import rollout, rollout_latents
from visual_gen.pipelines.stream_engine import StreamEngine
from visual_gen.pipelines.text import TextRows


@pytest.fixture
def run(model):
    """run(**settings of CausalConfig and of rollout) → all latents [C, F, H, W]."""

    def run(num_chunks=3, generator=None, **options):
        settings = CausalConfig(**(FEW | {k: options.pop(k) for k in list(options) if k in CausalConfig.model_fields}))
        generator = generator or seeded()
        out = rollout_latents(
            model, text(), SIZE, num_chunks=num_chunks, settings=settings, generator=generator, **options
        )
        assert out.dtype == torch.float32 and out.shape[:2] == (1, C)
        return out[0]

    return run


@pytest.fixture
def engines(monkeypatch):
    """Those of the rollouts that were begun."""
    made = []

    def make(*args, **options):
        made.append(StreamEngine(*args, **options))
        return made[-1]

    monkeypatch.setattr(rollout_module, "StreamEngine", make)
    return made


@torch.no_grad()
def plain_rollout(model, settings, num_chunks, rows, guidance_scale=None):
    """The formula of the rollout on whole videos under the training mask: no cache, everything anew in each forward."""
    rule = ChunkWindow(
        settings.frames_per_chunk, settings.first_chunk_frames, settings.sink_frames, settings.recent_frames
    )
    generator, video = seeded(), torch.zeros(C, 0, *SIZE)
    sizes = itertools.chain(
        [settings.first_chunk_frames or settings.frames_per_chunk], itertools.repeat(settings.frames_per_chunk)
    )
    text_kvs = [model.project_text(r.hidden, r.lens) for r in rows]
    for frames in itertools.islice(sizes, num_chunks):
        x = torch.randn(C, frames, *SIZE, generator=generator)
        mask = teacher_forcing_mask(rule, video.shape[1] + frames, S, "cpu")
        shifted = [settings.flow_shift * t / (1000 + (settings.flow_shift - 1) * t) for t in settings.steps]
        for sigma, following in itertools.zip_longest(shifted, shifted[1:]):
            noisy = torch.cat([video, x], dim=1)[None]
            flows = [
                model.forward_masked(noisy, torch.tensor([1000 * sigma]), block_mask=mask, text_kv=kv, clean=noisy)
                for kv in text_kvs
            ]
            flow = flows[0] if len(flows) == 1 else flows[1] + guidance_scale * (flows[0] - flows[1])
            clean = x - sigma * flow[0, :, -frames:]
            x = clean
            if following is not None:
                x = (1 - following) * clean + following * torch.randn(x.shape, generator=generator)
        video = torch.cat([video, x], dim=1)
    return video


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sink_frames": 1, "recent_frames": 3},
        {"first_chunk_frames": 1, "recent_frames": 4},
        {"first_chunk_frames": 3, "frames_per_chunk": 1, "recent_frames": 3},
        {"steps": [900.5], "flow_shift": 1.0},
        {"read": "block_table", "block_size": 4},
        {"read": "staged", "recent_frames": 3},
    ],
    ids=str,
)
def test_a_stream_is_the_formula_on_whole_videos(model, run, engines, changes):
    settings = CausalConfig(**(FEW | changes))
    expected = plain_rollout(model, settings, 4, [text()])
    torch.testing.assert_close(run(4, **changes), expected, rtol=0, atol=1e-4)
    [(read, _)] = engines[0].record().read_counts
    assert read == changes.get("read", "extent")


def test_guidance_runs_both_branches_in_one_forward_and_none_without_need(model, run, monkeypatch):
    negative, rows = text(2, seed=1), []
    forward = model.run

    def counting(hidden_states, *args):
        rows.append(len(hidden_states))
        return forward(hidden_states, *args)

    monkeypatch.setattr(model, "run", counting)
    found = run(2, negative=negative, guidance_scale=3.0)
    assert rows == [2] * 2 * 3  # chunks · (steps + commit)
    expected = plain_rollout(model, CausalConfig(**FEW), 2, [text(), negative], 3.0)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)
    rows.clear()
    unguided = run(2)
    assert torch.equal(unguided, run(2, negative=negative, guidance_scale=1.0))
    assert torch.equal(unguided, run(2, guidance_scale=3.0))
    assert set(rows) == {1}


def test_a_prompt_switch_counts_from_its_chunk_on(model, run):
    first, later = run(4), run(4, switches={2: text(3, seed=9)})
    assert torch.equal(first[:, :4], later[:, :4]) and not torch.allclose(first[:, 4:6], later[:, 4:6], atol=1e-3)
    assert torch.equal(run(2, switches={0: text(3, seed=9)}), run(2, switches={0: text(3, seed=9), 1: text(3, seed=9)}))
    assert torch.equal(first, run(4, switches={1: text(), 7: text(3, seed=9)}))


def test_a_switch_keeps_what_was_committed_and_the_negative_text(model, run):
    """Chunk 1 under another text, over chunk 0's keys and values under the first."""
    settings, guide = CausalConfig(**FEW), {"negative": text(2, seed=1), "guidance_scale": 3.0}
    found = run(2, switches={1: text(3, seed=9)}, **guide)[:, 2:]
    generator = seeded()
    with torch.no_grad():
        cache = cache_for(model, settings, S, branches=2)
        before, after = (model.project_text(torch.cat([rows.hidden, text(2, seed=1).hidden]), [*rows.lens, 2])
                         for rows in (text(), text(3, seed=9)))
        with cache.open_session(sink_frames=0, recent_frames=6, branches=2, max_chunk_frames=2) as session:
            for text_kv in (before, after):
                with session.begin(2) as chunk:
                    x = torch.randn(C, 2, *SIZE, generator=generator)
                    for sigma, following in itertools.zip_longest(*((1.0, 5 / 6)[i:] for i in (0, 1))):
                        t = torch.tensor([1000 * sigma] * 2)
                        towards, away = model(x.expand(2, *x.shape), t, kv=cache.batch([chunk]), text_kv=text_kv)
                        x = x - sigma * (away + 3 * (towards - away))
                        if following:
                            x = torch.lerp(x, torch.randn(x.shape, generator=generator), following)
                    model(x.expand(2, *x.shape), torch.zeros(2), kv=cache.batch([chunk]), text_kv=text_kv)
                    chunk.commit()
    torch.testing.assert_close(found, x, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("switches", "says"),
    [
        ({-1: text()}, "switches has -1"),
        ({True: text()}, "switches has True"),
        ({1: TextRows(torch.zeros(1, 9, 10), [3], [0])}, r"switches\[1\] has shape \(1, 9, 10\)"),
        ({1: TextRows(torch.zeros(2, TEXT_LEN, 10), [3, 3], [0, 1])}, r"switches\[1\] has 2 rows"),
    ],
)
def test_switches_that_no_stream_could_make_are_refused_at_once(model, switches, says):
    with pytest.raises(ValueError, match=says):
        rollout(model, text(), SIZE, num_chunks=2, settings=CausalConfig(**FEW), switches=switches)


def all_is_free(engine):
    free = engine.cache.free_blocks == engine.record().num_blocks
    return free and not engine.cache.sessions and not engine._texts.used


def test_a_stream_without_guidance_takes_memory_for_one_branch(model, engines):
    for scale in (1.0, 2.0):
        rollout(
            model, text(), SIZE, num_chunks=2, settings=CausalConfig(**FEW), negative=text(1), guidance_scale=scale
        )
    one, two = (engine.record().num_blocks for engine in engines)
    assert 2 * one == two and [engine.cache.free_blocks for engine in engines] == [0, 0]
    assert [engine._texts._pool.slots for engine in engines] == [1, 2]


def test_the_default_steps_are_self_forcings():
    assert CausalConfig().timesteps == pytest.approx((1000, 937.5, 2500 / 3, 625))
    assert CausalConfig(steps=[1000, 250], flow_shift=1).timesteps == (1000, 250)


def test_the_same_generator_gives_the_same_video_and_another_another(run):
    assert torch.equal(run(), run())
    assert not torch.equal(run(), run(generator=seeded(1)))


@pytest.mark.parametrize("given", [1, 3, 6, 9])
def test_given_frames_are_continued_as_if_the_stream_had_made_them(model, given):
    """Frame by frame, so that the stream committed them as the recache does; 6 frames are visible."""
    settings = CausalConfig(**(FEW | {"frames_per_chunk": 1}))
    generator = seeded()
    made = []
    for i, latents in enumerate(
        rollout(model, text(), SIZE, num_chunks=given + 2, settings=settings, generator=generator)
    ):
        made.append(latents)
        if i == given - 1:
            state = generator.get_state()
    made = torch.cat(made, dim=1)
    generator.set_state(state)
    continued = rollout_latents(
        model, text(), SIZE, num_chunks=2, settings=settings, generator=generator, initial_latents=made[:, :given]
    )
    torch.testing.assert_close(continued[0], made, rtol=0, atol=1e-4)


def test_given_frames_see_none_that_come_later_however_many_are_committed_together(run):
    first = torch.randn(C, 5, *SIZE, generator=seeded(2))
    in_twos, in_fours = (run(2, initial_latents=first, first_chunk_frames=n) for n in (1, 4))
    assert torch.equal(in_twos[:, :5], first)
    torch.testing.assert_close(in_twos, in_fours, rtol=0, atol=1e-5)


def test_given_frames_are_committed_together_as_long_as_the_window_fills(model, monkeypatch):
    frames, forward = [], model.run

    def counting(hidden_states, *args):
        frames.append(hidden_states.shape[2])
        return forward(hidden_states, *args)

    monkeypatch.setattr(model, "run", counting)
    first = torch.randn(C, 9, *SIZE, generator=seeded(2))
    settings = CausalConfig(**(FEW | {"first_chunk_frames": 1, "frames_per_chunk": 4, "steps": [1000]}))
    stream = rollout(model, text(), SIZE, num_chunks=1, settings=settings, initial_latents=first)
    assert next(stream).shape == (C, 4, *SIZE)  # the first chunk is behind it
    assert frames == [4, 2, 1, 1, 1, 4, 4]


@pytest.mark.parametrize("what", [RuntimeError("out of memory"), KeyboardInterrupt()], ids=["exception", "Ctrl-C"])
@pytest.mark.parametrize("forward", [4, 6])
def test_whatever_ends_a_stream_leaves_nothing_open(model, run, engines, fault, what, forward):
    expected, chunks = run(), []
    fault.at(forward, what)
    with pytest.raises(type(what)):
        chunks.extend(rollout(model, text(), SIZE, num_chunks=3, settings=CausalConfig(**FEW), generator=seeded()))
    fault.heal()
    assert all_is_free(engines[1])
    assert torch.equal(run(), expected)


def test_a_stream_that_is_closed_gives_its_blocks_back(model, engines):
    stream = rollout(model, text(), SIZE, num_chunks=None, settings=CausalConfig(**FEW))
    next(stream), next(stream)
    assert not all_is_free(engines[0])
    stream.close()
    assert all_is_free(engines[0])


@pytest.mark.parametrize("forward", [4, 6])
def test_a_chunk_that_is_not_finite_is_named_and_not_committed(model, engines, fault, forward):
    fault.at(forward, torch.nan)
    stream = rollout(model, text(), SIZE, num_chunks=3, settings=CausalConfig(**FEW), generator=seeded())
    assert next(stream).isfinite().all()
    with pytest.raises(GenerationError, match="chunk 1 of stream 0 gave NaN or infinity and was not kept"):
        next(stream)
    assert all_is_free(engines[0])


@pytest.mark.parametrize(("end", "chunks"), [(None, 32), (9, 4), (53, 26)])
def test_a_stream_without_end_stops_where_the_positions_do(model, end, chunks):
    """The checkpoint's 64, or as many as were asked for, on a model that other streams have given more."""
    model, made = copy.deepcopy(model), []
    model.extend_frames(100)
    settings = CausalConfig(**FEW | {"steps": [1000]}, rope_max_seq_len=end)
    says = rf"ends at latent frame {2 * chunks + 2} and the engine knows {end or 64} \(causal.rope_max_seq_len\)"
    with pytest.raises(ValueError, match=says):
        for latents in rollout(model, text(), SIZE, num_chunks=None, settings=settings):
            made.append(latents)  # noqa: PERF402
    assert len(made) == chunks


def test_without_a_generator_torchs_own_seed_counts(model):
    def chunk(seed):
        torch.manual_seed(seed)
        return next(rollout(model, text(), SIZE, num_chunks=1, settings=CausalConfig(**FEW)))

    assert torch.equal(chunk(1), chunk(1)) and not torch.equal(chunk(1), chunk(2))


def test_chunks_past_the_checkpoints_positions_are_those_of_a_model_with_more(model):
    longer = CausalWanTransformer(dataclasses.replace(model.config, rope_max_seq_len=200)).requires_grad_(False)
    longer.load_state_dict(model.state_dict())
    few = FEW | {"steps": [1000]}
    made = [
        rollout_latents(each, text(), SIZE, num_chunks=40, settings=CausalConfig(**few, **more), generator=seeded())
        for each, more in ((copy.deepcopy(model), {"rope_max_seq_len": 80}), (longer, {}))
    ]
    assert made[0].shape[2] == 80 and torch.equal(*made)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_chunks": 0}, "num_chunks is 0"),
        ({"num_chunks": 10**12}, "makes 2000000000000 latent frames"),
        ({"negative": TextRows(torch.zeros(1, 5, 10), [1], [0]), "guidance_scale": 2.0}, "encode both to one length"),
        ({"num_chunks": 33}, "makes 66 latent frames; the model knows 64: ask for fewer, or extend"),
        ({"latent_size": (4, 5)}, r"latent_size is \(4, 5\)"),
        ({"latent_size": (2, 4, 6)}, r"latent_size is \(2, 4, 6\); it must be \(H, W\)"),
        ({"latent_size": (4.0, 6)}, "two integers"),
        ({"negative": text(), "guidance_scale": float("nan")}, "guidance_scale is nan; it must be a finite number"),
        ({"text": TextRows(torch.zeros(2, 7, 10), [1, 1], [0, 1])}, "text has 2 rows"),
        ({"negative": TextRows(torch.zeros(2, 7, 10), [1, 1], [0, 1])}, "negative has 2 rows"),
        ({"initial_latents": torch.zeros(2, 4, 2, 4, 6)}, r"initial_latents has shape \(2, 4, 2, 4, 6\)"),
        ({"initial_latents": torch.zeros(4)}, r"initial_latents has shape \(4,\)"),
        ({"initial_latents": torch.zeros(4, 0, 4, 6)}, "with F of at least 1"),
        ({"initial_latents": torch.full((4, 1, 4, 6), torch.nan)}, "initial_latents hold NaN"),
        ({"initial_latents": torch.zeros(4, 60, 4, 6)}, "makes 66 latent frames"),
    ],
)
def test_bad_arguments_are_refused_before_any_work(model, changes, says):
    given = {"text": text(), "latent_size": SIZE, "num_chunks": 3, "settings": CausalConfig(**FEW)} | changes
    with pytest.raises(ValueError, match=says):
        rollout(model, **given)


def test_all_latents_of_a_stream_without_end_are_refused(model):
    with pytest.raises(ValueError, match="a stream without end"):
        rollout_latents(model, text(), SIZE, num_chunks=None)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"recent_frames": 1}, "recent_frames of at least 2"),
        ({"first_chunk_frames": 7}, "recent_frames of at least 7"),
        ({"steps": [500, 1000]}, "noise levels that fall"),
        ({"steps": [True, 0.5]}, "noise levels that fall"),
        ({"steps": []}, "noise levels that fall"),
        ({"steps": [1500]}, "less than or equal to 1000"),
        ({"steps": [1000, 0]}, "greater than 0"),
        ({"read": "paged"}, "'auto', 'extent', 'block_table' or 'staged'"),
        ({"window": 3}, "Extra inputs"),
        ({"flow_shift": 0}, "greater than 0"),
    ],
)
def test_settings_that_cannot_be(changes, says):
    with pytest.raises(ValueError, match=says):
        CausalConfig(**(FEW | changes))
