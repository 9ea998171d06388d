"""What a contender holds on a rank while it reduces: one measure for all of them.

*Memory* is the peak, during the micro-steps and reductions of one window, of the bytes that torch's allocator holds
for the contender: parameters, masters, optimizer states, gradients and buffers. The optimizer step is left out: the
activations of a real model are gone by then. Of accelerators the allocator's own peak is taken. On the CPU torch's
profiler reports each block; one that a thread of the backend happens to free, unseen by the profiler, is left out, and
the largest of several windows is taken, so that the blocks of one that went unseen count in another.
"""

from __future__ import annotations

import gc
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from .bench_contenders import CONTENDERS, Contender, DeepSpeedEngine, Setting
from .bench_measure import WARM_UP, Options, Samples, largest_of_ranks, progress, window
from .bench_settings import WITHOUT_STEP
from .config import ConfigError

WINDOW = "ds_lazyreduce.bench window"
WINDOWS = 5
MIB = 2**20


def memory_of(options: Options, setting: Setting, names: Sequence[str]) -> Samples:
    """Builds each contender alone, lets it run for a few windows and closes it again. Collective.

    Returns:
        MiB of the rank that takes most: ``memory``, where the device tells, and of the extension also ``buffers``,
        its report's ``peak_buffer_bytes``. Left out are what the extension refuses to be and what trains nothing.
    """
    samples: Samples = {}
    training = [name for name in names if name not in WITHOUT_STEP]
    for name in progress(options, "memory of each", iterable=training):
        gc.collect()
        try:
            taken = _alone(CONTENDERS[name], setting)
        except ConfigError:  # raised on every rank
            continue
        if taken:
            samples[name] = largest_of_ranks({metric: [count / MIB] for metric, count in taken.items()})
    return samples


def with_memory(times: Samples, memory: Samples) -> Samples:
    """Both measurements of the contenders that were timed."""
    return {name: {**metrics, **memory.get(name, {})} for name, metrics in times.items()}


def _alone(build: Callable[[Setting], Contender], setting: Setting) -> dict[str, int]:
    measure = _on_cpu if get_accelerator().device_name() == "cpu" else _on_accelerator
    peak, buffers = measure(build, setting)
    return {**({"memory": peak} if peak > 0 else {}), **({"buffers": buffers} if buffers else {})}


def peak_of(trace: list[dict[str, Any]], mark: str = WINDOW) -> int:
    """Bytes held on the CPU at the peak of the sections ``mark`` of a profiler's trace.

    Blocks that are not freed in the trace are left out.
    """
    sections = [(e["ts"], e["ts"] + e["dur"]) for e in trace if e.get("ph") == "X" and e.get("name") == mark]
    memory = [e for e in trace if e.get("name") == "[memory]" and e["args"]["Device Type"] == 0]
    changes, born = [], {}
    for event in sorted(memory, key=lambda e: e["ts"]):
        time, address, count = event["ts"], event["args"]["Addr"], event["args"]["Bytes"]
        if count > 0:
            born[address] = (time, count)  # in place of one that was freed unseen, if there is one
        elif address in born:
            since, count = born.pop(address)
            changes += [(since, count), (time, -count)]
    held, peak = 0, 0
    ends = sorted(changes) + [(math.inf, 0)]
    for (time, count), (until, _) in zip(ends, ends[1:], strict=False):
        held += count
        if any(time <= end and until >= start for start, end in sections):
            peak = max(peak, held)
    return peak


def _run(contender: Contender, setting: Setting, mark: Callable[[], AbstractContextManager]) -> int:
    """A few windows, and then some that ``mark`` watches. Returns the peak of the extension's buffers in bytes."""
    for index in range(-WARM_UP, WINDOWS):
        gc.collect()  # cycles that the construction left behind
        with mark() if index >= 0 else nullcontext():
            window(contender, setting.micro_steps)
        contender.step()
    is_lazy = isinstance(contender, DeepSpeedEngine) and contender.is_lazy
    return contender.engine.lazy_reduce_report()["peak_buffer_bytes"] if is_lazy else 0


@contextmanager
def _without_stderr():
    """The profiler writes a line there whenever it starts and stops, into the progress bar."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _on_cpu(build: Callable[[Setting], Contender], setting: Setting) -> tuple[int, int]:
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    with _without_stderr():
        profiler.start()
    try:
        contender = build(setting)
        buffers = _run(contender, setting, lambda: torch.profiler.record_function(WINDOW))
        contender.close()
        del contender
        gc.collect()
    finally:
        with _without_stderr():
            profiler.stop()
    with tempfile.TemporaryDirectory(prefix="ds_lazyreduce-bench-") as folder:
        path = os.path.join(folder, "trace.json")
        profiler.export_chrome_trace(path)
        with open(path, encoding="utf-8") as file:
            return peak_of(json.load(file)["traceEvents"]), buffers


def _on_accelerator(build: Callable[[Setting], Contender], setting: Setting) -> tuple[int, int]:
    accelerator, peaks = get_accelerator(), []

    @contextmanager
    def mark():
        accelerator.synchronize()
        accelerator.reset_peak_memory_stats()
        yield
        accelerator.synchronize()
        peaks.append(accelerator.max_memory_allocated())

    before = accelerator.memory_allocated()
    contender = build(setting)
    buffers = _run(contender, setting, mark)
    contender.close()
    return max(peaks) - before, buffers
