"""One rank of the doctor's self-test: ``python -m ds_lazyreduce.doctor_ranks RANK RANKS STORE``.

Every rank knows what every other one sends, so each checks its own shard of the sum, to the bit.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from .accumulate import load_kernel
from .buffer_pool import BufferPool
from .collectives import AllToAll

SHARD = 100_003  # elements: no power of two


def contribution(rank: int, ranks: int) -> torch.Tensor:
    """What ``rank`` sends: bf16, ``[ranks * SHARD]``."""
    return torch.randn(ranks * SHARD, generator=torch.Generator().manual_seed(rank)).bfloat16()


def check(rank: int, ranks: int, device: torch.device) -> None:
    """Two buckets through one pool. Collective.

    Raises:
        ArithmeticError: this rank's shard of the sum is wrong.
    """
    collective, pool = AllToAll(torch.distributed.group.WORLD, [0] * ranks), BufferPool(device)
    kernel, oracle = load_kernel("auto", device), load_kernel("torch", "cpu")
    mine = slice(rank * SHARD, (rank + 1) * SHARD)
    rows = torch.stack([contribution(sender, ranks)[mine] for sender in range(ranks)])
    outgoing = contribution(rank, ranks)
    partition, expected = torch.zeros(SHARD, device=device), torch.zeros(SHARD)
    for bucket in range(2):
        send = pool.take(outgoing.numel(), outgoing.dtype)
        send.data.copy_(outgoing)
        handle = collective.start(send, pool)
        kernel(partition, handle.wait(), 1 / ranks)
        handle.release()
        oracle(expected, rows, 1 / ranks)
        differs = int((partition.cpu() != expected).sum())
        if differs:
            raise ArithmeticError(f"{differs} of {SHARD} elements of bucket {bucket} are wrong on rank {rank}")


def main() -> None:
    rank, ranks, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        accelerator.set_device(rank)
    # Half a minute of compiling on a CPU, for an all-reduce that is not tested here; and this process may be killed,
    # which would leave the build's lock behind.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # the attribute of that name is torch itself
    dist.init_distributed(
        accelerator.communication_backend_name(),
        auto_mpi_discovery=False,
        verbose=False,
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
    )
    check(rank, ranks, torch.device(accelerator.current_device_name()))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
