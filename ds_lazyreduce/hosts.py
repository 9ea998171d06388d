"""Which ranks share a host."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as torch_dist


def name_of_host(rank: int, environment: Mapping[str, str]) -> str:
    """A name that ranks share exactly if they run on one host.

    Args:
        rank: global rank of this process.
        environment: its variables. A launcher's own numbering of hosts counts where there is one (torchrun's
            GROUP_RANK, DeepSpeed's CROSS_RANK), then its ranks per host (LOCAL_WORLD_SIZE, LOCAL_SIZE). The host's
            name and boot, which tell hosts of equal names apart, always count: a launcher such as srun says nothing.
    """
    place = environment.get("GROUP_RANK") or environment.get("CROSS_RANK")
    if place is None:
        local = environment.get("LOCAL_WORLD_SIZE") or environment.get("LOCAL_SIZE")
        place = str(rank // int(local)) if local else ""
    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return " ".join([platform.node(), boot, place])


def host_of_each_rank(*groups: Any) -> dict[int, int]:
    """For every global rank of an engine its host, numbered in the order of their first ranks.

    Collective over the engine's ranks, which need not be all of the job.

    Args:
        groups: process groups that together connect the engine's ranks: data-parallel, then model-parallel.
    """
    rank = torch_dist.get_rank()
    names = {rank: name_of_host(rank, os.environ)}
    for group in groups:
        everyone: list[dict[int, str]] = [{}] * torch_dist.get_world_size(group)
        torch_dist.all_gather_object(everyone, names, group=group)
        names = {rank: name for known in everyone for rank, name in known.items()}
    names = dict(sorted(names.items()))
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names.values()))}
    return {rank: numbers[name] for rank, name in names.items()}
