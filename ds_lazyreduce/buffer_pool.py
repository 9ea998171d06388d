"""Transient device memory: send, receive and accumulation buffers, reused while they are needed.

On an accelerator a buffer goes from stream to stream through the pool: ``give`` marks the point up to which its last
user needs it, and ``take`` makes the next one wait for the mark. So a buffer is returned on the stream that used it
last, as soon as what uses it has been issued there.
"""

from __future__ import annotations

from typing import Any

import torch

from .reduction_stream import InOrder

# Buffers whose sizes differ by no more are chosen by the time they have been free for, not by size.
_ALIKE = 1.5


class _Memory:
    """One allocation. freed: the mark of its last return to the pool, see ``reduction_stream.py``."""

    __slots__ = ("raw", "freed")

    def __init__(self, raw: torch.Tensor):
        self.raw = raw
        self.freed: Any = None


class Buffer:
    """A piece of device memory on loan from a :class:`BufferPool`, seen as a flat tensor ``data``."""

    __slots__ = ("data", "_memory")

    def __init__(self, memory: _Memory, numel: int, dtype: torch.dtype):
        self._memory = memory
        self.data = memory.raw[: numel * dtype.itemsize].view(dtype)


class BufferPool:
    """Owns all transient buffers. ``take`` never blocks: the pool grows instead, and reuses what fits.

    Args:
        device: where the buffers are.
        streams: the order of work on the device.

    Attributes:
        live_bytes: bytes of the buffers on loan or kept for reuse.
        peak_bytes: high-water mark of ``live_bytes``.
    """

    def __init__(self, device: torch.device, streams: InOrder | None = None):
        self._device = device
        self._free: list[_Memory] = []  # in the order of their return
        self.streams = InOrder() if streams is None else streams
        self.live_bytes = 0
        self.peak_bytes = 0

    def take(self, numel: int, dtype: torch.dtype) -> Buffer:
        """A buffer of ``numel`` elements with undefined content, the caller's until ``give``."""
        need = numel * dtype.itemsize
        fitting = [memory for memory in self._free if memory.raw.numel() >= need]
        if fitting:
            smallest = min(memory.raw.numel() for memory in fitting)
            alike = [memory for memory in fitting if memory.raw.numel() <= _ALIKE * smallest]
            memory = alike[-1 if self.streams.prefers_newest() else 0]
            self._free.remove(memory)
            self.streams.reuse(memory.freed)
        else:
            with self.streams.allocating():
                if self._free:  # too small for this bucket: replace one rather than hold both
                    self._give_up_one()
                memory = _Memory(torch.empty(need, dtype=torch.uint8, device=self._device))
            self.live_bytes += need
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return Buffer(memory, numel, dtype)

    def give(self, buffer: Buffer) -> None:
        """Takes a buffer back for reuse, once the current stream has done what it was given so far."""
        buffer._memory.freed = self.streams.freed()
        self._free.append(buffer._memory)

    def release(self) -> None:
        """Frees every buffer that is not on loan. The reduction stream has been joined."""
        while self._free:
            self._drop(self._free.pop())

    def restart_peak(self) -> None:
        """Starts the high-water mark anew."""
        self.peak_bytes = self.live_bytes

    def _give_up_one(self) -> None:
        memory = self._free.pop(0)
        self.streams.reuse(memory.freed)  # by whatever home's allocator makes of it
        self._drop(memory)

    def _drop(self, memory: _Memory) -> None:
        self.live_bytes -= memory.raw.numel()
        self.streams.retire(memory.raw)
