"""Names of what is compared, and the extension's settings among them. Pure: known before torch is imported."""

from __future__ import annotations

from typing import Any

PEERS = ("none", "bare", "zero2", "zero2-fp32", "zero2-loss", "fsdp2", "fsdp2-boundary", "ddp", "ddp-boundary")

# Limits that train nothing.
WITHOUT_STEP = ("none", "bare")

# Keys of ``gradient_partition``; the defaults where empty.
LAZY: dict[str, dict[str, Any]] = {
    "lazy": {},
    "lazy-2": {"max_in_flight": 2},
    "lazy-4": {"max_in_flight": 4},
    "lazy-drained": {"carry_over": False},
    "lazy-boundary": {"reduce_every": "boundary"},
}

NAMES = (*PEERS, *LAZY)
