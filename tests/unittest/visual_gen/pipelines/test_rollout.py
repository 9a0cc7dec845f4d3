"""A stream of a causal model against the plain formula, and what it leaves behind when it ends early."""

import copy
import dataclasses
import itertools

import pytest
import torch

from visual_gen.config import CausalConfig
from visual_gen.models.wan import CausalWanTransformer, WanConfig
from visual_gen.modules.block_causal import ChunkWindow, teacher_forcing_mask
from visual_gen.pipelines.errors import GenerationError
from visual_gen.pipelines.rollout import rollout, rollout_latents, stream_cache
from visual_gen.pipelines.text import TextRows

CONFIG = WanConfig(
    num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=10, freq_dim=16, ffn_dim=40,
    num_layers=2, rope_max_seq_len=24,
)  # fmt: skip
C, SIZE, S, TEXT_LEN = 4, (4, 6), 6, 7
FEW = {"frames_per_chunk": 2, "recent_frames": 6, "steps": [1000, 500]}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = CausalWanTransformer(CONFIG).requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter += 0.2 * torch.randn_like(parameter)
    return model


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def text(n=5, seed=0):
    hidden = torch.randn(1, TEXT_LEN, CONFIG.text_dim, generator=seeded(seed))
    hidden[:, n:] = 0
    return TextRows(hidden, [n], [0])


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
def test_a_stream_is_the_formula_on_whole_videos(model, run, changes):
    settings = CausalConfig(**(FEW | changes))
    expected = plain_rollout(model, settings, 4, [text()])
    torch.testing.assert_close(run(4, **changes), expected, rtol=0, atol=1e-4)


def test_guidance_runs_both_branches_in_one_forward_and_none_without_need(model, run, monkeypatch):
    negative, rows = text(2, seed=1), []
    forward = model.forward

    def counting(hidden_states, *args, **kwargs):
        rows.append(len(hidden_states))
        return forward(hidden_states, *args, **kwargs)

    monkeypatch.setattr(model, "forward", counting)
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
        cache = stream_cache(model, settings, S, branches=2)
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


def test_a_stream_without_guidance_takes_memory_for_one_branch(model):
    settings = CausalConfig(**FEW)
    one, two = (stream_cache(model, settings, S, branches=n) for n in (1, 2))
    free = one.free_blocks
    stream = rollout(model, text(), SIZE, num_chunks=2, settings=settings, cache=one, negative=text(1))
    next(stream)
    assert one.free_blocks == 0 and two.free_blocks == 2 * free
    stream.close()
    with pytest.raises(ValueError, match="2 branches"):
        list(
            rollout(model, text(), SIZE, num_chunks=1, settings=settings, cache=one, negative=text(1), guidance_scale=2)
        )
    assert one.free_blocks == free


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
        model, text(), SIZE, num_chunks=2, settings=settings, generator=generator, first_latents=made[:, :given]
    )
    torch.testing.assert_close(continued[0], made, rtol=0, atol=1e-4)


def test_given_frames_see_none_that_come_later_however_many_are_committed_together(run):
    first = torch.randn(C, 5, *SIZE, generator=seeded(2))
    in_twos, in_fours = (run(2, first_latents=first, first_chunk_frames=n) for n in (1, 4))
    assert torch.equal(in_twos[:, :5], first)
    torch.testing.assert_close(in_twos, in_fours, rtol=0, atol=1e-5)


def test_given_frames_are_committed_together_as_long_as_the_window_fills(model, monkeypatch):
    frames, forward = [], model.forward

    def counting(hidden_states, *args, **kwargs):
        frames.append(hidden_states.shape[2])
        return forward(hidden_states, *args, **kwargs)

    monkeypatch.setattr(model, "forward", counting)
    first = torch.randn(C, 9, *SIZE, generator=seeded(2))
    settings = CausalConfig(**(FEW | {"first_chunk_frames": 1, "frames_per_chunk": 4, "steps": [1000]}))
    stream = rollout(model, text(), SIZE, num_chunks=1, settings=settings, first_latents=first)
    assert next(stream).shape == (C, 4, *SIZE)  # the first chunk is behind it
    assert frames == [4, 2, 1, 1, 1, 4, 4]


@pytest.fixture
def broken(model, monkeypatch):
    """Makes the model's n-th forward from now raise or give NaN."""

    def break_(n, fault):
        forward, calls = model.forward, itertools.count(1)

        def faulty(*args, **kwargs):
            out = forward(*args, **kwargs)
            if next(calls) != n:
                return out
            if isinstance(fault, BaseException):
                raise fault
            return out * fault

        monkeypatch.setattr(model, "forward", faulty)

    return break_


@pytest.mark.parametrize("fault", [RuntimeError("out of memory"), KeyboardInterrupt()], ids=["exception", "Ctrl-C"])
@pytest.mark.parametrize("forward", [4, 6])
def test_whatever_ends_a_stream_leaves_the_cache_as_it_was(model, run, broken, monkeypatch, fault, forward):
    settings = CausalConfig(**FEW)
    cache = stream_cache(model, settings, S)
    free, chunks = cache.free_blocks, []
    broken(forward, fault)
    stream = rollout(model, text(), SIZE, num_chunks=3, settings=settings, generator=seeded(), cache=cache)
    with pytest.raises(type(fault)):
        chunks.extend(iter(lambda: next(stream), None))
    monkeypatch.undo()
    assert cache.free_blocks == free and not cache.sessions
    assert torch.equal(run(cache=cache), run())


