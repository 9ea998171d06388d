"""Which reduce-scatter the groups of a job get: making the two hops' process groups is collective over all ranks."""

import threading

import pytest

from ds_lazyreduce import collective_choice
from ds_lazyreduce.config import ConfigError, GradientPartitionConfig


class Job:
    """Ranks as threads: what of ``deepspeed.comm`` and ``torch.distributed`` the choice uses."""

    def __init__(self, ranks):
        self.barrier, self.here, self.sent = threading.Barrier(ranks, timeout=10), threading.local(), [None] * ranks

    def get_world_size(self, group=None):
        return len(self.sent) if group is None else len(group)

    def get_rank(self, group=None):
        return self.here.rank if group is None else group.index(self.here.rank)

    def get_global_rank(self, group, rank):
        return group[rank]

    def all_gather_object(self, received, sent):
        self.sent[self.here.rank] = sent
        self.barrier.wait()
        received[:] = self.sent
        self.barrier.wait()


def choices(monkeypatch, groups, host_of_rank, **section):
    """For each rank the name of what it gets, or the error."""
    job = Job(len(host_of_rank))
    monkeypatch.setattr(collective_choice, "dist", job)
    monkeypatch.setattr(collective_choice, "torch_dist", job, raising=False)
    monkeypatch.setattr(collective_choice, "TwoHops", lambda group, node_size, *_: f"two hops of {node_size}")
    monkeypatch.setattr(collective_choice, "AllToAll", lambda *_: "flat")
    section = GradientPartitionConfig(enabled=True, **section)
    hosts, found = dict(enumerate(host_of_rank)), [None] * len(host_of_rank)

    def choose(rank):
        job.here.rank = rank
        group = next(group for group in groups if rank in group)
        try:
            found[rank] = collective_choice.choose_reduce_scatter(section, None, hosts, group)
        except ConfigError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=choose, args=(rank,)) for rank in range(len(found))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


# use_data_before_expert_parallelism: the groups of experts are consecutive ranks, here on two hosts of six.
CONSECUTIVE, HOSTS = [range(4), range(4, 8), range(8, 12)], [0] * 6 + [1] * 6


@pytest.mark.parametrize("node_size", ["auto", 2])
def test_groups_that_lie_on_hosts_in_different_ways_are_all_flat(monkeypatch, node_size):
    assert set(choices(monkeypatch, CONSECUTIVE, HOSTS, node_size=node_size)) == {"flat"}


def test_two_hops_that_not_every_group_can_have_are_refused_on_every_rank(monkeypatch):
    (error,) = set(choices(monkeypatch, CONSECUTIVE, HOSTS, collective="hierarchical"))
    assert "some data-parallel groups of this job span hosts and others do not" in error


@pytest.mark.parametrize(
    "groups,hosts,expected",
    [
        ([range(0, 8, 2), range(1, 8, 2)], [0] * 4 + [1] * 4, "two hops of 2"),
        ([range(0, 4), range(4, 8)], [0] * 4 + [1] * 4, "flat"),  # each inside a host
        ([range(0, 8, 4), range(1, 8, 4), range(2, 8, 4), range(3, 8, 4)], [0] * 4 + [1] * 4, "flat"),
    ],
)
def test_groups_that_lie_alike(monkeypatch, groups, hosts, expected):
    assert set(choices(monkeypatch, groups, hosts)) == {expected}
