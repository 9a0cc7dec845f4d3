"""visual-gen convert: what it needs of the host, what it leaves when it fails, and distilled models' .pt files."""

import json
import subprocess
import sys
import textwrap

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unittest.visual_gen import authors_names
from visual_gen.checkpoint import CheckpointError, WeightFiles
from visual_gen.cli import main
from visual_gen.models.wan import CausalWanTransformer, WanTransformer
from visual_gen.pipelines.convert import convert
from visual_gen.runtime.sharding import write_shards


def distilled(folder, key="generator_ema"):
    """A .pt file as Self-Forcing saves it, with weights that are the folder's negated."""
    weights = {name: -x for name, x in WeightFiles.open(folder / "transformer").tensors()}
    path = folder.parent / f"{key}.pt"
    state = {f"model.{authors_names.transformer(name)}": x for name, x in weights.items()}
    torch.save({key: state, "step": 3}, path)
    return path, weights


@pytest.mark.parametrize("layout", ["authors", "diffusers"])
def test_a_distilled_models_file_takes_the_rest_from_its_base(make_checkpoint, tmp_path, layout, capsys):
    made = make_checkpoint("t2v")
    path, weights = distilled(made.diffusers)
    base, dest = getattr(made, layout), tmp_path / "dest"
    assert main(["convert", str(path), str(dest), "--base", str(base)]) == 0
    assert capsys.readouterr().out.strip() == str(dest)
    found = load_file(dest / "transformer" / "diffusion_pytorch_model.safetensors")
    assert found.keys() == weights.keys() and all(torch.equal(found[name], x) for name, x in weights.items())
    for part, file in (("vae", "diffusion_pytorch_model"), ("text_encoder", "model")):
        original, kept = (load_file(x / part / f"{file}.safetensors") for x in (made.diffusers, dest))
        assert original.keys() == kept.keys() and all(torch.equal(kept[name], x) for name, x in original.items())
    ours = CausalWanTransformer.from_pretrained(dest)
    direct = CausalWanTransformer.from_pickle(path, ours.config)
    assert all(torch.equal(x, y) for x, y in zip(ours.parameters(), direct.parameters(), strict=True))
    both = WanTransformer.from_pickle(path, ours.config, state_dict="generator_ema")
    assert type(both) is WanTransformer


def test_which_weights_of_the_file_can_be_said(make_checkpoint, tmp_path):
    made = make_checkpoint("t2v")
    path, _ = distilled(made.diffusers, key="critic")
    with pytest.raises(CheckpointError, match="no tensors under generator_ema or generator"):
        convert(path, tmp_path / "dest", base=made.authors)
    convert(path, tmp_path / "dest", base=made.authors, state_dict="critic")


def test_what_does_not_go_together_is_refused(make_checkpoint, tmp_path):
    made, experts = make_checkpoint("t2v"), make_checkpoint("t2v-a14b")
    path, _ = distilled(made.diffusers)
    (tmp_path / "there").mkdir()
    for source, dest, base, says in (
        (made.authors, "there", None, "there exists already"),
        (made.diffusers, "dest", None, "has diffusers' layout already"),
        (made.authors, "dest", made.authors, "--base goes with a .pt file"),
        (path, "dest", None, "give --base"),
        (path, "dest", experts.authors, "has two transformers"),
        (path, "dest", make_checkpoint("ti2v").authors, "wrongly shaped: .*patch_embedding"),
        (tmp_path / "nowhere", "dest", None, "nowhere is missing"),
    ):
        with pytest.raises(ValueError, match=says):
            convert(source, tmp_path / dest, base=base)
    assert sorted(x.name for x in tmp_path.iterdir()) == ["there"]


@pytest.mark.parametrize("base", [False, True])
def test_a_file_of_another_kind_is_named_before_a_base_is_asked_for(make_checkpoint, tmp_path, base):
    (tmp_path / "some.txt").write_text("a red circle\n")
    with pytest.raises(CheckpointError, match="some.txt is damaged, or is no .pt file as torch.save writes"):
        convert(tmp_path / "some.txt", tmp_path / "dest", base=make_checkpoint("t2v").authors if base else None)


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_conversion_that_fails_leaves_nothing(make_checkpoint, tmp_path, monkeypatch, error):
    def fail(weights, folder, **_):
        (folder / "half").write_text("written")
        raise error

    monkeypatch.setattr("visual_gen.pipelines.convert.write_shards", fail)
    with pytest.raises(type(error)):
        convert(make_checkpoint("t2v").authors, tmp_path / "dest")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_seen_before_anything_is_written(make_checkpoint, tmp_path, monkeypatch):
    import shutil
    from types import SimpleNamespace

    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    monkeypatch.setattr("visual_gen.pipelines.convert.write_shards", lambda *_, **__: pytest.fail("written"))
    with pytest.raises(OSError, match="0.0 GB free"):
        convert(make_checkpoint("t2v").authors, tmp_path / "dest")


def test_shards_keep_every_dtype_and_shape_and_are_what_an_index_says(tmp_path):
    tensors = {
        "scalar": torch.tensor(3.5), "empty": torch.zeros(0, 3), "a": torch.randn(5, 7), "h": torch.randn(9).half(),
        "b": torch.randn(3, 4).bfloat16(), "strided": torch.randn(6, 4).T,
    }  # fmt: skip
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    save_file({name: x.contiguous() for name, x in tensors.items()}, tmp_path / "in" / "m.safetensors")
    write_shards(WeightFiles.open(tmp_path / "in", "m"), tmp_path / "out", stem="m", max_shard_bytes=100)
    written = WeightFiles.open(tmp_path / "out", "m")
    assert len(written.files) > 1
    found = {name: x.clone() for name, x in written.tensors()}
    assert found.keys() == tensors.keys()
    assert all(found[name].dtype == x.dtype and torch.equal(found[name], x) for name, x in tensors.items())
    index = json.loads((tmp_path / "out" / "m.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in tensors.values())


def test_the_host_holds_no_more_than_the_largest_file(tmp_path):
    """Peak resident memory, mapped files counted in, from shards and from a .pt file of large tensors."""
    file_bytes = 80_000_000
    source = tmp_path / "source"
    source.mkdir()
    names = [f"m-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    weight_map = {}
    for i, name in enumerate(names):
        shard = {f"{i}.{j}": torch.ones(1_000_000) for j in range(file_bytes // 4_000_000)}
        save_file(shard, source / name)
        weight_map |= dict.fromkeys(shard, name)
    (source / "m.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    torch.save({"generator": shard}, tmp_path / "file.pt")
    script = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        import torch
        from visual_gen.checkpoint import WeightFiles
        from visual_gen.models.wan.authors_names import PickledWeights
        from visual_gen.runtime.sharding import write_shards

        def resident(key):
            status = Path("/proc/self/status").read_text()
            return int(status.split(key + ":")[1].split()[0]) * 1024

        source, pickle, out = map(Path, sys.argv[1:])
        for i, open_ in enumerate((lambda: WeightFiles.open(source, "m"), lambda: PickledWeights.open_file(pickle))):
            Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
            before = resident("VmRSS")
            (out / str(i)).mkdir(parents=True)
            write_shards(open_(), out / str(i), stem="m", max_shard_bytes=30_000_000)
            print(resident("VmHWM") - before)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script, source, tmp_path / "file.pt", tmp_path / "out"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    peaks = [int(line) for line in done.stdout.split()]
    assert len(peaks) == 2 and all(0 < peak < 1.2 * file_bytes for peak in peaks), peaks
