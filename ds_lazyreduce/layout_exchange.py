"""Moves a sharded flat tensor from one layout into another, round by round, in bounded device memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from .checkpoint import CheckpointError
from .stock_layout import Segment, split_into_rounds

DEVICE_BYTES = 256 * 2**20  # of send and receive buffer together

Pieces = list[tuple[int, int]]  # (offset, length)


@dataclass(frozen=True)
class _Round:
    """What this rank sends to, and receives from, each rank. Both ends list a pair's pieces in the same order."""

    sends: list[Pieces]
    receives: list[Pieces]


class LayoutExchange:
    """A transfer plan as this rank takes part in it, in both directions. Every method is collective.

    Args:
        segments: the whole plan, the same on every rank.
        group: the process group whose ranks the plan names.
        round_bytes: bound of the send and receive buffers together, for elements of 4 bytes.
    """

    def __init__(self, segments: Sequence[Segment], group, round_bytes: int = DEVICE_BYTES):
        self._group = group
        rank, ranks = dist.get_rank(group=group), dist.get_world_size(group=group)
        staying, rounds = split_into_rounds(segments, max(round_bytes // 8, 1))
        self._local = [
            (segment.source_offset, segment.target_offset, segment.length)
            for segment in staying
            if segment.source_rank == rank
        ]
        self._rounds = [self._my_part(segments_of_round, rank, ranks) for segments_of_round in rounds]

    @staticmethod
    def _my_part(segments: Sequence[Segment], rank: int, ranks: int) -> _Round:
        part = _Round([[] for _ in range(ranks)], [[] for _ in range(ranks)])
        for segment in segments:
            if segment.source_rank == rank:
                part.sends[segment.target_rank].append((segment.source_offset, segment.length))
            if segment.target_rank == rank:
                part.receives[segment.source_rank].append((segment.target_offset, segment.length))
        return part

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies ``source`` into ``target`` along the plan, both flat, of one dtype, each on any device.

        Elements of ``target`` that no segment names stay as they are.
        """
        for here, there, length in self._local:
            target[there : there + length].copy_(source[here : here + length])
        for part in self._rounds:
            self._run(source, part.sends, target, part.receives)

    def backward(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies ``target`` back into ``source``."""
        for here, there, length in self._local:
            source[here : here + length].copy_(target[there : there + length])
        for part in self._rounds:
            self._run(target, part.receives, source, part.sends)

    def _run(self, source: torch.Tensor, sends: list[Pieces], target: torch.Tensor, receives: list[Pieces]) -> None:
        device = get_accelerator().current_device_name()
        parts = [source[offset : offset + length] for pieces in sends for offset, length in pieces]
        send = torch.cat(parts) if parts else source.new_empty(0)
        send = send.to(device)
        receive = torch.empty(_total(receives), dtype=target.dtype, device=device)
        try:
            dist.all_to_all_single(
                receive,
                send,
                output_split_sizes=[_numel(pieces) for pieces in receives],
                input_split_sizes=[_numel(pieces) for pieces in sends],
                group=self._group,
            )
        except RuntimeError as error:
            raise CheckpointError(
                f"optimizer state could not be exchanged between the ranks of a checkpoint (has one died?): {error}"
            ) from error
        received = receive.to(target.device)
        start = 0
        for pieces in receives:
            for offset, length in pieces:
                target[offset : offset + length].copy_(received[start : start + length])
                start += length


def _numel(pieces: Pieces) -> int:
    return sum(length for _, length in pieces)


def _total(per_rank: list[Pieces]) -> int:
    return sum(_numel(pieces) for pieces in per_rank)
