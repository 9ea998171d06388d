"""The checks that need a GPU; started by gpu_check.sh. With ``--device cpu`` a rehearsal: the same code, tiny sizes."""

import argparse
import datetime
import importlib.util
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import types
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
BUDGET = 225.0  # seconds in all
NEEDED = ("pydantic", "deepspeed")
WIRES = (torch.bfloat16, torch.float16, torch.float32)

if any(importlib.util.find_spec(name) is None for name in NEEDED):
    # The kernel alone needs neither: a package whose __init__, which reads configs, is not run.
    package = types.ModuleType("ds_lazyreduce")
    package.__path__ = [str(ROOT / "ds_lazyreduce")]
    sys.modules["ds_lazyreduce"] = package

from ds_lazyreduce import op_builder  # noqa: E402
from ds_lazyreduce.accumulate import fused_accumulate, load_kernel  # noqa: E402


class Skipped(Exception):
    """A check that cannot run here; the message says why."""


def check(condition, message):
    if not condition:
        raise AssertionError(message)


def bits(tensor):
    tensor = tensor.cpu()
    return torch.where(tensor.isnan(), torch.nan, tensor).view(torch.int32)


# ---- the checks: each returns (one line for the table, data)


def build(options):
    """From nothing, in a cache of this run's own."""
    start = time.monotonic()
    kernel = load_kernel("native", options.device)
    seconds = time.monotonic() - start
    backend, targets = op_builder.gpu_backend() if options.device == "cuda" else ("cpu", [])
    return f"{kernel.name} for {backend} {' '.join(targets)}, {seconds:.1f} s", {"seconds": seconds, "targets": targets}


def cases():
    """(partition, received, scale) on the CPU: rows 1 to 9, odd sizes, misaligned views, special values."""
    draw = torch.Generator().manual_seed(0)
    for wire in WIRES:
        for rows in range(1, 10):
            for size, shift in ((1, 0), (31, 0), (1024, 0), (1000, 8), (1001, 1), (4099, 3), (65_537, 0)):
                received = torch.randn(rows, size + shift, generator=draw).to(wire)[:, shift:]
                yield torch.randn(size + shift, generator=draw)[shift:], received, 1 / rows
    for wire in WIRES[:2]:  # every value: subnormals, both zeros, infinities, NaN
        every = torch.arange(1 << 16).to(torch.int16).view(wire)
        for scale in (1.0, 1e-45, float("inf")):
            yield torch.full((1 << 16,), -0.0), torch.stack([every, every.roll(1)]), scale
    values = torch.tensor([0.0, -0.0, 1e-45, -1e-40, 3e38, -3e38, float("inf"), float("-inf"), float("nan"), 1.0])
    yield torch.zeros(100), torch.cartesian_prod(values, values).t().contiguous(), 0.5


def on_device(partition, received, device):
    """Copies with the same alignment: views of allocations one row longer."""
    shift = received.storage_offset() % 16
    copies = torch.empty(received.shape[0], received.shape[1] + shift, dtype=received.dtype, device=device)
    out = torch.empty(partition.numel() + shift, device=device)
    copies[:, shift:].copy_(received)
    out[shift:].copy_(partition)
    return out[shift:], copies[:, shift:]


def correctness(options):
    """Against float64 within one rounding an add, and to the bit against the torch path on the CPU."""
    oracle, count, torch_differs, worst = load_kernel("torch", "cpu"), 0, 0, 0.0
    for partition, received, scale in cases():
        expected = partition.clone()
        oracle(expected, received, scale)
        result, copies = on_device(partition, received, options.device)
        here = result.clone()
        fused_accumulate(result, copies, scale, kernel="native")
        fused_accumulate(here, copies, scale, kernel="torch")
        what = f"{received.dtype} {list(received.shape)} scale {scale}"
        check(torch.equal(bits(result), bits(expected)), f"{what}: differs from the torch path on the CPU")
        torch_differs += not torch.equal(bits(here), bits(expected))
        wide = received.double()
        exact, magnitude = partition.double() + scale * wide.sum(0), partition.abs() + abs(scale) * wide.abs().sum(0)
        finite = exact.isfinite() & (exact.abs() < 1e38)
        if finite.any() and scale in (1.0, *(1 / n for n in range(1, 10))):
            error = ((result.cpu().double() - exact).abs() / (magnitude + 1e-30))[finite & (magnitude > 1e-30)]
            bound = (received.shape[0] + 1) * torch.finfo(torch.float32).eps
            worst = max(worst, float((error / bound).max()) if error.numel() else 0.0)
            check(worst <= 1.0, f"{what}: off float64 by {worst:.2f} of the bound")
        count += 1
    line = f"{count} cases equal the CPU's torch path to the bit; off float64 by {worst:.2f} of the bound at most"
    line += f"; torch path here differs in {torch_differs}" if torch_differs else "; so is the torch path here"
    return line, {"cases": count, "worst_of_bound": worst, "torch_path_here_differs": torch_differs}


