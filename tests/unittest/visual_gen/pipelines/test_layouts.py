"""Folders as Wan's authors publish them: loaded directly and after conversion, they are the diffusers original."""

import json
import shutil

import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image
from safetensors.torch import load_file
from transformers import CLIPImageProcessorPil

from visual_gen.checkpoint import CheckpointError
from visual_gen.models.wan import WanConfig, WanTransformer
from visual_gen.models.wan.layouts import open_weights, read_config, read_index
from visual_gen.pipelines import WanPipeline
from visual_gen.pipelines.components import load_text_encoder, load_vae
from visual_gen.pipelines.convert import convert
from visual_gen.pipelines.vae_config import empty_vae

CPU = torch.device("cpu")
KINDS = ("t2v", "i2v", "flf2v", "t2v-a14b", "i2v-a14b", "ti2v")
T5, VAE = "models_t5_umt5-xxl-enc-bf16.pth", "Wan2.1_VAE.pth"
SHARD = "diffusion_pytorch_model-00002-of-00002.safetensors"
RUN = {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 2, "max_sequence_length": 16,
       "progress": False}  # fmt: skip


@pytest.fixture(scope="session")
def converted(make_checkpoint, tmp_path_factory):
    made = {}

    def run(kind):
        if kind not in made:
            dest = tmp_path_factory.mktemp("converted") / kind
            made[kind] = convert(make_checkpoint(kind).authors, dest, max_shard_bytes=30_000)
        return made[kind]

    return run


@pytest.fixture
def authors(make_checkpoint, tmp_path):
    def copy(kind="t2v"):
        return shutil.copytree(make_checkpoint(kind).authors, tmp_path / "authors")

    return copy


def stored(folder):
    tensors = {name: x for file in sorted(folder.glob("*.safetensors")) for name, x in load_file(file).items()}
    # Published image encoders have this prefix, which transformers reads and no longer writes.
    return {name.removeprefix("vision_model."): x for name, x in tensors.items()}


def same(a, b):
    assert a.keys() == b.keys()
    assert all(a[name].dtype == x.dtype and torch.equal(a[name], x) for name, x in b.items())


@pytest.mark.parametrize("kind", KINDS)
def test_a_converted_folder_holds_the_original_tensors_and_settings(make_checkpoint, converted, kind):
    original, folder = make_checkpoint(kind).diffusers, converted(kind)
    parts = sorted(path.name for path in original.iterdir() if path.is_dir())
    extra = ["image_processor"] if (original / "image_encoder").is_dir() else []
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == sorted(parts + extra)
    for part in set(parts) - {"tokenizer", "scheduler"}:
        same(stored(folder / part), stored(original / part))
        shards = [load_file(file) for file in (folder / part).glob("*.safetensors")]
        assert all(len(shard) == 1 or sum(x.nbytes for x in shard.values()) <= 30_000 for shard in shards)
        assert len(shards) == 1 or any(len(shard) > 1 for shard in shards)
    ours, theirs = (json.loads((x / "model_index.json").read_text()) for x in (folder, original))
    del ours["_diffusers_version"]
    assert ours == theirs
    assert WanConfig.from_folder(folder / "transformer") == WanConfig.from_folder(original / "transformer")
    for part in ("vae", "text_encoder", "image_encoder"):
        if (original / part).is_dir():
            ours, theirs = (json.loads((x / part / "config.json").read_text()) for x in (folder, original))
            unset = {"_diffusers_version", "transformers_version", "dropout_rate", "initializer_factor", "num_labels"}
            differing = {k for k in ours.keys() & theirs.keys() - unset if ours[k] != theirs[k]}
            assert not differing, {k: (ours[k], theirs[k]) for k in differing}


