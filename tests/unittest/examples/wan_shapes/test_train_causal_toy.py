"""The causal training at toy size: its stages go on from one another, and its forward is that of a rollout."""

import json
from dataclasses import replace

import pytest
import torch

from attention_backend.kv_cache import PagedKVCache
from examples.wan_shapes.captions import make_tokenizer
from examples.wan_shapes.causal_settings import CAUSAL_TOY, CausalSettings
from examples.wan_shapes.causal_stage import CausalTrainer, ChunkText, causal_round
from examples.wan_shapes.combinations import Prompt
from examples.wan_shapes.distil_stage import CausalDistiller, distil_round, shifted
from examples.wan_shapes.evaluate_causal import CausalEvaluation
from examples.wan_shapes.evaluate_causal import main as evaluate_causal
from examples.wan_shapes.latents_stage import scaled_latents, tokenise
from examples.wan_shapes.measure import shown
from examples.wan_shapes.models import make_text_encoder, make_transformer, make_vae, save_pipeline
from examples.wan_shapes.run_folder import settings_from
from examples.wan_shapes.settings import TOY
from examples.wan_shapes.train_causal import even_steps, main
from examples.wan_shapes.whole_sequence_vae import run_whole_sequences
from visual_gen.config import CausalConfig
from visual_gen.models.wan import CausalWanTransformer
from visual_gen.pipelines.rollout import rollout_latents
from visual_gen.pipelines.text import TextRows

CPU = torch.device("cpu")
CAPTIONS = ("a red circle moving right on a navy background", "a cyan star spinning")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder as the bidirectional training exports it, whose output is not zero."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    vae, text_encoder, transformer = make_vae(TOY), make_text_encoder(TOY), make_transformer(TOY)
    torch.nn.init.normal_(transformer.proj_out.weight, std=0.05)
    save_pipeline(folder, TOY, vae, text_encoder, transformer)
    return folder


