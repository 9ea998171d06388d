"""The workload ``jitter``: ranks that are late at random, and what it costs in time and memory to wait less."""

from __future__ import annotations

from .bench_contenders import Contender
from .bench_measure import Options, Times, contenders, details, now, size, take_turns, window
from .bench_memory import memory_of, with_memory
from .bench_models import Shape
from .bench_report import Result
from .bench_settings import LAZY

IMPLEMENTATIONS = (
    "zero2-loss", "zero2", "fsdp2", "fsdp2-boundary", "ddp", "ddp-boundary",
    "lazy-drained", "lazy", "lazy-2", "lazy-4", "lazy-boundary",
)  # fmt: skip


def jitter(options: Options) -> Result:
    """8 micro-steps with a delay before each; time of an optimizer step, update included, and memory of a window."""
    setting = options.setting(Shape(layers=4, tensors=1, elements=2**16), micro_steps=8, bucket=2**16)
    drawn = [options.delays.draw(index, options.ranks, setting.micro_steps) for index in range(options.rounds)]

    def one_round(contender: Contender, index: int) -> Times:
        own = drawn[index][options.rank] if index >= 0 else ()  # no need to wait while warming up
        start = now()
        window(contender, setting.micro_steps, [delay / 1e3 for delay in own])
        contender.step()
        return {"step": (now() - start) * 1e3}

    notes = [
        "limit: the delays of the slowest rank alone, as if ranks waited for one another once a step",
        "memory: of a rank at the peak of a window: parameters, states, gradients, buffers; buffers: those of them "
        "that lazy_reduce_report() counts",
        "ddp keeps no fp32 masters and whole bf16 states on every rank, so its memory is another one",
    ]
    names = options.contenders or IMPLEMENTATIONS
    memory = memory_of(options, setting, names)
    with contenders(options, setting, names, notes) as built:
        samples = take_turns(options, "jitter", built, one_round)
    limit = [max(map(sum, delays)) for delays in drawn]
    return Result(
        workload="jitter",
        title=f"{size(setting)}, 4 buckets, {setting.micro_steps} micro-steps, {options.delays.describe()} before each",
        unit="ms",
        primary="step",
        baselines=("zero2", "limit"),
        samples={**with_memory(samples, memory), "limit": {"step": limit}},
        units={"memory": "MiB", "buffers": "MiB"},
        notes=notes,
        details={
            **details(options, setting),
            "delays": {**options.delays.as_json(), "drawn_ms": drawn},
            "settings": {name: LAZY[name] for name in names if name in LAZY},
        },
    )
