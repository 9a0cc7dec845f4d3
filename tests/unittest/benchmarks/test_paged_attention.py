"""The benchmark of paged attention at toy size: every arm runs, and computes what it is timed for."""

import json
import runpy
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def test_the_smoke_run_records_every_arm_of_every_point(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    record = tmp_path / "record.json"
    monkeypatch.setattr(sys, "argv", ["paged_attention.py", "--smoke", "--output", str(record)])
    runpy.run_path(str(BENCHMARKS / "paged_attention.py"), run_name="__main__")
    result = json.loads(record.read_text())
    assert json.loads(capsys.readouterr().out) == result
    arms = ["contiguous", "extent", "block_table", "read", "chunk", "staged chunk"]
    assert len(result["points"]) == 6 and any("uneven 3/1" in name for name in result["points"])
    for point in result["points"].values():
        assert point["read"] == "extent"
        assert list(point["median_ms"]) == [f"sdpa {arm}" for arm in arms]
        assert min(point["median_ms"].values()) > 0 and point["copied_by_bandwidth"] > 0
        assert list(point["write_and_metadata_ms"]) == ["sdpa chunk", "sdpa staged chunk"]
        assert max(point["rms_difference"].values()) < 1e-6
        assert 0 < point["host_ms_per_forward"]["auto"] < 50
    assert len(result["goals"]) == 3 * 6
    assert {line["at_most"] for line in result["goals"]} == {0.02, 0.03, 0.5}
