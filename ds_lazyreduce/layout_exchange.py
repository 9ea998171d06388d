"""Moves a sharded flat tensor from one layout into another, round by round, in bounded device memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from .failures import during
from .stock_layout import Segment, split_into_rounds

DEVICE_BYTES = 256 * 2**20  # of send and receive buffers together
_UNFINISHED = "It was neither saved nor loaded as a whole; checkpoints on the disk are as they were."
Pieces = list[tuple[int, int]]  # (offset, length)


@dataclass(frozen=True)
class _Round:
    """What this rank sends to, and receives from, each rank. Both ends list a pair's pieces in the same order."""

    sends: list[Pieces]
    receives: list[Pieces]


class _Flight(NamedTuple):
    """A round that travels; its buffers, of bytes, must live until it is finished."""

    work: Any
    send: torch.Tensor
    receive: torch.Tensor
    received: torch.Tensor
    target: torch.Tensor
    receives: list[Pieces]


class LayoutExchange:
    """A transfer plan as this rank takes part in it, in both directions. Copying is collective.

    ``peak_device_bytes`` is the most that send and receive buffers have taken so far, and ``peak_host_bytes`` that
    of their copies on the host, which there are where the device is another one.

    Args:
        segments: the whole plan, the same on every rank.
        group: the process group whose ranks the plan names.
        round_bytes: bound of the send and receive buffers of two rounds together, for elements of 4 bytes.
    """

    def __init__(self, segments: Sequence[Segment], group, round_bytes: int = DEVICE_BYTES):
        self._group = group
        self.peak_device_bytes = self.peak_host_bytes = 0
        rank, ranks = dist.get_rank(group=group), dist.get_world_size(group=group)
        staying, rounds = split_into_rounds(segments, max(round_bytes // 16, 1))
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

    def forward(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        """Copies every source into its target along the plan, both flat, of one dtype, each on any device.

        Elements of a target that no segment names stay as they are.
        """
        self._copy(sources, targets, self._local, [(part.sends, part.receives) for part in self._rounds])

    def backward(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Copies the targets back into the sources."""
        local = [(there, here, length) for here, there, length in self._local]
        self._copy(targets, sources, local, [(part.receives, part.sends) for part in self._rounds])

    def _copy(self, sources, targets, local: list[tuple[int, int, int]], rounds: list[tuple[list, list]]) -> None:
        flying: deque[_Flight] = deque()  # two rounds: one is packed, or unpacked, while the other travels
        buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        element = max((source.element_size() for source in sources), default=0)
        with during("the exchange of optimizer state between the ranks of a checkpoint", _UNFINISHED, self._group):
            for source, target in zip(sources, targets, strict=True):
                for sends, receives in rounds:
                    if len(flying) == 2:
                        buffers.append(self._finish(flying.popleft()))
                    pair = buffers.pop() if buffers else self._new_buffers(rounds, element)
                    flying.append(self._start(source, sends, target, receives, *pair))
                for here, there, length in local:
                    target[there : there + length].copy_(source[here : here + length])
            while flying:
                buffers.append(self._finish(flying.popleft()))
        self.peak_device_bytes = max(self.peak_device_bytes, sum(one.nbytes + two.nbytes for one, two in buffers))

    @staticmethod
    def _new_buffers(rounds: list[tuple[list, list]], element: int) -> tuple[torch.Tensor, torch.Tensor]:
        # Memory that is new to the process costs more than the copy into it, so buffers serve all rounds of a call.
        device = get_accelerator().current_device_name()
        sizes = (max(map(_total, side)) * element for side in zip(*rounds, strict=True))
        send, receive = (torch.empty(size, dtype=torch.uint8, device=device) for size in sizes)
        return send, receive

    def _start(self, source, sends: list[Pieces], target, receives: list[Pieces], send, receive) -> _Flight:
        parts = [source[offset : offset + length] for pieces in sends for offset, length in pieces]
        packed, received = (
            buffer[: _total(pieces) * source.element_size()].view(source.dtype)
            for buffer, pieces in ((send, sends), (receive, receives))
        )
        if parts and source.device == packed.device:
            torch.cat(parts, out=packed)
        elif parts:
            packed.copy_(torch.cat(parts))
        if packed.device != source.device or packed.device != target.device:  # one side is on the host
            copied = packed.nbytes if packed.device != source.device else received.nbytes
            self.peak_host_bytes = max(self.peak_host_bytes, copied)
        work = dist.all_to_all_single(
            received,
            packed,
            output_split_sizes=[_numel(pieces) for pieces in receives],
            input_split_sizes=[_numel(pieces) for pieces in sends],
            group=self._group,
            async_op=True,
        )
        return _Flight(work, send, receive, received, target, receives)

    @staticmethod
    def _finish(flight: _Flight) -> tuple[torch.Tensor, torch.Tensor]:
        """Completes the round; returns its buffers."""
        flight.work.wait()
        received = flight.received.to(flight.target.device)
        start = 0
        for pieces in flight.receives:
            for offset, length in pieces:
                flight.target[offset : offset + length].copy_(received[start : start + length])
                start += length
        return flight.send, flight.receive


def _numel(pieces: Pieces) -> int:
    return sum(length for _, length in pieces)


def _total(per_rank: list[Pieces]) -> int:
    return sum(_numel(pieces) for pieces in per_rank)
