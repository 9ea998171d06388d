"""The workloads: ``WORKLOADS[name](options) -> Result``. Collective: all ranks call them alike."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import torch.distributed as dist

from .bench_checkpoint import checkpoint
from .bench_contenders import Contender, DeepSpeedEngine
from .bench_jitter import jitter
from .bench_kernel import kernel
from .bench_measure import (
    WARM_UP,
    Options,
    Samples,
    Times,
    contenders,
    details,
    now,
    only,
    progress,
    size,
    take_turns,
    window,
)
from .bench_memory import memory_of, with_memory
from .bench_models import Shape
from .bench_report import Result, Target


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
    held = memory_of(options, setting, names)
    with contenders(options, setting, names, notes) as built:
        samples = take_turns(options, "comm", built, one_round)
    return Result(
        workload="comm",
        title=f"{size(setting)}, {setting.micro_steps} micro-steps, buckets of {setting.bucket:,}",
        unit="ms",
        primary="forward+backward",
        baselines=("zero2", "fsdp2", "ddp", "bare"),
        samples=with_memory(samples, held),
        units={"memory": "MiB", "buffers": "MiB"},
        details=details(options, setting),
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
        built = only(built, lambda contender: contender.has_step, "optimizer step", notes)
        samples = take_turns(options, "step", built, one_round)
    return Result(
        workload="step",
        title=f"{size(setting)}, {setting.shape.layers} buckets, torch AdamW",
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
        title=f"{size(setting)}, forward+backward and reductions",
        unit="us",
        primary="above none" if "none" in samples else "per parameter",
        baselines=("zero2",),
        samples=samples,
        notes=notes,
    )


def memory(options: Options) -> Result:
    """Peak bytes of the extension's buffers: the same for any number of buckets and any param groups."""
    samples: Samples = {}
    cases = [(f"{layers} buckets", layers, "one") for layers in (4, 16, 64)]
    cases += [(f"16 layers, {split} groups", 16, split) for split in ("decay", "layers")]
    for name, layers, split in progress(options, "memory", iterable=cases):
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


WORKLOADS: dict[str, Callable[[Options], Result]] = {
    "comm": comm,
    "step": step,
    "hooks": hooks,
    "jitter": jitter,
    "memory": memory,
    "checkpoint": checkpoint,
    "kernel": kernel,
}
