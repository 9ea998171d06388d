"""Ranks that were started differently: found at construction by a small exchange, named in the error.

Ranks that do not agree on sizes or order of buckets would mix gradients up or wait for one another for ever.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any


class DisagreementError(RuntimeError):
    """Ranks of one job have different configs, models or versions of the extension."""


def check_agreement(
    facts: dict[str, str],
    details: Callable[[], Sequence[str]],
    gather: Callable[[Any], list[Any]],
) -> None:
    """Raises on every rank if any rank differs. Collective.

    Args:
        facts: what must be the same on every rank, by the name the error gives it; short strings.
        details: lines that must be the same, too; only their digest travels unless it differs.
        gather: takes this rank's object, returns every rank's.

    Raises:
        DisagreementError: names what differs, and two ranks with their values.
    """
    lines = list(details())
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    everyone = gather({**facts, "model": digest})
    for name in everyone[0]:
        values = [one.get(name) for one in everyone]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is None:
            continue
        mine, theirs = values[0], values[other]
        if name == "model":  # every rank comes here, since every rank compares the same values
            mine, theirs = _first_difference(gather(lines), other)
        raise DisagreementError(
            f"lazy_reduce: ranks were started differently: {name} is {mine} on rank 0 and {theirs} on rank {other} "
            "of the data-parallel group; start all ranks with the same config, model and package"
        )


def _first_difference(all_lines: list[list[str]], other: int) -> tuple[str, str]:
    ours, theirs = all_lines[0], all_lines[other]
    for a, b in zip(ours, theirs, strict=False):
        if a != b:
            return a, b
    shared = min(len(ours), len(theirs))
    rest = [lines[shared] if len(lines) > shared else "nothing more" for lines in (ours, theirs)]
    return rest[0], rest[1]
