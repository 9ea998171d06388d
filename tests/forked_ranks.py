"""Runs many small jobs whose ranks are forks of one process that has imported DeepSpeed already.

    python -m tests.forked_ranks FOLDER < cases.json

A case is a fault of `tests.faulty_job`, or null: the job is run with the fault, in a folder of its own; its
survivors are waited for; then the job is started once more, without a fault, to resume. What happened is
printed as JSON. (Importing DeepSpeed in every rank of every case would take minutes.)
"""

import faulthandler
import gc
import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path

CASES_AT_ONCE = 4
PATIENCE = 30  # seconds after which a rank counts as hung


def _preload():
    import torch

    # DeepSpeed decorates an optimizer that is not used here with it: seconds, and much memory to fork.
    torch.compile = lambda function=None, **kwargs: function or (lambda decorated: decorated)
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    import torch._dynamo  # noqa: F401

    import ds_lazyreduce.registration  # noqa: F401
    from ds_lazyreduce.accumulate import load_kernel

    from . import faulty_job  # noqa: F401

    load_kernel("auto", "cpu")
    # An extension of DeepSpeed's own for inference, looked for at every start.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked safely"
    gc.collect()
    gc.freeze()


def _fork(function, *args):
    """The id of a new process that calls `function`; after an error it exits as Python does, with all that it does."""
    pid = os.fork()
    if pid:
        return pid
    try:
        function(*args)
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    sys.stdout.flush()
    os._exit(0)  # the way out is of interest after a failure only, and takes as long as all the rest


def _rank(rank, ranks, port, folder, fault, log):
    from .faulty_job import run_job

    for stream in (1, 2):
        os.dup2(log, stream)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    run_job(folder, fault)


def _run(folder, fault):
    """Status, end (by time.monotonic) and outcome of every rank; a status of None for a rank that hung."""
    from .faulty_job import RANKS

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = os.open(f"{folder}/log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    pids = [_fork(_rank, rank, RANKS, port, folder, fault, log) for rank in range(RANKS)]
    os.close(log)
    ended = {}
    awaited = [rank for rank in range(RANKS) if fault is None or fault.kind != "stop" or rank != fault.rank]
    deadline = time.monotonic() + PATIENCE
    while len(ended) < len(awaited) and time.monotonic() < deadline:
        for rank in awaited:
            if rank not in ended and os.waitpid(pids[rank], os.WNOHANG)[0]:
                ended[rank] = time.monotonic()
        time.sleep(0.02)
    for rank in set(awaited) - set(ended):
        os.kill(pids[rank], signal.SIGUSR1)  # says in the log where it hangs
        time.sleep(0.2)
    for rank in range(RANKS):
        if rank not in ended:
            os.kill(pids[rank], signal.SIGKILL)
            os.waitpid(pids[rank], 0)
    outcomes = {}
    for rank in range(RANKS):
        file = Path(folder, f"outcome-{rank}.json")
        outcomes[rank] = json.loads(file.read_text()) if file.exists() else None
        file.unlink(missing_ok=True)
    return [{"ended": ended.get(rank), "outcome": outcomes[rank]} for rank in range(RANKS)]


def _supervise(folder, fault):
    folder.mkdir()
    report = {"faulty": _run(folder, fault), "resumed": None, "happened": None}
    if fault is not None:
        marker = folder / "fault"
        report["happened"] = float(marker.read_text()) if marker.exists() else None
        report["latest"] = (folder / "latest").read_text()
        report["resumed"] = _run(folder, None)
    report["log"] = (folder / "log").read_text()[-20000:]
    (folder / "report.json").write_text(json.dumps(report))


def main():
    _preload()
    from .faulty_job import Fault

    cases = [case and Fault(*case) for case in json.load(sys.stdin)]
    root, running = Path(sys.argv[1]), set()
    for index, fault in enumerate(cases):
        if len(running) == CASES_AT_ONCE:
            running.discard(os.wait()[0])
        running.add(_fork(_supervise, root / str(index), fault))
    while running:
        running.discard(os.wait()[0])


if __name__ == "__main__":
    main()
