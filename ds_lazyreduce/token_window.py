"""The window's token count: added up on the device, agreed once per optimizer step.

(One normaliser per optimizer window instead of one all-reduce per micro-batch is the idea of
SpecForge's ``loss_terms``.)
"""

from __future__ import annotations

import math

import torch


class TokenWindow:
    """Tokens that this rank's losses covered since the last optimizer step.

    A gradient of a loss *summed* over many tokens overflows an fp16 wire. So losses are multiplied with
    ``prescale``, constant within a window and the same on every rank, and the division by the window's
    tokens makes up for it. It is a power of two near the inverse of the last window's count (1 in the
    first window), so that it does not round.
    """

    def __init__(self) -> None:
        self.prescale = 1.0
        self._host = 0
        self._device: torch.Tensor | None = None

    def add(self, num_tokens: int | torch.Tensor) -> None:
        """Adds an int or a 0-d tensor; a device tensor is added on the device, without a host read."""
        if not isinstance(num_tokens, torch.Tensor):
            self._host += num_tokens
        elif self._device is None:
            self._device = num_tokens.detach().to(torch.float64, copy=True)
        else:
            self._device += num_tokens.detach()

    def total(self) -> float | torch.Tensor:
        """Tokens of this rank; a 0-d float64 tensor if any count was a tensor."""
        return self._host if self._device is None else self._device + self._host

    def restart(self, agreed_total: float) -> None:
        """Begins a new window after one of ``agreed_total`` tokens over all ranks."""
        self._host = 0
        self._device = None
        if agreed_total > 0:
            self.prescale = 2.0 ** -math.floor(math.log2(agreed_total))
