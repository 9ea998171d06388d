"""Gradients that arrive on several streams of an accelerator, brought to one.

Autograd runs a parameter's hook on the stream of its forward pass; under torch.compile, or where a model uses
side streams, that differs from one parameter to the next. The chain fills one buffer with all of them and starts
a collective that waits for one stream only. So everything the chain does happens on one *home* stream, that of
the code which called backward; a hook on another stream makes home wait for it first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class OneStream:
    """For the CPU and devices that keep the order by themselves: there is nothing to do."""

    def settle(self) -> None:
        """Called when a backward pass begins: from now on home is the current stream."""

    def join(self) -> None:
        """Makes the current stream wait for home: called before the step and before gradients are read."""

    def bring_home(self, take: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
        """The hook ``take``, made to run on home."""
        return take


class ProducerStreams:
    """For accelerators with streams.

    Args:
        accelerator: DeepSpeed's accelerator: ``current_stream()`` and ``stream(s)``, a context.
    """

    def __init__(self, accelerator: Any):
        self._accelerator = accelerator
        self._home = accelerator.current_stream()

    def settle(self) -> None:
        current = self._accelerator.current_stream()
        if current != self._home:
            current.wait_stream(self._home)  # what is in flight was started there
            self._home = current

    def join(self) -> None:
        current = self._accelerator.current_stream()
        if current != self._home:
            current.wait_stream(self._home)

    def bring_home(self, take: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
        accelerator = self._accelerator

        def on_home(param: torch.Tensor) -> None:
            producer = accelerator.current_stream()
            home = self._home
            if producer == home:
                take(param)
                return
            home.wait_stream(producer)
            if param.grad is not None:
                # Allocated on the producer's stream, read on home: not to be reused before that.
                param.grad.record_stream(home)
            with accelerator.stream(home):
                take(param)

        return on_home


def make_streams(accelerator: Any) -> OneStream | ProducerStreams:
    """What fits the accelerator; DeepSpeed's CPU accelerator has no streams."""
    return OneStream() if accelerator.current_stream() is None else ProducerStreams(accelerator)
