"""`visual-gen warmup` of a configuration that compiles its blocks: the graphs that its videos will take."""

import json
from pathlib import Path

import pytest

from tests.unittest.visual_gen.compiling import counted_graphs
from visual_gen.cli import main
from visual_gen.config import load_config
from visual_gen.pipelines import WanPipeline
from visual_gen.pipelines.compiled_blocks import warm_up_blocks

CONFIGS = Path(__file__).parents[3] / "configs"
SMALL = ["device=cpu", "compile=true", "generation.height=32", "generation.width=48", "generation.num_frames=5"]
STREAM = ["generation.width=32", "generation.max_sequence_length=48", "causal.frames_per_chunk=2",
          "causal.recent_frames=4", "causal.steps=[1000, 500]"]  # fmt: skip


@pytest.fixture
def graphs():
    with counted_graphs() as counter:
        yield counter


def arguments(config, settings):
    return ["--config", str(CONFIGS / f"{config}.yaml"), *(text for one in settings for text in ("--set", one))]


def test_the_command_says_what_compiling_the_blocks_took(graphs, capsys):
    assert main(["warmup", "--json", *arguments("wan_shapes_t2v", SMALL)]) == 0
    found = json.loads(capsys.readouterr().out)
    blocks = found["variants"][-1]
    assert (blocks["role"], blocks["backend"], blocks["call"]) == ("blocks", "torch.compile", "a step")
    assert found["compile_seconds"] == blocks["seconds"] > 0.05
    assert graphs.frame_count == 1
    assert main(["warmup", "--json", *arguments("wan_shapes_t2v", [*SMALL, "compile=false"])]) == 0
    assert "blocks" not in capsys.readouterr().out and graphs.frame_count == 1


@pytest.mark.parametrize(
    "settings", [[], ["generation.cfg=sequential"], ["attention.cross_kv=packed"], ["generation.guidance_scale=1"]]
)
def test_a_video_compiles_nothing_that_was_warmed_up(graphs, settings):
    config = load_config(CONFIGS / "wan_shapes_t2v.yaml", [*SMALL, *settings])
    warm_up_blocks(config)
    assert graphs.frame_count == 1
    generation = config.generation
    pipe = WanPipeline.from_pretrained(config.model.path, compile=True, attention=config.attention, progress=False)
    record = pipe(
        "a red circle", height=32, width=48, num_frames=5, num_inference_steps=1, cfg=generation.cfg,
        guidance_scale=generation.guidance_scale, max_sequence_length=generation.max_sequence_length,
        output_type="latent", progress=False,
    ).record  # fmt: skip
    assert graphs.frame_count == 1 and record.stage_seconds["compile"] == 0


@pytest.mark.parametrize(
    ("more", "texts", "count"),
    [
        ([], ["a red circle", "a blue square"], 1),
        # The first chunk's forwards are filled up by a second row, later ones have one.
        (["stream.deterministic=true", "causal.first_chunk_frames=1"], ["a red circle"], 2),
    ],
)
def test_a_stream_compiles_nothing_that_was_warmed_up(graphs, random_causal_folder, tmp_path, more, texts, count):
    settings = [*SMALL[:3], *STREAM, f"model.path={random_causal_folder}", *more]
    prompts = [argument for text in texts for argument in ("--prompt", text)]
    assert main(["warmup", *arguments("wan_shapes_stream", settings), *prompts]) == 0
    assert graphs.frame_count == count
    output = ["--output", str(tmp_path / "out.mp4"), "--chunks", "3"]
    assert main(["stream", *arguments("wan_shapes_stream", settings), *prompts, *output]) == 0
    assert graphs.frame_count == count
    assert json.loads((tmp_path / "out.report.json").read_text())["seconds"]["stages"]["compile"] == 0
