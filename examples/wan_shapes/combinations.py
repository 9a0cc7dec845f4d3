"""Which colour × shape × motion combinations are never trained on, and the prompt lists that are scored.

The lists are committed beside this file; `python -m examples.wan_shapes.combinations` writes them again.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from .captions import (
    BACKGROUND_WORDS,
    BACKGROUNDS,
    COLOUR_WORDS,
    COLOURS,
    DEFAULT_BACKGROUND,
    MOTION_PHRASES,
    MOTIONS,
    SHAPE_WORDS,
    SHAPES,
    plain_caption,
    visible_combination,
    with_article,
)

PROMPTS_FOLDER = Path(__file__).parent / "prompts"
HELD_OUT_SEED, SEEN_SEED, SPINNING_SEED, SYNONYM_SEED, UNKNOWN_SEED = 2026, 2027, 2028, 2029, 2030
ENDLESS_SEED, SWITCH_SEED = 2031, 2032
# What cannot go on forever, in streams.
ENDING_MOTIONS = ("growing", "shrinking")
# None of these is in the vocabulary.
OUTSIDE_WORDS = ("majestic", "cinematic", "masterpiece", "photorealistic", "wonderful", "4k", "dramatic", "elegantly")
Combination = tuple[str, str, str]


@dataclass(frozen=True)
class Prompt:
    """A prompt with its answer and the seed of its noise; None is what the prompt leaves open."""

    prompt: str
    colour: str | None
    shape: str | None
    motion: str | None
    background: str | None
    seed: int


def all_combinations() -> list[Combination]:
    """The 608 visible (colour, shape, motion)."""
    return [
        (colour, shape, motion)
        for colour in COLOURS for shape in SHAPES for motion in MOTIONS if visible_combination(shape, motion)
    ]


def balanced_choice(candidates: list[Combination], count: int, seed: int) -> list[Combination]:
    """`count` combinations in which every colour, shape and motion comes about equally often."""
    limits = [-(-count // len(set(values))) for values in zip(*candidates, strict=True)]
    rng = random.Random(seed)
    for _ in range(1000):
        chosen, used = [], [{}, {}, {}]
        for combination in rng.sample(candidates, len(candidates)):
            counts = [counter.get(value, 0) for counter, value in zip(used, combination, strict=True)]
            if all(have < limit for have, limit in zip(counts, limits, strict=True)):
                chosen.append(combination)
                for counter, value, have in zip(used, combination, counts, strict=True):
                    counter[value] = have + 1
            if len(chosen) == count:
                return chosen
    raise ValueError(f"no balanced choice of {count} out of {len(candidates)} combinations")


def make_held_out() -> list[Combination]:
    """64 of the 608 combinations, a tenth; none of them is ever drawn for training."""
    return balanced_choice(all_combinations(), 64, HELD_OUT_SEED)


def as_prompts(combinations: list[Combination], first_seed: int) -> list[Prompt]:
    """Prompts over all backgrounds, half of them in the long form; half of the default ones leave it unsaid."""
    prompts = []
    for index, (colour, shape, motion) in enumerate(combinations):
        background = list(BACKGROUNDS)[index % len(BACKGROUNDS)]
        unsaid = background == DEFAULT_BACKGROUND and index % 8 == 0
        text = plain_caption(colour, shape, motion, None if unsaid else background, long_form=(index // 4) % 2 == 1)
        prompts.append(Prompt(text, colour, shape, motion, background, first_seed + index))
    return prompts


def _synonym_prompt(rng: random.Random, colour: str, shape: str, motion: str, background: str) -> str:
    groups = (COLOUR_WORDS[colour], SHAPE_WORDS[shape], MOTION_PHRASES[motion], BACKGROUND_WORDS[background])
    colour, shape, motion, background = (rng.choice(words[1:] or words) for words in groups)
    return f"{with_article(f'{colour} {shape}')} {motion} over a {background} backdrop"


def _partial_prompts() -> list[Prompt]:
    """What is left out of a prompt is not scored, but for the background, which has a default."""
    rows = [(f"a {shape}", None, shape, None, DEFAULT_BACKGROUND) for shape in SHAPES]
    rows += [(with_article(f"{colour} shape"), colour, None, None, DEFAULT_BACKGROUND) for colour in COLOURS]
    rows += [
        (f"an object moving {motion} on a {background} background", None, None, motion, background)
        for motion, background in zip(("left", "right", "up", "down"), BACKGROUNDS, strict=True)
    ]
    rows.append(("a green star", "green", "star", None, DEFAULT_BACKGROUND))
    rows.append(("a thing spinning", None, None, "spinning", DEFAULT_BACKGROUND))
    return [Prompt(*row, seed=4000 + index) for index, row in enumerate(rows)]


def _with_outside_words(rng: random.Random, text: str) -> str:
    words = text.split()
    for word in rng.sample(OUTSIDE_WORDS, 3):
        words.insert(rng.randint(0, len(words)), word)
    return " ".join(words)


def _reworded(prompts: list[Prompt], seed: int, reword) -> list[Prompt]:
    rng = random.Random(seed)
    return [replace(prompt, prompt=reword(rng, prompt), seed=prompt.seed + seed) for prompt in prompts]


def switch_of(before: Sequence[Prompt], candidates: list[Combination], seed: int, first_seed: int) -> list[Prompt]:
    """What each of the prompts is switched to: another colour, shape and motion on the same background."""
    rng = random.Random(seed)
    prompts = []
    for index, row in enumerate(before):
        others = [other for other in candidates
                  if not set(zip("csm", other, strict=True)) & {("c", row.colour), ("s", row.shape), ("m", row.motion)}]
        other = rng.choice(others)
        text = plain_caption(*other, row.background)
        prompts.append(Prompt(text, *other, row.background, first_seed + index))
    return prompts


def make_lists() -> dict[str, list[Prompt]]:
    held_out = make_held_out()
    trained_on = [combination for combination in all_combinations() if combination not in set(held_out)]
    spinning = random.Random(SPINNING_SEED).sample([c for c in trained_on if c[2] == "spinning"], 16)
    seen = as_prompts(balanced_choice(trained_on, 64, SEEN_SEED), 1000)
    forever = [combination for combination in trained_on if combination[2] not in ENDING_MOTIONS]
    endless = as_prompts(balanced_choice(forever, 64, ENDLESS_SEED), 6000)

    def synonym(rng: random.Random, row: Prompt) -> str:
        return _synonym_prompt(rng, row.colour, row.shape, row.motion, row.background)

    return {
        "seen": seen,
        "held_out": as_prompts(held_out, 2000),
        "spinning": as_prompts(spinning, 3000),
        "endless": endless,
        "switched": switch_of(endless, forever, SWITCH_SEED, 7000),
        "partial": _partial_prompts(),
        "synonyms": _reworded(seen[:24], SYNONYM_SEED, synonym),
        "unknown_words": _reworded(
            seen[24:48], UNKNOWN_SEED, lambda rng, row: _with_outside_words(rng, row.prompt)
        ),
    }


def load_prompts(name: str) -> list[Prompt]:
    """A committed list, one of those that `make_lists` makes."""
    path = PROMPTS_FOLDER / f"{name}.json"
    if not path.exists():
        raise ValueError(f"no prompt list {name!r} in {PROMPTS_FOLDER}")
    return [Prompt(**row) for row in json.loads(path.read_text())]


def held_out_combinations() -> frozenset[Combination]:
    return frozenset((row.colour, row.shape, row.motion) for row in load_prompts("held_out"))


if __name__ == "__main__":
    PROMPTS_FOLDER.mkdir(exist_ok=True)
    for list_name, rows in make_lists().items():
        lines = ",\n".join(json.dumps(asdict(row)) for row in rows)
        (PROMPTS_FOLDER / f"{list_name}.json").write_text(f"[\n{lines}\n]\n")
