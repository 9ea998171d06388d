"""Which reduce-scatter a process group gets: if not told, flat inside one node, two hops across nodes."""

from __future__ import annotations

import logging
import os

from deepspeed import comm as dist

from .collectives import AllToAll, BackendReduceScatter, ReduceScatter, SingleRank
from .config import ConfigError, GradientPartitionConfig
from .two_hops import Accumulate, TwoHops

logger = logging.getLogger("ds_lazyreduce")


def ranks_per_host() -> int:
    """Ranks that the launcher started on this host; all of them where no launcher says."""
    local = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE")  # torchrun and deepspeed; MPI
    return int(local) if local else dist.get_world_size()


def choose_reduce_scatter(section: GradientPartitionConfig, accumulate: Accumulate, group) -> ReduceScatter:
    """The reduce-scatter for the data-parallel ranks of ``group``. Collective over the group where it has two hops.

    Raises:
        ConfigError: two hops are asked for and ``node_size`` does not fit the group; on every rank of it.
    """
    ranks = dist.get_world_size(group=group)
    if ranks == 1:
        return SingleRank()
    members = [dist.get_global_rank(group, rank) for rank in range(ranks)]
    hosts = [member // ranks_per_host() for member in members]
    if section.collective == "reduce_scatter":
        return BackendReduceScatter(group, hosts)
    node_size = hosts.count(hosts[0]) if section.node_size == "auto" else section.node_size
    # Consecutive ranks of the group share a node, the same number on each.
    regular = ranks % node_size == 0
    if section.node_size == "auto":
        regular = regular and all(hosts[r] == hosts[r - r % node_size] for r in range(ranks))
    if section.collective == "hierarchical" and not regular:
        raise ConfigError(
            f"lazy_reduce.gradient_partition.node_size: got {section.node_size}, which makes nodes of {node_size} "
            f"ranks; expected a divisor of the {ranks} ranks of the data-parallel group, consecutive ones on one host"
        )
    spans_hosts = len(set(hosts)) > 1
    two_hops = section.collective == "hierarchical" or (section.collective == "auto" and spans_hosts and regular)
    if two_hops and 1 < node_size < ranks:
        return TwoHops(group, node_size, accumulate, section.across_dtype == "wire")
    if spans_hosts and dist.get_rank() == 0:
        logger.warning(
            "lazy_reduce.gradient_partition.collective: ranks span hosts and the all-to-all is flat: it sends "
            "node_size / 2 times the bytes between nodes that a ring all-reduce does"
        )
    return AllToAll(group, hosts if section.node_size == "auto" else [rank // node_size for rank in range(ranks)])
