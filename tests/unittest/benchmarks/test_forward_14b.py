"""The end-to-end benchmark on its toy: every arm runs, and the ones that must agree do."""

import importlib
import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def result(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    importlib.import_module("forward_14b").main(["--smoke", "--runs", "1", "--output", str(tmp_path / "a.json")])
    found = json.loads((tmp_path / "a.json").read_text())
    assert json.loads(capsys.readouterr().out) == found
    return found


def test_all_arms_run_and_agree_as_their_modes_do(result):
    for lens, arms in result["some_layers"]["text_lens"].items():
        assert list(arms) == ["padded", "seqused_k", "packed", "packed_pad_exact"]
        difference = {arm: found["rms_difference_from_padded"] for arm, found in arms.items()}
        assert difference["padded"] == 0 and difference["packed_pad_exact"] < 1e-5 < 1e-3 < difference["packed"]
        assert difference["seqused_k"] == pytest.approx(difference["packed"], rel=1e-3)
        assert all(found["finite"] and found["ms"] > 0 for found in arms.values())
        kept = {arm: found["text_kv_mib"] for arm, found in arms.items()}
        assert kept["packed"] < kept["padded"] == kept["seqused_k"], lens
        assert arms["packed_pad_exact"]["formulation"] == "merge" and arms["packed"]["formulation"] == "packed"


def test_times_are_scaled_to_all_layers_and_checked_against_them(result):
    some, whole = result["some_layers"], result["all_layers"]
    assert (some["layers"], whole["layers"]) == (2, 3)
    (lens,) = whole["text_lens"]
    for arm, found in whole["text_lens"][lens].items():
        few = some["text_lens"][lens][arm]
        assert few["ms_scaled_to_all_layers"] == pytest.approx(few["ms"] * 3 / 2, abs=0.1)
        ratio = few["ms_scaled_to_all_layers"] / found["ms"]
        assert found["scaled_from_some_layers_over_measured"] == pytest.approx(ratio, abs=1e-4)