def seconds_of(call, options):
    """Median time of one call."""
    for _ in range(3):
        call()
    samples = []
    for _ in range(5 if options.device == "cpu" else 20):
        if options.device == "cpu":
            start = time.perf_counter()
            call()
            samples.append(time.perf_counter() - start)
        else:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            end.synchronize()
            samples.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(samples)


def bandwidth(options):
    """Against a copy that moves as many bytes, and against torch.sum(dtype=float32) and add_."""
    size = 2**16 if options.device == "cpu" else 2**26
    rows, native, data = 8, load_kernel("native", options.device), {}
    for wire in WIRES:
        received = torch.randn(rows, size, device=options.device).to(wire)
        partition = torch.zeros(size, device=options.device)
        moved = received.nbytes + 2 * partition.nbytes
        source = torch.empty(moved // 2, dtype=torch.uint8, device=options.device)
        target = torch.empty_like(source)

        def summed(received=received, partition=partition):
            partition.add_(torch.sum(received, 0, dtype=torch.float32), alpha=0.5)

        times = {
            "native": seconds_of(lambda r=received, p=partition: native(p, r, 0.5), options),
            "copy": seconds_of(lambda t=target, s=source: t.copy_(s), options),
            "sum_add": seconds_of(summed, options),
        }
        data[str(wire).removeprefix("torch.")] = {"bytes": moved, "seconds": times}
        del received, partition, source, target
    parts = []
    for wire, found in data.items():
        s = found["seconds"]
        rate = found["bytes"] / s["native"] / 1e9
        parts.append(
            f"{wire} {rate:.0f} GB/s ({s['copy'] / s['native']:.2f} of copy, x{s['sum_add'] / s['native']:.1f} sum+add)"
        )
    return f"[{rows}, {size}]: " + "; ".join(parts), data


def ranks_of(options):
    return max(1, min(8, torch.cuda.device_count())) if options.device == "cuda" else 2


def run_ranks(options, job):
    """``gpu_check_ranks.py`` on every device; rank 0's result."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise Skipped(f"needs {', '.join(missing)}: pip install pydantic deepspeed==0.19.8")
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks_of(options)}",
        ]
        command += [str(ROOT / "tests" / "gpu_check_ranks.py"), job, options.device, folder]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if options.device == "cpu":
            environment["DS_ACCELERATOR"] = "cpu"
        left = max(1.0, options.deadline - time.monotonic())
        with subprocess.Popen(command, env=environment, text=True, start_new_session=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as ranks:  # fmt: skip
            try:
                output, _ = ranks.communicate(timeout=left)
            except subprocess.TimeoutExpired:
                ranks.terminate()  # torch's launcher ends its ranks
                raise AssertionError(f"the ranks did not finish in the {left:.0f} s that were left") from None
        check(ranks.returncode == 0, f"the ranks failed:\n{output[-3000:]}")
        return json.loads(Path(folder, "rank0.json").read_text())


def spark(series):
    low, high = min(series), max(series)
    marks = "▁▂▃▄▅▆▇█"
    every = max(1, len(series) // 24)
    return "".join(marks[int((value - low) / max(1, high - low) * 7)] for value in series[::every])


def memory(options):
    """Over a step with 4, 16 and 64 buckets: what the buffers take, in buckets, and the curve."""
    data = run_ranks(options, "memory")
    for found in data["buckets"]:
        check(
            found["peak_buckets"] <= 3.01, f"{found['buckets']} buckets: buffers of {found['peak_buckets']:.2f} buckets"
        )
    parts = [
        f"{f['buckets']}: {f['peak_buckets']:.1f} buckets, {f['peak_bytes'] / 2**20:.0f} MiB {spark(f['curve'])}"
        for f in data["buckets"]
    ]
    return f"{data['ranks']} ranks, {data['what']}; " + "; ".join(parts), data


def overlap(options):
    """Which streams work in a profiled step, and how much of the collectives' time other kernels run as well."""
    data = run_ranks(options, "overlap")
    if options.device == "cpu":
        check(data["events"] > 0, "the profiler saw nothing")
        return f"{data['ranks']} ranks, {data['events']} events traced; no streams on a CPU", data
    streams = ", ".join(f"{kind} on {ids}" for kind, ids in data["streams"].items())
    share = (
        f"{data['overlapped']:.0%} of the collectives' time overlapped"
        if data["ranks"] > 1
        else "1 rank: no collective"
    )
    return f"{data['ranks']} ranks: {streams}; {share}", data


def sanitizer(options):
    """compute-sanitizer's memcheck over the correctness cases of one dtype."""
    tool = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if options.device == "cpu" or tool is None:
        raise Skipped(
            "on the CPU the tests use ASan" if options.device == "cpu" else "compute-sanitizer is not installed"
        )
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", "--kernel-regex", "kns=accumulate_kernel"]
    command += [sys.executable, __file__, "--only", "correctness", "--device", "cuda"]
    try:
        done = subprocess.run(command, capture_output=True, text=True,
                              timeout=max(1.0, options.deadline - time.monotonic()))  # fmt: skip
    except subprocess.TimeoutExpired:
        raise Skipped("did not finish in the time that was left") from None
    output = done.stdout + done.stderr
    if "not supported" in output:
        raise Skipped("does not support this device")
    check(done.returncode == 0 and "ERROR SUMMARY: 0 errors" in output, output[-1500:])
    return "memcheck: 0 errors", {}


CHECKS = {c.__name__: c for c in (build, correctness, bandwidth, memory, overlap, sanitizer)}


def machine(options):
    facts = {"date": f"{datetime.date.today()}", "python": platform.python_version(), "torch": torch.__version__}
    if options.device == "cuda":
        facts |= {"device": torch.cuda.get_device_name(), "devices": torch.cuda.device_count()}
        facts |= {"cuda": torch.version.cuda, "hip": torch.version.hip}
    else:
        facts["device"] = "CPU: a rehearsal, tiny sizes"
    return facts


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS))
    options = parser.parse_args()
    options.deadline = time.monotonic() + BUDGET
    if options.device == "cuda" and not torch.cuda.is_available():
        print("gpu_check: no GPU: torch.cuda.is_available() is False; --device cpu rehearses on the CPU")
        return 2
    results = {}
    with tempfile.TemporaryDirectory() as cache:
        if options.only == list(CHECKS) and options.device == "cuda":
            os.environ["TORCH_EXTENSIONS_DIR"] = cache  # so that the kernel is built now
        for name in options.only:
            start = time.monotonic()
            try:
                check(start < options.deadline, f"no time left of {BUDGET:.0f} s")
                line, data = CHECKS[name](options)
                results[name] = {"status": "ok", "line": line, "data": data}
            except Skipped as reason:
                results[name] = {"status": "skipped", "line": str(reason)}
            except Exception as error:  # the others still run
                results[name] = {"status": "FAILED", "line": f"{error}", "traceback": traceback.format_exc()}
            results[name]["seconds"] = round(time.monotonic() - start, 1)
            print(f"{name}: {results[name]['status']}", file=sys.stderr, flush=True)
    facts = machine(options)
    print("gpu_check: " + ", ".join(f"{key} {value}" for key, value in facts.items() if value))
    for name, found in results.items():
        print(f"{name:<12} {found['status']:<8} {found['seconds']:>6} s  {found['line']}")
    if options.only == list(CHECKS):
        out = Path(os.environ.get("OUT", "."), "gpu_check.json")
        out.write_text(json.dumps({"machine": facts, "checks": results}, indent=2) + "\n")
        print(f"written to {out}")
    return int(any(found["status"] == "FAILED" for found in results.values()))


if __name__ == "__main__":
    sys.exit(main())
