"""Which package imports which: read from the sources, so that a cycle or a back arrow cannot creep in."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# From the bottom up; a file imports its own layer and those below.
LAYERS = [
    ["attention_backend"],
    [
        "visual_gen.version",
        "visual_gen.config",
        "visual_gen.config_file",
        "visual_gen.checkpoint",
        "visual_gen.device",
        "visual_gen.compilation",
    ],
    ["visual_gen.modules"],
    ["visual_gen.models"],
    ["visual_gen.runtime"],
    ["visual_gen.pipelines", "visual_gen.integrations"],
    ["visual_gen.commands"],
    ["visual_gen.cli"],
]
SOURCES = sorted(path for package in ("attention_backend", "visual_gen") for path in (ROOT / package).rglob("*.py"))


def layer(module: str) -> int | None:
    for depth, packages in enumerate(LAYERS):
        if any(module == package or module.startswith(f"{package}.") for package in packages):
            return depth
    return None


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(tree: ast.AST) -> Iterator[str]:
    """Every module that the code imports anywhere, functions included; what only type checkers see is left out."""
    if isinstance(tree, ast.If) and ast.unparse(tree.test) == "TYPE_CHECKING":
        return
    if isinstance(tree, ast.Import):
        yield from (alias.name for alias in tree.names)
    elif isinstance(tree, ast.ImportFrom):
        assert tree.level == 0, "imports are absolute here"
        yield from (f"{tree.module}.{alias.name}" for alias in tree.names)
    for child in ast.iter_child_nodes(tree):
        yield from imported(child)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: module_name(path))
def test_imports_go_one_way(path):
    name = module_name(path)
    if name == "visual_gen":  # offers names of all layers, on first use
        return
    own = layer(name)
    assert own is not None, f"{name} is in no layer: add it to LAYERS"
    found = {module: layer(module) for module in imported(ast.parse(path.read_text()))}
    upward = [module for module, depth in found.items() if depth is not None and depth > own]
    assert not upward


def test_back_arrows_are_seen():
    code = "import visual_gen.cli\ndef f():\n    from visual_gen.pipelines import WanPipeline\n"
    assert [layer(module) for module in imported(ast.parse(code))] == [7, 5]
    hidden = "if TYPE_CHECKING:\n    from visual_gen.pipelines import WanPipeline\n"
    assert list(imported(ast.parse(hidden))) == []