@pytest.mark.parametrize("kind", KINDS)
def test_diffusers_own_loader_takes_a_converted_folder(make_checkpoint, converted, kind):
    ours, theirs = (DiffusionPipeline.from_pretrained(folder) for folder in (
        converted(kind), make_checkpoint(kind).diffusers if kind not in ("i2v", "flf2v") else converted(kind),
    ))  # fmt: skip
    assert type(ours) is type(theirs) and ours.config.boundary_ratio == theirs.config.boundary_ratio
    assert ours.scheduler.config.flow_shift == {"flf2v": 16.0, "ti2v": 5.0}.get(kind, 3.0)
    for name in ("transformer", "transformer_2", "vae", "text_encoder"):
        if getattr(theirs, name) is not None:
            same(getattr(ours, name).state_dict(), getattr(theirs, name).state_dict())
    if kind in ("i2v", "flf2v"):
        size = ours.image_encoder.config.image_size
        assert ours.image_processor.crop_size["height"] == size == 8
        original = stored(make_checkpoint(kind).diffusers / "image_encoder")
        found = ours.image_encoder.state_dict()
        assert len(original) == len(found)
        assert all(torch.equal(found[k], x.float()) for k, x in original.items())


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_every_transformer_of_an_authors_folder_is_the_original(make_checkpoint, kind):
    made = make_checkpoint(kind)
    pairs = {"transformer": made.authors}
    if "a14b" in kind:
        pairs = {"transformer": made.authors / "high_noise_model", "transformer_2": made.authors / "low_noise_model"}
    for part, folder in pairs.items():
        original = WanTransformer.from_pretrained(made.diffusers / part)
        found = WanTransformer.from_pretrained(folder)
        assert found.config == original.config
        same(found.state_dict(), original.state_dict())
    whole = WanTransformer.from_pretrained(made.authors)  # of two experts, the one for high noise
    same(whole.state_dict(), WanTransformer.from_pretrained(made.diffusers / "transformer").state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_frames_are_the_originals_bit_for_bit(make_checkpoint, converted, tmp_path, kind):
    made, images = make_checkpoint(kind), {}
    original = shutil.copytree(made.diffusers, tmp_path / "original")
    if (original / "image_encoder").is_dir():
        CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8}).save_pretrained(
            original / "image_processor"
        )
    if kind not in ("t2v", "t2v-a14b"):
        images["image"] = Image.effect_noise((40, 40), 60).convert("RGB")
    if kind in ("flf2v", "i2v-a14b"):
        images["last_image"] = Image.effect_noise((40, 40), 60).convert("RGB")
    frames, steps = [], []
    for folder in (original, made.authors, converted(kind)):
        output = WanPipeline.from_pretrained(folder, progress=False)(
            "a red circle", negative_prompt="a", generator=torch.Generator().manual_seed(0), **RUN, **images
        )
        frames.append(output.frames)
        steps.append(output.record.expert_steps)
    assert (frames[0] == frames[1]).all() and (frames[0] == frames[2]).all()
    assert steps == [[0, 1] if "a14b" in kind else []] * 3


@pytest.mark.parametrize("kind", ["t2v", "ti2v"])
def test_vae_and_text_encoder_are_the_originals_in_any_dtype(make_checkpoint, kind):
    made = make_checkpoint(kind)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for load, part in ((load_vae, "vae"), (load_text_encoder, "text_encoder")):
            ours, theirs = (load(x / part, dtype=dtype, device=CPU) for x in (made.authors, made.diffusers))
            same(ours.state_dict(), theirs.state_dict())
            assert {p.dtype for n, p in ours.named_parameters() if ".wo." not in n} == {dtype}
    config = empty_vae(made.authors / "vae").config
    assert (config.z_dim, config.scale_factor_spatial) == ((48, 16) if kind == "ti2v" else (16, 8))


def test_a_text_encoder_loads_as_transformers_loads_it(make_checkpoint):
    """What from_pretrained gives, tied embedding and the layer that stays fp32 included."""
    from transformers import UMT5EncoderModel

    folder = make_checkpoint("t2v").diffusers / "text_encoder"
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        ours = load_text_encoder(folder, dtype=dtype, device=CPU)
        theirs = UMT5EncoderModel.from_pretrained(folder, dtype=dtype).eval()
        same(ours.state_dict(), theirs.state_dict())
        assert ours.shared.weight is ours.encoder.embed_tokens.weight
        ids = torch.tensor([[3, 17, 1]])
        with torch.no_grad():
            assert torch.equal(ours(ids).last_hidden_state, theirs(ids).last_hidden_state)


def test_plan_reads_an_authors_folder(make_checkpoint):
    from visual_gen.config import RunConfig
    from visual_gen.runtime.model import find_model

    for kind, experts, scale in (("t2v", 1, 8), ("i2v", 1, 8), ("t2v-a14b", 2, 8), ("ti2v", 1, 16)):
        found, original = (
            find_model(RunConfig.model_validate({"model": {"path": str(folder)}}))
            for folder in (make_checkpoint(kind).authors, make_checkpoint(kind).diffusers)
        )
        assert (found.num_experts, found.geometry.spatial_scale) == (experts, scale)
        assert found.timestep_per_token == (kind == "ti2v")
        assert (found.vae, found.text_encoder) == (original.vae, original.text_encoder) and found.vae.parameters
        assert found.image_encoder == original.image_encoder and (found.image_encoder is None) == (kind != "i2v")


