"""What is here, what works, and what would be right; ``python -m ds_lazyreduce.doctor``, a page like ds_report's.

Every check returns rows and prints nothing; a check that raises becomes a failed row. Exit code 0 if no row failed,
else 1. It needs no GPU, no compiler and no supported DeepSpeed to say so.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from . import op_builder
from .op_builder import KernelBuildError
from .version import __version__

COLLECTIVE_SECONDS = 60.0
# torch's own extensions (DeepSpeed's among them) wait for such a file for ever; no build takes so long.
STALE_LOCK_SECONDS = 600.0


class Row(NamedTuple):
    """One line of the page; ``advice`` says what would be right, and is there exactly if the check failed."""

    name: str
    finding: str
    advice: str = ""


def versions() -> list[Row]:
    rows = [Row("ds_lazyreduce", __version__), Row("python", f"{platform.python_version()} ({sys.executable})")]
    for package in ("torch", "deepspeed"):
        try:
            module = importlib.import_module(package)
            rows.append(Row(package, f"{module.__version__} ({Path(module.__file__).parent})"))
        except Exception as error:
            rows.append(Row(package, f"cannot be imported: {_line(error)}", f"pip install {package}"))
    return rows


def support() -> list[Row]:
    """Whether the installed DeepSpeed is one that ``register()`` accepts."""
    try:
        from .registration import check_deepspeed

        check_deepspeed()
    except Exception as error:
        return [Row("this DeepSpeed", f"not supported: {_line(error)}", "pip install deepspeed==0.19.8")]
    return [Row("this DeepSpeed", "supported")]


def accelerator() -> list[Row]:
    import torch

    if not torch.cuda.is_available():
        return [Row("GPU", "torch sees none; the CPU is used")]
    backend, targets = op_builder.gpu_backend()
    names = sorted({torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())})
    return [Row("GPU", f"{torch.cuda.device_count()} x {', '.join(names)} ({backend} {' '.join(targets)})")]


def prebuilt() -> list[Row]:
    try:
        module = importlib.import_module(op_builder.MODULE)
    except ImportError as error:
        if importlib.util.find_spec(op_builder.MODULE) is None:
            return [Row("prebuilt kernel", "none; it is compiled at first use")]
        return [Row("prebuilt kernel", f"does not load: {_line(error)}", "reinstall with DS_BUILD_LAZYREDUCE=1")]
    return [Row("prebuilt kernel", f"CPU{' and GPU' if hasattr(module, 'accumulate_gpu') else ''} ({module.__file__})")]


def compilers() -> list[Row]:
    rows = [_program("C++ compiler", lambda: shutil.which(op_builder.find_cxx()[0]), "install g++, or set CXX")]
    try:
        backend = op_builder.gpu_backend()[0]
    except KernelBuildError:
        backend = "cpu"
    if backend == "cuda":
        rows.append(_program("nvcc", op_builder.find_nvcc, "install the CUDA toolkit, or set CUDA_HOME"))
    if backend == "hip":
        rows.append(_program("hipcc", op_builder.find_hipcc, "install ROCm's compilers, or set ROCM_PATH"))
    ninja = shutil.which("ninja")
    rows.append(Row("ninja", ninja or "not found; only DeepSpeed's own extensions need it (pip install ninja)"))
    return rows


def _program(name: str, find: Callable[[], str | None], advice: str) -> Row:
    try:
        return Row(name, str(find()))
    except KernelBuildError as error:
        return Row(name, _line(error), advice)


def cache() -> list[Row]:
    """The directory of builds: writable, and without a lock that nobody will remove."""
    folder = op_builder.cache_directory()
    advice = "make it writable, or set TORCH_EXTENSIONS_DIR to a directory of your own"
    try:
        there = next(parent for parent in (folder, *folder.parents) if parent.exists())
        with tempfile.TemporaryFile(dir=there):
            rows = [Row("cache", f"{folder} is writable")]
    except OSError as error:
        return [Row("cache", f"{folder} is not writable: {_line(error)}", advice)]
    # Ours are the operating system's and die with their holder.
    locks = [p for pattern in ("*/lock", "*/*/lock") for p in folder.parent.glob(pattern) if folder not in p.parents]
    for lock in locks:
        age = time.time() - lock.stat().st_mtime
        if age > STALE_LOCK_SECONDS:
            rows.append(Row("stale lock", f"{lock} is {age / 60:.0f} minutes old", "delete it if nothing is building"))
        else:
            rows.append(Row("lock", f"{lock}: something is being built"))
    return rows


def kernel() -> list[Row]:
    """Builds the native kernel if need be, and compares it with the torch path to the bit."""
    import torch

    from .accumulate import load_kernel

    rows = []
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        try:
            native = load_kernel("native", device)
        except KernelBuildError as error:
            advice = 'see above; until then kernel "auto" takes the torch path: the same results, slower'
            rows.append(Row(f"kernel, {device}", f"no native kernel: {_line(error)}", advice))
            continue
        differing = []
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            received = torch.randn(5, 10_007, device=device).to(dtype)
            ours = torch.randn(10_007, device=device)
            theirs = ours.clone()
            native(ours, received, 0.3)
            load_kernel("torch", device)(theirs, received, 0.3)
            if not torch.equal(ours.view(torch.int32), theirs.view(torch.int32)):
                differing.append(str(dtype).removeprefix("torch."))
        if differing:
            advice = 'set lazy_reduce.gradient_partition.kernel to "torch", and report it'
            rows.append(Row(f"kernel, {device}", f"native and torch differ in {', '.join(differing)}", advice))
        else:
            rows.append(Row(f"kernel, {device}", "native, equal to the torch path to the bit"))
    return rows


# Alone, without our package: it has to tell whether torch and the machine can do it.
_RANK = """
import sys, datetime, torch, torch.distributed as dist
backend, rank, store = sys.argv[1], int(sys.argv[2]), sys.argv[3]
device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
if backend == "nccl": torch.cuda.set_device(device)
dist.init_process_group(backend, init_method="file://" + store, rank=rank, world_size=2,
                        timeout=datetime.timedelta(seconds=30))
