"""Transient device memory: send, receive and accumulation buffers, reused while they are needed."""

from __future__ import annotations

import torch


class Buffer:
    """A piece of device memory on loan from a :class:`BufferPool`, seen as a flat tensor ``data``."""

    __slots__ = ("data", "_raw")

    def __init__(self, raw: torch.Tensor, numel: int, dtype: torch.dtype):
        self._raw = raw
        self.data = raw[: numel * dtype.itemsize].view(dtype)


class BufferPool:
    """Owns all transient buffers. ``take`` never blocks: the pool grows instead, and reuses what fits.

    Attributes:
        live_bytes: bytes of the buffers on loan or kept for reuse.
        peak_bytes: high-water mark of ``live_bytes``.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._free: list[torch.Tensor] = []
        self.live_bytes = 0
        self.peak_bytes = 0

    def take(self, numel: int, dtype: torch.dtype) -> Buffer:
        """A buffer of ``numel`` elements with undefined content, the caller's until ``give``."""
        need = numel * dtype.itemsize
        fitting = [raw for raw in self._free if raw.numel() >= need]
        if fitting:
            raw = min(fitting, key=torch.Tensor.numel)
            self._free = [kept for kept in self._free if kept is not raw]
        else:
            if self._free:  # too small for this bucket: replace one rather than hold both
                self._drop(self._free.pop())
            raw = torch.empty(need, dtype=torch.uint8, device=self._device)
            self.live_bytes += need
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return Buffer(raw, numel, dtype)

    def give(self, buffer: Buffer) -> None:
        """Takes a buffer back for reuse."""
        self._free.append(buffer._raw)

    def release(self) -> None:
        """Frees every buffer that is not on loan."""
        while self._free:
            self._drop(self._free.pop())

    def restart_peak(self) -> None:
        """Starts the high-water mark anew."""
        self.peak_bytes = self.live_bytes

    def _drop(self, raw: torch.Tensor) -> None:
        self.live_bytes -= raw.numel()
