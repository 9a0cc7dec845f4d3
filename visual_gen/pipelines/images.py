"""The images of a request: opened, checked, and how far the video's shape stretches them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps, UnidentifiedImageError

# Of width against height: less is the rounding of sizes to whole tokens.
_STRETCH_SEEN = 0.05


def open_images(name: str, value: Any, batch: int) -> list[Image.Image]:
    """One RGB image for each of `batch` prompts; empty if `value` is None.

    value: a PIL image, the path of an image file, or a list with one for each prompt. Raises ValueError on anything
    else, on a file that is no image, and on a list of another length.
    """
    if value is None:
        return []
    if not isinstance(value, list | tuple):
        return [_open(name, value)] * batch
    if len(value) != batch:
        raise ValueError(f"{name} has {len(value)} images for {batch} prompt(s); give one for all, or one for each")
    return [_open(f"{name}[{i}]", one) for i, one in enumerate(value)]


def _open(name: str, value: Any) -> Image.Image:
    if isinstance(value, Image.Image):
        return value.convert("RGB")
    if not isinstance(value, str | Path):
        raise ValueError(
            f"{name} is a {type(value).__name__}; it must be a PIL image or the path of an image file (of pixels [H, "
            "W, 3] from 0 to 255: PIL.Image.fromarray)"
        )
    path = Path(os.path.expanduser(value))  # Path's own raises on an unknown user
    try:
        with Image.open(path) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except FileNotFoundError:
        raise ValueError(f"{name} is {str(value)!r}: there is no such file") from None
    except UnidentifiedImageError:
        raise ValueError(f"{name} is {str(value)!r}: this file is no image that can be read") from None
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:  # truncated, a folder, or far too large
        raise ValueError(f"{name} is {str(value)!r}: it cannot be read ({error})") from None


def stretch_warnings(name: str, images: Sequence[Image.Image], *, height: int, width: int) -> list[str]:
    """One sentence for each distinct image that the video's shape distorts."""
    found = []
    for image in {id(image): image for image in images}.values():
        stretch = (width / height) / (image.width / image.height)
        if max(stretch, 1 / stretch) > 1 + _STRETCH_SEEN:
            found.append(
                f"{name} is {image.width}x{image.height} (width x height) and is stretched to {width}x{height}: crop "
                "it, or ask for a height and width of its shape"
            )
    return found
