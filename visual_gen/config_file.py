"""A YAML file as plain values, the line of every key, and values of the command line put over them.

Nothing here knows which keys there are: that is visual_gen.config.
"""

from __future__ import annotations

import reprlib
from pathlib import Path
from typing import Any, NamedTuple

import yaml

Lines = dict[tuple[str, ...], int]  # of every key, as its path in the file


class ConfigError(ValueError):
    """Something in a configuration file or an override is wrong; the message has one line for each problem."""


class Override(NamedTuple):
    """A value that replaces what the file says. `key` is dotted; `origin` is what an error names as its source."""

    key: str
    value: object
    origin: str


def parse_override(text: str) -> Override:
    """`"a.b=c"` as an Override; the value is read as YAML. Raises ConfigError."""
    key, equals, value = text.partition("=")
    origin = f"--set {text}"
    if not equals or not all(key.strip().split(".")):
        raise ConfigError(f"{origin}: wants key=value, for example generation.seed=7")
    try:
        return Override(key.strip(), yaml.safe_load(value), origin)
    except yaml.YAMLError as error:
        raise ConfigError(f"{origin}: the value is not YAML ({_yaml_problem(error)})") from error


def read_yaml(path: Path) -> tuple[dict[str, Any], Lines]:
    """The values of a file, and the line of every key. Raises FileNotFoundError, and ConfigError for what is no mapping
    of keys in YAML."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such configuration file")
    if path.is_dir():
        raise ConfigError(f"{path}: is a folder; name the YAML file in it")
    try:
        text = path.read_text(encoding="utf-8-sig")
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        lines: Lines = {}
        if node is not None:
            _walk(node, (), lines, path, set())
        data = loader.construct_document(node) if node is not None else None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text (byte {error.start})") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date such as 2020-99-99
        if isinstance(error, ConfigError):
            raise
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError(f"{where}: is not YAML ({_yaml_problem(error)})") from error
    if not isinstance(data, dict):
        found = "is empty" if data is None else f"holds {show(data)}"
        raise ConfigError(f"{path}: {found}; wants a mapping with at least model.path")
    return data, lines


def _walk(node: yaml.Node, keys: tuple[str, ...], lines: Lines, path: Path, seen: set[int]) -> None:
    """Note the line of every key, and refuse a key that stands twice: YAML would silently take the last."""
    if not isinstance(node, yaml.MappingNode) or id(node) in seen:
        return
    seen.add(id(node))  # an alias is the same node again, and may stand inside itself
    for key_node, value_node in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge":
            continue
        key = (*keys, str(key_node.value))
        line = key_node.start_mark.line + 1
        if key in lines:
            raise ConfigError(f"{path}:{line}: {'.'.join(key)}: stands twice (first on line {lines[key]}); keep one")
        lines[key] = line
        _walk(value_node, key, lines, path, seen)


def put(data: dict[str, Any], keys: tuple[str, ...], override: Override) -> None:
    """Sets an override's value in `data`, sections on the way to it included. Raises ConfigError."""
    for depth, key in enumerate(keys[:-1], start=1):
        section = data.get(key)
        if section is None:
            section = data[key] = {}
        if not isinstance(section, dict):
            name = ".".join(keys[:depth])
            raise ConfigError(f"{override.origin}: {override.key}: {name} is a value, not a section")
        data = section
    data[keys[-1]] = override.value


def origin_of(keys: tuple[str, ...], origins: dict[tuple[str, ...], str], lines: Lines) -> str | None:
    """The override that a key's value comes from; None if that is the file."""
    for length in range(len(keys), 0, -1):
        if keys[:length] in origins:
            return origins[keys[:length]]
    if keys in lines:
        return None
    # A section that the file lacks, made by an override of a key in it.
    return next((origin for at, origin in origins.items() if at[: len(keys)] == keys), None)


def line_of(path: Path, keys: tuple[str, ...], lines: Lines) -> str:
    """File and line of a key, or of the nearest section round it that the file has."""
    for length in range(len(keys), 0, -1):
        if keys[:length] in lines:
            return f"{path}:{lines[keys[:length]]}"
    return str(path)


def show(value: object) -> str:
    return reprlib.repr(value)


def _yaml_problem(error: Exception) -> str:
    problem = getattr(error, "problem", None) or str(error)
    return " ".join(str(problem).split())
