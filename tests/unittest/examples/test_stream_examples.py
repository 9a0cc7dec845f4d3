"""The examples of streams run, on random weights, and leave the videos that they name."""

import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs one example in a folder of its own; the frames of each video that it left."""

    def run(name: str, *arguments: str) -> dict[str, int]:
        (tmp_path / "configs").symlink_to(ROOT / "configs")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
        return {file.name: frames(file) for file in sorted(tmp_path.glob("outputs/*"))}

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
        ("many_streams.py", [], {"many-0.mp4": 21, "many-1.mp4": 33, "many-2.mp4": 45, "many-3.mp4": 57}),
    ],
)
def test_an_example_makes_its_videos(run, random_causal_folder, name, arguments, left):
    assert run(name, *arguments, str(random_causal_folder)) == left


def test_actions_change_their_own_frame_alone(run, capsys):
    assert run("act.py") == {}
    differences = [float(line.rpartition(" ")[2]) for line in capsys.readouterr().out.splitlines()]
    assert differences[1] > 0.01
    assert [differences[i] for i in (0, 2, 3)] == [0, 0, 0]
