"""The model beside what ``ds_lazyreduce.bench --workload jitter --json`` measured, on the delays drawn there.

What the model needs to know of the machine comes from runs without delays, of the same contender:

* on one rank: a rank's own work;
* on as many ranks: what is longer than that is what exchanges cost, all of them the same.

So nothing is fitted to the times that are predicted, and the error is that of who waits for whom.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ValidationError

from .simulate_model import Cluster, Costs, Link, Setting, Workload, bucket_numel, peak_buffer_bytes, play, program
from .simulate_settings import STOCK, resolve

MEASURED_BY = "ds_lazyreduce.bench --workload jitter --json"
_MIB = 2**20


class ValidationInputError(ValueError):
    """Files that cannot be compared with the model: one line that says which, and what would be right."""


# ---- what is read of the benchmark's JSON


class _Metric(BaseModel):
    samples: list[float]


class _Contender(BaseModel):
    metrics: dict[str, _Metric]


class _Delays(BaseModel):
    drawn_ms: list[list[list[float]]]  # [rounds][ranks][micro-steps]


class _Details(BaseModel):
    ranks: int
    micro_steps: int
    elements: int
    buckets: int
    delays: _Delays
    settings: dict[str, dict[str, Any]]


class _Jitter(BaseModel):
    workload: str
    contenders: dict[str, _Contender]
    details: _Details


class _File(BaseModel):
    workloads: list[dict[str, Any]]


@dataclass(frozen=True)
class Measurement:
    """One run. delays_s: ``[rounds, ranks, micro_steps]``. buffers: MiB, where they were measured."""

    path: Path
    details: _Details
    delays_s: torch.Tensor
    step_s: dict[str, float]  # medians
    buffers: dict[str, float]

    @property
    def shape(self) -> tuple[int, int, int]:
        """What runs must have in common to be compared."""
        return self.details.micro_steps, self.details.buckets, self.details.elements

    @property
    def is_calm(self) -> bool:
        return not self.delays_s.any()


def read(path: Path) -> Measurement:
    """The workload ``jitter`` of a file.

    Raises:
        ValidationInputError: no such file, or something else in it.
    """
    try:
        whole = _File.model_validate_json(path.read_text(encoding="utf-8"))
        (found,) = (w for w in whole.workloads if w.get("workload") == "jitter")
        jitter = _Jitter.model_validate(found)
        delays = torch.tensor(jitter.details.delays.drawn_ms, dtype=torch.float64) / 1e3
        if delays.shape[1:] != (jitter.details.ranks, jitter.details.micro_steps):
            raise ValueError
    except OSError as error:
        raise ValidationInputError(f"{path}: {error.strerror}") from error
    except (ValidationError, ValueError) as error:
        raise ValidationInputError(f"{path}: expected what `{MEASURED_BY}` writes") from error

    def medians(metric: str) -> dict[str, float]:
        found = {name: c.metrics[metric].samples for name, c in jitter.contenders.items() if metric in c.metrics}
        return {name: statistics.median(samples) for name, samples in found.items()}

    step_s = {name: value / 1e3 for name, value in medians("step").items()}
    return Measurement(path, jitter.details, delays, step_s, medians("buffers"))


# ---- prediction


@dataclass(frozen=True)
class Prediction:
    """delays_only_s: the model without any costs. Buffers are in bytes, None where they are not known."""

    name: str
    measured_s: float
    predicted_s: float
    delays_only_s: float
    measured_buffers: int | None
    predicted_buffers: int | None

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


def predict(late: Measurement, runs: Iterable[Measurement]) -> list[Prediction]:
    """Predicts the contenders of ``late`` that the model knows, from runs without delays among ``runs``.

    Raises:
        ValidationInputError: one of the two runs without delays is missing.
    """
    calm_runs = [run for run in runs if run.is_calm and run.shape == late.shape]
    ranks = late.details.ranks
    calm, alone = (_on(count, calm_runs, late) for count in (ranks, 1))
    cluster = Cluster(ranks, ranks, Link(0.0, 1.0), Link(0.0, 1.0))
    predictions = []
    for name in late.step_s:
        if name not in calm.step_s or name not in alone.step_s:
            continue
        micro_steps, buckets, elements = late.shape
        free = Workload(micro_steps, buckets, elements, forward_s=0.0, backward_s=0.0)
        if name in STOCK or name in late.details.settings:
            setting, free = resolve(name, cluster, free, late.details.settings.get(name))
        else:
            continue
        ops = program(setting, micro_steps, free.buckets)
        meetings = sum(op.kind in ("dispatch", "meet") for op in ops)
        cost = max(0.0, calm.step_s[name] - alone.step_s[name]) / meetings
        work = Workload(micro_steps, free.buckets, elements, 0.0, alone.step_s[name] / micro_steps)

        def median(workload: Workload, each_s: float, ops=ops) -> float:
            costs = Costs(hops_s=(each_s,), meet_s=each_s, gather_s=0.0)
            return statistics.median(play(ops, workload, costs, late.delays_s, ranks, streams=False).step_s.tolist())

        measured = late.buffers.get(name)
        predictions.append(
            Prediction(
                name=name,
                measured_s=late.step_s[name],
                predicted_s=median(work, cost),
                delays_only_s=median(free, 0.0),
                measured_buffers=None if measured is None else round(measured * _MIB),
                predicted_buffers=_buffers(setting, ops, cluster, free),
            )
        )
    return predictions


def _buffers(setting: Setting, ops: Sequence, cluster: Cluster, workload: Workload) -> int | None:
    if setting.collective == "all_reduce":
        return None
    return peak_buffer_bytes(ops, cluster, setting, bucket_numel(cluster, workload))


def _on(ranks: int, calm: list[Measurement], late: Measurement) -> Measurement:
    for run in calm:
        if run.details.ranks == ranks:
            return run
    raise ValidationInputError(
        f"{late.path}: expected beside it what `{MEASURED_BY} FILE --jitter-ms 0` measures on {ranks} rank(s), "
        "with the same sizes; the model takes its costs from there"
    )
