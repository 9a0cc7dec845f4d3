"""Tests are collected also where packages that few of them need are missing: those few fail there, not all."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# What neither torch nor diffusers nor transformers brings along; hypothesis is left out, which decorates tests.
MISSING = ["accelerate", "av", "ftfy", "markdown_it", "matplotlib", "pdoc"]


def test_gpu_tests_are_collected_on_a_machine_without_the_packages_of_docs_and_reports():
    # A None there makes an import fail, and find_spec find nothing, as if it were not installed.
    code = f"""import sys
sys.modules.update(dict.fromkeys({MISSING}))
import pytest
sys.exit(pytest.main(["--collect-only", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests"]))"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout
