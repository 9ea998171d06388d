"""Demo job: trains a byte-level GPT on Python's own source text and shows what was communicated.

    deepspeed --num_accelerators 2 --module ds_lazyreduce.demo --deepspeed_config ds_configs/cpu_gloo.json

Rank 0 shows a progress bar and, at the end, a table; the loss goes to ``DIR/<job name>/*.csv``.
A wrong argument or config is found before the ranks connect, so that no rank waits for one that gave
up, and before the imports inside functions, which take seconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any, NoReturn

from .config import ConfigError, LazyReduceConfig, parse_section
from .demo_report import closing_table
from .refusal import refuse
from .stock_keys import check_against_deepspeed


class DemoError(Exception):
    """A mistake of the user's, reported as one line."""


@dataclasses.dataclass(frozen=True)
class Job:
    """What was asked for: the arguments, the DeepSpeed config and its parsed ``lazy_reduce`` section."""

    args: argparse.Namespace
    config: dict[str, Any]
    section: LazyReduceConfig
    rank: int
    world_size: int


# ---- arguments and checks


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise DemoError(f"{message} (see --help)")  # the stock method prints the usage, once per rank


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line.

    Raises:
        DemoError: an argument is missing, unknown or out of range.
    """
    parser = _Parser(prog="ds_lazyreduce.demo", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--deepspeed_config", required=True, metavar="JSON", help="DeepSpeed configuration file")
    add("--steps", type=int, default=100, help="optimizer steps (default: 100)")
    add(
        "--output",
        type=Path,
        default="output",
        metavar="DIR",
        help="for csv files (default: output)",
    )
    add("--size", choices=("tiny", "small"), default="small", help="of the model (default: small)")
    add("--seed", type=int, default=0, help="of weights and data (default: 0)")
    add("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # added by the launcher
    args = parser.parse_args(argv)
    if args.steps < 1:
        raise DemoError(f"--steps must be at least 1, not {args.steps}")
    if not 0 <= args.seed < 2**32:
        raise DemoError(f"--seed must be at least 0 and below 2**32, not {args.seed}")
    return args


def load_config(path: str) -> tuple[dict[str, Any], LazyReduceConfig]:
    """Read a DeepSpeed config; returns it and its ``lazy_reduce`` section.

    Raises:
        DemoError: no such file, not JSON, or a section that is absent, disabled or wrong.
    """
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
        section = parse_section(config)
        if section is not None:
            check_against_deepspeed(section, config)
    except OSError as error:
        raise DemoError(f"cannot read the config {path}: {error.strerror}") from error
    except ConfigError as error:
        raise DemoError(one_line(path, error)) from error
    except ValueError as error:
        raise DemoError(f"the config {path} is not valid JSON: {error}") from error
    if section is None:
        raise DemoError(f'the config {path} has no enabled "lazy_reduce" section')
    return config, section


def one_line(path: str, error: Exception) -> str:
    """A complaint about the config ``path``, which may have several lines, as one line."""
    first, *rest = (line.strip() for line in str(error).splitlines() or [type(error).__name__])
    return f"{path}: {first} {'; '.join(rest)}".rstrip()


def prepare_output(directory: Path) -> None:
    """Create ``directory`` and prove that files can be written there.

    Raises:
        DemoError: it cannot be created or written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise DemoError(f"cannot write to the output directory {directory}: {error.strerror}") from error


def csv_to(config: dict[str, Any], output: Path) -> dict[str, Any]:
    """``config`` with the csv monitor switched on and writing to ``output``."""
    given = config.get("csv_monitor")
    monitor = {"job_name": "ds_lazyreduce_demo", **(given if isinstance(given, dict) else {})}
    return {**config, "csv_monitor": {**monitor, "enabled": True, "output_path": str(output)}}


# ---- training


def build_engine(job: Job):
    """Returns ``(engine, model size)``; optimizer and, if there, scheduler are the config's.

    Raises:
        DemoError: DeepSpeed or the extension refuses the config, or the extension this DeepSpeed; or there is no
            compiler for what DeepSpeed needs on CPUs.
    """
    import torch
    from deepspeed.runtime.config import DeepSpeedConfigError

    from . import initialize
    from .demo_model import SIZES, ByteGPT, parameter_groups, warmup_cosine
    from .registration import UnsupportedDeepSpeedError

    torch.manual_seed(job.args.seed)
    size = SIZES[job.args.size]
    model = ByteGPT(size)
    try:
        engine, *_ = initialize(
            model=model,
            model_parameters=parameter_groups(model),
            lr_scheduler=None if "scheduler" in job.config else warmup_cosine(job.args.steps),
            config=job.config,
        )
    except UnsupportedDeepSpeedError as error:
        raise DemoError(str(error)) from error
    except (ValueError, TypeError, AssertionError, AttributeError, DeepSpeedConfigError) as error:
        # DeepSpeed raises any of these for a wrong config.
        raise DemoError(one_line(job.args.deepspeed_config, error)) from error
    except (RuntimeError, ImportError) as error:  # of the rank that builds, and of those that wait for it
        if "deepspeed_shm_comm" not in str(error):
            raise
        raise DemoError(
            "DeepSpeed cannot compile its communication on CPUs: install a C++ compiler (g++); "
            "python -m ds_lazyreduce.doctor says what is missing"
        ) from error
    return engine, size


