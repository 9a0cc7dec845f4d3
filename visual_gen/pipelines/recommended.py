"""What a checkpoint was trained for, from its `recommended.json`, and warnings where a call leaves it.

The file is advice: what is wrong in it is warned about and left aside. All keys are optional: label, what kind of
checkpoint it is, in a few words, for people; sizes, a list of [height, width]; num_frames, a list;
max_sequence_length, [lowest, highest].
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from visual_gen.checkpoint import read_json

logger = logging.getLogger(__name__)

FILE_NAME = "recommended.json"


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, int) and not isinstance(v, bool) for v in value)


_FITS = {
    "label": lambda value: isinstance(value, str),
    "sizes": lambda value: isinstance(value, list) and all(_counts(size) and len(size) == 2 for size in value),
    "num_frames": _counts,
    "max_sequence_length": lambda value: _counts(value) and len(value) == 2,
}


def read_recommended(folder: Path) -> dict[str, Any]:
    """What the file says as it should; empty where a checkpoint has none."""
    path = folder / FILE_NAME
    if not path.exists():
        return {}
    try:
        content = read_json(path)
    except (ValueError, OSError) as error:
        logger.warning("%s; going on without its advice", error)
        return {}
    wrong = [key for key, fits in _FITS.items() if key in content and not fits(content[key])]
    for key in wrong:
        logger.warning("%s has %s %r, which is none; going on without it", path, key, content[key])
    return {key: value for key, value in content.items() if key not in wrong}


def recommended_warnings(
    recommended: dict[str, Any], *, height: int, width: int, num_frames: int | None, max_sequence_length: int
) -> list[str]:
    """One sentence for each setting outside what the checkpoint is known to do well. num_frames: None for a stream."""
    found = []
    sizes, counts, lengths = (recommended.get(key) for key in ("sizes", "num_frames", "max_sequence_length"))
    if sizes and [height, width] not in sizes:
        known = ", ".join(f"{h}x{w}" for h, w in sizes)
        found.append(f"height x width {height}x{width} is none of this checkpoint's sizes ({known}): it may fail there")
    if counts and num_frames is not None and num_frames not in counts:
        known = ", ".join(map(str, counts))
        found.append(f"num_frames {num_frames} is none of this checkpoint's frame counts ({known}): it may fail there")
    if lengths and not lengths[0] <= max_sequence_length <= lengths[1]:
        found.append(
            f"max_sequence_length {max_sequence_length} is outside this checkpoint's {lengths[0]} to {lengths[1]}, and "
            "it attends to the padding: it may fail there"
        )
    return found
