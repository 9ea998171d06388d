"""Where plain ZeRO-2 keeps the parameters of a param group, and how to get there from buckets. Pure logic.

Checkpoints are written in the layout of plain DeepSpeed 0.19.8, which flattens a whole param group:

    param group     [ w0 . w1 b0 . . ]                   parameters in order, "." = alignment and end padding
    stock, 2 ranks  [ w0 . w1 |  b0 . . ]                 one equal partition a rank
    here            [ b0 w1 ] [ w0 . ]                    one flat buffer a bucket, cut into a shard a rank
      rank 0        [ b0 | w0 ]                           the shards of a rank side by side
      rank 1        [ w1 | .  ]

On both sides a rank holds one flat tensor a param group, so that converting moves runs of elements between
ranks and nothing else: the *segments* of :func:`plan_transfer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

START_ALIGNMENT = 2  # elements; DeepSpeed pads a flat group to this times the number of ranks


@dataclass(frozen=True)
class StockLayout:
    """Plain ZeRO-2's layout of one param group. See :func:`stock_layout`.

    numels: elements of each parameter, in the user's order.
    order: the flat buffer's parameters from left to right, as indices into ``numels``.
    paddings: elements of padding behind each parameter, from left to right.
    offsets: where each parameter starts in the flat buffer, from left to right.
    ranks: number of partitions.
    partition_size: elements of a partition, padding included.
    """

    numels: tuple[int, ...]
    order: tuple[int, ...]
    paddings: tuple[int, ...]
    offsets: tuple[int, ...]
    ranks: int
    partition_size: int

    @property
    def numel(self) -> int:
        """Elements of the flat buffer."""
        return self.ranks * self.partition_size

    def starts(self) -> list[int]:
        """Where each parameter starts in the flat buffer, in the user's order."""
        starts = [0] * len(self.numels)
        for index, offset in zip(self.order, self.offsets, strict=True):
            starts[index] = offset
        return starts

    def end_padding(self, rank: int) -> int:
        """Elements at the end of the rank's partition that lie behind the last parameter's padding."""
        used = self.offsets[-1] + self.numels[self.order[-1]] + self.paddings[-1] if self.order else 0
        return min(max((rank + 1) * self.partition_size - used, 0), self.partition_size)

    def fragments(self, rank: int) -> dict[int, tuple[int, int]]:
        """``{parameter: (start, numel)}`` of the parts that lie in the rank's partition, in the user's order."""
        first = rank * self.partition_size
        fragments = {}
        for index, start in enumerate(self.starts()):
            begin = max(start, first)
            end = min(start + self.numels[index], first + self.partition_size)
            if begin < end:
                fragments[index] = (begin - first, end - begin)
        return fragments

    def gaps(self, rank: int) -> list[tuple[int, int]]:
        """``(start, stop)`` of the runs of padding in the rank's partition, from left to right."""
        gaps, end = [], 0
        for start, numel in [*sorted(self.fragments(rank).values()), (self.partition_size, 0)]:
            if start > end:
                gaps.append((end, start))
            end = start + numel
        return gaps

    def placements(self) -> list[Placement]:
        """Where the parameters lie, in the user's order."""
        return [Placement(start, self.partition_size, 0) for start in self.starts()]


def stock_layout(numels: Sequence[int], ranks: int, *, round_robin: bool = False, alignment: int = 1) -> StockLayout:
    """The layout that plain ZeRO-2 gives a param group.

    Args:
        numels: elements of the trainable parameters, in the user's order.
        ranks: size of the group's data-parallel process group.
        round_robin: ``zero_optimization.round_robin_gradients``: every ``ranks``-th parameter comes next.
        alignment: elements that every parameter but the first starts at a multiple of
            (``zero_optimization.parameter_alignment``; 1: none).
    """
    order = list(range(len(numels)))
    if round_robin:
        order.sort(key=lambda index: index % ranks)  # stable, so the rest keeps its order
    offsets, paddings, end = [], [], 0
    for position, index in enumerate(order):
        offsets.append(end)
        end += numels[index]
        paddings.append(0 if position == len(order) - 1 else -end % alignment)
        end += paddings[-1]
    end += -end % (START_ALIGNMENT * ranks)
    return StockLayout(tuple(numels), tuple(order), tuple(paddings), tuple(offsets), ranks, end // ranks)


class Placement(NamedTuple):
    """Where a parameter lies: at ``start`` of a flat buffer that is cut into shards of ``shard`` elements, one a
    rank, each of which begins at ``base`` of the rank's own tensor."""

    start: int
    shard: int
    base: int


class Segment(NamedTuple):
    """A run of ``length`` elements that moves from one rank's tensor into another's."""

    source_rank: int
    source_offset: int
    target_rank: int
    target_offset: int
    length: int


def plan_transfer(numels: Sequence[int], source: Sequence[Placement], target: Sequence[Placement]) -> list[Segment]:
    """The segments that move every parameter from one placement to another; each element occurs in exactly one."""
    segments = []
    for numel, here, there in zip(numels, source, target, strict=True):
        done = 0
        while done < numel:
            source_rank, source_offset = divmod(here.start + done, here.shard)
            target_rank, target_offset = divmod(there.start + done, there.shard)
            length = min(numel - done, here.shard - source_offset, there.shard - target_offset)
            segments.append(
                Segment(source_rank, here.base + source_offset, target_rank, there.base + target_offset, length)
            )
            done += length
    return segments


def split_into_rounds(segments: Sequence[Segment], cap: int) -> tuple[list[Segment], list[list[Segment]]]:
    """Segments that stay on their rank, and the others in rounds of bounded size.

    In no round does a rank send, or receive, more than ``cap`` elements. Segments are cut where a round is
    full. The answer depends on the arguments only, so all ranks that hold the same plan run the same rounds.
    """
    if cap < 1:
        raise ValueError(f"a round must allow at least 1 element, got {cap}")
    staying = [segment for segment in segments if segment.source_rank == segment.target_rank]
    rounds: list[list[Segment]] = []
    sent: list[dict[int, int]] = []
    received: list[dict[int, int]] = []
    # Rounds before these are full for the rank.
    first_to_send: dict[int, int] = {}
    first_to_receive: dict[int, int] = {}
    for segment in segments:
        source, target, done = segment.source_rank, segment.target_rank, 0
        if source == target:
            continue
        current = max(first_to_send.get(source, 0), first_to_receive.get(target, 0))
        while done < segment.length:
            if current == len(rounds):
                rounds.append([])
                sent.append({})
                received.append({})
            room = cap - max(sent[current].get(source, 0), received[current].get(target, 0))
            length = min(room, segment.length - done)
            if length:
                rounds[current].append(
                    Segment(source, segment.source_offset + done, target, segment.target_offset + done, length)
                )
                sent[current][source] = sent[current].get(source, 0) + length
                received[current][target] = received[current].get(target, 0) + length
                done += length
            current += done < segment.length
        first_to_send[source] = _first_with_room(sent, source, first_to_send.get(source, 0), cap)
        first_to_receive[target] = _first_with_room(received, target, first_to_receive.get(target, 0), cap)
    return staying, rounds


def _first_with_room(used: list[dict[int, int]], rank: int, start: int, cap: int) -> int:
    while start < len(used) and used[start].get(rank, 0) == cap:
        start += 1
    return start
