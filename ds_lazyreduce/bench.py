"""Benchmark: the extension beside plain ZeRO-2, FSDP2 and DDP, measured in turns in the same run.

    deepspeed --num_accelerators 4 --module ds_lazyreduce.bench --plot time-against-memory.png --advise
    torchrun --nproc-per-node 4 -m ds_lazyreduce.bench --workload comm step --json result.json

Rank 0 prints a table a workload: medians over rounds with their quartiles, ratios of medians, the machine.
On the CPU set ``DS_ACCELERATOR=cpu OMP_NUM_THREADS=1`` where ranks outnumber cores.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any, NoReturn

from . import bench_plot
from .bench_delays import DelaysError, Exponential, Recorded
from .bench_report import Result, describe, machine
from .bench_settings import LAZY, NAMES, WITHOUT_STEP
from .refusal import refuse, why_not_writable

WORKLOADS = ("comm", "step", "hooks", "jitter", "memory", "checkpoint", "kernel")
WITH_MEMORY = ("comm", "jitter")  # those that measure time and memory of each contender


class BenchError(Exception):
    """A mistake of the user's, reported as one line."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise BenchError(f"{message} (see --help)")  # the stock method prints the usage, once per rank


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="ds_lazyreduce.bench", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), help="one or several (default: all)")
    add("--rounds", type=int, help="measured rounds (default: 9, with --quick 3)")
    add("--quick", action="store_true", help="a quarter of the sizes, of the mean delay and about of the rounds")
    add("--scale", type=float, help="factor on the elements of every tensor (default: 1, with --quick 0.25)")
    add("--jitter-ms", type=float, metavar="MS", help="mean delay of the workload jitter (default: 50, quick 12.5)")
    add("--delays", metavar="FILE", help="measured delays instead: a line a rank, milliseconds a micro-step, or JSON")
    add("--implementations", nargs="+", choices=NAMES, help="instead of each workload's own")
    add("--json", type=Path, metavar="FILE", help="also write all samples there")
    add("--plot", type=Path, metavar="FILE", help="also draw time against memory there, of the workloads jitter, comm")
    add(
        "--advise", nargs="?", type=float, const=10.0, metavar="PERCENT",
        help="print the config of the leanest setting within so much of the fastest one in jitter (default: 10)",
    )  # fmt: skip
    add("--memory-budget-mb", type=float, metavar="MIB", help="most memory of a rank for --advise, in MiB")
    add("--local_rank", "--local-rank", type=int, default=0, help=argparse.SUPPRESS)  # added by launchers
    return parser


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line, with ``delays`` read from their file.

    Raises:
        BenchError: an argument is wrong, or a file cannot be read or written.
    """
    args = _parser().parse_args(argv)
    args.rounds = (3 if args.quick else 9) if args.rounds is None else args.rounds
    args.scale = (0.25 if args.quick else 1.0) if args.scale is None else args.scale
    if args.rounds < 1 or not 0 < args.scale < float("inf"):
        raise BenchError("--rounds must be at least 1 and --scale above 0")
    args.delays = _delays(args)
    if args.advise is not None and not args.advise >= 0:
        raise BenchError("--advise must be at least 0 percent")
    if args.memory_budget_mb is not None and not (args.advise is not None and args.memory_budget_mb > 0):
        raise BenchError("--memory-budget-mb must be above 0 and belongs to --advise")
    if args.advise is not None:
        if "jitter" not in args.workload:
            raise BenchError("--advise needs the workload jitter")
        if args.implementations and not LAZY.keys() & set(args.implementations):
            raise BenchError(f"--advise needs one of the implementations {', '.join(LAZY)}")
    if args.plot is not None:
        if not set(WITH_MEMORY) & set(args.workload):
            raise BenchError("--plot needs the workload jitter or comm")
        if args.implementations and set(args.implementations) <= set(WITHOUT_STEP):
            raise BenchError(f"--plot needs another implementation than {' and '.join(WITHOUT_STEP)}")
        if not bench_plot.is_available():
            raise BenchError("--plot needs matplotlib: pip install 'ds-lazyreduce[plot]'")
        if args.plot.suffix not in bench_plot.SUFFIXES:
            raise BenchError(f"--plot: {args.plot} must end in {' or '.join(bench_plot.SUFFIXES)}")
    for option, path in {"--json": args.json, "--plot": args.plot}.items():
        if path is not None and (problem := why_not_writable(path)):
            raise BenchError(f"{option}: {problem}")
    return args


def _delays(args: argparse.Namespace) -> Exponential | Recorded:
    if args.delays is not None:
        if args.jitter_ms is not None:
            raise BenchError("--delays and --jitter-ms exclude one another")
        if "jitter" not in args.workload:
            raise BenchError("--delays needs the workload jitter")
        try:
            return Recorded.read(args.delays)
        except DelaysError as error:
            raise BenchError(f"--delays: {error}") from error
    mean = (12.5 if args.quick else 50.0) if args.jitter_ms is None else args.jitter_ms
    if not 0 <= mean < float("inf"):
        raise BenchError("--jitter-ms must be at least 0")
    return Exponential(mean)


def _connect() -> str:
    """Joins the ranks' process group; without a launcher there is one rank. Returns the backend."""
    one_rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    for name, value in {**one_rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        os.environ.setdefault(name, value)
    # torch deprecates names that DeepSpeed uses, and autograd runs the contenders' hooks on other streams.
    warnings.filterwarnings("ignore", module="torch")
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils.logging import set_log_level_from_string

    set_log_level_from_string("warning")
    logging.getLogger("torch").setLevel(logging.ERROR)
    if get_accelerator().device_name() != "cpu":
        get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    backend = get_accelerator().communication_backend_name()
    deepspeed.init_distributed(backend, verbose=False)
    return backend


def run(args: argparse.Namespace) -> None:
    """Measure; rank 0 prints tables and writes the files that were asked for."""
    info = machine(int(os.environ.get("WORLD_SIZE", "1")))
    backend = _connect()
    import torch
    import torch.distributed as dist
    from deepspeed.accelerator import get_accelerator

    from .accumulate import load_kernel
    from .bench_measure import Options
    from .bench_workloads import WORKLOADS

    device = torch.device(get_accelerator().current_device_name())
    rank = dist.get_rank()
    info |= {"device": _device_name(device), "backend": backend, "kernel": load_kernel("auto", device).name}
    options = Options(
        rounds=args.rounds,
        scale=args.scale,
        delays=args.delays,
        contenders=tuple(dict.fromkeys(args.implementations)) if args.implementations else None,
        device=device,
        rank=rank,
        ranks=dist.get_world_size(),
    )
    say = print if rank == 0 else (lambda *_, **__: None)
    say(
        f"{describe(info)}\n{args.rounds} rounds in turns: median (quartiles) of the slowest rank",
        flush=True,
    )
    if args.scale != 1.0:
        say(f"sizes x {args.scale:g}: not the sizes that targets are meant for", flush=True)
    results = []
    for name in dict.fromkeys(args.workload):
        results.append(WORKLOADS[name](options))
        say(f"\n{results[-1].table()}", flush=True)
    if rank == 0:
        _conclude(args, info, results)
    dist.barrier()
    dist.destroy_process_group()


def _conclude(args: argparse.Namespace, info: dict[str, Any], results: list[Result]) -> None:
    """The advice, the JSON file and the picture."""
    advice = None
    if args.advise is not None:
        from .bench_advise import advise

        (jitter,) = (result for result in results if result.workload == "jitter")
        advice = advise(jitter, args.advise, args.memory_budget_mb)
        print(f"\n{advice.text()}", flush=True)
    if args.json is not None:
        report = {
            "machine": info,
            "options": {"rounds": args.rounds, "scale": args.scale, "delays": args.delays.as_json()},
            "workloads": [result.as_json() for result in results],
            "advice": advice and {"config": advice.config, "reasons": advice.reasons},
        }
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    if args.plot is not None:
        bench_plot.plot([r for r in results if r.workload in WITH_MEMORY], args.plot, describe(info))


def _device_name(device) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def main() -> int:
    """Entry point of ``python -m ds_lazyreduce.bench``; returns the exit code, 2 for a mistake of the user's."""
    try:
        args = parse_arguments()
    except BenchError as error:
        return refuse("ds_lazyreduce.bench", str(error))
    run(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
