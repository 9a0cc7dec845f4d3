"""The report's plots, as SVG text to put into the page."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from visual_gen.runtime.units import format_seconds

INK, MUTED, GRID = "#1f2933", "#66727f", "#e3e8ee"
STAGE_COLORS = {
    "load": "#8fa3b8", "text": "#e0a13c", "image": "#8b6bb1", "denoise": "#3a6ea5", "decode": "#5aa37a",
    "write": "#b56576",
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
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 0.9), layout="constrained")
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
    scale, unit = (1.0, "seconds") if max(steps) >= 1 else (1e3, "milliseconds")
    values = np.asarray(steps) * scale
    numbers = np.arange(1, len(values) + 1)
    median = float(np.median(values))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9, 2.4), layout="constrained")
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


def _svg(figure: Figure, title: str) -> Markup:
    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Title": title})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]  # the XML prologue has no place inside a page
    # As wide as its column, not as wide as it was drawn.
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r'\1 role="img"', svg, count=1)
    return Markup(svg)
