"""A bucket: what it holds, how it is reduced, and what of it has arrived; and what all of them have sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .buffer_pool import Buffer
from .collectives import ReduceScatter, Traffic


@dataclass(eq=False)
class Slot:
    """Where one parameter's gradient goes: ``numel`` elements at ``offset`` of its bucket's buffer."""

    bucket: Bucket
    offset: int
    numel: int
    name: str
    filled: bool = False
    section: int = -1  # which section of the bucket's buffer it is, see ``Bucket.sections``


@dataclass(eq=False)
class Bucket:
    """One bucket: what it holds, how it is reduced, and what of it has arrived in this micro-step.

    numel: elements of the flat buffer, ``N * S`` with padding.
    send: the buffer being filled in the open micro-step, this bucket's until it is dispatched.
    views: the sections of ``send``.
    held: small gradients of the open micro-step that are still to be copied, together, into ``send``.
    accumulator: fp32 local accumulator ``[N * S]``, this bucket's until it is reduced or discarded.
    group: the process group of ``reduce_scatter``, None for all ranks.
    """

    index: int
    numel: int
    wire_dtype: torch.dtype
    reduce_scatter: ReduceScatter
    group: Any = None
    slots: list[Slot] = field(default_factory=list)
    send: Buffer | None = None
    views: Sequence[torch.Tensor] = ()
    held: list[tuple[Slot, torch.Tensor]] = field(default_factory=list)
    held_numel: int = 0
    missing: int = 0
    accumulator: Buffer | None = None

    def sections(self) -> tuple[list[int], list[int]]:
        """Sizes of the pieces the flat buffer consists of, and which of them are gaps (alignment padding).

        Numbers the slots' sections.
        """
        sizes, gaps, end = [], [], 0
        for slot in sorted(self.slots, key=lambda s: s.offset):
            if slot.offset > end:
                gaps.append(len(sizes))
                sizes.append(slot.offset - end)
            slot.section = len(sizes)
            sizes.append(slot.numel)
            end = slot.offset + slot.numel
        if self.numel > end:
            gaps.append(len(sizes))
            sizes.append(self.numel - end)
        return sizes, gaps

    def describe(self) -> str:
        names = [slot.name for slot in self.slots]
        listed = names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"
        return f"bucket {self.index} ({listed}, {self.numel} elements)"


@dataclass
class Counters:
    """What the chain did; see ``lazy_reduce_report`` in the README."""

    gradient_collectives: int = 0
    bytes_sent: int = 0
    bytes_sent_across_nodes: int = 0
    messages_sent: int = 0
    messages_sent_across_nodes: int = 0
    max_in_flight_seen: int = 0

    def add(self, traffic: Traffic, in_flight: int) -> None:
        """Counts a reduce-scatter that has started, with ``in_flight`` of them now under way."""
        self.gradient_collectives += 1
        self.bytes_sent += traffic.bytes
        self.bytes_sent_across_nodes += traffic.bytes_across_nodes
        self.messages_sent += traffic.messages
        self.messages_sent_across_nodes += traffic.messages_across_nodes
        self.max_in_flight_seen = max(self.max_in_flight_seen, in_flight)
