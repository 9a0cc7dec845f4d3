"""Runs the code of documentation pages, with the fixtures that the pages speak of."""

import re
from pathlib import Path

import pytest

from attention_backend import selection
from tests.unittest.attention_backend.conftest import check, make_case, oracle

__all__ = ["check", "make_case", "oracle"]

ROOT = Path(__file__).parents[3]


def blocks(page: str, language: str = "python") -> list[str]:
    """The fenced blocks of a page, each with empty lines before it so that errors name the page's own lines."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return ["\n" * text.count("\n", 0, match.start(1)) + match[1] for match in found]


@pytest.fixture
def run_page(monkeypatch, tmp_path):
    """run_page(page, **names): the page's python blocks, in order and in an empty folder; returns what they define."""
    monkeypatch.chdir(tmp_path)
    # Backends that a page registers are gone after the test.
    monkeypatch.setattr(selection, "_classes", dict(selection.backend_classes()))

    def run(page: str, **names) -> dict:
        namespace = {"__name__": "page"} | names
        for block in blocks(page):
            exec(compile(block, str(ROOT / page), "exec"), namespace)
        return namespace

    return run
