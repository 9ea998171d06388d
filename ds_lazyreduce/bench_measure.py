"""How workloads measure: contenders of a workload exist at the same time and take turns.

So a machine that becomes slower or faster while the benchmark runs does so for all of them. A time is that of the
slowest rank.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from tqdm import tqdm

from .bench_contenders import CONTENDERS, Contender, Setting
from .bench_models import Shape
from .bench_report import Target
from .config import ConfigError

WARM_UP = 2  # rounds: in the second one the extension uses the order of buckets it learned in the first


@dataclass(frozen=True)
class Options:
    """What the command line asked for.

    scale: factor on the elements of every tensor. contenders: None for each workload's own.
    """

    rounds: int
    scale: float
    jitter_ms: float
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


def take_turns(
    options: Options, what: str, built: dict[str, Contender], one_round: Callable[[Contender, int], Times]
) -> dict[str, dict[str, list[float]]]:
    """``one_round(contender, round)`` for all contenders in turn; rounds below 0 are warm-up.

    Returns:
        contender -> metric -> one value a round, the largest of all ranks.
    """
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in built}
    names = list(built)
    total = (options.rounds + WARM_UP) * len(names)
    with tqdm(total=total, desc=what, disable=options.rank != 0, file=sys.stderr, ncols=80) as bar:
        for index in range(-WARM_UP, options.rounds):
            first = index % len(names)  # nobody always runs behind the same one
            for name in names[first:] + names[:first]:
                dist.barrier()
                times = one_round(built[name], index)
                if index >= 0:
                    for metric, value in times.items():
                        samples[name].setdefault(metric, []).append(value)
                bar.update()
    return {name: _slowest_rank(metrics) for name, metrics in samples.items()}


def _slowest_rank(metrics: dict[str, list[float]]) -> dict[str, list[float]]:
    values = torch.tensor(list(metrics.values()), device=get_accelerator().current_device_name())
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return dict(zip(metrics, values.tolist(), strict=True))


def size(setting: Setting) -> str:
    """The model, for titles."""
    shape = setting.shape
    return f"{shape.layers} layers x {shape.tensors} tensors x {shape.elements:,} elements, bf16"
