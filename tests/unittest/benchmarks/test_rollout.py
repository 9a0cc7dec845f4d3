import json
import runpy
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def test_the_benchmark_runs_at_toy_size_on_a_cpu(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    record = tmp_path / "record.json"
    monkeypatch.setattr(sys, "argv", ["rollout.py", "--smoke", "--output", str(record)])
    runpy.run_path(str(BENCHMARKS / "rollout.py"), run_name="__main__")
    found = json.loads(record.read_text())
    assert [len(found["short"][name]["chunk_ms"]) for name in ("eager", "compiled")] == [7, 7]
    assert len(found["long"]["median_ms_of_each_part"]) == 10 and len(found["goals"]) == 3
    assert found["self_attention"]["backend"] == "sdpa"
