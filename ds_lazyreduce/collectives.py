"""Reduce-scatters of one bucket: ``start(send, pool) -> handle``, ``handle.wait() -> rows``.

A collective moves bytes; the last sum is the caller's, in fp32, over the rows that ``wait()`` returns. (The
low-precision wire with an fp32 sum is the idea of Megatron-Core's ``reduce_scatter_with_fp32_accumulation``.)

On an accelerator all of it is issued on the reduction stream: ``work.wait()`` makes that stream wait, not the host.
A buffer is given back to the pool where its last user has been issued, see ``buffer_pool.py``; buffers outlive the
collectives that use them, so that no ``record_stream`` on the backend's own stream is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from deepspeed import comm as dist

from .buffer_pool import Buffer, BufferPool


@dataclass(frozen=True)
class Traffic:
    """What one rank sends to other ranks in one reduce-scatter.

    messages: one for each rank it sends to, in each hop. bytes: of all messages together.
    messages_across_nodes, bytes_across_nodes: those of them that go to ranks on other nodes.
    """

    messages: int
    bytes: int
    messages_across_nodes: int
    bytes_across_nodes: int


class Handle(Protocol):
    """A started reduce-scatter; it owns its send and receive buffers, and gives the last back in ``release``."""

    def wait(self) -> torch.Tensor:
        """The rows to be summed for this rank's shard, ``[rows, S]``. Every rank waits in the order it started."""

    def release(self) -> None:
        """Gives back what the rows are in: they have been summed."""


class ReduceScatter(Protocol):
    """Moves every rank's contribution to the owner of each shard."""

    name: str

    def start(self, send: Buffer, pool: BufferPool) -> Handle:
        """Starts the exchange of ``send`` ``[N * S]``, which goes back to the pool as soon as it has been sent."""

    def traffic(self, numel: int, dtype: torch.dtype) -> Traffic:
        """What an exchange of ``numel`` elements of ``dtype`` sends from this rank."""

    def reference_rows(self, contributions: torch.Tensor) -> torch.Tensor:
        """The rows that ``wait()`` must return where ranks contribute ``contributions`` ``[N, S]`` to this rank.

        By plain torch operations, in the same order of summation. It does not communicate. Absent where the order
        is the backend's choice: there ``verify_every`` is refused.
        """

    def close(self) -> None:
        """Frees process groups made for it."""


class _FlatHandle:
    """Of one collective that reads ``send`` and fills ``receive``."""

    __slots__ = ("_work", "_send", "_receive", "_rows", "_pool")

    def __init__(self, work, send: Buffer, receive: Buffer, rows: int, pool: BufferPool):
        self._work, self._send, self._receive, self._rows, self._pool = work, send, receive, rows, pool

    def wait(self) -> torch.Tensor:
        self._work.wait()
        self._pool.give(self._send)  # before the rows are summed: backward may be waiting for it
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

    def start(self, send: Buffer, pool: BufferPool) -> Handle:
        receive = pool.take(send.data.numel(), send.data.dtype)
        work = dist.all_to_all_single(receive.data, send.data, group=self._group, async_op=True)
        return _FlatHandle(work, send, receive, self._ranks, pool)

    def traffic(self, numel: int, dtype: torch.dtype) -> Traffic:
        message = numel // self._ranks * dtype.itemsize
        others, remote = self._ranks - 1, self._remote_ranks
        return Traffic(others, others * message, remote, remote * message)

    def reference_rows(self, contributions: torch.Tensor) -> torch.Tensor:
        return contributions

    def close(self) -> None:
        pass


class BackendReduceScatter:
    """The backend's own ``reduce_scatter_tensor``: summed in the wire dtype, in the backend's order.

    The one row ``[1, S]`` is this rank's shard, already summed; so a receive buffer is 1/N of the bucket. Bytes are
    those of a ring of the ranks in order; what a backend does in fact (trees, switches that sum) it does not tell.

    Args:
        group: process group of the bucket's data-parallel ranks.
        node_of_rank: for each rank of ``group`` the node it runs on.
    """

    name = "reduce_scatter"

    def __init__(self, group, node_of_rank: list[int]):
        self._group = group
        self._ranks = len(node_of_rank)
        rank = dist.get_rank(group=group)
        self._successor_is_remote = node_of_rank[(rank + 1) % self._ranks] != node_of_rank[rank]

    def start(self, send: Buffer, pool: BufferPool) -> Handle:
        receive = pool.take(send.data.numel() // self._ranks, send.data.dtype)
        work = dist.reduce_scatter_tensor(receive.data, send.data, group=self._group, async_op=True)
        return _FlatHandle(work, send, receive, 1, pool)

    def traffic(self, numel: int, dtype: torch.dtype) -> Traffic:
        messages = self._ranks - 1
        sent = messages * (numel // self._ranks * dtype.itemsize)
        return Traffic(messages, sent, *((messages, sent) if self._successor_is_remote else (0, 0)))

    def close(self) -> None:
        pass


class _LocalHandle:
    __slots__ = ("_send", "_pool")

    def __init__(self, send: Buffer, pool: BufferPool):
        self._send, self._pool = send, pool

    def wait(self) -> torch.Tensor:
        return self._send.data.view(1, -1)

    def release(self) -> None:
        self._pool.give(self._send)


class SingleRank:
    """A group of one rank: what it sends is what it receives, and no collective runs."""

    name = "all_to_all"

    def start(self, send: Buffer, pool: BufferPool) -> Handle:
        return _LocalHandle(send, pool)

    def traffic(self, numel: int, dtype: torch.dtype) -> Traffic:
        return Traffic(0, 0, 0, 0)

    def reference_rows(self, contributions: torch.Tensor) -> torch.Tensor:
        return contributions

    def close(self) -> None:
        pass
