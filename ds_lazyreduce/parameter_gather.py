"""Gathers updated parameters after the optimizer step: small buckets together, large ones in place.

Every bucket has a flat buffer ``[N * S]`` of which this rank has updated its own shard. One all-gather per
bucket costs more than the bytes where buckets are small, so shards of small buckets are gathered together
through a staging buffer of bounded size; a bucket as large as that is gathered straight into its buffer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from deepspeed import comm as dist

from .failures import during

# Elements of a staging buffer over all ranks: beyond it an all-gather's start-up cost no longer shows.
STAGED_ELEMENTS = 4 * 2**20

_HALF_UPDATED = "Ranks hold parameters of different steps now: train no further and save nothing."


def plan_chunks(numels: Sequence[int], kinds: Sequence, limit: int) -> list[list[int]]:
    """Which buckets are gathered together: runs of one kind with at most ``limit`` elements. Pure.

    Args:
        numels: elements of each bucket's flat buffer.
        kinds: for each bucket its dtype and process group; different ones never share a chunk.

    Returns:
        Lists of bucket indices; each index occurs once. A bucket above ``limit`` is alone.
    """
    chunks: list[list[int]] = []
    open_chunks: dict = {}
    for index, (numel, kind) in enumerate(zip(numels, kinds, strict=True)):
        chunk, filled = open_chunks.get(kind, (None, 0))
        if chunk is None or filled + numel > limit:
            chunk, filled = [], 0
            chunks.append(chunk)
        chunk.append(index)
        open_chunks[kind] = (chunk, filled + numel)
    return chunks


class ParameterGather:
    """The all-gathers of one optimizer step.

    Args:
        flats: each bucket's flat parameter buffer ``[N * S]``, in the model dtype. Read at every call, since
            the owner may move them.
        groups: each bucket's process group.
        limit: elements that may be staged at once, over all ranks.
    """

    def __init__(self, flats: Sequence[torch.Tensor], groups: Sequence, limit: int):
        self._flats = flats
        self._groups = groups
        kinds = [(flat.dtype, id(group)) for flat, group in zip(flats, groups, strict=True)]
        self._chunks = plan_chunks([flat.numel() for flat in flats], kinds, limit)

    def gather(self) -> None:
        """Completes every bucket's flat buffer from the shards of all ranks. Collective."""
        for chunk in self._chunks:
            group = self._groups[chunk[0]]
            ranks = dist.get_world_size(group=group)
            if ranks == 1:
                continue
            which = f"bucket {chunk[0]}" if len(chunk) == 1 else f"buckets {', '.join(map(str, chunk))}"
            with during(f"the all-gather of updated parameters of {which}", _HALF_UPDATED, group):
                self._gather_chunk(chunk, ranks, group)

    def _gather_chunk(self, chunk: list[int], ranks: int, group) -> None:
        rows = [self._flats[index].view(ranks, -1) for index in chunk]
        mine = [row[dist.get_rank(group=group)] for row in rows]
        if len(chunk) == 1:
            dist.all_gather_into_tensor(rows[0].view(-1), mine[0], group=group)
            return
        shard = torch.cat(mine)
        staged = shard.new_empty(ranks, shard.numel())
        dist.all_gather_into_tensor(staged.view(-1), shard, group=group)
        torch._foreach_copy_(rows, staged.split([one.numel() for one in mine], dim=1))
