"""The benchmark of streams at toy size: every part runs, on the path that it is timed for."""

import json
import runpy
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """run(*arguments): the record, and what was printed."""

    def run(*arguments):
        monkeypatch.syspath_prepend(str(BENCHMARKS))
        monkeypatch.setattr(sys, "argv", ["streams.py", "--smoke", "--out", str(tmp_path / "made"), *arguments])
        runpy.run_path(str(BENCHMARKS / "streams.py"), run_name="__main__")
        return json.loads((tmp_path / "made" / "streams.json").read_text()), capsys.readouterr().out

    return run


def test_the_smoke_run_records_every_part(run):
    result, printed = run()
    parts = result["parts"]
    assert list(parts) == ["batch", "sync", "host", "kernels"]
    assert [shape["frame_tokens"] for shape in parts["batch"].values()] == [4, 6]
    for shape in parts["batch"].values():
        assert list(shape["modes"]) == ["eager", "compiled"]
        for found in shape["modes"].values():
            apart, together = (found[arm]["wall_ms"] for arm in ("one_after_another", "together"))
            assert found["throughput_ratio"] == pytest.approx(apart / together, abs=1e-3)
            assert found["read"] == "extent"
    sync = parts["sync"]
    assert sync["frames_of_history"] == list(range(32, 0, -2)) and sync["rows"] == [16]
    assert sync["forwards_that_denoise_and_commit"] > 0
    assert not sync["waits_are_errors"] and sync["waited"] is None
    host = parts["host"]
    assert host["times"] == {"join": 5, "fork": 5, "switch": 5, "leave": 10}
    assert host["rows_of_forwards"] == [1, 2, 3]
    assert host["compiled_before"] >= 1 and host["recompiles"] == 0
    ms = parts["kernels"]["median_ms"]
    assert len(ms) == 6 and min(ms.values()) > 0
    assert parts["kernels"]["read"] == "extent"
    assert len(result["goals"]) == 4 + 5
    assert all(goal["goal"] in printed for goal in result["goals"])
    assert result["self_attention"]["backend"] == "sdpa"


def test_parts_modes_and_layers_can_be_chosen(run):
    result, _ = run("--parts", "kernels", "batch", "--modes", "eager", "--layers", "1")
    assert list(result["parts"]) == ["batch", "kernels"]
    assert [list(shape["modes"]) for shape in result["parts"]["batch"].values()] == [["eager"]] * 2
    assert "1 layers" in result["conditions"]


def test_graphs_are_refused_on_a_cpu(run):
    with pytest.raises(ValueError, match="graphs are CUDA graphs and the model is on cpu"):
        run("--parts", "batch", "--modes", "graphs")
