"""LoRA files through the pipeline, the configuration and `visual-gen generate`."""

import json

import pytest
import torch
import yaml
from safetensors.torch import save_file

from visual_gen.checkpoint import CheckpointError
from visual_gen.cli import main
from visual_gen.config import ConfigError, load_config
from visual_gen.models.wan import WanTransformer
from visual_gen.pipelines import WanPipeline
from visual_gen.pipelines.experts import Experts
from visual_gen.pipelines.lora import check_loras
from visual_gen.runtime.plan import plan

Q = "diffusion_model.blocks.3.self_attn.q"


@pytest.fixture
def lora(tmp_path, pipe):
    """A file of one pair, and one for a model of another size."""
    generator = torch.Generator().manual_seed(0)
    size = pipe.transformer.config.hidden_size

    def write(name, size):
        state = {f"{Q}.lora_down.weight": torch.randn(4, size, generator=generator),
                 f"{Q}.lora_up.weight": torch.randn(size, 4, generator=generator)}  # fmt: skip
        save_file(state, tmp_path / name)
        return tmp_path / name

    return write("style.safetensors", size), write("other.safetensors", 2 * size)


def test_frames_change_and_come_back_bit_for_bit(pipe, generate, lora):
    before = generate().frames
    assert pipe.load_lora(lora[0], scale=0.5) == "style"
    output = generate()
    assert output.record.lora_scales == {"transformer": {"style": 0.5}}
    assert abs(output.frames - before).max() > 1e-3
    pipe.set_lora_scale("style", 0.0)
    assert abs(generate().frames - before).max() < 1e-5
    pipe.unload_lora("style")
    assert pipe.lora_scales == {} and (generate().frames == before).all()


def test_a_fused_lora_is_in_the_weights(lora):
    pipe = WanPipeline.from_pretrained("wan-shapes", progress=False)
    weight = pipe.transformer.blocks[3].self_attn.to_qkv.weight.clone()
    pipe.load_lora(lora[0])
    pipe.fuse_lora()
    fused = pipe.transformer.blocks[3].self_attn.to_qkv.weight
    rows = weight.shape[0] // 3
    assert not torch.equal(fused[:rows], weight[:rows]) and torch.equal(fused[rows:], weight[rows:])
    with pytest.raises(ValueError, match="no LoRA is loaded"):
        pipe.fuse_lora()


def test_each_of_two_transformers_has_its_own(pipe, lora, monkeypatch):
    with pytest.raises(ValueError, match="no 'transformer_2'; it has transformer"):
        pipe.load_lora(lora[0], transformer="transformer_2")
    second = WanTransformer(pipe.transformer.config)
    monkeypatch.setattr(pipe, "experts", Experts([pipe.transformer, second], 900.0, one_on_device=True))
    pipe.load_lora(lora[0], name="a", scale=0.1)
    pipe.load_lora(lora[0], name="a", scale=0.2, transformer="transformer_2")
    assert pipe.experts.exchanges == 1  # loaded where it will run
    assert pipe.lora_scales == {"transformer": {"a": 0.1}, "transformer_2": {"a": 0.2}}
    pipe.set_lora_scale("a", 0.3)
    assert second.lora_scales == pipe.transformer.lora_scales == {"a": 0.3}
    pipe.unload_lora()
    assert pipe.lora_scales == {}
    for call in (pipe.unload_lora, lambda name: pipe.set_lora_scale(name, 1)):
        with pytest.raises(ValueError, match="no LoRA 'a' is loaded; loaded are none"):
            call("a")


