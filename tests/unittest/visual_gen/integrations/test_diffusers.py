"""diffusers' own pipelines with our attention under them, against themselves without it."""

import pytest
import torch
from diffusers import DiffusionPipeline, WanVACEPipeline
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from PIL import Image

from attention_backend import AttentionBackendError
from attention_backend.sdpa import SDPABackend
from visual_gen.integrations import diffusers as integration
from visual_gen.integrations.diffusers import use
from visual_gen.pipelines.convert import convert

RUN = {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 2, "max_sequence_length": 512,
       "output_type": "latent"}  # fmt: skip
EXACT = ("padded", "packed_pad_exact")


@pytest.fixture(scope="module")
def pipelines(make_checkpoint, tmp_path_factory):
    made = {}

    def get(kind):
        if kind not in made:
            folder = make_checkpoint(kind).diffusers
            if kind == "i2v":  # for the image processor
                folder = convert(make_checkpoint(kind).authors, tmp_path_factory.mktemp("i2v") / "folder")
            made[kind] = DiffusionPipeline.from_pretrained(folder, torch_dtype=torch.float32)
            made[kind].set_progress_bar_config(disable=True)
        return made[kind]

    return get


@pytest.fixture
def calls(monkeypatch):
    """Every call that reaches a backend: q, k, v shapes, and whether K/V are packed."""
    seen = []
    attend = SDPABackend.attend

    def noting(self, q, k, v, *args, **kwargs):
        seen.append((self.spec.role, tuple(q.shape), tuple(k.shape)))
        return attend(self, q, k, v, *args, **kwargs)

    monkeypatch.setattr(SDPABackend, "attend", noting)
    return seen


