import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_benchmark_runs_at_toy_size_on_a_cpu(tmp_path):
    record = tmp_path / "record.json"
    command = [sys.executable, "-m", "benchmarks.rollout", "--smoke", "--output", str(record)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    found = json.loads(record.read_text())
    assert [len(found["short"][name]["chunk_ms"]) for name in ("eager", "compiled")] == [7, 7]
    assert len(found["long"]["median_ms_of_each_part"]) == 10 and len(found["goals"]) == 3
    assert found["self_attention"]["backend"] == "sdpa"
