"""Which backward passes of a window reduce gradients. Pure logic; ``lazy_reduce.gradient_partition.reduce_every``.

A pass that does not reduce adds to local fp32 accumulators, which travel with the next reducing one.
Slack between ranks is a resource with a price in memory: the rarer ranks meet, the less they wait.
"""

from __future__ import annotations

from typing import Protocol


class ReduceSchedule(Protocol):
    """Asked at the start of every backward pass and at the step. Decides the same on every rank."""

    def reduces_now(self, is_boundary: bool) -> bool:
        """Whether the pass that begins now reduces; ``is_boundary``: it is known to be the window's last."""

    def owes_a_pass(self) -> bool:
        """Whether ``step`` must reduce all accumulators because no pass of this window did."""

    def reduced(self) -> None:
        """All accumulators were reduced outside a backward pass."""

    def restart(self) -> None:
        """A new window begins."""


class EveryMicroSteps:
    """Every n-th pass reduces. What is left over at the step travels as late gradients do, by agreement.

    Every rank must run the same number of passes in a window.
    """

    def __init__(self, n: int):
        self._n = n
        self._passes = 0

    def reduces_now(self, is_boundary: bool) -> bool:
        self._passes += 1
        return self._passes % self._n == 0

    def owes_a_pass(self) -> bool:
        return False

    def reduced(self) -> None:
        self._passes = 0

    def restart(self) -> None:
        self._passes = 0


class OncePerWindow:
    """The window's last pass reduces while it runs, or ``step`` does where nobody knew it was the last.

    Exactly one pass over all buckets per window on every rank, so ranks may run unequal numbers of backward
    passes, or none.
    """

    def __init__(self) -> None:
        self._done = False

    def reduces_now(self, is_boundary: bool) -> bool:
        now = is_boundary and not self._done
        self._done |= now
        return now

    def owes_a_pass(self) -> bool:
        return not self._done

    def reduced(self) -> None:
        self._done = True

    def restart(self) -> None:
        self._done = False


def make_schedule(reduce_every: int | str) -> ReduceSchedule:
    """``reduce_every``: micro-steps >= 1, or ``"boundary"``."""
    return OncePerWindow() if reduce_every == "boundary" else EveryMicroSteps(reduce_every)