@pytest.fixture(scope="module")
def trained(base, tmp_path_factory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("run")
    run = ["--run", str(folder), "--device", "cpu"]
    stopped = main([*run, "--toy", "--start-from", str(base), "--stages", "causal_latents", "causal=0.001"])
    finished = main([*run, "--stages", "causal", "distil", "export", "export_guided"])
    torch.set_num_threads(threads)
    return folder, stopped, finished


@pytest.fixture
def trainer(base):
    from diffusers import WanTransformer3DModel

    torch.manual_seed(1)
    trainer = CausalTrainer(CAUSAL_TOY, causal_round(CAUSAL_TOY), CPU)
    weights = WanTransformer3DModel.from_pretrained(base / "transformer", torch_dtype=torch.float32)
    trainer.transformer.load_state_dict(weights.state_dict())
    return trainer


def chunk_text(second, padded: int = 64) -> ChunkText:
    """One clip under both captions, the second where `second` says so."""
    ids = tokenise(make_tokenizer(), list(CAPTIONS), CAUSAL_TOY.text_slots).long()[None]
    return ChunkText(ids, torch.tensor([second]), torch.tensor([padded]))


def test_stages_go_on_and_leave_what_a_stream_needs(trained):
    folder, stopped, finished = trained
    assert (stopped, finished) == (3, 0)
    log = (folder / "log.txt").read_text()
    assert "causal is not finished; call again" in log and "causal: going on from step" in log
    assert "causal: finished at step 6 of 6" in log and "distil: finished at step 3 of 3" in log
    assert settings_from(json.loads((folder / "settings.json").read_text()), CausalSettings) == CAUSAL_TOY
    for name, guidance, steps in (("pipeline", 1.0, [1000.0, 500.0]), ("guided", 4.0, even_steps(8))):
        kept = {path.name for path in (folder / name).iterdir()}
        assert kept == {"transformer", "text_encoder", "stream.json", "shares.json", "model_index.json"}
        stream = json.loads((folder / name / "stream.json").read_text())
        assert stream["guidance_scale"] == guidance and stream["causal"]["steps"] == steps
        model = CausalWanTransformer.from_pretrained(folder / name)
        text = TextRows(torch.randn(1, 64, TOY.text_dim), [5], [0])
        latents = rollout_latents(model, text, (4, 4), num_chunks=2, settings=CausalConfig(**stream["causal"]))
        assert latents.shape == (1, 8, 2 * CAUSAL_TOY.frames_per_chunk, 4, 4) and latents.isfinite().all()


def test_the_exported_folder_is_scored_through_a_rollout(trained, base, tmp_path):
    folder = trained[0] / "guided"
    arguments = [str(folder), "--base", str(base), "--steps", "1", "--max-prompts", "1", "--out", str(tmp_path)]
    code = evaluate_causal([*arguments, "--only", "quick"])
    report = json.loads((tmp_path / "scores.json").read_text())
    assert report["stream"]["steps"] == [1000.0] and report["guidance_scale"] == 4.0
    passed = {check["name"]: check["passed"] for check in report["checks"]}
    assert list(passed) == ["drawn clips, quick", "quick: colour", "quick: motion", "quick: shape"]
    assert passed["drawn clips, quick"] and code == (0 if all(passed.values()) else 1)
    with pytest.raises(ValueError, match="stream.json is missing"):
        evaluate_causal([str(base), "--base", str(base), "--quick"])


def test_streams_follow_seed_guidance_and_switch(trained, base):
    evaluation = CausalEvaluation.load(trained[0] / "guided", base, torch.float32, CPU, steps=1, guidance_scale=2.0)
    one, two = (Prompt(text, None, None, None, None, seed) for seed, text in enumerate(CAPTIONS))
    latents = evaluation.latents(one, 2, {})
    assert latents.shape == (1, 8, 4, 12, 12) and torch.equal(latents, evaluation.latents(one, 2, {}))
    assert not torch.equal(latents, evaluation.latents(replace(one, seed=5), 2, {}))
    switched = evaluation.latents(one, 2, {1: two})
    assert torch.equal(latents[:, :, :2], switched[:, :, :2]) and not torch.equal(latents, switched)
    assert not torch.equal(latents, replace(evaluation, guidance_scale=1.0).latents(one, 2, {}))
    clips = evaluation.generate([one, two, one], 2, switched=[two, two, two], switch_at=1)
    assert [clip.shape for clip in clips] == [(13, 96, 96, 3)] * 3
    torch.testing.assert_close(clips[0], evaluation.decode(switched)[0], atol=1e-5, rtol=0)


def test_latents_are_decoded_on_the_scale_that_they_are_trained_on(trained, base):
    evaluation = CausalEvaluation.load(trained[0] / "guided", base, torch.float32, CPU)
    evaluation.vae.register_to_config(latents_mean=[0.3 * i for i in range(8)], latents_std=[0.5 + i for i in range(8)])
    frames = torch.rand(1, 3, 5, 32, 32) * 2 - 1
    with torch.no_grad():
        expected = evaluation.vae.decode(evaluation.vae.encode(frames).latent_dist.mode()).sample.clamp(-1, 1)
        latents = scaled_latents(run_whole_sequences(evaluation.vae), frames).float()
    torch.testing.assert_close(evaluation.decode(latents)[0], shown(expected), atol=0.02, rtol=0)  # latents are bf16


def test_weights_are_the_averages_of_the_last_round_in_fp16(trained):
    from safetensors.torch import load_file

    folder, _, _ = trained
    names = [name for name, _ in make_transformer(TOY).named_parameters()]
    for stage, exported in (("distil", "pipeline"), ("causal", "guided")):
        state = torch.load(folder / f"{stage}.pt", weights_only=True)
        saved = load_file(folder / exported / "transformer/diffusion_pytorch_model.safetensors")
        assert {tensor.dtype for tensor in saved.values()} == {torch.float16}
        for name, average in zip(names, state["averages"], strict=False):
            assert torch.equal(saved[name], average.half()), name


@torch.no_grad()
def over_a_cache(trainer, context, noisy, level, text):
    """Each chunk's velocity from a rollout that commits `context`, chunk by chunk, under the chunk's own text."""
    settings, model = trainer.settings, trainer.transformer
    causal = CausalWanTransformer(model_config(trainer)).requires_grad_(False)
    own = causal.state_dict()
    for name, value in diffusers_names(model, causal).items():
        own[name].copy_(value)
    slots, frames = settings.text_slots, settings.frames_per_chunk
    embeddings, _ = trainer.encoded(text, trainer.text_encoder)
    lens = (text.ids[0] != 0).sum(1).tolist()
    padded = torch.nn.functional.pad(embeddings.view(2, slots, -1), (0, 0, 0, int(text.padded_lens) - slots))
    texts = [causal.project_text(padded[which : which + 1], lens[which : which + 1]) for which in (0, 1)]
    cache = PagedKVCache(
        settings.layers, settings.heads, settings.head_dim, trainer.frame_tokens, num_blocks=64,
        backend=causal.self_attention, dtype=torch.float32, device=CPU,
        attention_metadata_state=causal.attention_metadata_state,
    )
    found = []
    with cache.open_session(recent_frames=settings.recent_frames, max_chunk_frames=frames) as session:
        for index in range(settings.chunks):
            part = slice(index * frames, (index + 1) * frames)
            clean_text, noisy_text = (texts[int(text.second[0, index + side])] for side in (0, settings.chunks))
            with session.begin(frames) as chunk:
                found.append(causal(noisy[:, :, part], level[:, index] * 1000, kv=cache.batch([chunk]),
                                    text_kv=noisy_text))
                causal(context[:, :, part], torch.zeros(1), kv=cache.batch([chunk]), text_kv=clean_text)
                chunk.commit()
    return torch.cat(found, 2)


def model_config(trainer):
    from visual_gen.models.wan import WanConfig

    names = WanConfig.__dataclass_fields__
    return WanConfig(**{name: value for name, value in trainer.transformer.config.items() if name in names})


def diffusers_names(model, causal):
    """The weights of diffusers' model under this project's names."""
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return {name: value.clone() for name, value in
                CausalWanTransformer.from_pretrained(Path(folder)).state_dict().items()}


@pytest.mark.parametrize("padded", [64, 512])
@pytest.mark.parametrize("second", [(0, 0, 0, 0, 0, 0), (0, 1, 1, 0, 1, 1), (1, 1, 1, 0, 0, 1)], ids=str)
def test_the_training_forward_is_a_rollout_over_a_cache(trainer, second, padded):
    latents = torch.randn(2, 1, 8, CAUSAL_TOY.latent_frames, 4, 4)
    context, noisy, level = latents[0], latents[1], torch.tensor([[1.0, 0.3, 0.02]])
    text = chunk_text([bool(x) for x in second], padded)
    with torch.no_grad():
        got = trainer.velocity(trainer.forward, context, noisy, level, trainer.encoded(text, trainer.text_encoder))
    torch.testing.assert_close(got, over_a_cache(trainer, context, noisy, level, text), atol=1e-5, rtol=1e-5)


def test_what_a_chunk_sees_ends_with_its_window(trainer):
    latents = torch.randn(2, 1, 8, CAUSAL_TOY.latent_frames, 4, 4)
    text, level = chunk_text([False] * 6), torch.full((1, 3), 0.5)
    encoded = tuple(part.detach() for part in trainer.encoded(text, trainer.text_encoder))

    def velocity(context, noisy):
        with torch.no_grad():
            return trainer.velocity(trainer.forward, context, noisy, level, encoded)

    expected = velocity(*latents)
    for index, changed in enumerate((slice(0, 2), slice(2, 4), slice(4, 6))):
        context, noisy = latents[0].clone(), latents[1].clone()
        context[:, :, changed] += 1
        differs = (velocity(context, latents[1]) - expected).abs().amax((0, 1, 3, 4)).view(3, 2).amax(1) > 1e-6
        assert differs.tolist() == [chunk > index for chunk in range(3)]
        noisy[:, :, changed] += 1
        differs = (velocity(latents[0], noisy) - expected).abs().amax((0, 1, 3, 4)).view(3, 2).amax(1) > 1e-6
        assert differs.tolist() == [chunk == index for chunk in range(3)]


def test_texts_go_where_the_clip_changes(trainer):
    ids, batch = torch.zeros(64, 2, 48, dtype=torch.long), 64
    trainer.plan = replace(trainer.plan, dropped_captions=0.0)
    trainer.settings = replace(trainer.settings, recached=0.0)
    text = trainer.place_texts(ids, torch.tensor([0, 1, 2, 0] * 16))
    assert text.second[:4].int().tolist() == [[0] * 6, [0, 1, 1] * 2, [0, 0, 1] * 2, [0] * 6]
    trainer.settings = replace(trainer.settings, recached=1.0)
    text = trainer.place_texts(ids, torch.tensor([0, 1, 2, 0] * 16))
    assert text.second[:4].int().tolist() == [[0] * 6, [1, 1, 1, 0, 1, 1], [1, 1, 1, 0, 0, 1], [0] * 6]
    trainer.plan = replace(trainer.plan, dropped_captions=1.0)
    captioned = ids + 7
    text = trainer.place_texts(captioned, torch.tensor([0, 2] * 32))
    assert text.second.int().tolist() == [[1, 1, 1, 0, 1, 1]] * batch
    assert torch.equal(text.ids[:, 0], captioned[:, 0])
    assert torch.equal(text.ids[:, 1], trainer.no_caption_ids.long().expand(batch, -1))


def test_contexts_are_nearly_what_they_stand_for(trainer):
    latents, text = torch.randn(8, 8, 6, 4, 4), chunk_text([False] * 6)
    text = ChunkText(text.ids.expand(8, -1, -1), text.second.expand(8, -1), text.padded_lens.expand(8))
    encoded = trainer.encoded(text, trainer.text_encoder)
    trainer.settings = replace(CAUSAL_TOY, own_steps=0.0, noised_contexts=0.0)
    assert torch.equal(trainer.contexts(latents, encoded), latents)
    trainer.settings = replace(CAUSAL_TOY, own_steps=0.0, noised_contexts=1.0)
    away = (trainer.contexts(latents, encoded) - latents).unflatten(2, (3, 2)).square().mean((1, 3, 4, 5))
    assert (away > 0).all() and away.max() < 4 * CAUSAL_TOY.context_noise**2
    # Of an untrained model's own contexts, those of half the chunks, nothing is right.
    trainer.settings = replace(CAUSAL_TOY, own_steps=1.0, own_contexts=0.5, noised_contexts=0.0)
    assert torch.equal(trainer.contexts(latents, encoded), latents)  # the training has only begun
    trainer.steps = trainer.own_after
    away = (trainer.contexts(latents, encoded) - latents).unflatten(2, (3, 2)).square().mean((1, 3, 4, 5))
    assert 4 < int((away > 1e-3).sum()) < 20 and int((away == 0).sum()) == 24 - int((away > 1e-3).sum())
    # What a model makes that knows the way is what should be there.
    noise = torch.randn_like(latents)
    trainer.noise_like, trainer.forward = lambda _: noise, AlongStraightLines(latents, noise, 0.0, lambda text: 0.0)
    torch.testing.assert_close(trainer.contexts(latents, encoded), latents, atol=1e-5, rtol=0)


class AlongStraightLines:
    """Stands for a forward whose velocity is the noise minus the clean clip, plus `pull` where it has a caption."""

    def __init__(self, clean, noise, pull, captioned):
        self.velocity, self.pull, self.captioned, self.calls = noise - clean, pull, captioned, 0

    def __call__(self, x, timestep, text, bias, **_):
        self.calls, self.levels = self.calls + 1, timestep[:, timestep.shape[1] // 2 :] / 1000
        both = torch.cat([self.velocity, self.velocity], 2)
        return both + self.pull * self.captioned(text)


def test_the_student_learns_where_the_guided_teacher_ends(trainer):
    """On straight ways every level's target is their end; guidance moves it as far as the teacher's captions pull."""
    settings = replace(CAUSAL_TOY, own_steps=0.0, guidance_scale=3.0)
    distiller = CausalDistiller(settings, distil_round(settings), CPU)
    clean, noise = torch.randn(2, 3, 8, 6, 4, 4)
    ids = tokenise(make_tokenizer(), list(CAPTIONS) * 3, 48).view(3, 2, 48).long()
    text = ChunkText(ids, torch.zeros(3, 6, dtype=torch.bool), torch.full((3,), 64))
    without = ChunkText(distiller.no_caption_ids.long().expand_as(ids), text.second, text.padded_lens)
    uncaptioned = distiller.encoded(without, distiller.teacher_text_encoder)[0]
    captioned = lambda text: float(not torch.allclose(text, uncaptioned))  # noqa: E731
    distiller.teacher_forward = AlongStraightLines(clean, noise, 0.5, captioned)
    distiller.forward = AlongStraightLines(clean, noise, 1.5, lambda text: 1.0)  # what guidance 3 makes of 0.5
    distiller.noise_like = lambda latents: noise
    seen = {}

    def regress(context, noisy, level, encoded, target):
        seen.update(level=level, target=target, noisy=noisy)
        return level, level

    distiller.regress = regress
    distiller.generator.manual_seed(0)
    distiller.learn(clean, text)
    assert distiller.teacher_forward.calls == 2 and set(seen["level"].flatten().tolist()) <= set(
        shifted(torch.arange(1, 5) / 4).tolist()
    )
    torch.testing.assert_close(seen["target"], noise - clean + 1.5, atol=1e-5, rtol=1e-5)
    # The teacher steps from a level, and the student is asked on the next lower one.
    torch.testing.assert_close(distiller.teacher_forward.levels, seen["level"])
    ladder = shifted(torch.arange(5) / 4)
    rung = (seen["level"].unsqueeze(-1) - ladder).abs().argmin(-1)
    torch.testing.assert_close(distiller.forward.levels, ladder[rung - 1])


def test_levels_of_a_stream_are_among_those_that_are_distilled():
    settings = CausalSettings()
    distilled = {round(float(1000 * shifted(torch.tensor(rung / settings.levels))), 3)
                 for rung in range(1, settings.levels + 1)}
    for steps in (4, 8):
        stream = CausalConfig(frames_per_chunk=3, recent_frames=12, steps=even_steps(steps), flow_shift=3.0)
        assert {round(t, 3) for t in stream.timesteps} <= distilled


def test_a_causal_stage_asks_for_the_one_before(base, tmp_path):
    run = ["--run", str(tmp_path / "run"), "--toy", "--device", "cpu"]
    with pytest.raises(ValueError, match="stage 'vae' is not finished"):
        main([*run, "--stages", "causal_latents"])
    with pytest.raises(ValueError, match="stage 'distil' has left nothing"):
        main([*run, "--stages", "export"])
