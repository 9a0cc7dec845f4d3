"""Scripts that run a Triton kernel on the CPU, in Triton's interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]


def interpreted(script: Path) -> list[dict]:
    """The lines that the script prints, in a process of its own: the mode is fixed when triton is imported."""
    environment = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(REPOSITORY)}
    child = subprocess.run(
        [sys.executable, str(script)], cwd=REPOSITORY, env=os.environ | environment, capture_output=True, text=True
    )
    assert child.returncode == 0, child.stderr[-4000:]
    return [json.loads(line) for line in child.stdout.splitlines()]
