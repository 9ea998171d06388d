"""Time against memory of each contender, as a picture. Needs matplotlib (the extra ``plot``)."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .bench_report import Result, quartiles
from .bench_settings import LAZY

SUFFIXES = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class Point:
    """A contender: ``memory`` in MiB, median ``time`` with its quartiles in the result's unit."""

    name: str
    memory: float
    time: float
    lower: float
    upper: float


def is_available() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def points(result: Result) -> list[Point]:
    """The contenders whose time and memory were both measured, fastest first."""
    found = []
    for name, metrics in result.samples.items():
        if metrics.get("memory") and metrics.get(result.primary):
            lower, upper = quartiles(metrics[result.primary])
            found.append(Point(name, result.median(name, "memory"), result.median(name), lower, upper))
    return sorted(found, key=lambda point: (point.time, point.memory))


def front(among: Sequence[Point]) -> list[Point]:
    """Those that no other one beats in both time and memory; fastest first."""
    best: list[Point] = []
    for point in sorted(among, key=lambda point: (point.time, point.memory)):
        if not best or point.memory < best[-1].memory:
            best.append(point)
    return best


def apart(positions: Sequence[float], gap: float) -> list[float]:
    """Ascending ``positions``, moved up where they would be closer than ``gap`` to the one below."""
    moved: list[float] = []
    for position in positions:
        moved.append(max(position, moved[-1] + gap) if moved else position)
    return moved


def plot(results: Sequence[Result], path: Path, machine: str) -> None:
    """Writes one panel for each result to ``path``; its suffix gives the format.

    machine: a line or two below the panels.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5 * len(results) + 0.5), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, result in zip(figure.subplots(len(results), squeeze=False)[:, 0], results, strict=True):
        _panel(axes, result)
    figure.supxlabel(machine, fontsize=7, color="0.4")
    figure.savefig(path, dpi=150)


def _panel(axes, result: Result) -> None:
    shown = points(result)
    best = front([p for p in shown if p.name in LAZY or p.name.startswith("zero2")])  # the same model states
    axes.plot([p.memory for p in best], [p.time for p in best], color="0.8", linewidth=4, zorder=0)
    limit = result.median("limit")
    top = max([p.upper for p in shown] + [limit or 0]) * 1.1
    labels = apart([p.time for p in shown], gap=top / 24)
    right = max(p.memory for p in shown)
    for point, label in zip(shown, labels, strict=True):
        color = "C0" if point.name in LAZY else "C1" if point.name.startswith("zero2") else "C7"
        spread = [[point.time - point.lower], [point.upper - point.time]]
        axes.errorbar(point.memory, point.time, spread, fmt="o", color=color, capsize=3)
        axes.annotate(
            point.name,
            (point.memory, point.time),
            (right * 1.06, label),
            color=color,
            va="center",
            arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.4},
        )
    if limit is not None:
        axes.axhline(limit, color="0.6", linestyle=":")
        axes.text(0, limit, " the slowest rank's own delays", color="0.4", va="bottom", fontsize=8)
    axes.set(
        title=f"{result.workload}: {result.title}",
        xlabel="memory of a rank at the peak of a window [MiB]",
        ylabel=f"{result.primary} [{result.unit}], median and quartiles",
        xlim=(0, right * 1.3),
        ylim=(0, max(top, labels[-1] + top / 24)),
    )
    axes.title.set_fontsize(8)
    axes.grid(alpha=0.3)
