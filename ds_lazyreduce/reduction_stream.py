"""The order of work on an accelerator's streams.

    producers    gradients of hooks that run on other streams
    home         copies gradients into send buffers: the stream of the code that called backward, step or a reader
    reduction    starts collectives, waits for them, accumulates

    home       | copy .. copy | copy .. copy | [A] copy ..           [J] step
    reduction               [D] start    [D] start: wait, F, accumulate

D  a collective starts after everything that home has been given, its send buffer's copies above all.
F  the event that frees the send buffer: after the wait, before the accumulate.
A  a buffer is taken again after the event of its return to the pool. This is the only thing for which backward's
   stream waits within a micro-step, beside gradients of other streams, which it has to read, and memory that it
   gives back for larger buffers. The reduction stream waits in the same way for what home has returned.
J  a drain ends with home waiting for the reduction stream; so whoever has drained may read gradients.

Whose memory: buffers and gradient partitions are allocated on home, so that the allocator has them in the pool of
backward's stream; the reduction stream waits for home before it touches a new one, since home's earlier work may
still be using that memory, and home waits for its last use before it goes back. ``record_stream``, which leaves the
moment of reuse to the host's polling, is needed in two cases only: a gradient that another stream allocated, and
memory whose home has moved meanwhile.

No call here waits on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

_NOTHING = nullcontext()


class InOrder:
    """For the CPU, and devices that do everything in the order of the calls: there is nothing to do."""

    def settle(self) -> None:
        """Called where a backward pass, a step or a reader begins: from now on home is the current stream."""

    def at_home(self) -> AbstractContextManager:
        """Within it work is given to home."""
        return _NOTHING

    def bring_home(self, take: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
        """The gradient hook ``take``, made to run on home."""
        return take

    def dispatching(self) -> AbstractContextManager:
        """Within it collectives start, after all that home has been given so far."""
        return _NOTHING

    def draining(self) -> AbstractContextManager:
        """Within it collectives are waited for, and what they brought is accumulated."""
        return _NOTHING

    def join(self) -> None:
        """Makes the current stream, which becomes home, wait for all that was given to the reduction stream."""

    def allocating(self) -> AbstractContextManager:
        """Within it memory is allocated on home; the current stream goes on once home has come there."""
        return _NOTHING

    def freed(self) -> Any:
        """A mark of this point of the current stream: what it did before is done when the mark is passed."""

    def reuse(self, mark: Any) -> None:
        """Makes the current stream wait for a mark of another."""

    def retire(self, memory: torch.Tensor) -> None:
        """Called before ``memory``, on which home has the last word, goes back to the allocator."""

    def prefers_newest(self) -> bool:
        """Whether, of several free buffers, the one that was freed last fits the current stream best."""
        return False


class ReductionStream(InOrder):
    """For accelerators with streams.

    Args:
        accelerator: DeepSpeed's: ``Stream()``, ``current_stream()`` and ``stream(s)``, a context. Of a stream:
            ``record_event()``, ``wait_event(event)``, ``wait_stream(other)`` and equality.
    """

    def __init__(self, accelerator: Any):
        self._accelerator = accelerator
        self._home = accelerator.current_stream()
        self._reduction = accelerator.Stream()

    def settle(self) -> None:
        current = self._accelerator.current_stream()
        if current != self._home:
            current.wait_stream(self._home)  # its copies into open send buffers, its reads of gradients
            self._home = current

    def bring_home(self, take: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
        accelerator = self._accelerator

        def on_home(param: torch.Tensor) -> None:
            producer, home = accelerator.current_stream(), self._home
            if producer == home:
                take(param)
                return
            if param.grad is not None and param.grad.layout is not torch.strided:
                param.grad = param.grad.to_dense()  # only strided tensors have a record_stream
            home.wait_stream(producer)
            if param.grad is not None:
                param.grad.record_stream(home)  # the producer's memory, read on home: not to be reused before that
            with self.at_home():
                take(param)

        return on_home

    def at_home(self) -> AbstractContextManager:
        return self._accelerator.stream(self._home)

    @contextmanager
    def dispatching(self) -> Iterator[None]:
        self._reduction.wait_stream(self._home)
        with self._accelerator.stream(self._reduction):
            yield

    def draining(self) -> AbstractContextManager:
        return self._accelerator.stream(self._reduction)

    def join(self) -> None:
        self.settle()
        self._home.wait_stream(self._reduction)

    @contextmanager
    def allocating(self) -> Iterator[None]:
        current = self._accelerator.current_stream()
        with self.at_home():
            yield
        if current != self._home:
            current.wait_stream(self._home)

    def freed(self) -> Any:
        current = self._accelerator.current_stream()
        return current, current.record_event()

    def reuse(self, mark: Any) -> None:
        (freed_on, event), current = mark, self._accelerator.current_stream()
        if current != freed_on:
            current.wait_event(event)

    def retire(self, memory: torch.Tensor) -> None:
        memory.record_stream(self._home)  # without effect where home is the stream that allocated it

    def prefers_newest(self) -> bool:
        # The reduction stream has freed nearly all there is, in order, and need not wait for itself: it takes
        # what it freed last and leaves home what has been free for longest.
        return self._accelerator.current_stream() == self._reduction


def make_streams(accelerator: Any) -> InOrder:
    """What fits the accelerator; DeepSpeed's CPU accelerator, for one, has no streams."""
    return InOrder() if accelerator.current_stream() is None else ReductionStream(accelerator)


_BLOCKING = {
    "TORCH_NCCL_BLOCKING_WAIT": "the host waits for each collective",
    "NCCL_BLOCKING_WAIT": "the host waits for each collective",
    "CUDA_LAUNCH_BLOCKING": "the host waits for each kernel",
    "CUDA_DEVICE_MAX_CONNECTIONS": "streams share one queue and wait for one another",  # not from 2 on
}


def overlap_notes(comms_logger: bool, backend: str, environ: Mapping[str, str]) -> list[str]:
    """What keeps reductions from overlapping with backward here, worded as warnings."""
    notes = []
    if comms_logger:
        notes.append("comms_logger makes every collective wait: reductions do not overlap with backward")
    for name, why in _BLOCKING.items():
        value = environ.get(name, "0")
        if backend == "nccl" and value.lower() in ("1", "true", "y", "yes", "t"):
            notes.append(f"{name} is {value}: {why}, so reductions hardly overlap with backward")
    return notes
