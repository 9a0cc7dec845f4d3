"""The comparison with diffusers at toy size: every arm runs, and the ones that must agree do."""

import importlib
import json
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def result(tmp_path, monkeypatch, capsys):
    torch._dynamo.reset()
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    file = tmp_path / "a.json"
    importlib.import_module("forward_vs_diffusers").main(["--smoke", "--runs", "1", "--output", str(file)])
    found = json.loads(file.read_text())
    assert json.loads(capsys.readouterr().out) == found
    torch._dynamo.reset()
    return found


@pytest.fixture
def arms(result):
    return result["arms"]


def test_all_arms_agree_with_diffusers_but_the_one_that_drops_the_pads(arms):
    difference = {arm: found["rms_difference_from_diffusers"] for arm, found in arms.items()}
    assert difference.pop("auto, packed") > 1e-3
    assert max(difference.values()) < 1e-5 and len(difference) == 8
    assert all(found["median_ms"] > 0 for found in arms.values())


def test_compiled_arms_say_what_compiling_took_before_they_were_timed(result, arms):
    assert result["compile_seconds_while_timed"] == 0
    compiled = {arm for arm, found in arms.items() if "compile_seconds" in found}
    assert compiled == {"auto, padded, compiled", "diffusers, compiled"}
    assert all(arms[arm]["compile_seconds"] > 0 for arm in compiled)
