import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from visual_gen.checkpoint import PACKAGED_CHECKPOINTS, CheckpointError, WeightFiles, resolve_folder

STEM = "diffusion_pytorch_model"
TENSORS = {
    "a": torch.arange(6.0).view(2, 3),
    "b": torch.arange(4, dtype=torch.int64),
    "c": torch.full((3, 1), 0.5, dtype=torch.bfloat16),
}


@pytest.fixture
def single(tmp_path):
    save_file(TENSORS, tmp_path / f"{STEM}.safetensors")
    return tmp_path


@pytest.fixture
def sharded(tmp_path):
    write_shards(tmp_path, {"one.safetensors": ["a"], "two.safetensors": ["b", "c"]})
    return tmp_path


def write_shards(folder, shards, weight_map=None):
    for file, names in shards.items():
        save_file({name: TENSORS[name] for name in names}, folder / file)
    named = {name: file for file, names in shards.items() for name in names}
    index = {"metadata": {}, "weight_map": named if weight_map is None else weight_map}
    (folder / f"{STEM}.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_shapes_and_dtypes_come_from_headers_and_tensors_from_one_pass(layout, request):
    weights = WeightFiles.open(request.getfixturevalue(layout))
    assert weights.shapes == {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}
    assert weights.dtypes == {name: tensor.dtype for name, tensor in TENSORS.items()}
    read = list(weights.tensors())
    assert sorted(name for name, _ in read) == sorted(TENSORS)
    assert all(torch.equal(tensor, TENSORS[name]) for name, tensor in read)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"nowhere is missing: download"):
        WeightFiles.open(tmp_path / "nowhere")


def test_a_missing_file_is_named_with_what_lies_there_instead(tmp_path):
    (tmp_path / f"{STEM}.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=rf"{STEM}.safetensors is missing.*{STEM}.bin, which are not read"):
        WeightFiles.open(tmp_path)


def test_a_missing_shard_is_named(sharded):
    (sharded / "two.safetensors").unlink()
    with pytest.raises(CheckpointError, match="lacks 1 of the 2 files .*: two.safetensors: download"):
        WeightFiles.open(sharded)


def test_two_copies_of_the_weights_are_refused(single):
    write_shards(single, {"one.safetensors": ["a"]})
    with pytest.raises(CheckpointError, match="two copies of the weights"):
        WeightFiles.open(single)


@pytest.mark.parametrize("kept", [0, 5, 40, -1])
@pytest.mark.parametrize("layout, file", [("single", f"{STEM}.safetensors"), ("sharded", "two.safetensors")])
def test_a_truncated_file_is_named_wherever_it_ends(layout, file, kept, request):
    path = request.getfixturevalue(layout) / file
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=rf"{file} is truncated.*download it again"):
        WeightFiles.open(path.parent)


def test_a_file_longer_than_its_header_says_is_damaged(single):
    path = single / f"{STEM}.safetensors"
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(CheckpointError, match="is damaged: .* bytes, where its header says"):
        WeightFiles.open(single)


def test_other_contents_are_recognised(single):
    path = single / f"{STEM}.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    with pytest.raises(CheckpointError, match="Git LFS pointer.*git lfs pull"):
        WeightFiles.open(single)
    path.write_bytes(b"PK\x03\x04" * 64)
    with pytest.raises(CheckpointError, match="is not a safetensors file"):
        WeightFiles.open(single)


