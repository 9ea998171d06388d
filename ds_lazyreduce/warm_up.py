"""The first collective on each process group, at construction.

A communicator allocates its buffers and opens its connections in the first collective of a kind, gigabytes of device
memory at times. Here that happens before training has filled the device, and a backend that cannot do what the
config asks for is found out before the first step, on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from deepspeed import comm as dist

from .buffer_pool import BufferPool
from .collectives import ReduceScatter


class WarmUpError(RuntimeError):
    """The first reduce-scatter on a process group failed or gave a wrong sum."""


def warm_up(uses: Iterable[tuple[Any, ReduceScatter, torch.dtype]], device: torch.device) -> None:
    """Runs one reduce-scatter of one element per rank for each use. Collective over the groups, in this order.

    Args:
        uses: process group, how its buckets are reduced, and the dtype in which they travel.
        device: where gradients are.

    Raises:
        WarmUpError: a backend's error, or a wrong sum.
    """
    for group, reduce_scatter, dtype in uses:
        first, ranks = dist.get_rank(group=group) == 0, dist.get_world_size(group=group)
        pool = BufferPool(device)
        send = pool.take(ranks, dtype)
        send.data.fill_(1.0 if first else 0.0)
        try:
            handle = reduce_scatter.start(send, pool)
            total = handle.wait().float().sum().item()
            handle.release()
        except Exception as error:
            raise WarmUpError(f"{_describe(reduce_scatter, ranks, dtype)} failed: {error}. {_ADVICE}") from error
        if total != 1.0:
            raise WarmUpError(f"{_describe(reduce_scatter, ranks, dtype)} summed to {total}, not 1. {_ADVICE}")


_ADVICE = (
    "Check that every rank is alive and connected, or choose another lazy_reduce.gradient_partition.collective or "
    "wire_dtype."
)


def _describe(reduce_scatter: ReduceScatter, ranks: int, dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    return f"lazy_reduce: the first {reduce_scatter.name} over {ranks} ranks in {name}"


def device_memory_in_use(accelerator: Any) -> int | None:
    """Bytes in use on this rank's device, by torch, communicators and other processes; None on the CPU.

    Args:
        accelerator: DeepSpeed's.
    """
    name = accelerator.device_name()
    if name == "cpu":
        return None
    if name == "cuda":  # DeepSpeed's own answer leaves out all but torch's memory on ROCm, or without pynvml
        free, total = torch.cuda.mem_get_info()
    else:
        free, total = accelerator.available_memory(), accelerator.total_memory()
    return total - free
