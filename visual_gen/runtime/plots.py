"""The report's plots, as SVG text to put into the page."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
from markupsafe import Markup

from visual_gen.runtime.units import format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID = "#1f2933", "#66727f", "#e3e8ee"
STAGE_COLORS = {
    "load": "#8fa3b8", "text": "#e0a13c", "image": "#8b6bb1", "compile": "#c9b458", "denoise": "#3a6ea5",
    "decode": "#5aa37a", "write": "#b56576",
}  # fmt: skip
OTHER_COLOR = "#9a9a9a"
STYLE = {
    "svg.fonttype": "none",  # text stays text, in the page's font
    "svg.hashsalt": "visual-gen",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
}


def stage_shares(stages: Mapping[str, float]) -> Markup:
    """One bar as long as the run, cut into its stages; `stage_legend` says which is which."""
    with _styled_figure(0.9) as figure:
        axes = figure.add_subplot()
        start = 0.0
        for _, color, seconds, _ in stage_legend(stages):
            axes.barh(0, seconds, left=start, height=0.8, color=color, edgecolor="white", linewidth=1.5)
            start += seconds
        axes.set(xlim=(0, start or 1.0), ylim=(-0.4, 0.4), yticks=[], xlabel="seconds since the start")
        axes.spines[:].set_visible(False)
        return _svg(figure, "Seconds of each stage of the run")


def stage_legend(stages: Mapping[str, float]) -> list[tuple[str, str, float, float]]:
    """(name, color, seconds, share of the whole) of each stage, in order."""
    total = sum(stages.values()) or 1.0
    return [
        (name, STAGE_COLORS.get(name, OTHER_COLOR), seconds, seconds / total) for name, seconds in stages.items()
    ]


def step_times(steps: Sequence[float]) -> Markup:
    """A bar for each denoising step, and the median as a line."""
    from matplotlib.ticker import MaxNLocator

    scale, unit = (1.0, "seconds") if max(steps) >= 1 else (1e3, "milliseconds")
    values = np.asarray(steps) * scale
    numbers = np.arange(1, len(values) + 1)
    median = float(np.median(values))
    with _styled_figure(2.4) as figure:
        axes = figure.add_subplot()
        axes.bar(numbers, values, width=0.8, color=STAGE_COLORS["denoise"])
        axes.axhline(median, color=STAGE_COLORS["text"], linewidth=1.5)
        axes.annotate(
            f"median {format_seconds(median / scale)}",
            (1, median),
            xycoords=("axes fraction", "data"),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            color=INK,
        )
        axes.set(xlim=(0.4, len(values) + 0.6), ylim=(0, None), xlabel="denoising step", ylabel=unit)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.grid(axis="y", color=GRID)
        axes.set_axisbelow(True)
        axes.tick_params(length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
        return _svg(figure, "Seconds of each denoising step")


def stream_timeline(
    videos: Sequence[tuple[str, Sequence[float], Sequence[int]]],
    forwards: Mapping[str, Sequence[float]],
    num_blocks: int,
) -> Markup:
    """Three plots over the seconds of a run: the chunks of each video, the rows of each forward, the cache's blocks.

    videos: (name, seconds at which each chunk was there, chunks that a prompt switch began). forwards: "at_s",
    "seconds", "rows", "pad_rows" and "used_blocks" of each, of one at least.
    """
    from matplotlib.ticker import MaxNLocator

    lanes = len(videos)
    with _styled_figure(3.6 + 0.28 * lanes) as figure:
        chunks, rows, blocks = figure.subplots(3, 1, sharex=True, height_ratios=(0.6 + 0.28 * lanes, 1.3, 1.3))
        for lane, (_, ends, switched) in enumerate(videos):
            bars = [(start, end - start) for start, end in zip((0.0, *ends), ends, strict=False)]
            shades = [STAGE_COLORS["denoise" if i % 2 else "load"] for i in range(len(bars))]
            chunks.broken_barh(bars, (lane - 0.35, 0.7), facecolors=shades)
            begun = [bars[chunk][0] for chunk in switched if chunk < len(bars)]
            chunks.vlines(begun, lane - 0.48, lane + 0.48, color=STAGE_COLORS["write"], linewidth=2.5)
        chunks.set(yticks=range(lanes), yticklabels=[name for name, *_ in videos], ylim=(lanes - 0.4, -0.6))
        _name(chunks, "chunks; a red line is a prompt switch")
        # Each forward's values hold until the next one; the last one's for as long as it took.
        at = np.append(forwards["at_s"], forwards["at_s"][-1] + forwards["seconds"][-1])
        real, pads, used = (np.append(forwards[key], forwards[key][-1]) for key in ("rows", "pad_rows", "used_blocks"))
        rows.fill_between(at, real, step="post", color=STAGE_COLORS["denoise"], linewidth=0)
        rows.fill_between(at, real, real + pads, step="post", color=GRID, linewidth=0)
        _name(rows, "rows of each forward" + (", grey: pads" if pads.any() else ""))
        blocks.fill_between(at, used, step="post", color=STAGE_COLORS["decode"], linewidth=0)
        blocks.axhline(num_blocks, color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
        _name(blocks, f"blocks in use, of {num_blocks}")
        blocks.set(xlabel="seconds since the first forward", xlim=(0, None))
        for axes, top in ((rows, max(real + pads)), (blocks, num_blocks)):
            axes.set_ylim(0, 1.08 * top)
            axes.yaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
        for axes in (chunks, rows, blocks):
            axes.grid(axis="x", color=GRID)
            axes.set_axisbelow(True)
            axes.tick_params(length=0)
            axes.spines[:].set_visible(False)
        return _svg(figure, "Chunks, batch sizes and blocks over the run")


@contextmanager
def _styled_figure(height_inches: float) -> Iterator[Figure]:
    """As wide as the page; drawn and saved within."""
    import matplotlib  # here, so that a machine without it can use what draws nothing
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        yield Figure(figsize=(9, height_inches), layout="constrained")


def _name(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, color=MUTED)


def _svg(figure: Figure, title: str) -> Markup:
    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Title": title})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]  # the XML prologue has no place inside a page
    # As wide as its column, not as wide as it was drawn.
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r'\1 role="img"', svg, count=1)
    return Markup(svg)
