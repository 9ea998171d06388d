"""Reduce-scatters of one bucket: ``start(send, pool) -> handle``, ``handle.wait() -> rows``.

A collective moves bytes; the last sum is the caller's, in fp32, over the rows that ``wait()`` returns. (The
low-precision wire with an fp32 sum is the idea of Megatron-Core's ``reduce_scatter_with_fp32_accumulation``.)
"""

from __future__ import annotations

from typing import Protocol

import torch
from deepspeed import comm as dist

from .buffer_pool import Buffer, BufferPool


class Handle(Protocol):
    """A started reduce-scatter; it owns its receive buffers until ``release``."""

    def wait(self) -> torch.Tensor:
        """The rows to be summed for this rank's shard, ``[rows, S]``. Every rank waits in the order it started."""

    def release(self) -> None:
        """Gives the receive buffers back: the rows have been summed."""


class ReduceScatter(Protocol):
    """Moves every rank's contribution to the owner of each shard."""

    name: str

    def start(self, send: torch.Tensor, pool: BufferPool) -> Handle:
        """Starts the exchange of ``send`` ``[N * S]``, which may not be touched until the handle is released."""

    def bytes_sent(self, send: torch.Tensor) -> int:
        """Bytes that leave this rank for other ranks."""

    def bytes_sent_across_nodes(self, send: torch.Tensor) -> int:
        """Bytes that leave this rank for ranks on other nodes."""

    def close(self) -> None:
        """Frees process groups made for it."""


class _AllToAllHandle:
    __slots__ = ("_work", "_receive", "_rows", "_pool")

    def __init__(self, work, receive: Buffer, rows: int, pool: BufferPool):
        self._work, self._receive, self._rows, self._pool = work, receive, rows, pool

    def wait(self) -> torch.Tensor:
        if self._work is not None:  # None: the comms logger made the call synchronous
            self._work.wait()
        return self._receive.data.view(self._rows, -1)

    def release(self) -> None:
        self._pool.give(self._receive)


class AllToAll:
    """One ``all_to_all_single`` with equal splits, through ``deepspeed.comm`` so that its logger sees it.

    Rows are the ranks of ``group`` in order.

    Args:
        group: process group of the bucket's data-parallel ranks.
        node_of_rank: for each rank of ``group`` the node it runs on.
    """

    name = "all_to_all"

    def __init__(self, group, node_of_rank: list[int]):
        self._group = group
        self._ranks = len(node_of_rank)
        here = node_of_rank[dist.get_rank(group=group)]
        self._remote_ranks = sum(node != here for node in node_of_rank)

    def start(self, send: torch.Tensor, pool: BufferPool) -> Handle:
        receive = pool.take(send.numel(), send.dtype)
        work = dist.all_to_all_single(receive.data, send, group=self._group, async_op=True)
        return _AllToAllHandle(work, receive, self._ranks, pool)

    def bytes_sent(self, send: torch.Tensor) -> int:
        return send.numel() * send.element_size() * (self._ranks - 1) // self._ranks

    def bytes_sent_across_nodes(self, send: torch.Tensor) -> int:
        return send.numel() * send.element_size() * self._remote_ranks // self._ranks

    def close(self) -> None:
        pass


class _LocalHandle:
    __slots__ = ("_send",)

    def __init__(self, send: torch.Tensor):
        self._send = send

    def wait(self) -> torch.Tensor:
        return self._send.view(1, -1)

    def release(self) -> None:
        pass


class SingleRank:
    """A group of one rank: what it sends is what it receives, and no collective runs."""

    name = "all_to_all"

    def start(self, send: torch.Tensor, pool: BufferPool) -> Handle:
        return _LocalHandle(send)

    def bytes_sent(self, send: torch.Tensor) -> int:
        return 0

    def bytes_sent_across_nodes(self, send: torch.Tensor) -> int:
        return 0

    def close(self) -> None:
        pass