def run(pipe, **changes):
    arguments = RUN | {"prompt": ["a red circle", "a"], "generator": torch.Generator().manual_seed(0)} | changes
    if "ImageToVideo" in type(pipe).__name__:
        pixels = torch.randint(0, 256, (32, 32, 3), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
        arguments |= {"image": Image.fromarray(pixels.numpy()), "prompt": "a red circle"}
    return pipe(**arguments).frames


@pytest.mark.parametrize("cross_kv", EXACT)
@pytest.mark.parametrize("kind", ["t2v", "t2v-a14b", "ti2v", "i2v"])
def test_the_latents_are_those_of_the_pipeline_alone(pipelines, calls, kind, cross_kv):
    pipe = pipelines(kind)
    arguments = {"height": 64, "width": 64} if kind == "ti2v" else {}
    before = run(pipe, **arguments)
    assert not calls
    with use(pipe, {"cross_kv": cross_kv}) as used:
        inside = run(pipe, **arguments)
    scale = before.abs().max()
    assert (inside - before).abs().max() <= 1e-5 * scale
    roles = {"self", "cross_text"} | ({"cross_image"} if kind == "i2v" else set())
    assert set(used.choices) == roles == {role for role, *_ in calls}
    assert {choice.name for choice in used.choices.values()} == {"sdpa"}
    packed = {len(k) == 3 for role, _, k in calls if role == "cross_text"}
    assert packed == {cross_kv != "padded"}
    if cross_kv != "padded":
        assert max(k[0] for role, _, k in calls if role == "cross_text") < 100, "of 512 rows for each text"
    count = len(calls)
    assert torch.equal(run(pipe, **arguments), before) and len(calls) == count


def test_packed_is_another_video(pipelines):
    pipe = pipelines("t2v")
    before = run(pipe)
    with use(pipe, {"cross_kv": "packed"}):
        assert (run(pipe) - before).abs().max() > 1e-3 * before.abs().max()


def test_fused_projections_of_diffusers_are_used(pipelines):
    pipe = pipelines("i2v")
    before = run(pipe)
    pipe.transformer.fuse_qkv_projections()
    try:
        with use(pipe, {"cross_kv": "packed_pad_exact"}):
            inside = run(pipe)
    finally:
        pipe.transformer.unfuse_qkv_projections()
    assert (inside - before).abs().max() <= 1e-5 * before.abs().max()


def test_lengths_are_read_once_for_a_text_and_again_when_it_changes(pipelines, monkeypatch):
    pipe, read = pipelines("t2v"), []
    real_rows = integration._real_rows
    monkeypatch.setattr(integration, "_real_rows", lambda text: read.append(real_rows(text)) or read[-1])
    with use(pipe, {"cross_kv": "packed_pad_exact"}):
        run(pipe, num_inference_steps=4)
        assert len(read) == 2 and all(len(lens) == 2 for lens in read), read  # the prompts', the negative prompts'
        text = torch.zeros(1, 512, 16)
        text[0, :9] = 1
        inputs = {"hidden_states": torch.randn(1, 16, 1, 4, 4), "timestep": torch.tensor([5.0])}
        with torch.no_grad():
            first = pipe.transformer(**inputs, encoder_hidden_states=text).sample
            text[0, 9:12] = 1
            second = pipe.transformer(inputs["hidden_states"], inputs["timestep"], text).sample
        assert read[2:] == [(9,), (12,)]
    with torch.no_grad():
        torch.testing.assert_close(second, pipe.transformer(**inputs, encoder_hidden_states=text).sample)
    assert not torch.allclose(first, second)


@pytest.mark.parametrize("rows", [0, 1, 511, 512])
@torch.no_grad()
def test_texts_of_every_length(pipelines, rows):
    """No real row at all, one, all but one, all; a zero row inside is a real one."""
    transformer = pipelines("t2v").transformer
    text = torch.zeros(2, 512, 16)
    text[0, :rows] = torch.randn(rows, 16)
    text[0, : max(rows - 1, 0) : 2] = 0
    text[1, :7] = torch.randn(7, 16)
    inputs = {"hidden_states": torch.randn(2, 16, 1, 4, 4), "timestep": torch.tensor([5.0, 7.0]),
              "encoder_hidden_states": text}  # fmt: skip
    before = transformer(**inputs).sample
    with use(pipelines("t2v"), {"cross_kv": "packed_pad_exact"}):
        torch.testing.assert_close(transformer(**inputs).sample, before, rtol=1e-5, atol=1e-5)


def test_undo_gives_the_same_processors_back_once(pipelines):
    pipe = pipelines("t2v-a14b")
    before = [list(model.attn_processors.values()) for model in (pipe.transformer, pipe.transformer_2)]
    used = use(pipe)
    assert not any(type(p) is WanAttnProcessor for p in pipe.transformer_2.attn_processors.values())
    used.undo()
    used.undo()
    after = [list(model.attn_processors.values()) for model in (pipe.transformer, pipe.transformer_2)]
    assert all(a is b for left, right in zip(before, after, strict=True) for a, b in zip(left, right, strict=True))
    assert not pipe.transformer._forward_pre_hooks and not pipe.transformer_2._forward_pre_hooks


def test_a_model_that_is_cast_takes_its_backends_anew(pipelines):
    pipe = pipelines("t2v")
    with use(pipe):
        pipe.transformer.to(torch.bfloat16)
        try:
            with torch.no_grad():
                out = pipe.transformer(
                    torch.randn(1, 16, 1, 4, 4).bfloat16(), torch.tensor([5.0]), torch.randn(1, 512, 16).bfloat16()
                ).sample
        finally:
            pipe.transformer.to(torch.float32)
    assert out.isfinite().all() and out.dtype == torch.bfloat16


def test_what_is_not_known_is_refused_and_nothing_changed(pipelines):
    pipe = pipelines("t2v")
    vace = WanVACEPipeline.__new__(WanVACEPipeline)
    with pytest.raises(ValueError, match="pipe is a WanVACEPipeline; served are diffusers' WanPipeline"):
        use(vace)
    for config, says in (
        ({"self": "FA9"}, "no attention backend 'FA9'"),
        ({"cross_kv": "ragged"}, "cross_kv"),
        ({"cross_image": "sdpa"}, "has no image tokens"),
        ({"cross_text": "flash_attn4"}, "'flash_attn4' cannot serve cross_text"),
    ):
        with pytest.raises(ValueError, match=says):
            use(pipe, config)
    assert all(type(p) is WanAttnProcessor for p in pipe.transformer.attn_processors.values())
    with use(pipe), pytest.raises(ValueError, match="has the attention processor _Processor: take it off first"):
        use(pipe)
    assert issubclass(AttentionBackendError, ValueError)
    with use(pipe), pytest.raises(ValueError, match="an attention mask was given"):
        attention = pipe.transformer.blocks[0].attn1
        attention(torch.randn(1, 4, 24), None, torch.ones(1, 4), None)
