"""Two hosts on one machine: network, host-name and process namespaces, joined by a link of limited rate.

    with two_hosts(megabit=200) as hosts:
        launch(hosts, "package.job", ["argument"], slots=[2, 2], directory=tmp_path)

A host lives as long as a process of its own, which ends when this process does, however it ends; the kernel then
kills whatever runs on the host and removes its interface. So nothing is left to clean up.

Needs Linux, root, `ip` and `tc` (iproute2), `unshare` and `nsenter` (util-linux): see `missing`.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.launcher import job_env

INTERFACE = "eth0"  # of either host
NAMES, ADDRESSES = ("node-a", "node-b"), ("10.73.0.1", "10.73.0.2")
# Keeps the host: says that it is ready, then reads until the process at the other end of the pipe is gone.
KEEPER = 'mount --bind "$1" /etc/hosts && hostname "$2" && echo ready && exec cat'


class HostsUnavailable(RuntimeError):
    """This machine cannot emulate hosts; says why."""


@dataclass(frozen=True)
class Host:
    """`name` resolves on both hosts; `pid` is of the process that keeps the namespaces."""

    name: str
    address: str
    pid: int

    def command(self, *argv):
        """The command line that runs `argv` on this host, in the current directory."""
        enter = ["nsenter", "--target", str(self.pid), "--net", "--uts", "--pid", "--mount", f"--wd={os.getcwd()}"]
        return [*enter, *map(str, argv)]

    def run(self, line):
        _run(self.command(*line.split()))


def _run(argv):
    subprocess.run(argv, check=True, capture_output=True, text=True, timeout=20)


def bytes_sent():
    """Bytes that left the host of this process since it exists, headers included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        interface, _, counters = line.partition(":")
        if interface.strip() == INTERFACE:
            return int(counters.split()[8])
    raise RuntimeError(f"no interface {INTERFACE} here")


@contextlib.contextmanager
def two_hosts(megabit):
    """Two `Host`s; either sends to the other at `megabit` Mbit/s at most, like a full-duplex link.

    Raises `HostsUnavailable` where the machine does not allow it.
    """
    _check_tools()
    with contextlib.ExitStack() as stack:
        names = stack.enter_context(tempfile.NamedTemporaryFile("w", prefix="hosts-"))
        lines = ["127.0.0.1 localhost", *map(" ".join, zip(ADDRESSES, NAMES, strict=True))]
        names.write("\n".join(lines) + "\n")
        names.flush()
        try:
            hosts = [stack.enter_context(_host(*who, names.name)) for who in zip(NAMES, ADDRESSES, strict=True)]
            a, b = (f"name {INTERFACE} netns {host.pid}" for host in hosts)
            _run(f"ip link add {a} type veth peer {b}".split())
            for host in hosts:
                host.run("ip link set lo up")
                host.run(f"ip link set {INTERFACE} addrgenmode none")  # no IPv6, so no chatter of its own
                host.run(f"ip addr add {host.address}/24 dev {INTERFACE}")
                host.run(f"ip link set {INTERFACE} up")
                host.run(f"tc qdisc add dev {INTERFACE} root tbf rate {megabit}mbit burst 64kb latency 200ms")
        except (OSError, subprocess.SubprocessError) as error:
            said = getattr(error, "stderr", None) or str(error)
            raise HostsUnavailable(f"namespaces cannot be made here: {said.strip()}") from error
        yield hosts


def _check_tools():
    missing = [tool for tool in ("ip", "tc", "unshare", "nsenter") if shutil.which(tool) is None]
    if missing:
        raise HostsUnavailable(f"not installed: {', '.join(missing)}")
    if os.geteuid() != 0:
        raise HostsUnavailable("namespaces and their links need root")


@contextlib.contextmanager
def _host(name, address, hosts_file):
    unshare = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    keeper = subprocess.Popen(
        [*unshare, "sh", "-c", KEEPER, "sh", hosts_file, name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        if keeper.stdout.readline() != "ready\n":
            raise subprocess.CalledProcessError(keeper.wait(20), unshare, stderr=keeper.stderr.read())
        (inside,) = psutil.Process(keeper.pid).children()
        yield Host(name, address, inside.pid)
    finally:
        keeper.stdin.close()
        keeper.wait(20)
        keeper.stdout.close()
        keeper.stderr.close()


def launch(hosts, module, arguments, *, slots, directory, timeout, env=None):
    """Runs a module under the `deepspeed` launcher, started on each host, as a user without ssh starts it.

    slots: ranks of each host. directory: for the hostfile and the outputs. env: variables to add.

    Raises `AssertionError` with the outputs unless every launcher exits with 0 within `timeout` seconds.
    """
    hostfile = Path(directory) / "hostfile"
    hostfile.write_text("".join(f"{host.name} slots={n}\n" for host, n in zip(hosts, slots, strict=True)))
    launcher = ["deepspeed", "--no_ssh", "--hostfile", hostfile, "--master_addr", hosts[0].name]
    launcher += ["--master_port", _free_port()]
    logs = [Path(directory) / f"{host.name}.log" for host in hosts]
    jobs = []
    try:
        for node_rank, (host, log) in enumerate(zip(hosts, logs, strict=True)):
            with log.open("w") as output:
                jobs.append(
                    subprocess.Popen(
                        host.command(*launcher, "--node_rank", node_rank, "--module", module, *arguments),
                        stdout=output,
                        stderr=output,
                        env={**job_env(), "GLOO_SOCKET_IFNAME": INTERFACE, **(env or {})},
                        start_new_session=True,
                    )
                )
        codes = _wait(jobs, timeout)
    finally:
        for job in jobs:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
            job.wait()
    if any(codes):
        said = "\n".join(f"--- {log.name} ---\n{log.read_text()[-6000:]}" for log in logs)
        raise AssertionError(f"exit codes {codes} (None: still running when it was stopped)\n{said}")


def _wait(jobs, timeout):
    """Exit codes once all have ended or one has failed; None for those that still run."""
    deadline = time.monotonic() + timeout
    codes = [job.poll() for job in jobs]
    while None in codes and not any(codes) and time.monotonic() < deadline:
        time.sleep(0.1)
        codes = [job.poll() for job in jobs]
    return codes


def _free_port():
    """Free on the emulated hosts at any rate: nothing else runs there."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
