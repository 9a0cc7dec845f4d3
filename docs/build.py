"""Builds the pages and the API reference as HTML: python -m docs.build outputs/docs

Fails on links and anchors that lead nowhere, and on whatever pdoc warns of. Addresses outside are not looked at.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shutil
import sys
import warnings
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import jinja2
from markupsafe import Markup

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", "docs/*.md", "examples/**/README.md", "visual_gen/checkpoints/*/README.md")
# Those that outside users import from; each shows what it exports, or what it defines in public.
MODULES = (
    "attention_backend",
    "attention_backend.kv_cache",
    "visual_gen",
    "visual_gen.config",
    "visual_gen.integrations.diffusers",
    "visual_gen.models.wan",
    "visual_gen.modules",
    "visual_gen.pipelines",
    "visual_gen.pipelines.rollout",
    "visual_gen.pipelines.text",
    "visual_gen.runtime.plan",
)
REFERENCE = "api"


def build(root: Path, out: Path, modules: tuple[str, ...] = MODULES) -> list[str]:
    """Writes the pages of `root` and the reference of `modules` to `out`; returns what is broken in them, a line for
    each. A build that is there already is removed; ValueError if something else is there."""
    if out.exists():
        if any(out.iterdir()) and not (out / REFERENCE).is_dir():
            raise ValueError(f"{out} holds something else than a build of the docs: name a new folder")
        shutil.rmtree(out)
    pages = sorted({page.relative_to(root) for pattern in PAGES for page in root.glob(pattern)}, key=_order)
    parsed = {page: _markdown().parse((root / page).read_text(encoding="utf-8")) for page in pages}
    titles = {page: _title(tokens) for page, tokens in parsed.items()}
    for page, tokens in parsed.items():
        _write_page(root, out, page, tokens, titles)
    return _write_reference(out / REFERENCE, modules) + broken_links(out)


def _order(page: Path) -> tuple:
    return (page.parts[0] != "README.md", page.parts[0] != "docs", page.parts)


def _markdown() -> MarkdownIt:
    from markdown_it import MarkdownIt  # here, as pdoc below, so that a machine without them can import this module

    return MarkdownIt("commonmark", {"html": False}).enable("table")


def _title(tokens: list[Token]) -> str:
    heading = next(after for token, after in zip(tokens, tokens[1:], strict=False) if token.tag == "h1")
    return heading.content.replace("`", "")


def _html_path(page: Path) -> Path:
    return Path("index.html") if page == Path("README.md") else page.with_suffix(".html")


def _write_page(root: Path, out: Path, page: Path, tokens: list[Token], titles: dict[Path, str]) -> None:
    here = _html_path(page)
    seen: dict[str, int] = {}
    for token, inline in zip(tokens, tokens[1:], strict=False):
        if token.type == "heading_open":
            token.attrSet("id", _anchor(inline.content, seen))
    for child in (child for token in tokens for child in token.children or ()):
        name = {"link_open": "href", "image": "src"}.get(child.type)
        if name:
            child.attrSet(name, _address(root, out, page, child.attrGet(name), titles))
    targets = {_html_path(other): title for other, title in titles.items()}
    targets[Path(REFERENCE, "index.html")] = "API reference"
    links = [
        {"href": _relative(target, here), "title": title, "here": target == here} for target, title in targets.items()
    ]
    markdown = _markdown()
    body = Markup(markdown.renderer.render(tokens, markdown.options, {}))
    template = jinja2.Template((Path(__file__).parent / "page.html").read_text(encoding="utf-8"), autoescape=True)
    (out / here).parent.mkdir(parents=True, exist_ok=True)
    (out / here).write_text(template.render(title=titles[page], links=links, body=body), encoding="utf-8")


def _anchor(heading: str, seen: dict[str, int]) -> str:
    """As GitHub names it, so that a link works there and here."""
    text = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").replace("*", "")
    name = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
    count = seen[name] = seen.get(name, -1) + 1
    return f"{name}-{count}" if count else name


def _address(root: Path, out: Path, page: Path, address: str, titles: dict[Path, str]) -> str:
    """Where a link of a page leads in `out`: to a page's HTML, or to a copy of a file or folder of the repository. What
    leads nowhere stays as it is, to be found broken."""
    parts = urlsplit(address)
    if parts.scheme or not parts.path:
        return address
    target = Path(os.path.normpath(page.parent / unquote(parts.path)))
    if target.is_absolute() or target.parts[0] == ".." or not (root / target).exists():
        return address
    if (target / "README.md") in titles:
        target /= "README.md"
    if target in titles:
        target = _html_path(target)
    elif (root / target).is_dir():
        target = _write_listing(root, out, target)
    else:
        (out / target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / target, out / target)
    return _relative(target, _html_path(page)) + (f"#{parts.fragment}" if parts.fragment else "")


def _write_listing(root: Path, out: Path, folder: Path) -> Path:
    """The files of a folder, as a page of links to copies of them."""
    (out / folder).mkdir(parents=True, exist_ok=True)
    files = sorted(path.name for path in (root / folder).iterdir() if path.is_file())
    for name in files:
        shutil.copyfile(root / folder / name, out / folder / name)
    links = "".join(f'<li><a href="{name}">{name}</a></li>\n' for name in files)
    (out / folder / "index.html").write_text(f"<title>{folder}</title>\n<ul>\n{links}</ul>\n", encoding="utf-8")
    return folder / "index.html"


def _relative(target: Path, page: Path) -> str:
    return PurePosixPath(os.path.relpath(target, page.parent)).as_posix()


def _write_reference(out: Path, modules: tuple[str, ...]) -> list[str]:
    """pdoc's pages; returns its warnings."""
    import pdoc

    for name in modules:
        module = importlib.import_module(name)
        for export in getattr(module, "__all__", ()):
            vars(module)[export] = getattr(module, export)  # pdoc does not see those that are loaded on first use
    # Each module alone: pdoc adds what lies below it.
    specs = [spec for name in modules for spec in (name, rf"!{re.escape(name)}\.")]
    pdoc.render.configure(docformat="markdown", show_source=False, search=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        pdoc.pdoc(*specs, output_directory=out)
    for path in out.rglob("*.html"):  # a private base class is linked, and not shown
        path.write_text(re.sub(r'<a href="#_\w+">(\w+)</a>', r"\1", path.read_text(encoding="utf-8")), encoding="utf-8")
    return [f"pdoc: {warning.message}" for warning in caught if issubclass(warning.category, UserWarning)]


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" or (name == "name" and tag == "a"):
                self.anchors.add(value or "")
            elif name in ("href", "src"):
                self.links.append(value or "")


def broken_links(out: Path) -> list[str]:
    """A line for each relative link of an HTML file below `out` that leads to no file there, or to no anchor in it."""
    pages = {path: _Page(path.read_text(encoding="utf-8")) for path in sorted(out.rglob("*.html"))}

    def broken() -> Iterator[str]:
        for path, page in pages.items():
            for link in page.links:
                parts = urlsplit(link)
                if parts.scheme or parts.netloc:
                    continue
                target = Path(os.path.normpath(path.parent / unquote(parts.path))) if parts.path else path
                if not target.is_relative_to(out) or not target.is_file():
                    yield f"{path.relative_to(out)}: {link} leads to no file"
                elif target in pages and parts.fragment and unquote(parts.fragment) not in pages[target].anchors:
                    yield f"{path.relative_to(out)}: {link} leads to no anchor"

    return list(broken())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m docs.build", description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="folder to write to; a build that is there is replaced")
    out = parser.parse_args().out.resolve()
    try:
        problems = build(ROOT, out)
    except ValueError as error:
        parser.error(str(error))
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        print(f"{len(problems)} problem(s) in the docs", file=sys.stderr)
        return 1
    print(out / "index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
