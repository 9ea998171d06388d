"""How workloads measure: contenders of a workload exist at the same time and take turns.

So a machine that becomes slower or faster while the benchmark runs does so for all of them. A time is that of the
slowest rank.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from tqdm import tqdm

from .bench_contenders import CONTENDERS, Contender, Setting
from .bench_delays import Exponential, Recorded
from .bench_models import Shape
from .bench_report import Target
from .config import ConfigError

WARM_UP = 2  # rounds: in the second one the extension uses the order of buckets it learned in the first


@dataclass(frozen=True)
class Options:
    """What the command line asked for.

    scale: factor on the elements of every tensor. delays: of the workload ``jitter``.
    contenders: None for each workload's own.
    """

    rounds: int
    scale: float
    delays: Exponential | Recorded
    contenders: tuple[str, ...] | None
    device: torch.device
    rank: int
    ranks: int

    def setting(self, shape: Shape, micro_steps: int, bucket: int | None = None, split: str = "one") -> Setting:
        """The setting with ``shape`` and ``bucket`` (elements) scaled."""
        elements = max(1, round(shape.elements * self.scale))
        if bucket:
            bucket = bucket // shape.elements * elements
        shape = replace(shape, elements=elements)
        return Setting(shape, micro_steps, bucket, self.device, self.rank, self.ranks, split)

    def targets(self, *targets: Target) -> list[Target]:
        """Those that are meant for this number of ranks; none if sizes are not the real ones."""
        return [t for t in targets if t.ranks == self.ranks and self.scale == 1.0]


def now() -> float:
    """Seconds, once the device has done what was asked of it."""
    get_accelerator().synchronize()
    return time.perf_counter()


def window(contender: Contender, micro_steps: int, delays: Iterable[float] = ()) -> None:
    """All micro-steps of an optimizer step, reductions included; ``delays`` are slept before each."""
    delays = iter(delays)
    for index in range(micro_steps):
        time.sleep(next(delays, 0.0))
        contender.micro_step(last=index == micro_steps - 1)
    contender.finish()


def only(built: dict[str, Contender], fits: Callable[[Contender], bool], what: str, notes: list[str]):
    """Those that ``fits`` holds for; the others are left out with a note, which ``what`` ends: what they lack."""
    notes += [f"{name} left out: it has no {what}" for name, contender in built.items() if not fits(contender)]
    return {name: contender for name, contender in built.items() if fits(contender)}


@contextmanager
def contenders(options: Options, setting: Setting, names: Sequence[str], notes: list[str]):
    """The contenders by name; one that the extension refuses to be is left out, with a note."""
    built: dict[str, Contender] = {}
    try:
        for name in names:
            try:
                built[name] = CONTENDERS[name](setting)
            except ConfigError as error:  # raised on every rank, before any of them communicates
                notes.append(f"{name} left out: {str(error).splitlines()[-1].strip()}")
        yield built
    finally:
        for contender in built.values():
            contender.close()
        built.clear()
        gc.collect()


Times = dict[str, float]  # metric -> value
Samples = dict[str, dict[str, list[float]]]  # contender -> metric -> one value a round


def take_turns(
    options: Options, what: str, built: Mapping[str, Any], one_round: Callable[[Any, int], Times]
) -> Samples:
    """``one_round(contender, round)`` for all contenders in turn; rounds below 0 are warm-up.

    Returns:
        contender -> metric -> one value a round, the largest of all ranks.
    """
    if not built:
        return {}
    samples: Samples = {name: {} for name in built}
    names = list(built)
    with progress(options, what, total=(options.rounds + WARM_UP) * len(names)) as bar:
        for index in range(-WARM_UP, options.rounds):
            first = index % len(names)  # nobody always runs behind the same one
            for name in names[first:] + names[:first]:
                dist.barrier()
                times = one_round(built[name], index)
                if index >= 0:
                    for metric, value in times.items():
                        samples[name].setdefault(metric, []).append(value)
                bar.update()
    return {name: largest_of_ranks(metrics) for name, metrics in samples.items()}


def largest_of_ranks(metrics: dict[str, list[float]]) -> dict[str, list[float]]:
    """Each value's maximum over the ranks. Collective."""
    values = torch.tensor(list(metrics.values()), device=get_accelerator().current_device_name())
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return dict(zip(metrics, values.tolist(), strict=True))


def progress(options: Options, what: str, **of_tqdm: Any) -> tqdm:
    """A progress bar on rank 0; see ``tqdm``."""
    return tqdm(desc=what, disable=options.rank != 0, file=sys.stderr, ncols=80, **of_tqdm)


def details(options: Options, setting: Setting) -> dict[str, Any]:
    """For the JSON: counts, and sizes in elements and bytes."""
    return {
        "ranks": options.ranks,
        "rounds": options.rounds,
        "warm_up_rounds": WARM_UP,
        "micro_steps": setting.micro_steps,
        "elements": setting.shape.numel,
        "buckets": -(-setting.shape.numel // setting.bucket),
        "bucket_elements": setting.bucket,
        "bucket_bytes": setting.bucket * 2,
    }


def size(setting: Setting) -> str:
    """The model, for titles."""
    shape = setting.shape
    return f"{shape.layers} layers x {shape.tensors} tensors x {shape.elements:,} elements, bf16"
