"""The examples of streams run, on random weights, and leave the videos that they name."""

import re
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs one example in a folder of its own; its names, and the frames of each video that it left."""

    def run(name: str, *arguments: str) -> tuple[dict[str, object], dict[str, int]]:
        (tmp_path / "configs").symlink_to(ROOT / "configs")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        names = runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
        return names, {file.name: frames(file) for file in sorted(tmp_path.glob("outputs/*"))}

    return run


def frames(file: Path) -> int:
    import av

    with av.open(str(file)) as container:
        return sum(1 for _ in container.decode(video=0))


@pytest.mark.parametrize(
    ("name", "arguments", "left"),
    [
        ("stream.py", ["a red circle"], {"stream.mp4": 93}),
        ("switch.py", [], {"switch.mp4": 105}),
        ("fork.py", [], {"fork-first.mp4": 69, "fork-second.mp4": 69}),
        ("act.py", [], {"act-idle.mp4": 45, "act.mp4": 45}),
        ("many_streams.py", [], {"many-0.mp4": 21, "many-1.mp4": 33, "many-2.mp4": 45, "many-3.mp4": 57}),
    ],
)
def test_an_example_makes_its_videos(run, random_causal_folder, name, arguments, left):
    assert run(name, *arguments, str(random_causal_folder))[1] == left


def test_actions_change_what_is_made_in_their_chunk_and_leave_no_keys_and_values(run, capsys):
    names, _ = run("act.py")  # on the checkpoint that ships, whose later layers see what the first made
    lines = capsys.readouterr().out.splitlines()
    assert [re.findall(r"([a-z]+) -?[0-9.]+[,;]", line) for line in lines] == [[], ["left"], ["right", "jump"], []]
    engine, tokens = names["engine"], names["embed"].weight[:2]
    acting, idle = engine.open("a red circle", seed=1), engine.open("a red circle", seed=1)
    acting.set_extra(tokens)
    engine.step([acting], until="chunk")
    assert acting.extra_output.shape == (1, *tokens.shape)
    assert not torch.equal(*acting.extra_output[0]), "each action has an output of its own"
    (acted,) = acting.take_latents()
    while idle._making is None or not idle._making.commits:
        engine.step([idle])
    assert (idle._making.latents - acted[0]).abs().max() > 1e-3
    # The same latents, which only one of them saw actions for: all that is kept of the chunk must be the same.
    idle._making = replace(idle._making, latents=acted[0])
    acting.set_extra(None)
    engine.step([idle], until="chunk")
    for stream in (idle, acting):
        engine.step([stream], until="chunk")
    assert torch.equal(idle.take_latents()[1], acting.take_latents()[0])
    engine.close()