def train(job: Job, engine, size) -> tuple[float | None, float | None]:
    """Run the optimizer steps; returns the global loss of the first and of the last logging window.

    The loss beside the progress bar is that of the last reported window: showing it costs no collective.
    """
    from tqdm import tqdm

    from .demo_model import RandomWindows, load_corpus

    batch, micro_steps = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    windows = RandomWindows(load_corpus(), batch, size.context, job.args.seed, job.rank, job.world_size)
    tokens = batch * size.context
    reduction, options = loss_options(job, tokens)
    first = None
    with tqdm(total=job.args.steps, unit="step", disable=job.rank != 0, file=sys.stdout, ncols=100) as bar:
        for step in range(job.args.steps):
            for micro_step in range(step * micro_steps, (step + 1) * micro_steps):
                x, y = (part.to(engine.device) for part in windows.draw(micro_step))
                loss = engine(x, y, reduction)
                engine.backward(loss, **options)
                engine.step()
            latest = engine.last_metrics.get("train_loss")
            first = latest if first is None else first
            speed = tokens * micro_steps * job.world_size * (bar.format_dict["rate"] or 0.0)
            bar.set_postfix_str(progress(latest, speed), refresh=False)
            bar.update()
    if job.section.deferred_loss.enabled:
        engine.flush_metrics()  # the window that --steps may have cut short
    last = engine.last_metrics.get("train_loss")
    return (last if first is None else first), last


def loss_options(job: Job, tokens: int) -> tuple[str, dict[str, int]]:
    """How the model reduces its loss, and the keyword arguments of ``engine.backward`` that match."""
    if not job.section.token_normalization.enabled:
        return "mean", {}
    return job.section.token_normalization.loss_reduction, {"num_tokens": tokens}


def progress(loss: float | None, tokens_per_second: float) -> str:
    """Text behind the progress bar."""
    return f"loss {'...' if loss is None else format(loss, '.3f')}, {tokens_per_second:,.0f} tokens/s"


def print_summary(job: Job, engine, losses: tuple[float | None, float | None]) -> None:
    """Print the closing table and where the csv files are."""
    table = closing_table(
        engine.lazy_reduce_report(),
        bucket_size=engine.zero_reduce_bucket_size(),
        element_bytes=engine.communication_data_type.itemsize,
        sizes=[p.numel() for p in engine.module.parameters() if p.requires_grad],
        world_size=job.world_size,
        steps=job.args.steps,
        micro_steps=engine.gradient_accumulation_steps(),
        losses=losses,
    )
    monitor = job.config["csv_monitor"]
    print(f"\n{table}\ncsv files: {Path(monitor['output_path']) / monitor['job_name']}", flush=True)


# ---- the process: signals, errors, exit code


class _Stopped(BaseException):
    """A signal asked this process to end; not an ``Exception``, so that no library swallows it."""


def _stop(signum, frame) -> NoReturn:
    # On Ctrl-C a rank gets SIGINT from the terminal and at once SIGTERM from the launcher. The first
    # unwinds the stack (a JIT build in progress must release its lock file), the second is ignored, by a
    # function, because Python complains about SIG_IGN if that signal has come in already.
    _on_signals(lambda signum, frame: None)
    raise _Stopped(signum)


def _on_signals(handler) -> None:
    signal.signal(signal.SIGINT, handler)
    signal.signal(signal.SIGTERM, handler)


def _default_to_one_rank() -> None:
    """Without a launcher (``python -m ds_lazyreduce.demo``) train on one rank; DeepSpeed would ask MPI."""
    one_rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    for name, value in {**one_rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        os.environ.setdefault(name, value)


def _run() -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    args = parse_arguments()
    config, section = load_config(args.deepspeed_config)
    prepare_output(args.output)
    job = Job(args, csv_to(config, args.output), section, rank, world_size)
    if rank == 0:
        print("ds_lazyreduce.demo: starting; the first run compiles extensions", flush=True)
    # torch deprecates names that DeepSpeed uses; not a concern of whoever runs a demo.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    engine, size = build_engine(job)
    losses = train(job, engine, size)
    if rank == 0:
        print_summary(job, engine, losses)


def _say(message: str) -> None:
    if os.environ["LOCAL_RANK"] == "0":
        print(f"\nds_lazyreduce.demo: {message}", file=sys.stderr, flush=True)


def _refuse(message: str) -> int:
    _on_signals(signal.SIG_DFL)
    return refuse("\nds_lazyreduce.demo", message)


def main() -> int:
    """Run the demo; returns the exit code: 0, 2 for a mistake of the user's, 128 + n for signal n."""
    _default_to_one_rank()
    _on_signals(_stop)
    try:
        try:
            _run()
        except DemoError as error:
            return _refuse(str(error))
        except Exception:
            # It may be the echo of another rank being stopped: then this rank's own signal is on its way.
            time.sleep(2)
            raise
    except _Stopped as stopped:
        signum = stopped.args[0]
        _say("interrupted" if signum == signal.SIGINT else "stopped")
        os._exit(128 + signum)  # no destructors: they would wait for, or complain about, ranks that are gone
    return 0


if __name__ == "__main__":
    sys.exit(main())
