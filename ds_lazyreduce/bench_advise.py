"""Which setting to take, from the measured time and memory of each. Pure.

Of the settings that fit the memory budget and take at most ``within`` percent longer than the fastest of them, the
one that takes least memory; plain ZeRO-2 is among them. Memory is compared to 2 %: below that the faster one wins.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from .bench_report import Result
from .bench_settings import LAZY
from .config import SECTION

SAME_MEMORY = 1.02

# Keys of ``gradient_partition`` by contender. What changes only the timing of a loss is not among them.
CANDIDATES: dict[str, dict[str, Any]] = {"zero2": {"enabled": False}, **LAZY}


@dataclass(frozen=True)
class Advice:
    """config: to be merged into a DeepSpeed config; None where no setting can be recommended. reasons: lines."""

    config: dict[str, Any] | None
    reasons: list[str]

    def text(self) -> str:
        """The reasons, then the config section as JSON."""
        lines = ["advice", *(f"  {reason}" for reason in self.reasons)]
        return "\n".join(lines + ([json.dumps(self.config, indent=2)] if self.config else []))


def advise(result: Result, within: float, budget_mib: float | None = None) -> Advice:
    """Chooses among those contenders of ``result`` whose time and memory were measured.

    Args:
        within: percent of the fastest setting's time that may be given up for memory.
        budget_mib: most memory of a rank; None for no bound.
    """
    time = {name: result.median(name) for name in CANDIDATES}
    memory = {name: result.median(name, "memory") for name in CANDIDATES}
    measured = [name for name in CANDIDATES if time[name] is not None and memory[name] is not None]
    if not measured:
        return Advice(None, ["no setting was measured in both time and memory"])
    least = min(measured, key=memory.get)
    fitting = [name for name in measured if budget_mib is None or memory[name] <= budget_mib]
    if not fitting:
        return Advice(None, [f"nothing fits {budget_mib:g} MiB: {least} takes least, {memory[least]:.2f} MiB"])
    fastest = min(fitting, key=time.get)
    fast = [name for name in fitting if time[name] <= time[fastest] * (1 + within / 100)]
    leanest = min(fast, key=memory.get)
    chosen = min((name for name in fast if memory[name] <= memory[leanest] * SAME_MEMORY), key=time.get)

    reasons = []
    too_large = [f"{name} ({memory[name]:.2f})" for name in measured if name not in fitting]
    if too_large:
        reasons.append(f"above the budget of {budget_mib:g} MiB: {', '.join(too_large)}")
    reasons.append(f"fastest: {fastest}, {time[fastest]:.1f} {result.unit} and {memory[fastest]:.2f} MiB")
    others = [name for name in fast if name != chosen]
    if chosen != fastest:
        reasons.append(
            f"{chosen} takes {_percent(time[chosen], time[fastest])} time (up to +{within:g} % are allowed) "
            f"and {_percent(memory[chosen], memory[fastest])} memory"
        )
    elif others:
        reasons.append(f"no less memory at up to +{within:g} % time: {', '.join(others)}")
    else:
        reasons.append(f"no other within +{within:g} % of its time")
    if chosen == "zero2":
        reasons.append("plain ZeRO-2 is enough for these delays; the section leaves its gradients alone")
    elif "zero2" in measured:
        reasons.append(
            f"against plain ZeRO-2: {_percent(time[chosen], time['zero2'])} time, "
            f"{_percent(memory[chosen], memory['zero2'])} memory"
        )
    partition = CANDIDATES[chosen]
    section = {"enabled": True, **({"gradient_partition": partition} if partition else {})}
    return Advice({SECTION: section}, [f"take {chosen}", *reasons])


def _percent(ours: float, theirs: float) -> str:
    return f"{(ours / theirs - 1) * 100:+.0f} %"
