"""A run on disk: its settings, its log, and the state that the next call goes on from."""

import json
import time
from pathlib import Path

import torch

from .settings import ModelSettings


def _tuples(value):
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def settings_from(fields: dict, kind: type[ModelSettings]) -> ModelSettings:
    """Settings out of what `as_json` gave, through JSON; ValueError names a field that `kind` does not have."""
    unknown = sorted(set(fields) - set(kind().as_json()))
    if unknown:
        raise ValueError(f"no such setting: {', '.join(unknown)}")
    return kind(**{name: _tuples(value) for name, value in fields.items()})


class RunFolder:
    """Made once with `settings`; opened again, it keeps the settings that it was made with."""

    def __init__(self, path: Path, settings: ModelSettings, changes: dict | None = None) -> None:
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        self._started = time.monotonic()
        settings_file = self.path / "settings.json"
        if settings_file.exists():
            settings = settings_from(json.loads(settings_file.read_text()), type(settings))
        if changes:
            settings = settings_from(settings.as_json() | changes, type(settings))
            self.log(f"settings changed: {json.dumps(changes)}")
        self.settings = settings
        settings_file.write_text(json.dumps(settings.as_json(), indent=2) + "\n")

    def log(self, message: str) -> None:
        """Prints and keeps a line with the seconds since this call began."""
        line = f"[{time.monotonic() - self._started:7.1f} s] {message}"
        print(line, flush=True)
        with (self.path / "log.txt").open("a") as log:
            log.write(line + "\n")

    def save(self, name: str, state: dict) -> None:
        """Replaces the state in one move, so that a call cut short leaves the state before."""
        unfinished = self.path / f"{name}.pt.unfinished"
        torch.save(state, unfinished)
        unfinished.replace(self.path / f"{name}.pt")

    def load(self, name: str, device: torch.device | str = "cpu") -> dict | None:
        path = self.path / f"{name}.pt"
        return torch.load(path, map_location=device, weights_only=True) if path.exists() else None

    def finished(self, name: str) -> dict:
        """The state of a stage that must be done; ValueError names the stage to run first."""
        state = self.load(name)
        if state is None or not state["done"]:
            raise ValueError(f"stage {name!r} is not finished in {self.path}; run it first")
        return state


class Deadline:
    """Whether a call's time is used up, and when the state was last worth saving."""

    def __init__(self, limit_s: float, save_every_s: float = 90.0) -> None:
        self._end = time.monotonic() + limit_s
        self._save_every_s = save_every_s
        self._next_save = time.monotonic() + save_every_s

    def over(self) -> bool:
        return time.monotonic() >= self._end

    def save_due(self) -> bool:
        if time.monotonic() < self._next_save:
            return False
        self._next_save = time.monotonic() + self._save_every_s
        return True
