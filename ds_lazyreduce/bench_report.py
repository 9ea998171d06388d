"""Results of the benchmark as tables and as JSON. Pure: no torch, no communication."""

from __future__ import annotations

import os
import platform
import statistics
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Target:
    """``contender`` is to take at most ``bound`` times what ``baseline`` takes, on ``ranks`` ranks.

    metric: None for the workload's primary one.
    """

    contender: str
    baseline: str
    bound: float
    ranks: int
    metric: str | None = None


@dataclass
class Result:
    """What one workload measured.

    samples: contender -> metric -> one value a round, the largest of all ranks; of memory one in all.
    units: of the metrics that are in another unit than ``unit``.
    primary: the metric that ratios and targets compare.
    baselines: the contenders to compare with; those that did not run are left out.
    targets: left empty where sizes or ranks are not those that the targets are meant for.
    details: for the JSON alone: what a reader needs to repeat or to model the workload.
    """

    workload: str
    title: str
    unit: str
    primary: str
    baselines: tuple[str, ...]
    samples: dict[str, dict[str, list[float]]]
    targets: list[Target] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    units: dict[str, str] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)

    def median(self, contender: str, metric: str | None = None) -> float | None:
        """Median over rounds, None where there is no such measurement."""
        values = self.samples.get(contender, {}).get(metric or self.primary)
        return statistics.median(values) if values else None

    def ratio(self, contender: str, baseline: str, metric: str | None = None) -> float | None:
        """Ratio of the medians of the metric, by default the primary one."""
        ours, theirs = self.median(contender, metric), self.median(baseline, metric)
        return None if ours is None or not theirs else ours / theirs

    def as_json(self) -> dict[str, Any]:
        """Plain data, with all samples."""
        contenders = {}
        for name, metrics in self.samples.items():
            contenders[name] = {
                "metrics": {
                    metric: {
                        "unit": self.units.get(metric, self.unit),
                        "median": statistics.median(values),
                        "quartiles": quartiles(values),
                        "min": min(values),
                        "max": max(values),
                        "samples": values,
                    }
                    for metric, values in metrics.items()
                },
                "ratios": {
                    baseline: ratio
                    for baseline in self.baselines
                    if baseline != name and (ratio := self.ratio(name, baseline)) is not None
                },
            }
        return {
            "workload": self.workload,
            "title": self.title,
            "unit": self.unit,
            "primary": self.primary,
            "contenders": contenders,
            "targets": [
                {
                    "contender": t.contender,
                    "baseline": t.baseline,
                    "metric": t.metric or self.primary,
                    "bound": t.bound,
                    "ratio": ratio,
                }
                for t in self.targets
                if (ratio := self.ratio(t.contender, t.baseline, t.metric)) is not None
            ],
            "notes": self.notes,
            "details": self.details,
        }

    def table(self) -> str:
        """Rows are contenders; columns are medians with their quartiles, then ratios of the primary metric."""
        metrics = list(dict.fromkeys(metric for row in self.samples.values() for metric in row))
        baselines = [name for name in self.baselines if self.median(name) is not None]
        units = [self.units.get(metric, self.unit) for metric in metrics]
        header = [f"{metric} [{unit}]" for metric, unit in zip(metrics, units, strict=True)]
        rows = [["", *header, *(f"/ {name}" for name in baselines)]]
        for name, row in self.samples.items():
            ratios = [self.ratio(name, baseline) for baseline in baselines]
            rows.append([name, *(_cell(row.get(metric)) for metric in metrics), *map(_ratio_cell, ratios)])
        lines = [f"{self.workload}: {self.title}", *aligned(rows)]
        for target in self.targets:
            ratio = self.ratio(target.contender, target.baseline, target.metric)
            if ratio is not None:
                verdict = "reached" if ratio <= target.bound else "missed"
                wanted = f"{target.contender} <= {target.bound} x {target.baseline}"
                metric = f", {target.metric}" if target.metric else ""
                lines.append(f"  target {wanted}{metric}: {ratio:.3f}, {verdict}")
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])


def quartiles(values: list[float]) -> tuple[float, float]:
    """The lower and the upper one, by linear interpolation between the values."""
    if len(values) == 1:
        return values[0], values[0]
    lower, _, upper = statistics.quantiles(values, n=4, method="inclusive")
    return lower, upper


def _cell(values: list[float] | None) -> str:
    if not values:
        return "-"
    median, low, high = map(_number, (statistics.median(values), *quartiles(values)))
    return median if len(values) == 1 else f"{median} ({low} .. {high})"


def _number(value: float) -> str:
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _ratio_cell(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def aligned(rows: list[list[str]]) -> list[str]:
    """Lines of a table: the first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  " + "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]


def machine(ranks: int) -> dict[str, Any]:
    """What the numbers depend on; ``load`` is the machine's one-minute load average before the benchmark."""
    return {
        "ranks": ranks,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cpu": _cpu_model(),
        "threads_per_rank": os.environ.get("OMP_NUM_THREADS", "unset"),
        "load": round(os.getloadavg()[0], 1),
        **{name: metadata.version(name) for name in ("torch", "deepspeed")},
        "python": platform.python_version(),
    }


def describe(info: dict[str, Any]) -> str:
    """The machine in two lines."""
    return (
        f"{info['ranks']} ranks on {info['cores']} cores ({info['cpu']}, {info['device']}), "
        f"OMP_NUM_THREADS {info['threads_per_rank']}, load average before {info['load']}\n"
        f"torch {info['torch']}, deepspeed {info['deepspeed']}, python {info['python']}, "
        f"backend {info['backend']}, kernel {info['kernel']}"
    )


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    models = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.machine())