def test_a_stream_that_is_closed_gives_its_blocks_back(model):
    settings = CausalConfig(**FEW)
    cache = stream_cache(model, settings, S)
    free = cache.free_blocks
    stream = rollout(model, text(), SIZE, num_chunks=None, settings=settings, cache=cache)
    assert cache.free_blocks == free, "nothing is taken before the first chunk"
    next(stream), next(stream)
    assert cache.free_blocks < free
    stream.close()
    assert cache.free_blocks == free


@pytest.mark.parametrize("forward", [4, 6])
def test_a_chunk_that_is_not_finite_is_named_and_not_committed(model, broken, forward):
    settings = CausalConfig(**FEW)
    cache = stream_cache(model, settings, S)
    free = cache.free_blocks
    broken(forward, torch.nan)
    stream = rollout(model, text(), SIZE, num_chunks=3, settings=settings, generator=seeded(), cache=cache)
    assert next(stream).isfinite().all()
    with pytest.raises(GenerationError, match="chunk 1 gave NaN or infinity and was not committed"):
        next(stream)
    assert cache.free_blocks == free


@pytest.mark.parametrize(("end", "chunks"), [(None, 12), (9, 4), (53, 26)])
def test_a_stream_without_end_stops_where_the_positions_do(model, end, chunks):
    """The checkpoint's 24, or as many as were asked for, on a model that other streams have given more."""
    model, made = copy.deepcopy(model), []
    model.extend_frames(60)
    settings = CausalConfig(**FEW, rope_max_seq_len=end)
    says = f"chunk {chunks} ends at latent frame {2 * chunks + 2} and the positions at {end or 24}"
    with pytest.raises(ValueError, match=says):
        for latents in rollout(model, text(), SIZE, num_chunks=None, settings=settings):
            made.append(latents)  # noqa: PERF402
    assert len(made) == chunks


def test_chunks_past_the_checkpoints_positions_are_those_of_a_model_with_more(model):
    longer = CausalWanTransformer(dataclasses.replace(model.config, rope_max_seq_len=200)).requires_grad_(False)
    longer.load_state_dict(model.state_dict())
    made = [
        rollout_latents(each, text(), SIZE, num_chunks=20, settings=CausalConfig(**FEW, **more), generator=seeded())
        for each, more in ((copy.deepcopy(model), {"rope_max_seq_len": 40}), (longer, {}))
    ]
    assert made[0].shape[2] == 40 and torch.equal(*made)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_chunks": 0}, "num_chunks is 0"),
        ({"num_chunks": 10**12}, "makes 2000000000000 latent frames"),
        ({"negative": TextRows(torch.zeros(1, 5, 10), [1], [0]), "guidance_scale": 2.0}, "encode both to one length"),
        ({"num_chunks": 13}, "makes 26 latent frames; the model knows 24: ask for fewer, or extend"),
        ({"latent_size": (4, 5)}, r"latent_size is \(4, 5\)"),
        ({"latent_size": (2, 4, 6)}, r"latent_size is \(2, 4, 6\); it must be \(H, W\)"),
        ({"latent_size": (4.0, 6)}, "two integers"),
        ({"negative": text(), "guidance_scale": float("nan")}, "guidance_scale is nan; it must be a finite number"),
        ({"text": TextRows(torch.zeros(2, 7, 10), [1, 1], [0, 1])}, "text has 2 rows"),
        ({"negative": TextRows(torch.zeros(2, 7, 10), [1, 1], [0, 1])}, "negative has 2 rows"),
        ({"first_latents": torch.zeros(1, 4, 2, 4, 6)}, r"first_latents has shape \(1, 4, 2, 4, 6\)"),
        ({"first_latents": torch.zeros(4, 0, 4, 6)}, "with F of at least 1"),
        ({"first_latents": torch.full((4, 1, 4, 6), torch.nan)}, "first_latents hold NaN"),
        ({"first_latents": torch.zeros(4, 20, 4, 6)}, "makes 26 latent frames"),
    ],
)
def test_bad_arguments_are_refused_before_any_work(model, changes, says):
    given = {"text": text(), "latent_size": SIZE, "num_chunks": 3, "settings": CausalConfig(**FEW)} | changes
    with pytest.raises(ValueError, match=says):
        rollout(model, **given)


def test_all_latents_of_a_stream_without_end_are_refused(model):
    with pytest.raises(ValueError, match="a stream without end"):
        rollout_latents(model, text(), SIZE, num_chunks=None)


def test_a_cache_for_other_frames_is_refused(model):
    settings = CausalConfig(**FEW)
    cache = stream_cache(model, settings, S + 2)
    with pytest.raises(ValueError, match=r"the cache was made for 8 tokens a frame; latent_size \(4, 6\) has 6"):
        rollout(model, text(), SIZE, num_chunks=1, settings=settings, cache=cache)


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
