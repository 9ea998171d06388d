"""A small training job that resumes from its last checkpoint, and in which one rank can fail at a chosen moment.

    python -m tests.faulty_job FOLDER PG_TIMEOUT [KIND PHASE RANK]      under any launcher

KIND is "kill" (SIGKILL), "stop" (SIGSTOP) or "raise"; PHASE one of PHASES. It happens once per folder, in the
fourth window. Every rank leaves `FOLDER/outcome-RANK.json`.
"""

import hashlib
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch

from .harness import base_config, make_engine

RANKS = 3
PG_TIMEOUT = 5
WINDOWS, MICRO_STEPS, SAVED_AFTER = 6, 2, (2, 4)
PHASES = ("forward", "mid-bucket", "in flight", "scalar pack", "all-gather", "metric report", "save")


class Fault(NamedTuple):
    kind: str
    phase: str
    rank: int


class Injected(Exception):
    """What a rank with a fault of kind "raise" raises."""


class Net(torch.nn.Module):
    """Two blocks to a bucket; `on_forward` and `on_backward` are called between the last two blocks."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(6))
        self.on_forward = self.on_backward = lambda: None

    def forward(self, x):
        for index, block in enumerate(self.blocks):
            if index == len(self.blocks) - 1:
                self.on_forward()
                x = _Between.apply(x, self)
            x = torch.tanh(block(x)) + x
        return x.float().square().mean()


class _Between(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, net):
        ctx.net = net
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.net.on_backward()
        return grad, None


class _Trap:
    """Puts the fault in the way of the real calls."""

    def __init__(self, engine, fault, folder):
        self._engine, self._fault, self._marker = engine, fault, Path(folder, "fault")
        self._step = 4 if fault.phase in ("metric report", "save") else 3
        optimizer, chain = engine.optimizer, engine.optimizer.chain
        if fault.phase == "forward":
            engine.module.on_forward = self._spring
        elif fault.phase == "mid-bucket":
            engine.module.on_backward = lambda: self._spring(
                lambda: any(0 < bucket.missing < len(bucket.slots) for bucket in chain.buckets)
            )
        elif fault.phase == "in flight":
            chain._dispatch = self._after(chain._dispatch, lambda: len(chain._in_flight) > 0)
        elif fault.phase == "scalar pack":
            optimizer._all_reduce_scalars = self._before(optimizer._all_reduce_scalars)
        elif fault.phase == "all-gather":
            optimizer._gather._gather_chunk = self._before(optimizer._gather._gather_chunk, from_call=2)
        elif fault.phase == "metric report":
            engine._metrics._all_reduce = self._before(engine._metrics._all_reduce)
        else:
            engine.checkpoint_engine.save = self._before(engine.checkpoint_engine.save, first=_half_a_file)

    def _before(self, call, from_call=1, first=lambda *args: None):
        calls = dict.fromkeys(range(WINDOWS + 1), 0)

        def trapped(*args, **kwargs):
            calls[self._engine.global_steps] += 1
            if calls[self._engine.global_steps] == from_call:
                self._spring(first=lambda: first(*args, **kwargs))
            return call(*args, **kwargs)

        return trapped

    def _after(self, call, condition):
        def trapped(*args, **kwargs):
            call(*args, **kwargs)
            self._spring(condition)

        return trapped

    def _spring(self, condition=lambda: True, first=lambda: None):
        engine, fault = self._engine, self._fault
        is_time = engine.global_steps == self._step and (
            engine.is_gradient_accumulation_boundary() or fault.phase in ("metric report", "save")
        )
        if not is_time or _rank() != fault.rank or self._marker.exists():
            return
        assert condition(), f"not the moment for {fault.phase}"
        first()
        self._marker.write_text(str(time.monotonic()))
        if fault.kind == "raise":
            raise Injected(fault.phase)
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[fault.kind])


def _half_a_file(state_dict, path):
    torch.save(state_dict, path)
    os.truncate(path, os.path.getsize(path) // 2)


def _rank():
    return int(os.environ["RANK"])


def _batch(window, micro_step):
    generator = torch.Generator().manual_seed(1000 * window + 10 * micro_step + _rank())
    return torch.randn(4, 8, generator=generator).bfloat16()


def run_job(folder, fault=None, pg_timeout=PG_TIMEOUT):
    """Trains to the end of the last window, from the checkpoint that `latest` names if there is one."""
    outcome = {"error": None, "losses": {}}
    try:
        _train(Path(folder), fault, pg_timeout, outcome)
    except BaseException as error:
        outcome |= {"error": f"{type(error).__name__}: {error}", "at": time.monotonic()}
        raise
    finally:
        Path(folder, f"outcome-{_rank()}.json").write_text(json.dumps(outcome))


def _train(folder, fault, pg_timeout, outcome):
    import deepspeed

    deepspeed.init_distributed("gloo", timeout=timedelta(seconds=pg_timeout), verbose=False)
    torch.manual_seed(0)
    model = Net()
    config = base_config(
        lazy={"gradient_partition": {"bucket_size": 144}, "deferred_loss": {"interval": 1}},
        gradient_accumulation_steps=MICRO_STEPS,
        gradient_clipping=0.1,
        zero_optimization={"allgather_bucket_size": 200},  # an all-gather a bucket
    )
    engine = make_engine(model, torch.optim.AdamW(model.parameters(), lr=0.01), config)
    assert len(engine.optimizer.chain.buckets) == 3
    if (folder / "latest").exists():
        outcome["resumed_from"] = Path(engine.load_checkpoint(folder)[0]).parent.name
    if fault is not None:
        _Trap(engine, fault, folder)
    while engine.global_steps < WINDOWS:
        window = engine.global_steps
        for micro_step in range(MICRO_STEPS):
            engine.backward(engine(_batch(window, micro_step)))
            engine.step()
        outcome["losses"][window] = engine.last_metrics["train_loss"].hex()
        if engine.global_steps in SAVED_AFTER:
            engine.save_checkpoint(folder)
    digest = hashlib.sha256()
    for master in engine.optimizer.single_partition_of_fp32_groups:
        digest.update(master.numpy().tobytes())
    outcome["masters"] = digest.hexdigest()


if __name__ == "__main__":
    arguments = [argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")]
    chosen = Fault(*arguments[2:4], int(arguments[4])) if len(arguments) > 2 else None
    run_job(arguments[0], chosen, pg_timeout=int(arguments[1]))
