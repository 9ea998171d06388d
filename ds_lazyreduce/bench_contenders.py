"""What is compared: each contender owns a model and reduces its gradients in its own way.

    for i in range(micro_steps):
        contender.micro_step(last=i == micro_steps - 1)     # forward and backward
    contender.finish()                                      # nothing is in flight any more
    contender.step()                                        # the update, and whatever belongs to it
    contender.close()

All ranks construct, call and close contenders in the same order; several exist at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .bench_models import Shape, hand_over_model, parameter_groups
from .bench_settings import LAZY

NEVER = 10**9  # steps between reports: the bookkeeping runs, the report does not


@dataclass(frozen=True)
class Setting:
    """What all contenders of a workload share.

    bucket: elements of a gradient bucket; None leaves the extension its default (and stock its own).
    split: the optimizer's param groups, see ``parameter_groups``.
    """

    shape: Shape
    micro_steps: int
    bucket: int | None
    device: torch.device
    rank: int
    ranks: int
    split: str = "one"


class Contender:
    """The empty contender: every part may be left out."""

    has_step = True

    def micro_step(self, last: bool) -> None:
        """Forward and backward."""

    def finish(self) -> None:
        """Waits for the reductions of the window."""

    def step(self) -> None:
        """The optimizer step."""

    def close(self) -> None:
        """Frees what the contender holds."""


class DeepSpeedEngine(Contender):
    """Plain ZeRO-2, or with ``lazy`` (keys of ``gradient_partition``) the extension.

    loss_all_reduce: also average the loss over ranks at each micro-step, as training scripts do to log it.
    """

    def __init__(
        self,
        setting: Setting,
        *,
        lazy: dict[str, Any] | None = None,
        loss_all_reduce: bool = False,
        communication_data_type: str | None = None,
    ):
        from deepspeed import initialize as stock_initialize

        from . import initialize as lazy_initialize

        model = hand_over_model(setting.shape, setting.device, seed=setting.rank)
        zero = {"stage": 2}
        if setting.bucket:
            zero["reduce_bucket_size"] = setting.bucket
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": setting.micro_steps,
            "bf16": {"enabled": True},
            "steps_per_print": NEVER,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": zero,
        }
        if communication_data_type:
            config["communication_data_type"] = communication_data_type
        if lazy is not None:
            size = {"bucket_size": setting.bucket} if setting.bucket else {}
            config["lazy_reduce"] = {"enabled": True, "gradient_partition": {**size, **lazy}}
        optimizer = torch.optim.AdamW(parameter_groups(model, setting.split), lr=1e-4)
        initialize = stock_initialize if lazy is None else lazy_initialize
        self.engine = initialize(model=model, optimizer=optimizer, config=config)[0]
        self.is_lazy = lazy is not None
        self._loss_all_reduce = loss_all_reduce
        self._ranks = setting.ranks
        self._input = torch.zeros((), device=setting.device)

    def micro_step(self, last: bool) -> None:
        loss = self.engine(self._input)
        if self._loss_all_reduce:
            logged = loss.detach().clone()
            dist.all_reduce(logged)
            logged.div_(self._ranks).item()
        self.engine.backward(loss)
        if not last:
            self.engine.step()  # no update: the engine counts micro-steps there

    def finish(self) -> None:
        if self.is_lazy:  # else step() would wait for what was carried over, and the window look shorter
            self.engine.optimizer.chain.drain()

    def step(self) -> None:
        self.engine.step()

    def close(self) -> None:
        self.engine.destroy()


class _TorchModel(Contender):
    """A model of ``setting``'s shape with torch's own means; ``_wrap`` says how its gradients are reduced."""

    dtype = torch.bfloat16

    def __init__(self, setting: Setting):
        model = hand_over_model(setting.shape, setting.device, seed=setting.rank, dtype=self.dtype)
        self._model = self._wrap(model, setting)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4)
        self._input = torch.zeros((), device=setting.device)

    def _wrap(self, model: torch.nn.Sequential, setting: Setting) -> torch.nn.Module:
        return model

    def micro_step(self, last: bool) -> None:
        self._model(self._input).backward()

    def step(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def close(self) -> None:
        del self._model, self._optimizer


class FullyShard(_TorchModel):
    """FSDP2, one unit a layer, bf16 parameters, fp32 reductions.

    Parameters stay gathered from one step to the next, as in ZeRO-2; the gathering is part of the step.
    """

    dtype = torch.float32

    def _wrap(self, model: torch.nn.Sequential, setting: Setting) -> torch.nn.Module:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(setting.device.type, (setting.ranks,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for unit in [*model, model]:
            fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        model.set_reshard_after_backward(False)
        return model

    def step(self) -> None:
        super().step()
        for layer in self._model:
            layer.reshard()
            layer.unshard()


class FullyShardOnce(FullyShard):
    """FSDP2 that adds gradients up locally, in whole and in fp32, and reduces them in the last micro-step."""

    def micro_step(self, last: bool) -> None:
        self._model.set_requires_gradient_sync(last)
        super().micro_step(last)


class DataParallel(_TorchModel):
    """DistributedDataParallel in bf16: all gradients and optimizer states on every rank, no fp32 masters."""

    def _wrap(self, model: torch.nn.Sequential, setting: Setting) -> torch.nn.Module:
        megabytes = (setting.bucket or 0) * 2 / 2**20 or None
        return torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=megabytes, gradient_as_bucket_view=True)


class DataParallelOnce(DataParallel):
    """DistributedDataParallel with ``no_sync``: gradients add up in bf16 and are reduced in the last micro-step."""

    def micro_step(self, last: bool) -> None:
        with nullcontext() if last else self._model.no_sync():
            super().micro_step(last)


class BareExchange(Contender):
    """The limit: the same bytes in the same messages through ``all_to_all_single``, and nothing else."""

    has_step = False

    def __init__(self, setting: Setting):
        bucket = setting.bucket or setting.shape.numel
        padded = -(-bucket // setting.ranks) * setting.ranks
        self._messages = -(-setting.shape.numel // bucket)
        self._send = torch.ones(padded, dtype=torch.bfloat16, device=setting.device)
        self._receive = torch.empty_like(self._send)

    def micro_step(self, last: bool) -> None:
        for _ in range(self._messages):
            dist.all_to_all_single(self._receive, self._send)


class NoEngine(_TorchModel):
    """Forward and backward in plain torch: what remains when nobody handles the gradients."""

    has_step = False

    def micro_step(self, last: bool) -> None:
        super().micro_step(last)
        self._model.zero_grad()

    def step(self) -> None:
        pass


def _lazy(gradient_partition: dict[str, Any]) -> Callable[[Setting], Contender]:
    return lambda setting: DeepSpeedEngine(setting, lazy=gradient_partition)


CONTENDERS: dict[str, Callable[[Setting], Contender]] = {
    "none": NoEngine,
    "bare": BareExchange,
    "zero2": DeepSpeedEngine,
    "zero2-fp32": lambda setting: DeepSpeedEngine(setting, communication_data_type="fp32"),
    "zero2-loss": lambda setting: DeepSpeedEngine(setting, loss_all_reduce=True),
    "fsdp2": FullyShard,
    "fsdp2-boundary": FullyShardOnce,
    "ddp": DataParallel,
    "ddp-boundary": DataParallelOnce,
    **{name: _lazy(gradient_partition) for name, gradient_partition in LAZY.items()},
}
