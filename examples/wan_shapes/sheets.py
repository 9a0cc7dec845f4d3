"""Contact sheets: clips as rows of frames, so that they can be looked at."""

from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image, ImageDraw

LABEL_HEIGHT, GAP = 14, 2


def contact_sheet(clips: Sequence[torch.Tensor], labels: Sequence[str], path: Path, columns: int = 6) -> None:
    """Saves clips [frames, height, width, 3] in 0..1 as a PNG: a row each, `columns` frames from first to last."""
    if len(clips) != len(labels) or not clips:
        raise ValueError(f"need as many labels as clips and at least one, got {len(labels)} for {len(clips)}")
    row_heights = [clip.shape[1] + LABEL_HEIGHT + GAP for clip in clips]
    width = max(clip.shape[2] for clip in clips) + GAP
    sheet = Image.new("RGB", (width * columns, sum(row_heights)), (96, 96, 112))
    pen = ImageDraw.Draw(sheet)
    top = 0
    for clip, label, row_height in zip(clips, labels, row_heights, strict=True):
        pen.text((2, top + 1), label, fill=(255, 255, 255))
        for column in range(columns):
            frame = clip[round(column * (len(clip) - 1) / (columns - 1))]
            pixels = (frame.clamp(0, 1) * 255).round().byte().cpu().numpy()
            sheet.paste(Image.fromarray(pixels), (column * width, top + LABEL_HEIGHT))
        top += row_height
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path)
