"""The Python of docs/streams.md runs, block after block, on a model of random weights."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture
def page(random_causal_folder, monkeypatch, tmp_path):
    """run(n): runs the first n blocks of the page in a folder of its own; the names that they leave."""
    text = (ROOT / "docs" / "streams.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)

    def run(count):
        assert len(blocks) == 3
        names = {}
        for block in blocks[:count]:
            exec(block.replace('"wan-shapes-causal"', repr(str(random_causal_folder))), names)
        return names

    return run


def test_streams_are_opened_and_stepped(page, capsys):
    names = page(1)
    assert capsys.readouterr().out == "torch.Size([1, 4, 3, 12, 12])\n"
    assert [(s.chunk_index, s.guidance_scale) for s in (names["stream"], names["other"])] == [(1, 4.0), (1, 1.0)]
    assert 3 in names["engine"].record().batch_sizes, "two branches and one"
    names["engine"].close()


def test_streams_are_steered(page):
    names = page(2)
    stream, fork, again = names["stream"], names["fork"], names["again"]
    assert (stream.chunk_index, fork.state, again.chunk_index) == (1, "closed", 1)
    assert stream.prompt == again.prompt == "a blue square moving up on a navy background"
    assert again.guidance_scale == 2.0 and again.settings.steps == (1000.0, 750.0, 500.0)
    assert names["engine"].streams == [stream, again] and Path("stream.safetensors").stat().st_size > 0
    names["engine"].close()


def test_frames_are_decoded_and_all_is_given_back(page):
    names = page(3)
    assert names["frames"].chunks == 3 and names["chunk"].shape[1:] == (96, 96, 3)
    assert not names["engine"].streams and names["engine"].used_blocks == 0
