"""The workload ``kernel``: the fused accumulation alone, beside what torch offers and what the memory can do."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator

import torch

from .accumulate import load_kernel
from .bench_measure import Options, Times, now, take_turns
from .bench_report import Result, Target

ROWS, ELEMENTS, CALLS = 4, 2**22, 5


def kernel(options: Options) -> Result:
    """4 rows of 4 M bf16 elements into an fp32 partition, by each rank for itself; the median of 5 calls a round.

    ``axpy`` is torch's ``y.add_(x)`` in fp32: what this memory gives to a loop that reads two streams and writes one.
    On the CPU with one rank, all are also run with as many threads as there are cores.
    """
    received = torch.randn(ROWS, max(1, round(ELEMENTS * options.scale)), device=options.device).bfloat16()
    partition, other = (torch.zeros(received.shape[1], device=options.device) for _ in range(2))
    auto, fallback = load_kernel("auto", options.device), load_kernel("torch", options.device)
    moved = received.nbytes + 2 * partition.nbytes  # every byte once
    calls: dict[str, tuple[Callable[[], None], int]] = {
        "auto": (lambda: auto(partition, received, 0.5), moved),
        "torch": (lambda: fallback(partition, received, 0.5), moved),
        "torch.sum": (lambda: _add(partition, received.sum(0, dtype=torch.float32), 0.5), moved),
        "axpy": (lambda: _add(partition, other, 0.5), 3 * partition.nbytes),
    }
    runs = {
        name if threads is None else f"{name}, {threads} threads": (call, count, threads)
        for threads in _threads(options)
        for name, (call, count) in calls.items()
    }
    usual = torch.get_num_threads()

    def one_round(run: tuple[Callable[[], None], int, int | None], index: int) -> Times:
        call, count, threads = run
        torch.set_num_threads(threads or usual)
        call()
        seconds = []
        for _ in range(CALLS):
            start = now()
            call()
            seconds.append(now() - start)
        return {"per GB": statistics.median(seconds) * 1e3 / (count / 1e9)}

    try:
        samples = take_turns(options, "kernel", runs, one_round)
    finally:
        torch.set_num_threads(usual)
    for metrics in samples.values():
        metrics["bandwidth"] = [1e3 / value for value in metrics["per GB"]]
    return Result(
        workload="kernel",
        title=f"{ROWS} x {received.shape[1]:,} elements of bf16 into fp32",
        unit="ms",
        units={"bandwidth": "GB/s"},
        primary="per GB",
        baselines=("axpy", "torch.sum"),
        samples=samples,
        targets=options.targets(Target("auto", "axpy", 1.176, ranks=1)) if usual == 1 else [],  # 0.85 of its bandwidth
        notes=[f"auto: the {auto.name} kernel; torch.sum: summed in fp32, then added, as Megatron-Core does"],
    )


def _add(target: torch.Tensor, value: torch.Tensor, scale: float) -> None:
    target.add_(value, alpha=scale)


def _threads(options: Options) -> Iterator[int | None]:
    """None is the number that is set."""
    yield None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if options.device.type == "cpu" and options.ranks == 1 and cores > torch.get_num_threads():
        yield cores