def held_bytes(model):
    return sum(x.numel() * x.element_size() for x in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_plan_counts_the_bytes_that_loading_takes_and_that_fusing_gives_back(tmp_path, lora, dtype):
    one, hidden = torch.ones, 256
    mixed = {f"{Q}.lora_down.weight": one(4, hidden), f"{Q}.lora_up.weight": one(hidden, 4),
             f"{Q.replace('.q', '.v')}.lora_down.weight": one(2, hidden),
             f"{Q.replace('.q', '.v')}.lora_up.weight": one(hidden, 2), f"{Q}.alpha": torch.tensor(2.0),
             "diffusion_model.time_embedding.0.lora_down.weight": one(3, 256),
             "diffusion_model.time_embedding.0.lora_up.weight": one(hidden, 3),
             "diffusion_model.blocks.0.norm3.diff_b": one(hidden)}  # fmt: skip
    save_file(mixed, tmp_path / "mixed.safetensors")
    files = [str(lora[0]), str(tmp_path / "mixed.safetensors")]
    path = configuration(tmp_path, [{"path": file} for file in files])
    found = plan(load_config(path, [f"dtype={str(dtype).removeprefix('torch.')}"]))

    model = WanTransformer.from_pretrained("wan-shapes", dtype=dtype)
    assert model.config.hidden_size == hidden
    bare = held_bytes(model)
    for file in files:
        model.load_lora(file)
    assert found.memory_bytes["lora"] == held_bytes(model) - bare > 0
    assert found.memory_bytes["weights"] == bare
    assert any("counted unfused" in note and "its bytes to 0" in note for note in found.notes)
    model.fuse_lora()
    assert held_bytes(model) == bare


def test_a_plan_says_which_lora_it_could_not_count_and_refuses_one_that_does_not_fit(tmp_path, lora, capsys):
    absent = plan(load_config(configuration(tmp_path, [{"path": "none.safetensors"}])))
    assert "lora" not in absent.memory_bytes
    assert any(note.startswith("Not counted: LoRA of none.safetensors") for note in absent.notes)
    assert not any("LoRA" in note for note in plan(load_config(configuration(tmp_path, []))).notes)
    with pytest.raises(CheckpointError, match="other.safetensors does not fit"):
        plan(load_config(configuration(tmp_path, [{"path": str(lora[1])}])))
    assert main(["plan", "--config", str(configuration(tmp_path, [{"path": str(lora[0])}]))]) == 0
    assert "LoRA, unfused" in capsys.readouterr().out


def configuration(tmp_path, loras):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({
        "model": {"path": "wan-shapes"}, "device": "cpu", "lora": loras, "output": {"path": str(tmp_path / "v.mp4")},
        "generation": {"prompt": "a red circle", "height": 32, "width": 48, "num_frames": 5, "guidance_scale": 1.0,
                       "num_inference_steps": 1, "max_sequence_length": 48},
    }))  # fmt: skip
    return path


def test_the_configuration_loads_them_and_the_report_says_so(tmp_path, lora):
    path = configuration(tmp_path, [{"path": str(lora[0]), "scale": 0.5}])
    assert main(["generate", "--config", str(path)]) == 0
    report = json.loads((tmp_path / "v.report.json").read_text())
    assert report["run"]["lora_scales"] == {"transformer": {str(lora[0]): 0.5}}
    assert report["settings"]["lora"][0]["scale"] == 0.5


@pytest.mark.parametrize("which, says", [(1, r"other.safetensors does not fit .* where \["), (None, "is missing")])
def test_a_lora_that_does_not_fit_is_refused_before_weights_are_read(tmp_path, lora, monkeypatch, capsys, which, says):
    monkeypatch.setattr(WanPipeline, "from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    file = tmp_path / "none.safetensors" if which is None else lora[which]
    assert main(["generate", "--config", str(configuration(tmp_path, [{"path": str(file)}]))]) == 2
    assert not list(tmp_path.glob("v*"))
    config = load_config(tmp_path / "config.yaml")
    with pytest.raises(CheckpointError, match=says):
        check_loras("wan-shapes", config.lora)


@pytest.mark.parametrize(
    ("loras", "says"),
    [
        ([{"path": "a", "scal": 1}], r"lora.0.scal: unknown key; did you mean scale\? \(lora has path, scale, transf"),
        ([{"scale": 1.0}], "lora.0.path: is missing"),
        ([{"path": "a", "scale": float("inf")}], "lora.0.scale"),
        ({"path": "a"}, r"wants a list, such as"),
        ([{"path": "a", "transformer": "vae"}], "lora.0.transformer"),
    ],
)
def test_mistakes_in_the_list_are_named(tmp_path, loras, says):
    with pytest.raises(ConfigError, match=says):
        load_config(configuration(tmp_path, loras))
