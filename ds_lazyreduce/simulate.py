"""Simulator: step time, idle time and buffers of each setting on more ranks than there are to measure on.

    python -m ds_lazyreduce.simulate --ranks 64 512 4096
    python -m ds_lazyreduce.simulate --ranks 512 --delays exponential --section '{"max_in_flight": 8}'
    python -m ds_lazyreduce.simulate --validate bench-1.json bench-8-calm.json bench-8.json

Prints a table for each number of ranks. Nothing communicates; any machine will do. See ``simulate_model.py`` for what
is modelled, ``simulate_validation.py`` for what it is checked against.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .bench_report import aligned
from .config import ConfigError, show
from .refusal import why_not_writable
from .simulate_delays import KINDS, draw
from .simulate_model import Cluster, Link, Workload, bucket_numel, costs_of, peak_buffer_bytes, play, program, traffic
from .simulate_settings import BY_DEFAULT, NAMES, resolve
from .simulate_validation import MEASURED_BY, ValidationInputError, predict, read

GB = 1e9


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; wrong arguments end the process with code 2 and one line."""
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(
        prog="ds_lazyreduce.simulate", description=__doc__.splitlines()[0], formatter_class=formatter, usage=_USAGE
    )
    add = parser.add_argument
    link = {"nargs": 2, "type": _positive, "metavar": ("GB/S", "US")}
    many = {"nargs": "+", "type": _count}
    add("--ranks", default=[64, 512, 4096], **many, help="a table for each")
    add("--buckets", default=[16], **many, help="a table for each")
    add("--node-size", type=_count, default=8, help="ranks of a node")
    add("--inside", default=[300.0, 3.0], **link, help="a rank's link inside its node: bandwidth, latency of a message")
    add("--across", default=[45.0, 8.0], **link, help="a rank's link to other nodes")
    add("--device", choices=("accelerator", "cpu"), default="accelerator", help="cpu: backward stands still in a drain")
    add("--elements", type=_count, default=8_000_000_000, help="trainable elements; write them as a whole number")
    add("--micro-steps", type=_count, default=8, help="of a window")
    add("--compute-ms", type=_positive, default=500.0, help="of a micro-step, a third of it forward")
    add(
        "--delays", nargs="+", choices=KINDS, default=list(KINDS), help="; ".join(f"{k}: {v}" for k, v in KINDS.items())
    )
    add("--delay-ms", type=_positive, default=25.0, help="mean delay of a rank in a micro-step")
    add("--settings", nargs="+", choices=NAMES, default=list(BY_DEFAULT), help="rows of the tables")
    add("--section", type=_json, metavar="JSON", help="one more row: keys of lazy_reduce.gradient_partition")
    add("--windows", type=_count, default=20, help="optimizer steps to average over")
    add("--seed", type=_seed, default=0, help="of the delays")
    add("--json", type=Path, metavar="FILE", help="also write the numbers there")
    add("--validate", nargs="+", type=Path, metavar="FILE", help=f"instead: compare with files of `{MEASURED_BY}`")
    args = parser.parse_args(argv)
    for ranks in args.ranks:
        if ranks > args.node_size and ranks % args.node_size:
            parser.error(f"argument --ranks: {ranks} ranks do not fill nodes of {args.node_size}, see --node-size")
    for name in ("inside", "across"):
        if not vars(args)[name][0]:
            parser.error(f"argument --{name}: expected a bandwidth above 0")
    if args.section is not None and not isinstance(args.section, dict):
        parser.error(f"argument --section: got {show(args.section)}; expected an object")
    if args.json is not None and args.validate:
        parser.error("argument --json: not with --validate, which prints only")
    if args.json is not None and (problem := why_not_writable(args.json)):
        parser.error(f"argument --json: {problem}")
    return args


_USAGE = "python -m ds_lazyreduce.simulate [--help] [options]"


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def _seed(text: str) -> int:
    value = int(text)
    if not 0 <= value < 2**32:
        raise ValueError
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not 0 <= value < math.inf:
        raise ValueError
    return value


def _json(text: str) -> Any:
    return json.loads(text)


# argparse quotes these: "invalid whole number >= 1 value: '0'"
_count.__name__, _positive.__name__, _json.__name__ = "whole number >= 1", "number >= 0", "JSON"
_seed.__name__ = "whole number >= 0 and < 2**32"


