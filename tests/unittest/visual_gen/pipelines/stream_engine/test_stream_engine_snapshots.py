"""Streams that leave the device and come back."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from visual_gen.pipelines.errors import EngineFull
from visual_gen.pipelines.stream_snapshot import Snapshot

OPTIONS = {"deterministic": True, "sink_frames": 1, "recent_frames": 3, "rollback_chunks": 1, "guidance_scale": 2.0}


@pytest.mark.parametrize("read", ["extent", "block_table", "staged"])
@pytest.mark.parametrize("to_file", [False, True])
def test_a_stream_that_is_restored_goes_on_with_the_same_bits(tiny, tmp_path, read, to_file):
    options = OPTIONS | {"read": read}
    engine = tiny.engine(**options)
    stream = engine.open("a red circle", negative_prompt="not", seed=1)
    (first,) = tiny.run(engine, 3)
    stream.switch_prompt("a blue square", recache="window")
    stream.set(steps=[1000, 900, 300], guidance_scale=3.0)
    (second,) = tiny.run(engine, 5)
    snapshot = stream.snapshot(tmp_path / "kept" / "stream.safetensors" if to_file else None)
    (rest,) = tiny.run(engine, 8)
    given = tmp_path / "kept" / "stream.safetensors" if to_file else snapshot
    other = tiny.engine(**options, encode=None, block_size=16)  # of another cache, without an encoder
    other.open(tiny.text(), negative_prompt=tiny.text(2), seed=4)
    restored = other.restore(given)
    assert (restored.prompt, restored.chunk_index, restored.frames) == ("a blue square", 5, 10)
    assert (restored.guidance_scale, restored.settings.steps) == (3.0, (1000.0, 900.0, 300.0))
    (again,) = tiny.run(other, 8, [restored])
    assert torch.equal(again, rest)
    back = engine.restore(given)
    back.rollback(1)
    (redone,) = tiny.run(engine, 8, [back])
    torch.testing.assert_close(redone, torch.cat([second[:, :, 2:], rest], dim=2), rtol=0, atol=0)
    stream.close()
    assert engine.restore(given).frames == 10, "a snapshot outlives its stream"
    assert first.shape[2] == 6 and snapshot.num_bytes > 1000


def test_a_snapshot_is_of_streams_between_chunks_and_the_stream_goes_on(tiny):
    engine = tiny.engine(recent_frames=3)
    stream = engine.open("a red circle", seed=1)
    fresh = stream.snapshot()
    engine.step()
    with pytest.raises(ValueError, match="in the middle of chunk 0"):
        stream.snapshot()
    (made,) = tiny.run(engine, 4)
    stream.snapshot()
    torch.testing.assert_close(made, tiny.by_hand(["a red circle"] * 4, 1, recent_frames=3), rtol=0, atol=1e-5)
    restored = engine.restore(fresh)
    assert (restored.frames, restored.waiting_chunks) == (0, 0)
    torch.testing.assert_close(tiny.run(engine, 4, [restored])[0], made, rtol=0, atol=1e-5)


def test_a_snapshot_shares_nothing_with_the_stream_that_goes_on(tiny):
    engine = tiny.engine(recent_frames=3)
    stream = engine.open("a", seed=1)
    tiny.run(engine, 2)
    snapshot = stream.snapshot()
    kept = {name: x.clone() for name, x in snapshot._tensors().items()}
    tiny.run(engine, 5)
    assert all(torch.equal(x, kept[name]) for name, x in snapshot._tensors().items())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"frames_per_chunk": 1}, "the snapshot has frames_per_chunk 2, this engine 1"),
        ({"first_chunk_frames": 1}, "the snapshot has first_chunk_frames None, this engine 1"),
        ({"recent_frames": 2}, "a window of 3 frames in a cache for at most max_frames 2"),
        ({"batch_rows": 1, "branches": 2}, "the stream has 2 branches and a forward 1 rows"),
    ],
)
def test_a_snapshot_of_another_geometry_is_refused_and_takes_nothing(tiny, changes, says):
    changes = dict(changes)
    guided = changes.pop("branches", 1) > 1
    source = tiny.engine(recent_frames=3, guidance_scale=2.0 if guided else 1.0)
    stream = source.open("a")
    tiny.run(source, 1)
    engine = tiny.engine(**({"recent_frames": 3} | changes))
    free = engine.cache.free_blocks
    with pytest.raises(ValueError, match=says):
        engine.restore(stream.snapshot())
    assert engine.cache.free_blocks == free and not engine.streams and not engine._texts.used


def test_a_snapshot_of_other_layers_or_sizes_is_refused(tiny):
    engine = tiny.engine()
    stream = engine.open("a")
    tiny.run(engine, 1)
    snapshot = stream.snapshot()
    for name, value in (("latent_shape", [4, 8, 6]), ("text_dim", 4096)):
        changed = Snapshot(snapshot.meta | {name: value}, snapshot.session, snapshot.texts, snapshot.history)
        with pytest.raises(ValueError, match=f"the snapshot has {name} "):
            engine.restore(changed)
    assert len(engine.streams) == 1


def test_no_room_for_a_restored_stream_is_a_refusal(tiny):
    engine = tiny.engine(max_streams=1)
    stream = engine.open("a")
    tiny.run(engine, 1)
    snapshot = stream.snapshot()
    with pytest.raises(EngineFull):
        engine.restore(snapshot)
    assert engine._texts.used == 1 and engine.cache.sessions == [stream.session]


def test_files_that_hold_no_snapshot_are_refused(tiny, tmp_path):
    engine = tiny.engine()
    stream = engine.open("a")
    tiny.run(engine, 1)
    with pytest.raises(FileNotFoundError, match="no such snapshot file"):
        engine.restore(tmp_path / "missing.safetensors")
    path = tmp_path / "stream.safetensors"
    stream.snapshot(path)
    whole = path.read_bytes()
    for damaged in (b"", b"text", whole[: len(whole) // 2], whole[:64]):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="is damaged"):
            engine.restore(path)
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match="is no snapshot of a stream: its format is None"):
        engine.restore(path)
    path.write_bytes(whole)
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    fewer = {name: x for name, x in tensors.items() if name != "window.0"}
    save_file(fewer, path, metadata=metadata)
    with pytest.raises(ValueError, match="is damaged"):
        engine.restore(path)
    description = json.loads(metadata["stream"])
    description["geometry"]["recent_frames"] = 4
    save_file(tensors, path, metadata=metadata | {"stream": json.dumps(description | {"frames": 9})})
    with pytest.raises(ValueError, match="the snapshot's windows have shapes"):
        engine.restore(path)
    assert len(engine.streams) == 1 and engine._texts.used == 1
