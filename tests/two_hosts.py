"""Plain ZeRO-2, the flat exchange and two hops on two emulated hosts: time, and bytes that left a host.

python -m tests.two_hosts --ranks 4 --megabit 200
"""

import argparse
import json
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

from .emulated_hosts import launch, two_hosts
from .two_hosts_job import WARM_UP

CONTENDERS = {
    "plain ZeRO-2, bf16": None,
    "flat": {"collective": "all_to_all"},
    "hierarchical": {"collective": "hierarchical"},
    "hierarchical, wire": {"collective": "hierarchical", "across_dtype": "wire"},
    "auto": {},
}
MORE_IN_FLIGHT = {
    "hierarchical, max_in_flight 4": {"collective": "hierarchical", "max_in_flight": 4},
    "hierarchical, wire, max_in_flight 4": {
        "collective": "hierarchical",
        "across_dtype": "wire",
        "max_in_flight": 4,
    },
}


@dataclass(frozen=True)
class Outcome:
    """What one contender did, per optimizer step.

    bytes_on_wire: that left a host, by its interface's counter, medians of the rounds; one of each host.
    bytes_reported: the same by the ranks' reports, without headers; None for plain ZeRO-2.
    messages_reported: gradient messages that left a host.
    bytes_computed: by the algorithm.
    reduced, stepped: seconds of the slowest rank until the gradients are reduced and until the step is done.
    spread: smallest and largest `reduced`.
    collective: by the reports, of all ranks.
    exact: whether every rank's parameters are to the bit what they should be.
    """

    bytes_on_wire: list[float]
    bytes_reported: list[float] | None
    messages_reported: list[float] | None
    bytes_computed: float
    reduced: float
    stepped: float
    spread: tuple[float, float]
    collective: set[str]
    exact: bool


def compare(hosts, *, ranks, layers, numel, rounds, directory, timeout=120, contenders=CONTENDERS):
    """`{name: Outcome}` of training with `ranks` ranks on each host."""
    output = Path(directory) / "outcome.json"
    options = {"contenders": json.dumps(contenders), "layers": layers, "numel": numel, "rounds": rounds}
    arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
    arguments += ["--output", output]
    launch(
        hosts,
        "tests.two_hosts_job",
        arguments,
        slots=[ranks] * 2,
        directory=directory,
        timeout=timeout,
        # One of DeepSpeed's modules has a compiled function, which loads the compiler: a second for each rank.
        env={"TORCHDYNAMO_DISABLE": "1"},
    )
    everyone = json.loads(output.read_text())
    computed = bytes_by_algorithm(layers * numel, ranks)
    return {
        name: _outcome([rank[name] for rank in everyone], ranks, computed[_kind(partition)], WARM_UP + rounds)
        for name, partition in contenders.items()
    }


def bytes_by_algorithm(elements, ranks_per_host):
    """Gradient bytes that leave one of two hosts, in bf16 but for sums between hosts that stay fp32."""
    ranks = 2 * ranks_per_host
    return {
        "stock": 2 * (ranks - 1) / ranks * elements * 2,  # a ring crosses from host to host in one place
        "flat": ranks_per_host * (ranks_per_host / ranks) * elements * 2,  # each rank to every remote one
        "fp32": elements / 2 * 4,  # the ranks of a host send it half the bucket's sums
        "wire": elements / 2 * 2,
    }


def _kind(partition):
    if partition is None:
        return "stock"
    if partition.get("collective") == "all_to_all":
        return "flat"
    return partition.get("across_dtype", "fp32")


def _outcome(of_ranks, ranks_per_host, computed, steps):
    hosts = [of_ranks[:ranks_per_host], of_ranks[ranks_per_host:]]
    reports = None if of_ranks[0]["report"] is None else [[rank["report"] for rank in host] for host in hosts]

    def reported(field):
        return reports and [sum(report[field] for report in host) / steps for host in reports]

    def slowest(field):
        per_round = zip(*(rank["samples"] for rank in of_ranks), strict=True)
        return [max(sample[field] for sample in samples) for samples in per_round]

    reduced = slowest("reduced")
    return Outcome(
        bytes_on_wire=[statistics.median(sample["bytes"] for sample in host[0]["samples"]) for host in hosts],
        bytes_reported=reported("bytes_sent_across_nodes"),
        messages_reported=reported("messages_sent_across_nodes"),
        bytes_computed=computed,
        reduced=statistics.median(reduced),
        stepped=statistics.median(slowest("stepped")),
        spread=(min(reduced), max(reduced)),
        collective={report["collective"] for host in reports or () for report in host},
        exact=all(rank["exact"] for rank in of_ranks),
    )


def table(outcomes):
    """The outcomes as Markdown; bytes and messages are those of the first host."""
    stock = next(iter(outcomes.values()))
    lines = [
        "| | MB on the wire | by the report | by the algorithm | messages | ms, gradients | ms, whole step "
        "| against plain ZeRO-2 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, o in outcomes.items():
        said = f"{o.bytes_reported[0] / 1e6:.2f}" if o.bytes_reported else ""
        messages = f"{o.messages_reported[0]:.0f}" if o.messages_reported else ""
        spread = f"{o.reduced * 1e3:.0f} ({o.spread[0] * 1e3:.0f}–{o.spread[1] * 1e3:.0f})"
        lines.append(
            f"| {name} | {o.bytes_on_wire[0] / 1e6:.2f} | {said} | {o.bytes_computed / 1e6:.2f} | {messages} "
            f"| {spread} | {o.stepped * 1e3:.0f} | {o.reduced / stock.reduced:.2f} |"
        )
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description="Compare the exchanges on two emulated hosts (Linux, root).")
    parser.add_argument("--ranks", type=int, default=4, help="of each host")
    parser.add_argument("--megabit", type=int, default=200, help="Mbit/s between the hosts, either way")
    parser.add_argument("--layers", type=int, default=4, help="each one tensor and one bucket")
    parser.add_argument("--numel", type=int, default=2**20, help="elements of a layer")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    with two_hosts(options.megabit) as hosts, tempfile.TemporaryDirectory() as directory:
        outcomes = compare(
            hosts,
            ranks=options.ranks,
            layers=options.layers,
            numel=options.numel,
            rounds=options.rounds,
            directory=directory,
            timeout=1800,
            contenders=CONTENDERS | MORE_IN_FLIGHT,
        )
    size = f"{options.layers} x {options.numel:,} bf16 parameters"
    print(f"2 hosts x {options.ranks} ranks, {options.megabit} Mbit/s, {size}")
    print(table(outcomes))


if __name__ == "__main__":
    main()
