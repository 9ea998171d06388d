"""A model of when ranks wait and what they hold. Pure: nothing communicates, nothing is measured.

Every rank runs the same *program*, a list of operations that follows from the settings alone::

    own 0 | forward | fill 0, dispatch 0 | fill 1, drain, dispatch 1 | ... | own 1 | ... | drain, join, meet, update

Ranks differ only in how long their own work takes, and collectives start in the same order everywhere. So the
events of all ranks can be played operation by operation, with the clocks of all ranks in one vector: a
collective is complete once the last rank has dispatched it and its bytes have travelled.

``program`` says what happens, ``play`` when, ``peak_buffer_bytes`` what is held meanwhile. ``Costs`` are seconds:
of a :class:`Cluster` by ``costs_of``, or measured ones.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from .buffer_pool import Buffer, BufferPool
from .reduce_schedule import make_schedule

_DTYPES = {2: torch.bfloat16, 4: torch.float32}  # by bytes


@dataclass(frozen=True)
class Setting:
    """How gradients are reduced, and what else makes ranks meet.

    collective: ``"all_reduce"`` is plain ZeRO-2's, the others are the extension's.
    max_in_flight, carry_over, reduce_every: the extension's keys; stock's ``overlap_comm`` is 1 and False.
    blocking: whether backward stands still until each bucket is reduced, as in stock without ``overlap_comm``.
    wire_bytes, across_bytes: of an element inside a node (in a flat exchange everywhere) and between nodes.
    loss, normaliser: whether a scalar is all-reduced and waited for in every micro-step, after forward or before.
    """

    collective: Literal["all_reduce", "all_to_all", "hierarchical"] = "hierarchical"
    max_in_flight: int = 1
    carry_over: bool = True
    reduce_every: int | str = 1
    blocking: bool = False
    wire_bytes: int = 2
    across_bytes: int = 4
    loss: bool = False
    normaliser: bool = False


@dataclass(frozen=True)
class Workload:
    """What a rank does in a window; seconds are of one micro-step, without delays.

    elements: trainable elements; they are spread evenly over ``buckets``.
    update_s: of the optimizer, once a window.
    """

    micro_steps: int
    buckets: int
    elements: int
    forward_s: float
    backward_s: float
    update_s: float = 0.0


@dataclass(frozen=True)
class Link:
    """One rank's link: each message takes ``latency_s``, and all of them share ``bytes_per_s``."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, messages: int, nbytes: int) -> float:
        return messages * self.latency_s + nbytes / self.bytes_per_s


@dataclass(frozen=True)
class Cluster:
    """``ranks`` ranks, ``node_size`` of them on a node; every rank has a link of its own to either side."""

    ranks: int
    node_size: int
    inside: Link
    across: Link

    @property
    def nodes(self) -> int:
        return self.ranks // self.node_size


# ---- the program


class Op(NamedTuple):
    """What is done next; ``index`` is a micro-step of ``own``, a bucket of ``fill`` and ``dispatch``.

    kind: own (delays), forward, fill (backward until a bucket is complete), cast (of an accumulated bucket to the
    wire dtype), dispatch, drain (of the oldest), join (backward goes on once all drains are done), meet (a small
    all-reduce), update.
    """

    kind: str
    index: int = 0


def program(setting: Setting, micro_steps: int, buckets: int) -> list[Op]:
    """What every rank does in one window; the chain is that of ``bucket_chain.BucketChain``."""
    ops: list[Op] = []
    in_flight = 0
    schedule = make_schedule(setting.reduce_every)

    def drain() -> None:
        nonlocal in_flight
        ops.append(Op("drain"))
        in_flight -= 1

    def dispatch(bucket: int) -> None:
        nonlocal in_flight
        if setting.reduce_every != 1 and setting.wire_bytes != 4:
            ops.append(Op("cast", bucket))
        while in_flight >= setting.max_in_flight:
            drain()
        ops.append(Op("dispatch", bucket))
        in_flight += 1
        if setting.blocking:
            drain_all()

    def drain_all() -> None:
        while in_flight:
            drain()
        ops.append(Op("join"))

    for micro_step in range(micro_steps):
        ops.append(Op("own", micro_step))
        if setting.normaliser:
            ops.append(Op("meet"))
        ops.append(Op("forward"))
        if setting.loss:
            ops.append(Op("meet"))
        reduces = schedule.reduces_now(micro_step == micro_steps - 1)
        for bucket in range(buckets):
            ops.append(Op("fill", bucket))
            if reduces:
                dispatch(bucket)
        if not setting.carry_over:
            drain_all()
    if not reduces:  # n does not divide the window: what is left travels at the step
        for bucket in range(buckets):
            dispatch(bucket)
    drain_all()
    return [*ops, Op("meet"), Op("update")]


