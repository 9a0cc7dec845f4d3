"""Ours against the recorded outputs of Self-Forcing's own causal model, and how its checkpoints are read."""

import pytest
import torch

from visual_gen.checkpoint import CheckpointError
from visual_gen.models.wan import CausalWanTransformer

READS = ("extent", "block_table", "staged")


@pytest.fixture
def load(tmp_path):
    def load(recording, prefix="model._fsdp_wrapped_module.", key="generator_ema"):
        path = tmp_path / "checkpoint.pt"
        torch.save({key: {prefix + name: x for name, x in recording.weights.items()}}, path)
        return CausalWanTransformer.from_pickle(path, recording.wan)

    return load


@torch.no_grad()
def run(recording, model, begin):
    """Every chunk and forward of a recording; begin(frames) gives a chunk and the batch of its rows."""
    config = recording.config
    text = model.project_text(recording.tensors["text"], config["text_lens"])
    timesteps = config["timesteps"]
    for i in range(config["num_chunks"]):
        chunks, batch = begin(config["frames_per_chunk"])
        for step, timestep in enumerate(timesteps):
            x = recording.tensors[f"in.{i}.{step}"]
            out = model(x, torch.full((len(x),), timestep), kv=batch, text_kv=text)
            expected = recording.tensors[f"out.{i}.{step}"]
            error = (out - expected).abs().max() / expected.abs().max()
            assert error < 1e-4, f"chunk {i}, forward {step}: {error:.2e} of the largest value"
        for chunk in chunks:
            chunk.commit()


def paged_sessions(cache, recording, rows):
    config = recording.config
    frames, sink = config["frames_per_chunk"] * config["num_chunks"], config["sink_frames"]
    window = config["window_frames"]
    recent = {"recent_frames": None, "capacity_frames": frames} if window < 0 else {"recent_frames": window - sink}
    return [
        cache.open_session(sink_frames=sink, max_chunk_frames=config["frames_per_chunk"], **recent)
        for _ in range(rows)
    ]  # fmt: skip


def test_everything_visible_over_the_contiguous_cache(recordings, load, make_contiguous):
    recording = recordings["unlimited"]
    model = load(recording)
    cache = make_contiguous(model, batch=2, capacity_frames=8)

    def begin(frames):
        chunk = cache.begin(frames)
        return [chunk], cache.batch(chunk)

    run(recording, model, begin)


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("name", ["unlimited", "window"])
def test_every_read_of_the_paged_cache(recordings, load, make_paged, name, read):
    recording = recordings[name]
    model = load(recording)
    cache = make_paged(model, read=read, staging_tokens=1000 if read == "staged" else 0)
    sessions = paged_sessions(cache, recording, recording.config["batch"])
    reads = set()

    def begin(frames):
        chunks = [session.begin(frames) for session in sessions]
        batch = cache.batch(chunks)
        reads.add(batch.read)
        return chunks, batch

    run(recording, model, begin)
    assert reads == {read}


@pytest.mark.parametrize("prefix", ["", "model.", "_fsdp_wrapped_module.model.", "model._fsdp_wrapped_module."])
def test_prefixes_of_wrappers_come_off(recordings, load, prefix):
    recording = recordings["window"]
    model = load(recording, prefix=prefix, key="generator")
    torch.testing.assert_close(model.proj_out.weight, recording.weights["head.head.weight"], rtol=0, atol=0)


def test_the_averaged_weights_are_preferred_and_others_can_be_named(recordings, tmp_path):
    recording = recordings["window"]
    plain = {name: torch.zeros_like(x) for name, x in recording.weights.items()}
    torch.save({"generator": plain, "generator_ema": recording.weights, "step": 7}, tmp_path / "both.pt")
    averaged = CausalWanTransformer.from_pickle(tmp_path / "both.pt", recording.wan)
    named = CausalWanTransformer.from_pickle(tmp_path / "both.pt", recording.wan, state_dict="generator")
    assert averaged.proj_out.weight.abs().sum() > 0 and named.proj_out.weight.abs().sum() == 0


def test_missing_and_unknown_tensors_are_named_as_in_the_file(recordings, tmp_path):
    recording = recordings["window"]
    weights = dict(recording.weights)
    weights["blocks.0.self_attn.extra"] = weights.pop("blocks.0.self_attn.q.weight")
    torch.save({"generator": weights}, tmp_path / "bad.pt")
    with pytest.raises(CheckpointError, match=r"missing: blocks.0.self_attn.q.weight; unexpected: .*self_attn.extra"):
        CausalWanTransformer.from_pickle(tmp_path / "bad.pt", recording.wan)


class Opaque:
    pass


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "is missing"),
        ([torch.zeros(1)], "holds a list"),
        ({"critic": {"a": torch.zeros(1)}}, "no tensors under generator_ema or generator; its keys are 'critic'"),
        ({"generator": Opaque()}, "more than tensors"),
        (b"no zip archive", "damaged"),
    ],
)
def test_files_that_cannot_be_read_say_why(recordings, tmp_path, content, says):
    path = tmp_path / "file.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(CheckpointError, match=says):
        CausalWanTransformer.from_pickle(path, recordings["window"].wan)


def test_a_tensor_under_two_names_is_not_one_of_them_by_chance(recordings, tmp_path):
    weights = dict(recordings["window"].weights)
    weights["model.patch_embedding.bias"] = weights["patch_embedding.bias"] + 1
    torch.save({"generator": weights}, tmp_path / "file.pt")
    with pytest.raises(CheckpointError, match="has patch_embedding.bias more than once"):
        CausalWanTransformer.from_pickle(tmp_path / "file.pt", recordings["window"].wan)


def test_a_checkpoint_of_other_sizes_is_refused(recordings, tmp_path):
    torch.save({"generator": recordings["window"].weights}, tmp_path / "file.pt")
    with pytest.raises(CheckpointError, match="wrongly shaped"):
        CausalWanTransformer.from_pickle(tmp_path / "file.pt", recordings["unlimited"].wan)
