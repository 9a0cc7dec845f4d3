import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from visual_gen.checkpoint import resolve_folder
from visual_gen.pipelines import WanPipeline

# Small enough to be quick; the checkpoint warns about the size, which no test here minds.
SMALL = {
    "height": 32,
    "width": 48,
    "num_frames": 5,
    "num_inference_steps": 3,
    "max_sequence_length": 48,
    "progress": False,
}


@pytest.fixture(scope="session")
def pipe():
    return WanPipeline.from_pretrained("wan-shapes", progress=False)


@pytest.fixture(scope="session")
def euler_pipe():
    return WanPipeline.from_pretrained("wan-shapes", scheduler="euler", progress=False)


@pytest.fixture
def generate(pipe):
    """generate(prompt, seed or seeds, **changed settings) → the output of a small, silent run."""

    def run(prompt="a red circle", seed=0, **settings):
        return pipe(prompt, generator=seeded(seed), **{**SMALL, **settings})

    return run


def seeded(seed):
    generators = [torch.Generator().manual_seed(s) for s in (seed if isinstance(seed, list) else [seed])]
    return generators if isinstance(seed, list) else generators[0]


@pytest.fixture
def counted(pipe, monkeypatch):
    """The batch sizes of the transformer's forwards, and the text lengths of the rows of its text projections."""
    calls = {"batches": [], "text_lens": []}
    forward, project_text = pipe.transformer.forward, pipe.transformer.project_text

    def counting_forward(hidden_states, timestep, **kwargs):
        assert kwargs["text_kv"] is not None
        calls["batches"].append(hidden_states.shape[0])
        return forward(hidden_states, timestep, **kwargs)

    def counting_project_text(hidden, text_lens, image_tokens, *, text_index):
        calls["text_lens"].append([text_lens[i] for i in text_index])
        return project_text(hidden, text_lens, image_tokens, text_index=text_index)

    monkeypatch.setattr(pipe.transformer, "forward", counting_forward)
    monkeypatch.setattr(pipe.transformer, "project_text", counting_project_text)
    return calls


@pytest.fixture
def copied(tmp_path):
    """A copy of the checkpoint whose files are links: replace a file, never write into one. edit(file, **changes)
    rewrites a JSON file with other values."""

    folder = tmp_path / "checkpoint"
    shutil.copytree(resolve_folder("wan-shapes"), folder, copy_function=lambda a, b: Path(b).symlink_to(a))

    def edit(file, **changes):
        path = folder / file
        content = json.loads(path.read_text()) | changes
        path.unlink()
        path.write_text(json.dumps(content))
        return folder

    return SimpleNamespace(folder=folder, edit=edit)
