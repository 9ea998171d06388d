"""Two emulated hosts under the `deepspeed` launcher: what crosses the link, by the counters of its interfaces.

Times are not judged: `python -m tests.two_hosts` prints them.
"""

import signal
import subprocess
import sys
import time

import psutil
import pytest

from . import two_hosts as comparison
from .emulated_hosts import HostsUnavailable, two_hosts
from .launcher import ROOT

HEADERS = 1.10  # of the bytes: those of packets and acknowledgements, and the barriers around a measurement


@pytest.fixture(scope="module")
def hosts():
    try:
        with two_hosts(megabit=200) as pair:
            yield pair
    except HostsUnavailable as reason:
        pytest.skip(f"hosts cannot be emulated: {reason}")


@pytest.fixture(scope="module", params=[2, 4], ids="2x{}".format)
def ranks_per_host(request):
    return request.param


@pytest.fixture(scope="module")
def outcomes(hosts, ranks_per_host, warm_extensions, tmp_path_factory):
    directory = tmp_path_factory.mktemp("two_hosts")
    return comparison.compare(
        hosts, ranks=ranks_per_host, layers=4, numel=2**18, rounds=3, directory=directory, timeout=240
    )


def _wire(outcomes, name):
    return sum(outcomes[name].bytes_on_wire)


def test_gradients_are_those_of_plain_zero2_to_the_bit(outcomes):
    assert {name: outcome.exact for name, outcome in outcomes.items()} == dict.fromkeys(comparison.CONTENDERS, True)


def test_auto_takes_two_hops_on_every_rank(outcomes):
    chosen = {name: outcome.collective for name, outcome in outcomes.items()}
    assert chosen["auto"] == chosen["hierarchical"] == {"hierarchical"}
    assert chosen["flat"] == {"all_to_all"}


def test_the_wire_carries_what_the_report_says(outcomes):
    for name, outcome in outcomes.items():
        for host, wire in enumerate(outcome.bytes_on_wire):
            assert 1.0 <= wire / outcome.bytes_computed <= HEADERS, (name, host)
            assert outcome.bytes_reported is None or outcome.bytes_reported[host] == outcome.bytes_computed


def test_bytes_across_fall_as_computed(outcomes, ranks_per_host):
    ranks = 2 * ranks_per_host
    falls = {
        ("flat", "hierarchical"): ranks_per_host / 2,
        ("flat", "hierarchical, wire"): ranks_per_host,
        # With more hosts a ring and two hops come to the same; two hosts need only half of each other's sums.
        ("plain ZeRO-2, bf16", "hierarchical"): 2 * (ranks - 1) / ranks,
        ("plain ZeRO-2, bf16", "hierarchical, wire"): 4 * (ranks - 1) / ranks,
        ("hierarchical", "auto"): 1,
    }
    for (more, less), factor in falls.items():
        assert _wire(outcomes, more) / _wire(outcomes, less) == pytest.approx(factor, rel=0.1), (more, less)


def test_messages_across(outcomes, ranks_per_host):
    buckets = 4
    for host in range(2):
        per_rank = {name: o.messages_reported[host] / ranks_per_host for name, o in outcomes.items() if o.collective}
        assert per_rank.pop("flat") == buckets * ranks_per_host
        assert set(per_rank.values()) == {buckets}


def test_the_table_holds_every_contender(outcomes):
    lines = comparison.table(outcomes).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == list(comparison.CONTENDERS)
    assert len({line.count("|") for line in lines}) == 1
    print("\n" + "\n".join(lines))


KILLED = """
import os, psutil, signal, subprocess, time
from tests.emulated_hosts import two_hosts
with two_hosts(megabit=200) as hosts:
    for host in hosts:
        subprocess.Popen(host.command("sleep", "600"))
    while sum(p.name() == "sleep" for p in psutil.Process().children(recursive=True)) < 2:
        time.sleep(0.01)
    print(*(p.pid for p in psutil.Process().children(recursive=True)), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_nothing_is_left_if_the_process_is_killed(hosts):
    done = subprocess.run([sys.executable, "-c", KILLED], cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=60)
    pids = [int(pid) for pid in done.stdout.split()]
    assert done.returncode == -signal.SIGKILL and len(pids) == 8  # of each host: unshare, cat, nsenter, sleep
    deadline = time.monotonic() + 20
    while any(map(_runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_runs, pids))


def _runs(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
