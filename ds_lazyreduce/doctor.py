"""A page about this machine, in the manner of ``ds_report``: what works here, and what is missing for the rest.

    python -m ds_lazyreduce.doctor [--json] [--timeout SECONDS]

Lines marked FAIL say what would be right; exit code 1 if there is one, else 0. WARN marks what works, but slower or
at a risk: without a compiler, say, gradients are summed by the torch path, which gives the same bits.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import torch

from . import op_builder
from .accumulate import load_kernel
from .op_builder import KernelBuildError
from .reduction_stream import overlap_notes
from .version import __version__

LOCK_AGE = 600.0  # seconds after which no build of DeepSpeed's is still running
MOST_RANKS = 8


@dataclasses.dataclass(frozen=True)
class Finding:
    """A line of the page. ``status``: ``"ok"``, ``"warn"``, ``"fail"``, or ``"info"`` for plain facts."""

    status: str
    name: str
    detail: str


# ---- what is here


def versions() -> Iterator[Finding]:
    yield Finding("info", "python", f"{platform.python_version()} on {platform.platform()}")
    built_for = [f"CUDA {torch.version.cuda}"] if torch.version.cuda else []
    built_for += [f"ROCm {torch.version.hip}"] if torch.version.hip else []
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        built_for += ["NCCL " + ".".join(map(str, torch.cuda.nccl.version()))]
    yield Finding("info", "torch", f"{torch.__version__} ({', '.join(built_for) or 'CPU only'})")
    try:
        yield Finding("info", "deepspeed", metadata.version("deepspeed"))
    except metadata.PackageNotFoundError:
        yield Finding("fail", "deepspeed", 'is not installed: pip install "deepspeed==0.19.8"')
    yield Finding("info", "ds_lazyreduce", f"{__version__} in {Path(__file__).resolve().parent}")


def deepspeed_support() -> Iterator[Finding]:
    try:
        registration = importlib.import_module("ds_lazyreduce.registration")
        registration.check_deepspeed()
    except Exception as error:  # an unknown DeepSpeed may fail in any way
        what = str(error) if "supports DeepSpeed" in str(error) else f"{type(error).__name__}: {error}"
        yield Finding("fail", "this DeepSpeed", f'is not supported; pip install "deepspeed==0.19.8" ({what})')
    else:
        yield Finding("ok", "this DeepSpeed", "has all that the extension builds on")


def accelerator() -> Iterator[Finding]:
    try:
        from deepspeed.accelerator import get_accelerator

        chosen = get_accelerator()
        name, backend = chosen.device_name(), chosen.communication_backend_name()
        yield Finding("info", "DeepSpeed uses", f"{name}, {chosen.device_count()} of them, with {backend}")
    except Exception as error:
        name = None
        yield Finding("fail", "DeepSpeed uses", f"no accelerator could be chosen: {error}")
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        kind = getattr(device, "gcnArchName", "") or f"compute capability {device.major}.{device.minor}"
        yield Finding("info", f"GPU {index}", f"{device.name}, {kind}, {device.total_memory / 2**30:.0f} GiB")
    if name == "cpu" and torch.cuda.is_available():
        yield Finding(
            "warn", "GPU", "torch sees one, DeepSpeed does not use it: unset DS_ACCELERATOR, or set it to cuda"
        )
    for note in overlap_notes(False, "nccl", os.environ):  # not only this accelerator's: the job may run elsewhere
        yield Finding("warn", "overlap", note)


# ---- the native kernel


def device_types() -> list[str]:
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def prebuilt(device_type: str) -> str | None:
    """Where the kernel for these tensors already is, if it is."""
    try:
        module = importlib.import_module(op_builder.MODULE)
        if hasattr(module, f"accumulate_{'cpu' if device_type == 'cpu' else 'gpu'}"):
            return module.__file__
    except ImportError:
        pass
    with contextlib.suppress(KernelBuildError, OSError):
        backend, targets = op_builder.gpu_backend() if device_type == "cuda" else ("cpu", [])
        binary = op_builder.cache_directory() / op_builder.build_key(backend, targets) / "_kernel.so"
        return str(binary) if binary.exists() else None
    return None


def what_is_built() -> Iterator[Finding]:
    for device_type in device_types():
        where = prebuilt(device_type)
        yield Finding("info", f"kernel for {device_type}", where or "not built yet: compiled at first use")


def _compilers() -> Iterator[tuple[str, Callable[[], str], str]]:
    """What is compiled with what: name, the search for it, what would be right."""
    yield "C++ compiler", lambda: " ".join(op_builder.find_cxx()), "install g++, or name a compiler in CXX"
    if torch.version.hip:
        yield "hipcc", op_builder.find_hipcc, "install ROCm's hipcc, or name its root in ROCM_PATH"
    elif torch.version.cuda:
        yield "nvcc", op_builder.find_nvcc, "install the CUDA toolkit, or name its root in CUDA_HOME"


def _deepspeed_compiles() -> bool:
    """Whether DeepSpeed itself compiles: its communication on the CPU, in init_distributed, or it raises."""
    try:
        from deepspeed.accelerator import get_accelerator

        return get_accelerator().device_name() == "cpu"
    except Exception:  # said in its own section
        return False


def what_can_be_compiled() -> Iterator[Finding]:
    needed = not all(map(prebuilt, device_types()))
    missing = "warn" if needed else "info"
    by_deepspeed = _deepspeed_compiles()
    for name, find, advice in _compilers():
        try:
            command = find()
        except KernelBuildError as error:
            if by_deepspeed:
                yield Finding("fail", name, f"{error}; {advice}: DeepSpeed compiles its CPU communication")
            else:
                wanted = advice if needed else "not needed, the kernel is built"
                yield Finding(missing, name, f"{error}; {wanted}")
        else:
            yield Finding("ok", name, f"{shutil.which(command.split()[0])}: {_version_line(command)}")
    ninja = shutil.which("ninja")
    if ninja is None and by_deepspeed:
        yield Finding(
            "fail", "ninja", "is not on PATH, and DeepSpeed compiles its CPU communication: pip install ninja"
        )
    else:
        yield Finding("info", "ninja", ninja or "is not on PATH: only DeepSpeed's own extensions need it")
    try:
        folder = op_builder.cache_directory()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (KernelBuildError, OSError) as error:
        yield Finding(missing, "cache directory", f"cannot be written ({error}); TORCH_EXTENSIONS_DIR names another")
    else:
        yield Finding("ok", "cache directory", str(folder))
        yield from _locks(folder.parent)


def _version_line(command: str) -> str:
    try:
        done = subprocess.run([*command.split(), "--version"], capture_output=True, text=True, timeout=20)
        lines = [line for line in done.stdout.splitlines() if any(map(str.isdigit, line)) and "(c)" not in line.lower()]
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"does not answer ({error})"
    return lines[0].strip() if lines else "no version"


def _locks(root: Path) -> Iterator[Finding]:
    """DeepSpeed's builds wait for ever for a lock file that a killed one left; ours do not."""
    for lock in sorted({*root.glob("*/lock"), *root.glob("*/*/lock")}):
        with contextlib.suppress(OSError):
            age = time.time() - lock.stat().st_mtime
            if "ds_lazyreduce" not in lock.parts and age > LOCK_AGE:
                text = f"is {age / 60:.0f} minutes old, and DeepSpeed's build waits for it for ever: delete it"
                yield Finding("fail", f"lock {lock}", text)


