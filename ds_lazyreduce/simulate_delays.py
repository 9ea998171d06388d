"""Random delays of ranks: ``draw(kind, ...) -> seconds [windows, ranks, micro-steps]``."""

from __future__ import annotations

import torch

KINDS = {
    "none": "all ranks take the same time",
    "exponential": "drawn anew for every rank and micro-step",
    "imbalance": "drawn for every rank once a window, the same in all its micro-steps, as of uneven expert loads",
    "slow-node": "the mean on every rank of one node, nothing elsewhere",
}


def draw(
    kind: str, *, windows: int, ranks: int, micro_steps: int, mean_s: float, node_size: int, seed: int
) -> torch.Tensor:
    """Delays of a kind of ``KINDS``, float64; drawn ones are exponential. The same seed gives the same delays.

    Where nothing is drawn there is one window: all would be the same.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (windows if kind in ("exponential", "imbalance") else 1, ranks, micro_steps)
    if kind == "exponential":
        drawn = torch.empty(shape, dtype=torch.float64).exponential_(1.0, generator=generator)
    elif kind == "imbalance":
        drawn = torch.empty(shape[:2], dtype=torch.float64).exponential_(1.0, generator=generator)
        drawn = drawn.unsqueeze(-1).expand(shape)
    elif kind == "slow-node":
        drawn = torch.zeros(shape, dtype=torch.float64)
        drawn[:, :node_size] = 1.0
    elif kind == "none":
        drawn = torch.zeros(shape, dtype=torch.float64)
    else:
        raise ValueError(f"kind: {kind!r} is none of {', '.join(KINDS)}")
    return drawn * mean_s
