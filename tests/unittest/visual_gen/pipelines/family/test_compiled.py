"""Compiled blocks of every member of the family."""

import pytest
import torch

from tests.unittest.visual_gen.compiling import counted_graphs
from visual_gen.config import RunConfig
from visual_gen.pipelines import WanPipeline
from visual_gen.pipelines.compiled_blocks import warm_up_blocks

SMALL = {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 4, "max_sequence_length": 24}


@pytest.fixture
def graphs():
    with counted_graphs() as counter:
        yield counter


def run(pipe, **settings):
    generator = torch.Generator().manual_seed(0)
    return pipe("a red circle", generator=generator, progress=False, output_type="latent", **{**SMALL, **settings})


@pytest.mark.parametrize("name", ["t2v_a14b", "i2v_a14b", "i2v", "flf2v", "ti2v_5b"])
def test_one_graph_serves_both_experts_and_both_kinds_of_keys(graphs, opened, member, pictures, name):
    images = {} if name == "t2v_a14b" else {"image": pictures.first}
    if name == "flf2v":
        images["last_image"] = pictures.last
    pipe = WanPipeline.from_pretrained(member(name), compile=True, progress=False)
    found, expected = run(pipe, **images), run(opened(name), **images)
    assert (found.frames - expected.frames).abs().max() < 1e-4 * expected.frames.abs().max()
    if name.endswith("a14b"):
        assert sorted(set(found.record.expert_steps)) == [0, 1]
    assert graphs.frame_count == 1
    assert run(pipe, **images).record.stage_seconds["compile"] == 0


def test_an_expert_without_guidance_has_a_graph_for_its_one_row(graphs, opened, member):
    pipe = WanPipeline.from_pretrained(member("t2v_a14b"), compile=True, progress=False)
    settings = {"guidance_scale": 3.0, "guidance_scale_2": 1.0}
    found, expected = run(pipe, **settings), run(opened("t2v_a14b"), **settings)
    assert (found.frames - expected.frames).abs().max() < 1e-4 * expected.frames.abs().max()
    assert graphs.frame_count == 2
    # Compiled in the middle of the steps, and no part of them.
    assert max(found.record.step_seconds) < found.record.stage_seconds["compile"]


@pytest.mark.parametrize("name, shown", [("t2v_a14b", False), ("flf2v", True), ("ti2v_5b", True), ("ti2v_5b", False)])
def test_a_video_compiles_nothing_that_was_warmed_up(graphs, member, pictures, tmp_path, name, shown):
    pictures.first.save(tmp_path / "a.png")
    image = {"image": str(tmp_path / "a.png")} if shown else {}
    if name == "flf2v":
        image["last_image"] = image["image"]
    guidance = {"guidance_scale": 3.0} | ({"guidance_scale_2": 1.0} if name == "t2v_a14b" else {})
    generation = {"prompt": "a red circle", **SMALL, **image, **guidance}
    warm_up_blocks(RunConfig(model={"path": str(member(name))}, device="cpu", compile=True, generation=generation))
    found = graphs.frame_count
    pipe = WanPipeline.from_pretrained(member(name), compile=True, progress=False)
    assert run(pipe, **image, **guidance).record.stage_seconds["compile"] == 0
    assert graphs.frame_count == found == 1 + (name == "t2v_a14b")


@pytest.mark.gpu
def test_compiled_experts_may_take_turns_on_a_gpu(member):
    frames = {}
    for offload in ("none", "experts"):
        with counted_graphs("inductor") as graphs:
            pipe = WanPipeline.from_pretrained(
                member("t2v_a14b"), dtype=torch.bfloat16, device="cuda", offload=offload, compile=True, progress=False
            )
            frames[offload] = [run(pipe).frames.cpu() for _ in range(2)]
            assert graphs.frame_count == 1
    for found in frames["experts"]:
        assert torch.equal(found, frames["none"][0])
