"""The Python of docs/streams.md runs, on a model of random weights, and does what the page says."""

from pathlib import Path

import torch

from tests.unittest.docs.conftest import ROOT


def test_the_streams_of_the_page_are_opened_steered_and_decoded(run_page, random_causal_folder, tmp_path, capsys):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    page = run_page("docs/streams.md", {'"wan-shapes-causal"': repr(str(random_causal_folder))})
    assert capsys.readouterr().out == "torch.Size([1, 4, 3, 12, 12])\n"
    engine, stream, again = page["engine"], page["stream"], page["again"]
    assert 3 in engine.record().batch_sizes, "two branches of a stream and one of another"
    assert [page[name].chunk_index for name in ("other", "fork", "again")] == [1, 2, 4]
    assert stream.chunk_index >= 3 and stream.session.closed, "it is stepped with the one whose frames are wanted"
    assert stream.prompt == again.prompt == "a blue square moving up on a navy background"
    assert again.guidance_scale == 2.0 and again.settings.steps == (1000.0, 750.0, 500.0)
    taken = torch.cat(page["fork"].take_latents(), dim=2)
    assert taken.shape[2] == 3, "what was finished before the fork stays with its parent"
    assert Path("stream.safetensors").stat().st_size > 0
    assert page["frames"].chunks == 3 and page["chunk"].shape[1:] == (96, 96, 3)
    assert not engine.streams and engine.used_blocks == 0
