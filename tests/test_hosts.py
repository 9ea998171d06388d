"""Which ranks share a host, from what launchers say."""

import pytest

from ds_lazyreduce.hosts import name_of_host


def _hosts(environments):
    names = [name_of_host(rank, env) for rank, env in enumerate(environments)]
    return [names.index(name) for name in names]  # each host by its first rank


@pytest.mark.parametrize(
    "environments,hosts",
    [
        # deepspeed: uneven hosts, where LOCAL_RANK and LOCAL_SIZE alone would mislead
        ([{"CROSS_RANK": str(h), "LOCAL_SIZE": n} for h, n in [(0, "1"), (1, "2"), (1, "2")]], [0, 1, 1]),
        ([{"CROSS_RANK": str(h), "LOCAL_SIZE": n} for h, n in [(0, "2"), (0, "2"), (1, "1")]], [0, 0, 2]),
        # torchrun
        ([{"GROUP_RANK": str(rank // 2), "LOCAL_WORLD_SIZE": "2"} for rank in range(4)], [0, 0, 2, 2]),
        # only a number of ranks per host
        ([{"LOCAL_WORLD_SIZE": "2"}] * 4, [0, 0, 2, 2]),
        ([{"LOCAL_SIZE": "4"}] * 4, [0, 0, 0, 0]),
        # no launcher: one host has one name
        ([{}] * 3, [0, 0, 0]),
    ],
)
def test_hosts_by_launcher(environments, hosts):
    assert _hosts(environments) == hosts


def test_names_tell_hosts_apart_where_no_launcher_does(monkeypatch):
    here = name_of_host(0, {})
    monkeypatch.setattr("platform.node", lambda: "another")
    assert name_of_host(1, {}) != here