@pytest.mark.parametrize(
    "entry, said",
    [
        ({"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}, "8 bytes for a F32 tensor of shape"),
        ({"dtype": "F4", "shape": [2], "data_offsets": [0, 8]}, "dtype 'F4'"),
        ({"dtype": "F32", "shape": [2]}, "data_offsets"),
    ],
)
def test_a_header_that_contradicts_itself_is_damaged(tmp_path, entry, said):
    header = json.dumps({"a": entry}).encode()
    (tmp_path / f"{STEM}.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(CheckpointError, match=f"damaged header .*{said}"):
        WeightFiles.open(tmp_path)


def test_an_index_that_names_a_tensor_no_shard_has(tmp_path):
    write_shards(tmp_path, {"one.safetensors": ["a"]}, {"a": "one.safetensors", "ghost": "one.safetensors"})
    with pytest.raises(CheckpointError, match="one.safetensors holds ghost, but it does not"):
        WeightFiles.open(tmp_path)


def test_an_index_that_leaves_a_tensor_out(tmp_path):
    write_shards(tmp_path, {"one.safetensors": ["a", "b"]}, {"a": "one.safetensors"})
    with pytest.raises(CheckpointError, match="does not name b"):
        WeightFiles.open(tmp_path)


def test_a_tensor_in_two_shards(tmp_path):
    write_shards(
        tmp_path,
        {"one.safetensors": ["a", "b"], "two.safetensors": ["b", "c"]},
        {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"},
    )
    with pytest.raises(CheckpointError, match="tensor 'b' is in both .*one.safetensors and two.safetensors"):
        WeightFiles.open(tmp_path)


@pytest.mark.parametrize(
    "content, said",
    [
        ("{", "is damaged"),
        ("[]", "holds a JSON list"),
        ("{}", "has no 'weight_map'"),
        ('{"weight_map": {"a": "../one.safetensors"}}', "outside its folder"),
    ],
)
def test_an_index_that_cannot_be_used(tmp_path, content, said):
    (tmp_path / f"{STEM}.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match=said):
        WeightFiles.open(tmp_path)


def test_every_tensor_that_does_not_fit_is_named(single):
    expected = {"a": (3, 2), "d": (1,), "e": (1,)}
    with pytest.raises(CheckpointError) as error:
        WeightFiles.open(single).check_names_and_shapes(expected, "Thing")
    for part in ("missing: d, e", "unexpected: b, c", "a [2, 3] where [3, 2] is needed", "Thing", STEM):
        assert part in str(error.value)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float8_e4m3fn])
def test_quantised_weights_are_refused_with_tensor_dtype_and_file(tmp_path, monkeypatch, dtype):
    monkeypatch.setitem(TENSORS, "a", torch.zeros(2))
    monkeypatch.setitem(TENSORS, "b", torch.zeros(2).to(dtype))
    write_shards(tmp_path, {"one.safetensors": ["a"], "two.safetensors": ["b"]})
    said = rf"two.safetensors stores 'b' as {str(dtype).removeprefix('torch.')}: quantised weights are not served"
    with pytest.raises(CheckpointError, match=said):
        WeightFiles.open(tmp_path).check_names_and_shapes({"a": (2,), "b": (2,)}, "Thing")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_floating_weights_of_any_width_are_served(tmp_path, dtype):
    save_file({"a": torch.zeros(2, dtype=dtype)}, tmp_path / f"{STEM}.safetensors")
    WeightFiles.open(tmp_path).check_names_and_shapes({"a": (2,)}, "Thing")


def test_the_packaged_checkpoint_and_a_folder_resolve_to_themselves(tmp_path):
    assert (resolve_folder("wan-shapes") / "model_index.json").is_file()
    assert resolve_folder(tmp_path) == tmp_path
    assert resolve_folder(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    "name, said",
    [
        ("wan_shapes", "did you mean 'wan-shapes'"),
        ("./nowhere", r"folder './nowhere' not found \(looked for "),
        ("/nowhere/at/all", "check the path, or download"),
        (" ", "name is empty"),
        (__file__, "is a file: give the folder"),
    ],
)
def test_a_checkpoint_that_is_nowhere(name, said):
    with pytest.raises(CheckpointError, match=said):
        resolve_folder(name)


def test_a_hub_id_that_is_neither_cached_nor_reachable_says_where_was_looked(monkeypatch, tmp_path):
    import huggingface_hub

    def unreachable(hub_id, **kwargs):
        raise OSError("no route to the hub\nand more")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(
        CheckpointError, match=r"no folder .*Some/Model.*neither cached nor reachable \(no route to the hub\)"
    ):
        resolve_folder("Some/Model")


def test_a_hub_id_is_fetched_without_files_that_are_not_read(monkeypatch, tmp_path):
    import huggingface_hub

    asked = {}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda hub_id, **kwargs: asked.update(kwargs, id=hub_id) or str(tmp_path)
    )
    assert resolve_folder("Some/Model", files=("*.json",)) == tmp_path
    assert asked["id"] == "Some/Model" and asked["allow_patterns"] == ["*.json"]


def test_the_packaged_weights_are_in_small_shards():
    folder = PACKAGED_CHECKPOINTS["wan-shapes"]
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert max(path.stat().st_size for path in files) <= 14_000_000
    assert len(WeightFiles.open(folder / "transformer").files) > 1
    assert (folder / "README.md").is_file()


def test_a_copied_folder_stays_usable_when_shards_are_links(sharded, tmp_path_factory):
    linked = tmp_path_factory.mktemp("linked")
    for path in sharded.iterdir():
        if path.suffix == ".json":
            shutil.copy(path, linked)
        else:
            (linked / path.name).symlink_to(path)
    assert WeightFiles.open(linked).shapes.keys() == TENSORS.keys()
