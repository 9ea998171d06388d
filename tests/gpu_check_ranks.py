"""One rank of gpu_check.py: ``gpu_check_ranks.py memory|overlap cuda|cpu FOLDER``, under torch's launcher."""

import gc
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from ds_lazyreduce import initialize

LAYERS = 64


class Layers(torch.nn.Module):
    """Square layers in a row; ``on_gradient()`` is called as backward leaves each of them."""

    def __init__(self, width):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width, bias=False) for _ in range(LAYERS))
        self.on_gradient = None

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
            if self.on_gradient:
                x.register_hook(lambda grad: self.on_gradient())
        return x.float().square().mean()


def make(width, buckets, device):
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True,
        "lazy_reduce": {
            "enabled": True, "deferred_loss": {"enabled": False},
            "gradient_partition": {"bucket_size": width * width * LAYERS // buckets},
        },
    }  # fmt: skip
    model = Layers(width).to(device)
    return initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3), config=config)[0]


def step(engine, width, device):
    engine.backward(engine(torch.ones(256, width, dtype=torch.bfloat16, device=device)))
    engine.step()


def memory(device):
    width = 32 if device.type == "cpu" else 2048
    what = "resident set of the process" if device.type == "cpu" else "memory allocated on the device"

    def now():
        if device.type == "cuda":
            return torch.cuda.memory_allocated()
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    found = []
    for buckets in (4, 16, 64):
        engine = make(width, buckets, device)
        for _ in range(3):
            step(engine, width, device)
        curve = [now()]
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        engine.module.on_gradient = lambda curve=curve: curve.append(now())
        step(engine, width, device)
        curve.append(now())
        report = engine.lazy_reduce_report()
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else max(curve)
        found.append({
            "buckets": report["buckets"], "curve": curve, "peak_bytes": peak - curve[0], "report": report,
            "peak_buckets": report["peak_buffer_bytes"] / (2 * width * width * LAYERS // buckets),
        })  # fmt: skip
        engine.destroy()
        del engine
        gc.collect()
    return {"what": f"{what}, above rest", "buckets": found}


def overlap(device, folder):
    width = 32 if device.type == "cpu" else 2048
    engine = make(width, 16, device)
    for _ in range(3):
        step(engine, width, device)
    with torch.profiler.profile() as profiler:
        step(engine, width, device)
        if device.type == "cuda":
            torch.cuda.synchronize()
    trace = Path(folder, f"trace{dist.get_rank()}.json")
    profiler.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    kinds = {"collectives": [], "accumulate": [], "the rest": []}
    for event in kernels:
        name = event["name"].lower()
        kind = "collectives" if "nccl" in name else "accumulate" if "accumulate_kernel" in name else "the rest"
        kinds[kind].append((event["ts"], event["ts"] + event["dur"], event["args"].get("stream")))
    total = sum(end - begin for begin, end, _ in kinds["collectives"])
    both = covered(kinds["collectives"], kinds["accumulate"] + kinds["the rest"])
    streams = {kind: sorted({stream for *_, stream in found}) for kind, found in kinds.items()}
    return {"events": len(events), "streams": streams, "overlapped": both / total if total else 0.0}


def covered(spans, others):
    """Time within ``spans`` in which some of ``others`` runs as well."""
    merged = []
    for begin, end, _ in sorted(others):
        if merged and begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    return sum(max(0.0, min(end, e) - max(begin, b)) for begin, end, _ in spans for b, e in merged)


def main():
    job, device_type, folder = sys.argv[1:]
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    result = memory(device) if job == "memory" else overlap(device, folder)
    result["ranks"] = dist.get_world_size()
    Path(folder, f"rank{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