@pytest.mark.parametrize(
    ("remove", "says"),
    [
        (SHARD, f"lacks 1 of the 2 files .*{SHARD}"),
        (T5, r"lacks its text encoder \(models_t5_\*.pth\)"),
        (VAE, "lacks its vae .Wan2.1_VAE.pth or Wan2.2_VAE.pth"),
        ("google", "google/umt5-xxl/tokenizer_config.json is missing"),
        ("config.json", "config.json is missing"),
    ],
)
def test_a_missing_file_is_named_before_anything_is_loaded(authors, tmp_path, monkeypatch, remove, says):
    monkeypatch.setattr("visual_gen.pipelines.components.load_text_encoder", lambda *_, **__: pytest.fail("loaded"))
    folder = authors()
    path = folder / remove
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(ValueError, match=says):
        WanPipeline.from_pretrained(folder, progress=False)
    with pytest.raises(ValueError, match=says):
        convert(folder, tmp_path / "dest")
    assert not (tmp_path / "dest").exists()


@pytest.mark.parametrize("file", [SHARD, T5, VAE])
@pytest.mark.parametrize("keep", [0.5, 0.99])
def test_a_truncated_file_is_named_before_anything_is_loaded(authors, tmp_path, monkeypatch, file, keep):
    monkeypatch.setattr("visual_gen.pipelines.components.load_text_encoder", lambda *_, **__: pytest.fail("loaded"))
    folder = authors()
    content = (folder / file).read_bytes()
    (folder / file).write_bytes(content[: int(keep * len(content))])
    for load in (lambda: WanPipeline.from_pretrained(folder, progress=False), lambda: convert(folder, tmp_path / "d")):
        with pytest.raises(CheckpointError, match=f"{file} is (truncated|damaged)"):
            load()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["authors"]


@pytest.mark.parametrize("missing", ["high_noise_model", "low_noise_model"])
def test_the_second_expert_is_asked_for(authors, tmp_path, missing):
    folder = authors("t2v-a14b")
    shutil.rmtree(folder / missing)
    for load in (lambda: read_index(folder), lambda: convert(folder, tmp_path / "d"),
                 lambda: WanTransformer.from_pretrained(folder)):  # fmt: skip
        with pytest.raises(CheckpointError, match=f"{missing} is missing, the other of Wan 2.2's two experts"):
            load()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "vace"}, "model_type 'vace'; served are t2v"),
        ({"vace_layers": [0]}, "unknown key.s. vace_layers"),
        ({"num_heads": 5}, "dim 24 is no multiple of num_heads 5"),
        ({"num_layers": 3}, "missing: blocks.2"),
        ({"_class_name": "VaceWanModel"}, "VaceWanModel; of the authors' models only WanModel"),
    ],
)
def test_settings_that_are_not_wans_are_refused(authors, tmp_path, change, says):
    folder = authors()
    config = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=says):
        convert(folder, tmp_path / "dest")


def test_a_file_of_another_model_is_refused_by_its_tensors(authors, tmp_path):
    folder = authors()
    shutil.copy(folder / VAE, folder / T5)
    with pytest.raises(CheckpointError, match=f"{T5} has no tensor 'token_embedding.weight', so it is no T5"):
        read_config(folder / "text_encoder")
    state = torch.load(folder / VAE)
    state["encoder.stray.weight"] = state.pop("encoder.conv1.bias")
    torch.save(state, folder / VAE)
    with pytest.raises(CheckpointError, match=f"{VAE} holds tensors that no such model has: encoder.stray.weight"):
        open_weights(folder / "vae")


def test_two_vaes_are_one_too_many(authors):
    folder = authors()
    shutil.copy(folder / VAE, folder / "Wan2.2_VAE.pth")
    with pytest.raises(CheckpointError, match="holds Wan2.1_VAE.pth, Wan2.2_VAE.pth .* keep the one"):
        read_index(folder)


def test_an_unknown_folder_is_refused_with_what_was_looked_for(tmp_path):
    (tmp_path / "some").mkdir()
    for load in (lambda: WanPipeline.from_pretrained(tmp_path / "some", progress=False),
                 lambda: convert(tmp_path / "some", tmp_path / "dest")):  # fmt: skip
        with pytest.raises(CheckpointError, match=r"model_index.json .*high_noise_model.*models_t5_\*.pth.*Wan2.1_VAE"):
            load()