send = torch.arange(8, device=device).add(10 * rank).bfloat16()
received = torch.empty_like(send)
dist.all_to_all_single(received, send)
mine = torch.arange(4 * rank, 4 * rank + 4)
expected = torch.cat([mine, mine + 10]).bfloat16()
dist.barrier()
sys.exit(0 if torch.equal(received.cpu(), expected) else "the all-to-all delivered wrong values")
"""


def collective(seconds: float = COLLECTIVE_SECONDS) -> list[Row]:
    """An all-to-all of two ranks on this machine: over the GPUs if there are two, else over gloo."""
    import torch

    backend = "nccl" if torch.cuda.device_count() > 1 else "gloo"
    name = f"all-to-all, 2 ranks, {backend}"
    advice = "check that local processes can connect (GLOO_SOCKET_IFNAME=lo, NCCL_DEBUG=WARN show and change how)"
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-c", _RANK, backend]
        ranks = [
            subprocess.Popen([*command, str(rank), f"{scratch}/store"], stdout=subprocess.DEVNULL,
                             stderr=subprocess.PIPE, text=True)
            for rank in range(2)
        ]  # fmt: skip
        deadline = time.monotonic() + seconds
        try:
            said = [rank.communicate(timeout=max(deadline - time.monotonic(), 0.01))[1] for rank in ranks]
        except subprocess.TimeoutExpired:
            return [Row(name, f"did not finish within {seconds:g} s", advice)]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
                rank.stderr.close()
    failed = [f"rank {i}: {_last(text)}" for i, (rank, text) in enumerate(zip(ranks, said, strict=True))
              if rank.returncode]  # fmt: skip
    return [Row(name, "; ".join(failed), advice) if failed else Row(name, "works")]


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _last(text: str) -> str:
    return (text.strip().splitlines() or ["ended without a word"])[-1]


SECTIONS: dict[str, tuple[Callable[[], list[Row]], ...]] = {
    "Versions": (versions, support),
    "Devices": (accelerator,),
    "Build": (prebuilt, compilers, cache),
    "Self-test": (kernel, collective),
}


def examine() -> Iterable[tuple[str, list[Row]]]:
    """Sections of the page with their rows, as they are found out."""
    for title, checks in SECTIONS.items():
        rows: list[Row] = []
        for check in checks:
            try:
                rows += check()
            except Exception as error:
                rows.append(Row(check.__name__, f"{type(error).__name__}: {_line(error)}", "see the rows above"))
        yield title, rows


def main() -> int:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)  # DeepSpeed's greetings
    failed = 0
    for title, rows in examine():
        print(f"{title}\n{'-' * len(title)}")
        for row in rows:
            print(f"[{'FAIL' if row.advice else ' ok '}] {row.name}: {row.finding}")
            if row.advice:
                print(f"       right would be: {row.advice}")
                failed += 1
        print(flush=True)
    print(f"{failed} of these failed" if failed else "all is well")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
