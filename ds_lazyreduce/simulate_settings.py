"""The settings that can be simulated by name, and those of a config section."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from . import bench_settings
from .config import ConfigError, bucket_elements, parse_section, wire_dtype
from .simulate_model import Cluster, Setting, Workload

# Engines of plain DeepSpeed. "window": gradients are reduced once a window, so nothing else makes ranks meet before.
STOCK = {
    "zero2-loss": Setting("all_reduce", blocking=True, loss=True),
    "zero2-normaliser": Setting("all_reduce", blocking=True, normaliser=True),
    "zero2": Setting("all_reduce", blocking=True),
    "zero2-overlap": Setting("all_reduce", carry_over=False),
    "window-loss": Setting("all_reduce", blocking=True, reduce_every="boundary", loss=True),
    "window-normaliser": Setting("all_reduce", blocking=True, reduce_every="boundary", normaliser=True),
    "window": Setting("all_reduce", blocking=True, reduce_every="boundary"),
}

# Keys of lazy_reduce.gradient_partition: the benchmark's settings and two of the simulator's own. "unchained": no
# bucket waits for another, as before the chain was invented.
LAZY: dict[str, dict[str, Any]] = {
    "unchained": {"max_in_flight": 2**31, "carry_over": False},
    "lazy-flat": {"collective": "all_to_all"},
    **bench_settings.LAZY,
}

NAMES = (*STOCK, *LAZY)
MOST_BUCKETS = 10_000  # each is played in every micro-step
BY_DEFAULT = ("zero2-loss", "zero2", "zero2-overlap", "lazy-flat", "lazy", "lazy-4", "lazy-boundary")


def resolve(
    name: str, cluster: Cluster, workload: Workload, section: dict[str, Any] | None = None
) -> tuple[Setting, Workload]:
    """The setting ``name`` on a cluster, or that of ``section`` (keys of ``gradient_partition``) if it is given.

    A section's own ``bucket_size`` changes the workload's number of buckets.

    Raises:
        ConfigError: the section is wrong, or cannot be simulated.
    """
    if section is None and name in STOCK:
        return STOCK[name], workload
    keys = LAZY[name] if section is None else section
    lazy = parse_section({"lazy_reduce": {"gradient_partition": keys}})
    gradients = lazy.gradient_partition
    path = "lazy_reduce.gradient_partition"
    if not gradients.enabled:
        raise ConfigError(f"{path}.enabled: got false; expected true, or the setting zero2")
    if gradients.node_size not in ("auto", cluster.node_size):
        raise ConfigError(f"{path}.node_size: got {gradients.node_size}; expected the cluster's {cluster.node_size}")
    if gradients.collective == "reduce_scatter":
        raise ConfigError(f'{path}.collective: got "reduce_scatter"; expected "all_to_all" or "hierarchical"')
    if gradients.bucket_size != "auto":
        bucket = bucket_elements(lazy, gradients.bucket_size, workload.elements, cluster.ranks)
        buckets = -(-workload.elements // bucket)
        if buckets > MOST_BUCKETS:
            least = -(-workload.elements // MOST_BUCKETS)
            raise ConfigError(f"{path}.bucket_size: got {bucket}; expected at least {least} for {MOST_BUCKETS} buckets")
        workload = replace(workload, buckets=buckets)
    wire = wire_dtype(lazy, torch.bfloat16, None).itemsize
    every, window = gradients.reduce_every, workload.micro_steps
    if wire != 4 and every != "boundary" and window % every:  # what is left over travels in fp32
        raise ConfigError(f"{path}.reduce_every: got {every}; expected a divisor of {window}, or fp32 on the wire")
    two_hops = gradients.collective != "all_to_all" and 1 < cluster.node_size < cluster.ranks
    setting = Setting(
        collective="hierarchical" if two_hops else "all_to_all",
        max_in_flight=gradients.max_in_flight,
        carry_over=gradients.carry_over,
        reduce_every=gradients.reduce_every,
        wire_bytes=wire,
        across_bytes=wire if gradients.across_dtype == "wire" else 4,
    )
    return setting, workload