def simulate(args: argparse.Namespace, ranks: int, buckets: int) -> list[dict[str, Any]]:
    """One row for each setting; times are means over windows, in seconds; bytes are one rank's, of a window.

    Raises:
        ConfigError: ``--section`` is wrong.
    """
    inside, across = (Link(us / 1e6, gigabytes * GB) for gigabytes, us in (args.inside, args.across))
    cluster = Cluster(ranks, min(ranks, args.node_size), inside, across)
    micro_step_s = args.compute_ms / 1e3
    workload = Workload(args.micro_steps, buckets, args.elements, micro_step_s / 3, micro_step_s * 2 / 3)
    size = {"windows": args.windows, "ranks": ranks, "micro_steps": args.micro_steps}
    delays = {
        kind: draw(kind, **size, mean_s=args.delay_ms / 1e3, node_size=cluster.node_size, seed=args.seed)
        for kind in args.delays
    }
    rows = []
    wanted = [(name, None) for name in dict.fromkeys(args.settings)]
    wanted += [("section", args.section)] if args.section is not None else []
    for name, section in wanted:
        setting, own = resolve(name, cluster, workload, section)
        ops = program(setting, own.micro_steps, own.buckets)
        hops = traffic(cluster, setting, bucket_numel(cluster, own))
        reductions = sum(op.kind == "dispatch" for op in ops)
        held = None
        if setting.collective != "all_reduce":
            held = peak_buffer_bytes(ops, cluster, setting, bucket_numel(cluster, own))
        row = {
            "setting": name,
            "peak_buffer_bytes": held,
            "bucket_bytes": bucket_numel(cluster, own) * 2,
            "bytes_sent": reductions * sum(hop.bytes_inside + hop.bytes_across for hop in hops),
            "bytes_sent_across_nodes": reductions * sum(hop.bytes_across for hop in hops),
            "delays": {},
        }
        costs = costs_of(cluster, own, setting)
        for kind, drawn in delays.items():
            outcome = play(ops, own, costs, drawn, cluster.node_size, streams=args.device == "accelerator")
            step = outcome.step_s.mean().item()
            row["delays"][kind] = {"step_s": step, "idle_s": outcome.idle_s.mean().item()}
        rows.append(row)
    return rows


def _table(rows: list[dict[str, Any]], kinds: Sequence[str]) -> list[str]:
    cells = [["", "buffers", "in buckets", "across nodes", *kinds]]
    for row in rows:
        held = row["peak_buffer_bytes"]
        line = [row["setting"], "-", "-", _gigabytes(row["bytes_sent_across_nodes"])]
        if held is not None:
            line[1:3] = _gigabytes(held), f"{held / row['bucket_bytes']:.3g}"
        for kind in kinds:
            step, idle = row["delays"][kind]["step_s"], row["delays"][kind]["idle_s"]
            ratio = step / rows[0]["delays"][kind]["step_s"] if step else 1.0
            line.append(f"{step:.3g} s {ratio:.2f} {idle / step if step else 0.0:4.0%}")
        cells.append(line)
    return aligned(cells)


def _gigabytes(count: int) -> str:
    return f"{count / GB:.3g} GB"


def validate(paths: Sequence[Path]) -> None:
    """Prints predictions beside the measurements of all files with delays.

    Raises:
        ValidationInputError: a file is something else, or a run without delays is missing.
    """
    runs = [read(path) for path in paths]
    late = sorted((run for run in runs if not run.is_calm), key=lambda run: run.details.ranks)
    if not late:
        raise ValidationInputError(f"{', '.join(map(str, paths))}: expected one with delays among them")
    worst = 0.0
    for run in late:
        predictions = predict(run, runs)
        rows = [["", "measured", "model", "error", "delays alone", "buffers", "model"]]
        for p in predictions:
            times = [f"{p.measured_s * 1e3:,.0f} ms", f"{p.predicted_s * 1e3:,.0f} ms", f"{p.error:+.1%}"]
            buffers = ["-" if b is None else f"{b:,} B" for b in (p.measured_buffers, p.predicted_buffers)]
            rows.append([p.name, *times, f"{p.delays_only_s * 1e3:,.0f} ms", *buffers])
        print(f"\n{run.details.ranks} ranks, {len(run.delays_s)} windows, medians ({run.path})")
        print("\n".join(aligned(rows)))
        left_out = sorted(run.step_s.keys() - {p.name for p in predictions} - {"limit"})
        if left_out:
            print(f"  not modelled, or not measured without delays: {', '.join(left_out)}")
        worst = max([worst, *(abs(p.error) for p in predictions)])
    print(f"\nlargest error of a time: {worst:.1%}")


def run(args: argparse.Namespace) -> None:
    """Prints what the arguments ask for and writes the JSON file."""
    if args.validate:
        validate(args.validate)
        return
    print(
        f"{args.elements:,} elements, {args.micro_steps} micro-steps of {args.compute_ms:g} ms, delays of "
        f"{args.delay_ms:g} ms on average in each, nodes of {args.node_size}, links of {args.inside[0]:g} GB/s, "
        f"{args.inside[1]:g} us inside and {args.across[0]:g} GB/s, {args.across[1]:g} us across\n"
        "of a rank: peak of buffers, also in bf16 buckets; bytes to other nodes in a window; time of a window, "
        "against the first row, idle share"
    )
    tables = []
    for ranks in dict.fromkeys(args.ranks):
        for buckets in dict.fromkeys(args.buckets):
            rows = simulate(args, ranks, buckets)
            print("\n".join([f"\n{ranks} ranks, {buckets} buckets", *_table(rows, args.delays)]), flush=True)
            tables.append({"ranks": ranks, "buckets": buckets, "rows": rows})
    if args.json is not None:
        options = {key: value for key, value in vars(args).items() if key not in ("json", "validate")}
        args.json.write_text(json.dumps({"options": options, "tables": tables}, indent=2) + "\n")


def main(argv: list[str] | None = None) -> int:
    """Entry point of ``python -m ds_lazyreduce.simulate``."""
    try:
        run(parse_arguments(argv))
    except (ConfigError, ValidationInputError) as error:
        print(f"ds_lazyreduce.simulate: error: {str(error).splitlines()[-1].strip()}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
