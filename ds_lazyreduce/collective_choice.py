"""Which reduce-scatter a process group gets: if not told, flat inside one node, two hops across nodes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby

import torch.distributed as torch_dist
from deepspeed import comm as dist

from .collectives import AllToAll, BackendReduceScatter, ReduceScatter, SingleRank
from .config import ConfigError, GradientPartitionConfig, show
from .two_hops import Accumulate, TwoHops

logger = logging.getLogger("ds_lazyreduce")


def choose_reduce_scatter(
    section: GradientPartitionConfig, accumulate: Accumulate, host_of_rank: Mapping[int, int], group
) -> ReduceScatter:
    """The reduce-scatter for the data-parallel ranks of ``group``. Collective over all ranks of a job on several hosts.

    All ranks agree: where some group does not lie on hosts as the others do, ``"auto"`` is flat for every group.

    Args:
        host_of_rank: for every global rank of the engine its host.

    Raises:
        ConfigError: two hops are asked for and the nodes do not fit the group; on every rank of it.
    """
    ranks = dist.get_world_size(group=group)
    if ranks == 1:
        return SingleRank()
    hosts = [host_of_rank[dist.get_global_rank(group, rank)] for rank in range(ranks)]
    if section.collective == "reduce_scatter":
        return BackendReduceScatter(group, hosts)
    node_size = section.node_size
    if node_size == "auto":
        obstacle = _irregularity(host_of_rank, hosts)
        node_size = hosts.count(hosts[0])
    else:
        obstacle = f"{ranks} ranks make no nodes of {node_size}" if ranks % node_size else None
    spans_hosts = len(set(hosts)) > 1
    wanted = section.collective == "hierarchical" or (section.collective == "auto" and spans_hosts)
    two_hops = wanted and 1 < node_size < ranks
    if section.collective != "all_to_all" and len(set(host_of_rank.values())) > 1:
        everybody = torch_dist.get_world_size()
        if len(host_of_rank) < everybody:  # process groups are made by all ranks of a job
            obstacle = f"the engine runs on {len(host_of_rank)} of the job's {everybody} ranks"
        else:
            obstacle = _obstacle_of_any_group(obstacle, two_hops)
    if section.collective == "hierarchical" and obstacle:
        raise ConfigError(
            f"lazy_reduce.gradient_partition.node_size: got {show(section.node_size)}, but {obstacle}; expected a "
            f"divisor of the {ranks} ranks of the data-parallel group, or the same number of consecutive ranks on "
            'every host, or collective "all_to_all"'
        )
    if two_hops and not obstacle:
        return TwoHops(group, node_size, accumulate, section.across_dtype == "wire")
    if spans_hosts and dist.get_rank() == 0:
        _warn_of_flat(section, hosts, obstacle)
    return AllToAll(group, hosts if section.node_size == "auto" else [rank // node_size for rank in range(ranks)])


def _obstacle_of_any_group(obstacle: str | None, two_hops: bool) -> str | None:
    """What keeps two hops from some group of the job, if anything does. Collective over all ranks."""
    found: list[tuple[str | None, bool]] = [(None, False)] * torch_dist.get_world_size()
    torch_dist.all_gather_object(found, (obstacle, two_hops))
    if obstacle is None:
        obstacle = next((other for other, _ in found if other), None)
    if obstacle is None and len({wanted for _, wanted in found}) > 1:
        obstacle = "some data-parallel groups of this job span hosts and others do not"
    return obstacle


def _irregularity(host_of_rank: Mapping[int, int], hosts: Sequence[int]) -> str | None:
    """Why hosts cannot be nodes, if they cannot: uneven hosts, or ranks of a host that are not consecutive."""
    sizes = Counter(host_of_rank.values())
    if len(set(sizes.values())) > 1:
        return f"the hosts run {', '.join(map(str, sizes.values()))} ranks"
    runs = [len(list(run)) for _, run in groupby(hosts)]
    if len(set(runs)) > 1 or len(runs) > len(set(hosts)):
        return f"the ranks of the data-parallel group lie on hosts {', '.join(map(str, hosts))}"
    return None


def _warn_of_flat(section: GradientPartitionConfig, hosts: Sequence[int], obstacle: str | None) -> None:
    largest = max(Counter(hosts).values())
    unexpected = section.collective == "auto" and obstacle
    if largest > 2 or unexpected:  # up to 2 ranks a host it is no more than a ring all-reduce sends
        why = f" because {obstacle}" if unexpected else ""
        logger.warning(
            f"lazy_reduce.gradient_partition.collective: ranks span hosts and the all-to-all is flat{why}: between "
            f"hosts it sends {largest / 2:g} times the bytes of a ring all-reduce; for two hops start the same number "
            'of consecutive ranks on every host, with collective "auto"'
        )
