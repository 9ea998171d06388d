"""The hierarchical reduce-scatter: first inside the node, then across nodes, with fp32 sums in both.

    ranks      node 0: 0 1 2 3      node 1: 4 5 6 7            (node_size 4; shard j belongs to rank j)
    hop 1      rank 1 of node 0 collects from its node what is meant for ranks 1 and 5, and sums it
    hop 2      ranks 1 and 5 exchange these sums: each gets one row per node

Between nodes a rank sends 1/node_size of the bucket instead of nearly all of it: node_size / 2 times fewer bytes
than the flat all-to-all with sums in fp32, node_size times with sums in a two-byte wire dtype. Who owns which
shard is the same, so checkpoints do not know the difference.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as torch_dist
from deepspeed import comm as dist

from .buffer_pool import Buffer, BufferPool
from .collectives import Handle, Traffic
from .failures import inherit_timeout

Accumulate = Callable[[torch.Tensor, torch.Tensor, float], None]


class _TwoHopsHandle:
    """Each buffer goes back when its last reader has been issued; the next one taken may be the same memory."""

    def __init__(self, hops: TwoHops, work, packed, received, pool: BufferPool):
        self._hops, self._work, self._pool = hops, work, pool
        self._packed, self._received, self._rows = packed, received, None

    def wait(self) -> torch.Tensor:
        hops, pool = self._hops, self._pool
        self._work.wait()
        pool.give(self._packed)
        received = self._received.data.view(hops.node_size, -1)
        sums = pool.take(received.shape[1], torch.float32)
        sums.data.zero_()
        hops.accumulate(sums.data, received, 1.0)
        pool.give(self._received)
        across_dtype = hops.across_dtype(received.dtype)
        if across_dtype != torch.float32:
            rounded = pool.take(sums.data.numel(), across_dtype)
            rounded.data.copy_(sums.data)
            pool.give(sums)
            sums = rounded
        self._rows = pool.take(sums.data.numel(), sums.data.dtype)
        dist.all_to_all_single(self._rows.data, sums.data, group=hops.across)
        pool.give(sums)
        return self._rows.data.view(hops.nodes, -1)

    def release(self) -> None:
        self._pool.give(self._rows)


class TwoHops:
    """See the module's docstring. Rows are the nodes in order; sums are in the order of ranks within a node.

    The second hop runs in ``wait()``, which therefore is collective.

    Args:
        group: process group of the bucket's data-parallel ranks; ``node_size`` consecutive ones share a node.
        node_size: ranks of a node, a proper divisor of the group's size and above 1.
        accumulate: the fused fp32 accumulation.
        across_in_wire_dtype: whether sums are rounded to the wire dtype between nodes, instead of staying fp32.
    """

    name = "hierarchical"

    def __init__(self, group, node_size: int, accumulate: Accumulate, across_in_wire_dtype: bool):
        ranks = dist.get_world_size(group=group)
        if node_size < 2 or ranks % node_size or ranks == node_size:
            raise ValueError(f"node_size {node_size} is no proper divisor above 1 of {ranks} ranks")
        self.node_size, self.nodes = node_size, ranks // node_size
        self.accumulate, self.across_in_wire_dtype = accumulate, across_in_wire_dtype
        rank = dist.get_rank(group=group)
        members = [dist.get_global_rank(group, r) for r in range(ranks)]
        node, place = divmod(rank, node_size)
        self.inside, self.across = _new_groups(
            members[node * node_size : (node + 1) * node_size], members[place::node_size]
        )

    def start(self, send: Buffer, pool: BufferPool) -> Handle:
        numel, dtype = send.data.numel(), send.data.dtype
        packed = pool.take(numel, dtype)
        shards = send.data.view(self.nodes, self.node_size, -1)
        packed.data.view(self.node_size, self.nodes, -1).copy_(shards.transpose(0, 1))
        pool.give(send)  # packed is what travels
        received = pool.take(numel, dtype)
        work = dist.all_to_all_single(received.data, packed.data, group=self.inside, async_op=True)
        return _TwoHopsHandle(self, work, packed, received, pool)

    def traffic(self, numel: int, dtype: torch.dtype) -> Traffic:
        neighbours, other_nodes = self.node_size - 1, self.nodes - 1
        shard = numel // (self.node_size * self.nodes)
        inside = neighbours * shard * self.nodes * dtype.itemsize
        across = other_nodes * shard * self.across_dtype(dtype).itemsize
        return Traffic(neighbours + other_nodes, inside + across, other_nodes, across)

    def reference_rows(self, contributions: torch.Tensor) -> torch.Tensor:
        across_dtype = self.across_dtype(contributions.dtype)
        sums = []
        for node in contributions.split(self.node_size):
            total = node[0].float()
            for row in node[1:]:
                total = total + row.float()
            sums.append((0.0 + total).to(across_dtype))  # added to zero, which makes -0 of it 0
        return torch.stack(sums)

    def across_dtype(self, wire_dtype: torch.dtype) -> torch.dtype:
        """What travels between nodes for a bucket sent in ``wire_dtype``."""
        return wire_dtype if self.across_in_wire_dtype else torch.float32

    def close(self) -> None:
        for group in (self.inside, self.across):
            torch_dist.destroy_process_group(group)


def _new_groups(*wanted: list[int]) -> list:
    """A process group for each list of global ranks, all containing this one. Collective over all ranks.

    Every rank makes every group that any rank wants, in one order, as torch asks for. (Its groups made by members
    only are named after their ranks: a second one would meet what the first has left in the store.)
    """
    everyone = [None] * torch_dist.get_world_size()
    torch_dist.all_gather_object(everyone, wanted)
    groups = {ranks: torch_dist.new_group(ranks) for ranks in sorted({tuple(r) for lists in everyone for r in lists})}
    mine = [groups[tuple(ranks)] for ranks in wanted]
    for group in mine:
        inherit_timeout(group)
    return mine
