"""The five workloads: ``WORKLOADS[name](options) -> Result``. Collective: all ranks call them alike.

Contenders of a workload exist at the same time and take turns, so that a machine that becomes slower or
faster while the benchmark runs does so for all of them. A time is that of the slowest rank.
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

from .bench_contenders import CONTENDERS, Contender, DeepSpeedEngine, Setting
from .bench_models import Shape
from .bench_report import Result, Target
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


# ---- measuring


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


# ---- workloads


def comm(options: Options) -> Result:
    """Communication-bound: 4 micro-steps whose backward only hands 16 M gradient elements over."""
    setting = options.setting(Shape(layers=16, tensors=4, elements=2**18), micro_steps=4, bucket=2**22)

    def one_round(contender: Contender, index: int) -> Times:
        start, cpu_start = now(), time.process_time()
        window(contender, setting.micro_steps)
        times = {"forward+backward": (now() - start) * 1e3, "CPU": (time.process_time() - cpu_start) * 1e3}
        if contender.has_step:
            dist.barrier()
            start = now()
            contender.step()
            times["step"] = (now() - start) * 1e3
        return times

    notes = [
        "CPU: of one rank, all its threads, in forward+backward; where cores are scarce it sets the time",
    ]
    names = options.contenders or ("bare", "zero2", "lazy", "lazy-4", "fsdp2", "ddp")
    if "ddp" in names:
        notes.append("ddp keeps no fp32 masters and whole optimizer states, so its step is another one")
    with contenders(options, setting, names, notes) as built:
        samples = take_turns(options, "comm", built, one_round)
    return Result(
        workload="comm",
        title=f"{_size(setting)}, {setting.micro_steps} micro-steps, buckets of {setting.bucket:,}",
        unit="ms",
        primary="forward+backward",
        baselines=("zero2", "fsdp2", "ddp", "bare"),
        samples=samples,
        targets=options.targets(
            Target("lazy", "zero2", 0.42, ranks=4),
            Target("lazy", "fsdp2", 0.25, ranks=4),
            Target("lazy", "ddp", 0.85, ranks=4),
            Target("lazy", "bare", 1.3, ranks=4),
        ),
        notes=notes,
    )


def step(options: Options) -> Result:
    """The optimizer step alone, with 80 buckets."""
    setting = options.setting(Shape(layers=80, tensors=1, elements=2**18), micro_steps=1, bucket=2**18)

    def one_round(contender: Contender, index: int) -> Times:
        window(contender, setting.micro_steps)
        dist.barrier()
        start = now()
        contender.step()
        return {"step": (now() - start) * 1e3}

    notes: list[str] = []
    with contenders(options, setting, options.contenders or ("zero2", "lazy"), notes) as built:
        built = {name: contender for name, contender in built.items() if contender.has_step}
        samples = take_turns(options, "step", built, one_round)
    return Result(
        workload="step",
        title=f"{_size(setting)}, {setting.shape.layers} buckets, torch AdamW",
        unit="ms",
        primary="step",
        baselines=("zero2",),
        samples=samples,
        targets=[t for ranks in (2, 4) for t in options.targets(Target("lazy", "zero2", 1.1, ranks))],
        notes=notes,
    )


def hooks(options: Options) -> Result:
    """What a gradient's way into its bucket costs: 1600 parameters of 64 elements."""
    setting = options.setting(Shape(layers=200, tensors=8, elements=64), micro_steps=8)
    handled = setting.shape.parameters * setting.micro_steps

    def one_round(contender: Contender, index: int) -> Times:
        start = now()
        window(contender, setting.micro_steps)
        times = {"per parameter": (now() - start) / handled * 1e6}
        contender.step()
        return times

    notes: list[str] = []
    with contenders(options, setting, options.contenders or ("none", "zero2", "lazy"), notes) as built:
        samples = take_turns(options, "hooks", built, one_round)
    if "none" in samples:
        base = samples["none"]["per parameter"]
        for name in samples.keys() - {"none"}:
            values = samples[name]["per parameter"]
            samples[name]["above none"] = [a - b for a, b in zip(values, base, strict=True)]
    return Result(
        workload="hooks",
        title=f"{_size(setting)}, forward+backward and reductions",
        unit="us",
        primary="above none" if "none" in samples else "per parameter",
        baselines=("zero2",),
        samples=samples,
        notes=notes,
    )


def jitter(options: Options) -> Result:
    """Ranks that are late at random: who waits for whom."""
    setting = options.setting(Shape(layers=4, tensors=1, elements=2**16), micro_steps=8, bucket=2**16)
    mean = options.jitter_ms / 1e3

    def delays(index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index + WARM_UP)
        drawn = torch.empty(options.ranks, setting.micro_steps).exponential_(1.0, generator=generator)
        return drawn * (mean if index >= 0 else 0.0)

    def one_round(contender: Contender, index: int) -> Times:
        own = delays(index)[options.rank].tolist()
        start = now()
        window(contender, setting.micro_steps, own)
        contender.step()
        return {"step": (now() - start) * 1e3}

    notes = ["limit: the delays of the slowest rank alone, as if ranks waited for one another once a step"]
    names = options.contenders or ("zero2-loss", "zero2", "lazy-drained", "lazy", "lazy-4", "lazy-boundary")
    with contenders(options, setting, names, notes) as built:
        samples = take_turns(options, "jitter", built, one_round)
    limit = [delays(index).sum(dim=1).max().item() * 1e3 for index in range(options.rounds)]
    return Result(
        workload="jitter",
        title=f"{_size(setting)}, 4 buckets, {setting.micro_steps} micro-steps, "
        f"delays of {options.jitter_ms:g} ms on average before each",
        unit="ms",
        primary="step",
        baselines=("zero2", "limit"),
        samples={**samples, "limit": {"step": limit}},
        notes=notes,
    )


def memory(options: Options) -> Result:
    """Peak bytes of the extension's buffers: the same for any number of buckets and any param groups."""
    samples: dict[str, dict[str, list[float]]] = {}
    cases = [(f"{layers} buckets", layers, "one") for layers in (4, 16, 64)]
    cases += [(f"16 layers, {split} groups", 16, split) for split in ("decay", "layers")]
    for name, layers, split in tqdm(cases, desc="memory", disable=options.rank != 0, file=sys.stderr, ncols=80):
        shape = Shape(layers=layers, tensors=4, elements=2**14, vectors=2)
        setting = options.setting(shape, micro_steps=2, bucket=2**16, split=split)
        contender = DeepSpeedEngine(setting, lazy={})
        for _ in range(WARM_UP):
            window(contender, setting.micro_steps)
            contender.step()
        report = contender.engine.lazy_reduce_report()
        contender.close()
        bucket = setting.bucket * 2
        samples[name] = {
            "peak buffers": [report["peak_buffer_bytes"] / 1024],
            "one bucket": [bucket / 1024],
            "gradients": [setting.shape.numel * 2 / 1024],
        }
        gc.collect()
    return Result(
        workload="memory",
        title="4 tensors a layer (2 without weight decay), buckets of one layer, bf16, max_in_flight 1",
        unit="KiB",
        primary="peak buffers",
        baselines=("4 buckets",),
        samples=samples,
    )


def _size(setting: Setting) -> str:
    shape = setting.shape
    return f"{shape.layers} layers x {shape.tensors} tensors x {shape.elements:,} elements, bf16"


WORKLOADS: dict[str, Callable[[Options], Result]] = {
    "comm": comm,
    "step": step,
    "hooks": hooks,
    "jitter": jitter,
    "memory": memory,
}
