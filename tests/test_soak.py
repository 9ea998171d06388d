"""Long runs: what a process holds neither grows with optimizer steps nor with engines that came and went.

A few hundred steps each time; LAZYREDUCE_SOAK_STEPS asks for more. `-s` shows the figures.
"""

import gc
import os
import time

import pytest
import torch

from .harness import base_config, make_engine

STEPS = int(os.environ.get("LAZYREDUCE_SOAK_STEPS") or 400)
ENGINES = int(os.environ.get("LAZYREDUCE_SOAK_ENGINES") or 8)
SAMPLES = 4
MiB = 2**20


def _held():
    """What this process holds: resident MiB, open files, threads, and objects and tensors that Python knows."""
    gc.collect()
    objects = gc.get_objects()
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MiB
    return {
        "MiB": round(resident, 2),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "objects": len(objects),
        "tensors": sum(issubclass(type(value), torch.Tensor) for value in objects),
    }


def _engine(micro_steps=2):
    layers = [torch.nn.Linear(16, 16) for _ in range(4)]
    model = torch.nn.Sequential(*layers)
    decay, no_decay = [layer.weight for layer in layers], [layer.bias for layer in layers]
    optimizer = torch.optim.AdamW([{"params": decay}, {"params": no_decay, "weight_decay": 0.0}], lr=1e-3)
    lazy = {
        "gradient_partition": {"bucket_size": 256, "max_in_flight": 2},
        "deferred_loss": {"interval": 5},
        "token_normalization": {"enabled": True},
    }
    config = base_config(lazy=lazy, gradient_accumulation_steps=micro_steps, gradient_clipping=1.0)
    return make_engine(model, optimizer, config)


def _train(engine, steps):
    x = torch.ones(1, 16, dtype=torch.bfloat16)
    for _ in range(steps * engine.gradient_accumulation_steps()):
        loss = engine(x).float().square().sum()
        engine.record_metric("aux", loss.detach(), 1)
        engine.backward(loss, num_tokens=16)
        engine.step()


def many_steps(steps):
    engine = _engine()
    _train(engine, 50)  # the order is learned, names of metrics are agreed
    samples = [_held()]
    for _ in range(SAMPLES):
        started = time.perf_counter()
        _train(engine, steps // SAMPLES)
        samples.append({**_held(), "ms per step": round((time.perf_counter() - started) / (steps // SAMPLES) * 1e3, 2)})
    engine.destroy()
    return samples


def many_engines(engines):
    samples = []
    for index in range(engines):
        engine = _engine()
        _train(engine, 2)
        engine.destroy()
        del engine
        if index % (engines // SAMPLES) == engines // SAMPLES - 1:
            samples.append(_held())
    return samples


def _check_flat(samples):
    print(*samples, sep="\n")
    first, last = samples[1], samples[-1]  # before that allocators still get their arenas
    for what in ("files", "threads"):
        assert last[what] == first[what], what
    assert last["tensors"] - first["tensors"] <= 2  # of the last step, where a report is on its way
    assert last["objects"] - first["objects"] <= 100
    assert last["MiB"] - first["MiB"] <= 1


@pytest.mark.timeout(300 + STEPS // 20)
def test_many_steps_hold_no_more_than_a_few(ranks):
    for samples in ranks(2).run(many_steps, STEPS, timeout=200 + STEPS // 25):
        _check_flat(samples)


@pytest.mark.timeout(300 + ENGINES * 10)
def test_engines_that_were_destroyed_leave_nothing(ranks):
    for samples in ranks(2).run(many_engines, ENGINES, timeout=200 + ENGINES * 8):
        _check_flat(samples)
