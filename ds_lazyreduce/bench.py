"""Benchmark: the extension beside plain ZeRO-2, FSDP2 and DDP, measured in turns in the same run.

    deepspeed --num_accelerators 4 --module ds_lazyreduce.bench
    torchrun --nproc-per-node 4 -m ds_lazyreduce.bench --workload comm step --json result.json

Rank 0 prints a table a workload: medians over rounds with their range, ratios of medians, the machine.
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

from .bench_report import describe, machine

WORKLOADS = ("comm", "step", "hooks", "jitter", "memory", "checkpoint")
CONTENDERS = (
    "none", "bare", "zero2", "zero2-fp32", "zero2-loss", "fsdp2", "ddp",
    "lazy", "lazy-4", "lazy-drained", "lazy-boundary",
)  # fmt: skip


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; wrong arguments end the process with code 2 before ranks connect."""
    parser = argparse.ArgumentParser(prog="ds_lazyreduce.bench", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--workload", nargs="+", choices=WORKLOADS, default=["comm"], help="one or several (default: comm)")
    add("--rounds", type=int, help="measured rounds (default: 9, with --quick 3)")
    add("--quick", action="store_true", help="a quarter of the sizes, delays and rounds")
    add("--scale", type=float, help="factor on the elements of every tensor (default: 1, with --quick 0.25)")
    add("--jitter-ms", type=float, help="mean delay of the workload jitter (default: 50, with --quick 12.5)")
    add("--implementations", nargs="+", choices=CONTENDERS, help="instead of each workload's own")
    add("--json", type=Path, metavar="FILE", help="also write all samples there")
    add("--local_rank", "--local-rank", type=int, default=0, help=argparse.SUPPRESS)  # added by launchers
    args = parser.parse_args(argv)
    args.rounds = (3 if args.quick else 9) if args.rounds is None else args.rounds
    args.scale = (0.25 if args.quick else 1.0) if args.scale is None else args.scale
    args.jitter_ms = (12.5 if args.quick else 50.0) if args.jitter_ms is None else args.jitter_ms
    if args.rounds < 1 or args.scale <= 0 or args.jitter_ms < 0:
        parser.error("--rounds must be at least 1, --scale above 0, --jitter-ms at least 0")
    if args.json is not None and not args.json.resolve().parent.is_dir():
        parser.error(f"--json: {args.json.resolve().parent} is not a directory")
    return args


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
    """Measure; rank 0 prints tables and writes the JSON file."""
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
        jitter_ms=args.jitter_ms,
        contenders=tuple(dict.fromkeys(args.implementations)) if args.implementations else None,
        device=device,
        rank=rank,
        ranks=dist.get_world_size(),
    )
    say = print if rank == 0 else (lambda *_, **__: None)
    say(
        f"{describe(info)}\n{args.rounds} rounds in turns: median (min .. max) of the slowest rank",
        flush=True,
    )
    if args.scale != 1.0:
        say(f"sizes x {args.scale:g}: not the sizes that targets are meant for", flush=True)
    results = []
    for name in dict.fromkeys(args.workload):
        results.append(WORKLOADS[name](options))
        say(f"\n{results[-1].table()}", flush=True)
    if rank == 0 and args.json is not None:
        report = {
            "machine": info,
            "options": {"rounds": args.rounds, "scale": args.scale, "jitter_ms": args.jitter_ms},
            "workloads": [result.as_json() for result in results],
        }
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def _device_name(device) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def main() -> int:
    """Entry point of ``python -m ds_lazyreduce.bench``."""
    run(parse_arguments())
    return 0


if __name__ == "__main__":
    sys.exit(main())
