"""Reduce-scatters of one bucket: ``start(send, receive) -> handle``, ``handle.wait() -> [N, S]``.

A collective only moves bytes. The sum over ranks is done by the caller, in fp32, over the rows that
``wait()`` returns: row j is what rank j holds for the shard of this rank. (The low-precision wire
with an fp32 sum is the idea of Megatron-Core's ``reduce_scatter_with_fp32_accumulation``.)
"""

from __future__ import annotations

from typing import Protocol

import torch
from deepspeed import comm as dist


class Handle(Protocol):
    """A started reduce-scatter."""

    def wait(self) -> torch.Tensor:
        """Returns the received rows, ``[N, S]`` in the wire dtype; both buffers are free once they are summed."""


class ReduceScatter(Protocol):
    """Moves every rank's contribution to the owner of each shard."""

    name: str

    def receive_numel(self, numel: int) -> int:
        """Elements of receive buffer needed for a bucket of ``numel`` elements (0: none)."""

    def start(self, send: torch.Tensor, receive: torch.Tensor) -> Handle:
        """Starts the exchange of ``send`` ``[N * S]``; neither buffer may be touched until ``wait()``."""

    def bytes_sent(self, send: torch.Tensor) -> int:
        """Bytes that leave this rank for other ranks."""

    def bytes_sent_across_nodes(self, send: torch.Tensor) -> int:
        """Bytes that leave this rank for ranks on other nodes."""


class _AllToAllHandle:
    __slots__ = ("_work", "_received")

    def __init__(self, work, received: torch.Tensor):
        self._work = work
        self._received = received

    def wait(self) -> torch.Tensor:
        if self._work is not None:  # None: the comms logger made the call synchronous
            self._work.wait()
        return self._received


class AllToAll:
    """One ``all_to_all_single`` with equal splits, through ``deepspeed.comm`` so that its logger sees it.

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

    def receive_numel(self, numel: int) -> int:
        return numel

    def start(self, send: torch.Tensor, receive: torch.Tensor) -> Handle:
        work = dist.all_to_all_single(receive, send, group=self._group, async_op=True)
        return _AllToAllHandle(work, receive.view(self._ranks, -1))

    def bytes_sent(self, send: torch.Tensor) -> int:
        return send.numel() * send.element_size() * (self._ranks - 1) // self._ranks

    def bytes_sent_across_nodes(self, send: torch.Tensor) -> int:
        return send.numel() * send.element_size() * self._remote_ranks // self._ranks


class _LocalHandle:
    __slots__ = ("_send",)

    def __init__(self, send: torch.Tensor):
        self._send = send

    def wait(self) -> torch.Tensor:
        return self._send.view(1, -1)


class SingleRank:
    """A group of one rank: what it sends is what it receives, and no collective runs."""

    name = "all_to_all"

    def receive_numel(self, numel: int) -> int:
        return 0

    def start(self, send: torch.Tensor, receive: torch.Tensor) -> Handle:
        return _LocalHandle(send)

    def bytes_sent(self, send: torch.Tensor) -> int:
        return 0

    def bytes_sent_across_nodes(self, send: torch.Tensor) -> int:
        return 0


def make_reduce_scatter(group, node_size: int) -> ReduceScatter:
    """The reduce-scatter for the ranks of ``group``, of which ``node_size`` consecutive ones share a host."""
    ranks = dist.get_world_size(group=group)
    if ranks == 1:
        return SingleRank()
    nodes = [dist.get_global_rank(group, rank) // node_size for rank in range(ranks)]
    return AllToAll(group, nodes)
