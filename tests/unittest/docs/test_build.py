"""The docs build as `make docs` builds them, and what is broken in them is found."""

import importlib
import inspect
import subprocess
import sys

import pytest

from docs.build import MODULES, PAGES, broken_links, build
from tests.unittest.docs.conftest import ROOT


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    out = tmp_path_factory.mktemp("built") / "docs"
    command = [sys.executable, "-m", "docs.build", out]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return out


def test_all_pages_and_all_public_names_are_there(built):
    pages = [page.relative_to(ROOT).with_suffix(".html") for pattern in PAGES for page in ROOT.glob(pattern)]
    assert len(pages) > 10
    for page in pages:
        path = built / ("index.html" if str(page) == "README.html" else page)
        assert '<a href="' in path.read_text() and "api/index.html" in path.read_text()
    for module in MODULES:
        text = (built / "api" / f"{module.replace('.', '/')}.html").read_text()
        for name in getattr(importlib.import_module(module), "__all__", ()):
            assert f'id="{name}"' in text, f"{module}.{name} is not in the reference"


def test_every_public_class_and_function_says_what_it_is():
    bare = []
    for module in map(importlib.import_module, MODULES):
        names = getattr(module, "__all__", None) or [
            name for name, x in vars(module).items()
            if not name.startswith("_") and getattr(x, "__module__", None) == module.__name__
        ]  # fmt: skip
        for name in names:
            found = getattr(module, name)
            # A dataclass without a docstring is given its signature as one.
            documented = found.__doc__ and not found.__doc__.startswith(f"{name}(")
            if (inspect.isclass(found) or inspect.isfunction(found)) and not documented:
                bare.append(f"{module.__name__}.{name}")
    assert not bare


def write(root, **pages):
    for name, text in pages.items():
        path = root / (f"{name}.md" if name == "README" else f"docs/{name}.md")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_links_and_anchors_are_those_of_github(tmp_path):
    root = write(
        tmp_path / "repository",
        README="# A\n[b](docs/b.md#one-two_3--four) [file](docs/data.yaml) [folder](docs) [out](https://host/x#y)\n"
        "[here](#a) ![picture](docs/p.png)",
        b="# `b`: it's\n## One, *two_3* & `four`\n## Same\n## Same\n[up](../README.md) [2](#same-1) [it](#b-its)",
    )
    (root / "docs" / "data.yaml").write_text("a: 1")
    (root / "docs" / "p.png").write_bytes(b"")
    out = tmp_path / "out"
    assert build(root, out, ("attention_backend.kv_cache",)) == []
    text = (out / "index.html").read_text()
    for link in ("docs/b.html#one-two_3--four", "docs/data.yaml", "docs/index.html", "https://host/x#y", "docs/p.png"):
        assert f'"{link}"' in text
    assert (out / "docs" / "data.yaml").read_text() == "a: 1"
    assert '"../index.html"' in (out / "docs" / "b.html").read_text()


@pytest.mark.parametrize(
    ("link", "says"),
    [
        ("docs/c.md", "docs/c.md leads to no file"),
        ("docs/b.md#none", "docs/b.html#none leads to no anchor"),
        ("#none", "#none leads to no anchor"),
        ("../outside.md", "../outside.md leads to no file"),
        ("/etc/hostname", "/etc/hostname leads to no file"),
    ],
)
def test_a_link_that_leads_nowhere_is_named_with_its_page(tmp_path, link, says):
    (tmp_path / "outside.md").write_text("# Not of the repository")
    root = write(tmp_path / "repository", README=f"# A\n[link]({link})", b="# B\n")
    assert build(root, tmp_path / "out", ("attention_backend.kv_cache",)) == [f"index.html: {says}"]


def test_warnings_of_pdoc_and_broken_links_of_its_pages_are_told(tmp_path, monkeypatch):
    (tmp_path / "badly_said.py").write_text("__all__ = ['number']\nnumber: 'NoSuchType' = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    root, out = write(tmp_path / "repository", README="# A\n"), tmp_path / "out"
    (problem,) = build(root, out, ("badly_said",))
    assert problem.startswith("pdoc: Error parsing type annotation NoSuchType for badly_said.number")
    (out / "api" / "more.html").write_text('<a href="gone.html">x</a>')
    assert broken_links(out) == ["api/more.html: gone.html leads to no file"]


def test_a_folder_of_other_things_is_left_alone(tmp_path):
    (tmp_path / "precious").write_text("")
    with pytest.raises(ValueError, match="holds something else"):
        build(ROOT, tmp_path)
    assert (tmp_path / "precious").exists()
