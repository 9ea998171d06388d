"""The workload ``checkpoint``: what the conversion to and from plain DeepSpeed's layout costs."""

from __future__ import annotations

import os
import shutil
import tempfile

import torch.distributed as dist

from .bench_contenders import Contender, DeepSpeedEngine
from .bench_measure import Options, Times, contenders, now, only, size, take_turns, window
from .bench_models import Shape
from .bench_report import Result, Target


def checkpoint(options: Options) -> Result:
    """Save and load of 16 M elements with AdamW's state, in 8 buckets of two param groups.

    Files go to the directory for temporary files. ``save`` and ``load`` find the page cache there, as DeepSpeed
    syncs nothing; ``synced save`` is the time until the files are on the disk, ``cold load`` reads them from it.
    """
    shape = Shape(layers=16, tensors=4, elements=2**18, vectors=2)
    setting = options.setting(shape, micro_steps=1, bucket=2**21, split="decay")
    folder: list = [tempfile.mkdtemp(prefix="ds_lazyreduce-bench-") if options.rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    (folder,) = folder

    def one_round(contender: Contender, index: int) -> Times:
        window(contender, setting.micro_steps)
        contender.step()
        target = os.path.join(folder, "checkpoint")
        if options.rank == 0:
            shutil.rmtree(target, ignore_errors=True)
            os.sync()  # what the one before left to be written is not this one's to wait for
        dist.barrier()
        start = now()
        contender.engine.save_checkpoint(target, tag="now")
        times = {"save": (now() - start) * 1e3}
        if options.rank == 0:
            _to_disk(target)
        dist.barrier()
        times["synced save"] = (now() - start) * 1e3
        for what in ("cold load", "load"):
            if options.rank == 0 and what == "cold load":
                _to_disk(target, forget=True)
            dist.barrier()
            start = now()
            contender.engine.load_checkpoint(target, tag="now")
            times[what] = (now() - start) * 1e3
        return times

    notes: list[str] = []
    try:
        with contenders(options, setting, options.contenders or ("zero2", "lazy"), notes) as built:
            built = only(built, lambda contender: isinstance(contender, DeepSpeedEngine), "checkpoint", notes)
            samples = take_turns(options, "checkpoint", built, one_round)
            notes += [_memory(name, contender) for name, contender in built.items() if contender.is_lazy]
    finally:
        if options.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    result = Result(
        workload="checkpoint",
        title=f"{size(setting)}, buckets of {setting.bucket:,}, 2 param groups, AdamW",
        unit="ms",
        primary="synced save",
        baselines=("zero2",),
        samples=samples,
        targets=[
            target
            for ranks in (2, 4)
            for metric in ("synced save", "cold load")
            for target in options.targets(Target("lazy", "zero2", 1.3, ranks, metric))
        ],
        notes=notes,
    )
    for name in samples.keys() - {"zero2"}:
        ratios = {metric: result.ratio(name, "zero2", metric) for metric in ("save", "cold load", "load")}
        if "zero2" in samples:
            notes.append(f"{name} / zero2: " + ", ".join(f"{metric} {ratio:.2f}" for metric, ratio in ratios.items()))
    return result


def _to_disk(folder: str, forget: bool = False) -> None:
    """Waits until the files are on the disk; ``forget``: and no longer in the page cache, where the system can."""
    for directory, _, names in os.walk(folder):
        for name in names:
            file = os.open(os.path.join(directory, name), os.O_RDONLY)
            try:
                os.fsync(file)
                if forget and hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(file)


def _memory(name: str, contender: DeepSpeedEngine) -> str:
    taken = {what: f"{count / 2**20:.1f} MiB" for what, count in contender.engine.optimizer.conversion_bytes().items()}
    return (
        f"{name}: conversion took {taken['device']} of buffers on the device (bound {taken['cap']}), "
        f"{taken['staging']} of their copies on the host and {taken['host']} of host tensors a rank"
    )