# ---- self-tests


def kernel_test() -> Iterator[Finding]:
    for device_type in device_types():
        name = f"kernel on {device_type}"
        try:
            native = load_kernel("native", device_type)
            wrong = _wrong_cases(native, device_type)
        except KernelBuildError as error:
            reason = " ".join(str(error).split())
            yield Finding("warn", name, f"not available, the torch path is used (same bits, slower): {reason}")
        except RuntimeError as error:  # the driver's or torch's
            yield Finding(
                "fail", name, f"does not run: {error}; train with lazy_reduce.gradient_partition.kernel torch"
            )
        else:
            advice = 'set lazy_reduce.gradient_partition.kernel to "torch" and report it'
            yield (
                Finding("fail", name, f"differs from the torch path ({', '.join(wrong)}); {advice}")
                if wrong
                else Finding("ok", name, "native equals the torch path to the bit (bf16, fp16, fp32; 1 to 5 rows)")
            )


def _wrong_cases(native, device_type: str) -> list[str]:
    oracle, wrong = load_kernel("torch", "cpu"), []
    draw = torch.Generator().manual_seed(0)
    for wire in (torch.bfloat16, torch.float16, torch.float32):
        for rows, size in ((1, 1), (2, 31), (3, 4097), (4, 100_000), (5, 100_003)):
            received = torch.randn(rows, size, generator=draw).to(wire)
            expected = torch.randn(size, generator=draw)
            result = expected.clone().to(device_type)
            oracle(expected, received, 1 / rows)
            native(result, received.to(device_type), 1 / rows)
            if not torch.equal(result.cpu().view(torch.int32), expected.view(torch.int32)):
                wrong.append(f"{wire} [{rows}, {size}]")
    return wrong