# ---- bytes and seconds


class Traffic(NamedTuple):
    """What one rank sends in one exchange of a bucket, to its own node and to others."""

    messages_inside: int = 0
    bytes_inside: int = 0
    messages_across: int = 0
    bytes_across: int = 0


def traffic(cluster: Cluster, setting: Setting, numel: int) -> list[Traffic]:
    """The hops of one bucket of ``numel`` elements (a multiple of the ranks), one after another."""
    ranks, size, nodes = cluster.ranks, cluster.node_size, cluster.nodes
    wire = numel * setting.wire_bytes
    if setting.collective == "all_reduce":  # rings through all links of a node, trees where messages are short
        rounds_inside, rounds_across = 2 * _log2(size), 2 * _log2(nodes)
        across = 2 * wire // size * (nodes - 1) // nodes
        return [Traffic(rounds_inside, 2 * wire * (size - 1) // size, rounds_across, across)]
    if setting.collective == "hierarchical" and 1 < size < ranks:
        between = numel // size * setting.across_bytes * (nodes - 1) // nodes
        return [
            Traffic(messages_inside=size - 1, bytes_inside=wire * (size - 1) // size),
            Traffic(messages_across=nodes - 1, bytes_across=between),
        ]
    return [Traffic(size - 1, wire * (size - 1) // ranks, ranks - size, wire * (ranks - size) // ranks)]


@dataclass(frozen=True)
class Costs:
    """Seconds of communication once the last rank is there.

    hops_s: of a bucket's exchange; a second hop runs while the rank drains it.
    meet_s: of a small all-reduce. gather_s: of all updated parameters.
    """

    hops_s: tuple[float, ...]
    meet_s: float
    gather_s: float


def bucket_numel(cluster: Cluster, workload: Workload) -> int:
    """Elements of a bucket, padded to a multiple of the ranks."""
    return -(-workload.elements // (workload.buckets * cluster.ranks)) * cluster.ranks


def costs_of(cluster: Cluster, workload: Workload, setting: Setting) -> Costs:
    """Seconds by latency and bandwidth; what goes inside a node and across travels at the same time."""

    def seconds(hop: Traffic) -> float:
        inside = cluster.inside.seconds(hop.messages_inside, hop.bytes_inside)
        return max(inside, cluster.across.seconds(hop.messages_across, hop.bytes_across))

    size, nodes = cluster.node_size, cluster.nodes
    hops = traffic(cluster, setting, bucket_numel(cluster, workload))
    meet = 2 * _log2(size) * cluster.inside.latency_s + 2 * _log2(nodes) * cluster.across.latency_s
    model = 2 * workload.elements  # parameters travel in a two-byte dtype
    gathered = Traffic(_log2(size), model * (size - 1) // size, _log2(nodes), model // size * (nodes - 1) // nodes)
    return Costs(tuple(map(seconds, hops)), meet, seconds(gathered))


def _log2(n: int) -> int:
    return math.ceil(math.log2(n))


# ---- time


class Outcome(NamedTuple):
    """Per window: ``step_s`` ``[windows]``; ``idle_s`` ``[windows, ranks]``, the part a rank did no work in."""

    step_s: torch.Tensor
    idle_s: torch.Tensor


def play(
    ops: Iterable[Op], workload: Workload, costs: Costs, delays: torch.Tensor, node_size: int, streams: bool
) -> Outcome:
    """Plays one window per row of ``delays``; all ranks leave a window together, so windows do not depend.

    Args:
        ops: of ``program``.
        delays: ``[windows, ranks, micro_steps]``, float64 seconds a rank works longer, before each forward.
        node_size: ranks of a node, for costs with two hops.
        streams: whether dispatch and drain run beside backward, on a stream of their own: backward then waits only
            for the memory of a send buffer, and where it joins. On the CPU it waits for each drain.
    """
    windows, ranks, micro_steps = delays.shape
    backward = torch.zeros(windows, ranks, dtype=torch.float64)  # the clock of what computes
    reduction = backward  # the clock of what dispatches and drains
    two_hops = len(costs.hops_s) == 2
    groups = ranks // node_size if two_hops else 1  # that exchange among themselves at first
    first, second = _Channel(costs.hops_s[0]), _Channel(costs.hops_s[-1])
    in_flight: deque[torch.Tensor] = deque()  # [windows, groups, 1]: when an exchange is complete
    held: set[int] = set()  # buckets that have memory to be filled
    freed: deque[torch.Tensor] = deque()  # when send buffers became free
    fill_s = workload.backward_s / workload.buckets
    for op in ops:
        if not streams:  # one clock
            reduction = backward = torch.maximum(backward, reduction)
        if op.kind == "own":
            backward = backward + delays[:, :, op.index]
        elif op.kind == "forward":
            backward = backward + workload.forward_s
        elif op.kind == "fill":
            if op.index not in held and freed:
                backward = torch.maximum(backward, freed.popleft())
            held.add(op.index)
            backward = backward + fill_s
        elif op.kind == "dispatch":
            held.discard(op.index)
            reduction = torch.maximum(reduction, backward)
            in_flight.append(first.exchange(reduction.view(windows, groups, -1)))
        elif op.kind == "drain":
            there = torch.maximum(reduction.view(windows, groups, -1), in_flight.popleft())
            if two_hops:  # among the ranks that have the same place in their nodes
                there = second.exchange(there.transpose(1, 2)).transpose(1, 2).expand_as(there)
            reduction = there.reshape(windows, ranks)
            freed.append(reduction)  # with two hops, the sums of the first are in that memory until then
        elif op.kind == "meet":
            backward = (backward.amax(1, keepdim=True) + costs.meet_s).expand(windows, ranks)
        elif op.kind == "update":
            backward = backward + workload.update_s + costs.gather_s
        elif op.kind == "join":
            backward = torch.maximum(backward, reduction)
    work = delays.sum(2) + micro_steps * (workload.forward_s + workload.backward_s) + workload.update_s
    return Outcome(backward[:, 0], backward - work)


class _Channel:
    """Exchanges within groups, each group's one after another, as on a communicator."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._free = torch.zeros((), dtype=torch.float64)

    def exchange(self, arrivals: torch.Tensor) -> torch.Tensor:
        """When it is complete ``[windows, groups, 1]`` if members arrive at ``[windows, groups, members]``."""
        self._free = torch.maximum(arrivals.amax(-1, keepdim=True), self._free) + self._seconds
        return self._free


# ---- memory


def peak_buffer_bytes(ops: Iterable[Op], cluster: Cluster, setting: Setting, numel: int) -> int:
    """Most bytes of send, receive and accumulation buffers at once, of buckets of ``numel`` elements.

    It is the extension's own pool that counts, on a device without memory. Of the extension's settings: plain
    ZeRO-2's buffers are DeepSpeed's matter.
    """
    pool = BufferPool(torch.device("meta"))
    wire, across = _DTYPES[setting.wire_bytes], _DTYPES[setting.across_bytes]
    filled_in = wire if setting.reduce_every == 1 else torch.float32
    two_hops = len(traffic(cluster, setting, numel)) == 2
    held: dict[int, Buffer] = {}
    in_flight: deque[tuple[Buffer, Buffer]] = deque()
    for op in ops:
        if op.kind == "fill" and op.index not in held:
            held[op.index] = pool.take(numel, filled_in)
        elif op.kind == "cast":
            send = pool.take(numel, wire)
            pool.give(held[op.index])
            held[op.index] = send
        elif op.kind == "dispatch":
            sent = held.pop(op.index)
            if two_hops:  # the first hop sends a packed copy
                packed = pool.take(numel, wire)
                pool.give(sent)
                sent = packed
            in_flight.append((sent, pool.take(numel, wire)))
        elif op.kind == "drain":
            sent, received = in_flight.popleft()
            pool.give(sent)
            if two_hops:
                sums = pool.take(numel // cluster.node_size, torch.float32)
                pool.give(received)
                if across != torch.float32:
                    rounded = pool.take(numel // cluster.node_size, across)
                    pool.give(sums)
                    sums = rounded
                received = pool.take(numel // cluster.node_size, across)
                pool.give(sums)
            pool.give(received)
    return pool.peak_bytes
