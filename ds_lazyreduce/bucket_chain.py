"""The chain: ordered dispatch of buckets, drain of the predecessor, reuse of buffers.

    gradient -> slot of its bucket's send buffer -> [bucket complete, and its turn] -> dispatch
    dispatch: drain the oldest while ``max_in_flight`` are in flight; take a receive buffer; start
    drain:    wait; add the rows in fp32 to the gradient partition; give the buffers back

Copies run on the stream of backward, dispatch and drain on the reduction stream: ``reduction_stream.py``.

(The drain of the predecessor before the next receive buffer is taken is the idea of Megatron-Core's
distributed optimizer; there it made the transient memory independent of the number of buckets.)

Every rank dispatches every bucket exactly once per reducing micro-step, in one agreed order, whatever
order gradients arrive in and whichever parameters a rank did not use: what is missing counts as zero.

A gradient that cannot go that way (its slot has already been filled in this micro-step, or no
micro-step is open, or the caller coalesces several backward passes) is added to the *local
accumulator* of its bucket, in fp32, and travels in a pass of its own, see ``reduce_accumulated``.
``AccumulatingChain`` sends every gradient by way of the accumulators, for passes that do not reduce.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from .bucket import Bucket, Counters, Slot
from .bucket_layout import learned_order
from .buffer_pool import Buffer, BufferPool
from .collectives import Handle
from .failures import CollectiveError, explain

# Gradients of up to so many elements are copied together: there a copy costs its call, not its bytes. At most
# so many elements are held back for it.
_SMALL = 16 * 1024
_HELD = 64 * 1024


class ReductionError(CollectiveError):
    """A gradient reduction failed, for instance because a rank died; nothing was applied."""


class BucketChain:
    """See the module's docstring.

    Args:
        buckets: all buckets of the optimizer; ``buckets[i].index == i``.
        order: a permutation of the bucket indices, the same on every rank.
        accumulate: ``accumulate(bucket, rows)`` adds ``rows`` ``[N, S]``, summed and scaled in fp32,
            to this rank's gradient partition.
        pool: owner of the send, receive and local accumulation buffers, and of the order of streams.
        max_in_flight: reduce-scatters (receive buffers) that may be in flight at once, at least 1.
        carry_over: whether ``close`` may leave reduce-scatters in flight.
        open_chains: chains with an open micro-step, in the order in which they opened. Several are open in a
            backward pass through several engines; their buckets must not interleave by arrival, so only the
            oldest dispatches before its close, and it closes first.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        order: Sequence[int],
        accumulate: Callable[[Bucket, torch.Tensor], None],
        pool: BufferPool,
        max_in_flight: int,
        carry_over: bool,
        open_chains: list[BucketChain] | None = None,
    ):
        self.buckets = list(buckets)
        self.pool = pool
        self.counters = Counters()
        self.is_open = False
        self._sections = [bucket.sections() for bucket in self.buckets]
        self._accumulate = accumulate
        self._streams = pool.streams
        self._max_in_flight = max_in_flight
        self._carry_over = carry_over
        self._open_chains = [] if open_chains is None else open_chains
        self._in_flight: deque[tuple[Bucket, Handle]] = deque()
        self._failure: ReductionError | None = None
        self._order: list[Bucket] = []
        self._next = 0
        self._completed: list[int] = []
        self._mute: torch.Tensor | None = None
        self._on_arrival: Callable[[], None] | None = None
        self.set_order(order)

    # -- order ---------------------------------------------------------------------------------

    def set_order(self, order: Sequence[int]) -> None:
        """Uses ``order`` from the next micro-step on. Every rank must set the same order."""
        if self.is_open:
            raise RuntimeError("the order of buckets cannot change within a micro-step")
        self._order = [self.buckets[index] for index in order]
        self._order_is_new = True

    def observed_order(self) -> list[int]:
        """The order in which buckets completed in the last micro-step on this rank."""
        return learned_order(self._completed, [bucket.index for bucket in self._order])

    # -- a micro-step --------------------------------------------------------------------------

    def open(self) -> None:
        """Begins a reducing micro-step; every rank must open the same number of them in a window."""
        self._raise_if_failed()
        if self.is_open:
            raise RuntimeError("a micro-step is open already")
        self._streams.settle()
        if self._order_is_new:  # what an earlier order took says nothing about this one
            self._order_is_new = False
            self.pool.restart_peak()
        self.is_open = True
        self._open_chains.append(self)
        self._next = 0
        self._completed = []
        for bucket in self.buckets:
            bucket.missing = len(bucket.slots)
            for slot in bucket.slots:
                slot.filled = False

    def arm(self, begin: Callable[[], None]) -> None:
        """Calls ``begin``, which may open a micro-step, when the next gradient arrives before ``close``."""
        self._on_arrival = begin

    def fire(self) -> None:
        """Calls what was armed, if anything still is."""
        begin, self._on_arrival = self._on_arrival, None
        if begin is not None:
            begin()

    def put(self, slot: Slot, grad: torch.Tensor) -> None:
        """Takes the gradient of one parameter; ``grad`` is not needed afterwards."""
        if slot.filled or not self.is_open:
            self.fire()
            if slot.filled or not self.is_open:
                self.put_local(slot, grad)
                return
        bucket = slot.bucket
        if slot.numel > _SMALL:
            if bucket.send is None:
                self._open_send_buffer(bucket)
            bucket.views[slot.section].copy_(grad.reshape(-1))
        else:
            bucket.held.append((slot, grad))
            bucket.held_numel += slot.numel
            if bucket.held_numel > _HELD:
                self._copy_held(bucket)
        self._mark_filled(slot)

    def mute(self, where: torch.Tensor | None) -> None:
        """While set, gradients count as zero where ``where`` (0-d bool) is true, even if they are NaN."""
        self._mute = where

    def close(self) -> None:
        """Ends the micro-step: what did not arrive counts as zero; drains unless carried over."""
        self._raise_if_failed()
        self._on_arrival = None
        if not self.is_open:
            return
        with self._streams.at_home():  # autograd may call back on another stream
            while self._open_chains[0] is not self:
                self._open_chains[0].close()
            while self._next < len(self._order):
                self._dispatch_next()
        self.is_open = False
        self._open_chains.remove(self)
        if not self._carry_over:  # what is carried over keeps the ring of buffers, too
            self.drain()

    def drain(self) -> None:
        """Waits for everything in flight and adds it to the gradient partition. Idempotent.

        Afterwards the current stream may read the partition, and change it.
        """
        self._raise_if_failed()
        while self._in_flight:
            self._drain_oldest()
        self._streams.join()
        self.pool.release()

    # -- local accumulators --------------------------------------------------------------------

    def put_local(self, slot: Slot, grad: torch.Tensor) -> None:
        """Adds a gradient to its bucket's local fp32 accumulator."""
        if self._mute is not None:
            grad = grad.masked_fill(self._mute, 0)
        bucket = slot.bucket
        if bucket.accumulator is None:
            bucket.accumulator = self._take_accumulator(bucket)
        bucket.accumulator.data[slot.offset : slot.offset + slot.numel].view(grad.shape).add_(grad)

    def has_accumulated(self) -> list[bool]:
        """For each bucket whether this rank holds gradients in its local accumulator."""
        return [bucket.accumulator is not None for bucket in self.buckets]

    def reduce_accumulated(self, which: Sequence[bool]) -> None:
        """Reduces the local accumulators of the buckets in ``which`` (the same on every rank), in fp32."""
        self._raise_if_failed()
        self._streams.settle()
        for bucket in self._order:
            if which[bucket.index]:
                self._dispatch(bucket, self._take_accumulator(bucket))
        self.drain()

    def forget(self) -> None:
        """Drops everything; the chain is not used any more."""
        if self in self._open_chains:
            self._open_chains.remove(self)
        self.discard_accumulated()

    def discard_accumulated(self) -> None:
        """Drops all local accumulators."""
        self._streams.join()
        for bucket in self.buckets:
            if bucket.accumulator is not None:
                self.pool.give(bucket.accumulator)
                bucket.accumulator = None
        self.pool.release()

    # -- internals -----------------------------------------------------------------------------

    def _open_send_buffer(self, bucket: Bucket) -> None:
        sizes, gaps = self._sections[bucket.index]
        bucket.send = self.pool.take(bucket.numel, bucket.wire_dtype)
        bucket.views = bucket.send.data.split(sizes)
        for section in gaps:
            bucket.views[section].zero_()  # never send what a reused buffer happened to hold

    def _copy_held(self, bucket: Bucket) -> None:
        if bucket.send is None:
            self._open_send_buffer(bucket)
        views = [bucket.views[slot.section] for slot, _ in bucket.held]
        torch._foreach_copy_(views, [grad.reshape(-1) for _, grad in bucket.held])
        bucket.held, bucket.held_numel = [], 0

    def _mark_filled(self, slot: Slot) -> None:
        bucket = slot.bucket
        slot.filled = True
        bucket.missing -= 1
        if bucket.missing == 0:
            self._completed.append(bucket.index)
            if self._open_chains[0] is self:
                self._dispatch_complete()

    def _dispatch_complete(self) -> None:
        while self._next < len(self._order) and self._order[self._next].missing == 0:
            self._dispatch_next()

    def _dispatch_next(self) -> None:
        bucket = self._order[self._next]
        self._next += 1
        self._dispatch(bucket, self._take_contribution(bucket))
        # From now on its slots are on their way: a gradient that still comes is a late one.
        if bucket.missing:
            bucket.missing = 0
            for slot in bucket.slots:
                slot.filled = True

    def _take_contribution(self, bucket: Bucket) -> Buffer:
        """What this rank sends for a bucket, in the wire dtype; what has not arrived is zero."""
        if bucket.held:
            self._copy_held(bucket)
        elif bucket.send is None:
            self._open_send_buffer(bucket)
        if bucket.missing:
            for slot in bucket.slots:
                if not slot.filled:
                    bucket.views[slot.section].zero_()
        send, bucket.send, bucket.views = bucket.send, None, ()
        if self._mute is not None:
            send.data.masked_fill_(self._mute, 0)
        return send

    def _take_accumulator(self, bucket: Bucket) -> Buffer:
        accumulator, bucket.accumulator = bucket.accumulator, None
        if accumulator is None:
            accumulator = self.pool.take(bucket.numel, torch.float32)
            accumulator.data.zero_()
        return accumulator

    def _dispatch(self, bucket: Bucket, send: Buffer) -> None:
        while len(self._in_flight) >= self._max_in_flight:
            self._drain_oldest()
        with self._failing_as(bucket, "start"), self._streams.dispatching():
            handle = bucket.reduce_scatter.start(send, self.pool)
        self._in_flight.append((bucket, handle))
        self.counters.add(bucket.reduce_scatter.traffic(send.data.numel(), send.data.dtype), len(self._in_flight))

    def _drain_oldest(self) -> None:
        bucket, handle = self._in_flight[0]
        with self._streams.draining():
            with self._failing_as(bucket, "complete"):
                rows = handle.wait()
            self._in_flight.popleft()
            self._accumulate(bucket, rows)
            handle.release()

    def _raise_if_failed(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _failing_as(self, bucket: Bucket, what: str) -> _Failing:
        return _Failing(self, bucket, what)


class AccumulatingChain(BucketChain):
    """Sends every gradient by way of its bucket's local fp32 accumulator.

    A pass that does not reduce is one in which no micro-step is open. In an open micro-step a bucket leaves,
    with all that earlier passes added to it, as soon as it is complete and its turn has come.
    """

    def put(self, slot: Slot, grad: torch.Tensor) -> None:
        self.fire()
        self.put_local(slot, grad)
        if self.is_open and not slot.filled:
            self._mark_filled(slot)

    def _take_contribution(self, bucket: Bucket) -> Buffer:
        accumulator = self._take_accumulator(bucket)
        if bucket.wire_dtype == torch.float32:
            return accumulator
        send = self.pool.take(bucket.numel, bucket.wire_dtype)
        send.data.copy_(accumulator.data)
        self.pool.give(accumulator)
        return send


class _Failing:
    """Turns a backend's error into a ReductionError that names the bucket, and remembers it.

    After such a failure ranks stand at different places in the sequence, so no later reduction may
    start: each later call raises the same error instead of hanging in a collective.
    """

    __slots__ = ("_chain", "_bucket", "_what")

    def __init__(self, chain: BucketChain, bucket: Bucket, what: str):
        self._chain = chain
        self._bucket = bucket
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, error, traceback) -> None:
        if isinstance(error, Exception):
            what = f"the gradient reduction of {self._bucket.describe()} did not {self._what}"
            failure = ReductionError(explain(what, error, "No update was applied.", self._bucket.group))
            self._chain._failure = failure
            if self._chain in self._chain._open_chains:  # it never closes
                self._chain._open_chains.remove(self._chain)
            raise failure from error