def collective_test(seconds: float) -> Iterator[Finding]:
    """One rank a device, or two on the CPU, each a process of its own; see ``doctor_ranks.py``."""
    from deepspeed.accelerator import get_accelerator

    chosen = get_accelerator()
    ranks = 2 if chosen.device_name() == "cpu" else max(1, min(chosen.device_count(), MOST_RANKS))
    name = f"all-to-all, {ranks} local rank{'s' * (ranks > 1)}, {chosen.communication_backend_name()}"
    failure = run_ranks(ranks, seconds)
    if failure is None:
        yield Finding("ok", name, "the fp32 sum of all ranks is exact on every rank")
    else:
        advice = "if it hangs, see the locks above; gloo and NCCL take the interface of GLOO_/NCCL_SOCKET_IFNAME"
        yield Finding("fail", name, f"{failure} ({advice})")


def run_ranks(ranks: int, seconds: float) -> str | None:
    """Run the ranks' self-test; returns what went wrong, or None. Leaves no process behind."""
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    here = str(Path(__file__).resolve().parent.parent)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    deadline = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch, contextlib.ExitStack() as started:
        processes, logs = [], [Path(scratch, f"rank{rank}") for rank in range(ranks)]
        for rank, log in enumerate(logs):
            command = [sys.executable, "-m", "ds_lazyreduce.doctor_ranks", str(rank), str(ranks), f"{scratch}/store"]
            output = started.enter_context(open(log, "w"))
            process = subprocess.Popen(
                command, env={**environment, "LOCAL_RANK": str(rank)}, stdout=output, stderr=output, cwd=scratch
            )
            started.callback(process.wait)
            started.callback(process.kill)
            processes.append(process)
        late = []
        for rank, process in enumerate(processes):
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                late.append(rank)
        bad = [rank for rank, process in enumerate(processes) if process.returncode]
        if bad:  # before those that wait for it
            return f"rank {bad[0]}: {_last_line(logs[bad[0]])}"
        if late:
            return (
                f"ranks {late} did not finish within {seconds:.0f} s; the first stopped at: {_last_line(logs[late[0]])}"
            )
    return None


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1].strip() if lines else "no output"


# ---- the page


def examine(seconds: float) -> dict[str, list[Finding]]:
    """All findings by section; takes as long as a build and ``seconds`` for the collective."""
    page = {
        "versions": list(versions()),
        "DeepSpeed": list(deepspeed_support()),
        "accelerator": list(accelerator()),
        "built": list(what_is_built()),
        "can be compiled": list(what_can_be_compiled()),
    }
    page["self-test"] = list(kernel_test())
    if all(finding.status != "fail" for finding in [*page["DeepSpeed"], *page["accelerator"]]):
        page["self-test"] += collective_test(seconds)
    else:
        page["self-test"].append(Finding("info", "all-to-all", "not tried: DeepSpeed does not work here"))
    return page


def render(page: dict[str, list[Finding]]) -> str:
    marks = {"ok": "[ OK ]", "warn": "[WARN]", "fail": "[FAIL]", "info": "      "}
    lines = ["-" * 100, "ds_lazyreduce: what works here", "-" * 100]
    for section, findings in page.items():
        lines.append(section)
        for finding in findings:
            lines.append(f"  {marks[finding.status]} {finding.name:<20} {finding.detail}")
    counts = [sum(f.status == status for found in page.values() for f in found) for status in ("fail", "warn")]
    return "\n".join([*lines, "-" * 100, f"{counts[0]} failed, {counts[1]} warnings"])


def main(argv: list[str] | None = None) -> int:
    """Entry point of ``python -m ds_lazyreduce.doctor``."""
    parser = argparse.ArgumentParser(prog="ds_lazyreduce.doctor", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="the findings as JSON on standard output")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for the ranks' self-test (default: 120)")
    args = parser.parse_args(argv)
    if not args.timeout > 0:
        parser.error(f"argument --timeout: got {args.timeout:g}; expected seconds above 0")
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed logs to standard output
        page = examine(args.timeout)
    if args.json:
        print(json.dumps({section: list(map(dataclasses.asdict, found)) for section, found in page.items()}, indent=2))
    else:
        print(render(page))
    return int(any(finding.status == "fail" for found in page.values() for finding in found))


if __name__ == "__main__":
    sys.exit(main())
