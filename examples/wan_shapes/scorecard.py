"""What an evaluation has found: scores, whether they are where they must be, and the clips that were read wrong."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from .combinations import Prompt
from .scores import Reading, mistakes
from .sheets import contact_sheet

Rows = list[tuple[str, Tensor]]  # label and clip, to be looked at


@dataclass
class Scorecard:
    scores: dict[str, object] = field(default_factory=dict)
    checks: list[dict] = field(default_factory=list)
    wrong: Rows = field(default_factory=list)

    def check(self, name: str, value: float, *, at_least: float | None = None, at_most: float | None = None) -> None:
        """Notes a score and whether it is where it must be."""
        passed = (at_least is None or value >= at_least) and (at_most is None or value <= at_most)
        bound = f">= {at_least:g}" if at_least is not None else f"<= {at_most:g}"
        self.checks.append({"name": name, "value": round(float(value), 3), "must_be": bound, "passed": passed})
        print(f"{'ok  ' if passed else 'LOW ' if at_least is not None else 'HIGH'} {name}: {value:.4g} ({bound})",
              flush=True)

    def passed(self) -> bool:
        return all(check["passed"] for check in self.checks)

    def note_mistakes(
        self, readings: Sequence[Reading], prompts: Sequence[Prompt], clips: Sequence[Tensor], where: str = ""
    ) -> None:
        """Keeps the clips that are not what their prompts say."""
        for prompt, reading, clip in zip(prompts, readings, clips, strict=True):
            self.wrong += [(where + line, clip) for line in mistakes([reading], [prompt])]


def run_measures(
    card: Scorecard, measures: Mapping[str, Callable], names: Sequence[str], how: Mapping[str, object],
    out: Path | None, columns: int = 6,
) -> int:
    """Runs the measures of these names, each of which takes `card` and returns rows to show; writes scores.json, with
    `how` at its head, and the sheets, of `columns` frames a clip, to `out`. 0 when all scores are reached, else 1."""
    for name in names:
        print(f"-- {name}: {measures[name].__doc__.splitlines()[0]}", flush=True)
        sheet = measures[name](card)
        if out is not None and sheet:
            contact_sheet([clip for _, clip in sheet], [label for label, _ in sheet], out / f"sheet_{name}.png",
                          columns)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            report = {**how, "scores": card.scores, "checks": card.checks, "mistakes": [line for line, _ in card.wrong]}
            (out / "scores.json").write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    if out is not None and card.wrong:
        worst = card.wrong[:16]
        contact_sheet([clip for _, clip in worst], [line for line, _ in worst], out / "sheet_mistakes.png", columns=8)
    for line, _ in card.wrong:
        print(f"wrong: {line}")
    print("all scores reached" if card.passed() else "some scores were not reached")
    return 0 if card.passed() else 1
