"""Runs the code of documentation pages, with the fixtures that the pages speak of."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from attention_backend import selection
from tests.unittest.attention_backend.conftest import check, make_case, oracle
from tests.unittest.visual_gen.conftest import make_checkpoint

__all__ = ["check", "make_case", "make_checkpoint", "oracle"]

ROOT = Path(__file__).parents[3]


def blocks(page: str, language: str = "python") -> list[str]:
    """The fenced blocks of a page, each with empty lines before it so that errors name the page's own lines."""
    from markdown_it import MarkdownIt  # here, so that a machine without it can collect these tests

    fences = [x for x in MarkdownIt().parse((ROOT / page).read_text(encoding="utf-8")) if x.type == "fence"]
    return ["\n" * (fence.map[0] + 1) + fence.content for fence in fences if fence.info == language]


@pytest.fixture
def run_page(monkeypatch, tmp_path):
    """run_page(page): the page's python blocks, in order and in tmp_path; returns what they define. smaller: texts of
    the page and what stands for them here."""
    monkeypatch.chdir(tmp_path)
    # Backends that a page registers are gone after the test.
    monkeypatch.setattr(selection, "_classes", dict(selection.backend_classes()))

    def run(page: str, smaller: Mapping[str, str] | None = None) -> dict:
        namespace = {"__name__": "page"}
        code = blocks(page)
        for text, other in (smaller or {}).items():
            assert any(text in block for block in code), f"{page} has no {text!r} in its code"
            code = [block.replace(text, other) for block in code]
        for block in code:
            exec(compile(block, str(ROOT / page), "exec"), namespace)
        return namespace

    return run
