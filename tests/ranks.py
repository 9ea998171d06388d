"""Pools of persistent worker processes, one per rank, for tests that need several ranks.

    pool = RankPool(2)
    pool.run(step, 1.0, key="value")         # -> [result of rank 0, result of rank 1]
    pool.run_expect_error(bad_step)          # -> [RankError of rank 0, RankError of rank 1]

The function must be importable (module level, not a lambda); arguments and results are pickled. Workers keep
their process group, and whatever the function changed in imported modules, from one call to the next, but no
engine: those are destroyed. A pool of its own (`RankPool(...)` in a `with`, or `ranks(n, fresh=True)`) gives
a test new processes.
"""

import dataclasses
import faulthandler
import gc
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import OrderedDict
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
START_TIMEOUT = 240  # seconds for the workers' imports and rendezvous, on a busy machine
GRACE = 5  # seconds the other ranks get to answer once one has failed
WORKER = "import sys; from tests.ranks import serve; serve(int(sys.argv[1]), float(sys.argv[2]))"
LOG_TAIL = 4000  # characters of a silent rank's output shown in a failure


@dataclasses.dataclass(frozen=True)
class RankError:
    """An exception raised on one rank."""

    type: str
    message: str
    traceback: str


class RanksFailed(AssertionError):
    """A call that did not return on every rank: `errors` {rank: RankError}, ranks `hung` and ranks `dead`."""

    def __init__(self, what, errors, hung, dead, logs):
        self.errors, self.hung, self.dead = errors, hung, dead
        errors = dict(sorted(errors.items()))
        parts = [f"rank {rank} raised {error.type}: {error.message}" for rank, error in errors.items()]
        parts += [f"rank {rank} died" for rank in dead] + [f"rank {rank} did not answer" for rank in hung]
        lines = [f"{what}: " + "; ".join(parts)]
        shown = {}
        for rank, error in errors.items():
            first = shown.setdefault(error.traceback, rank)
            text = error.traceback.rstrip() if first == rank else f"(the same as on rank {first})"
            lines += [f"--- rank {rank}: traceback ---", text]
        for rank, log in sorted(logs.items()):
            lines += [f"--- rank {rank}: end of its output ---", log.rstrip()]
        super().__init__("\n".join(lines))


class RankPool:
    """`world_size` worker processes in one gloo group, started at the first call and again after a failure.

    A call that hangs, loses a rank or leaves collectives unmatched costs the pool its processes: they are
    killed, and the next call starts new ones. `pg_timeout` (seconds) bounds every collective.
    """

    def __init__(self, world_size, *, extensions_dir=None, env=None, pg_timeout=60):
        self.world_size = world_size
        self.extensions_dir = extensions_dir or os.environ.get("TORCH_EXTENSIONS_DIR")
        self.env = env or {}
        self.pg_timeout = pg_timeout
        self._workers = []

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()

    @property
    def alive(self):
        return bool(self._workers)

    @property
    def pids(self):
        return [worker.process.pid for worker in self._workers]

    def run(self, fn, *args, timeout=120, **kwargs):
        """Call `fn(*args, **kwargs)` on every rank; the results in rank order, or `RanksFailed`."""
        values, failure = self._call(fn, args, kwargs, timeout)
        if failure is not None:
            raise failure
        return [values[rank] for rank in range(self.world_size)]

    def run_expect_error(self, fn, *args, timeout=120, **kwargs):
        """Call `fn` on every rank and return the `RankError` of each; every rank must raise."""
        values, failure = self._call(fn, args, kwargs, timeout)
        if failure is None:
            raise AssertionError(f"{_name(fn)} on {self.world_size} ranks: no rank raised")
        if len(failure.errors) < self.world_size:
            note = f"an exception was expected on every rank; these returned: {sorted(values)}"
            raise AssertionError(f"{note}\n{failure}") from failure
        return [failure.errors[rank] for rank in range(self.world_size)]

    def close(self):
        """Kill the workers, and what they started, at once."""
        for worker in self._workers:
            worker.kill()
        if self._workers and self.extensions_dir:
            for lock in Path(self.extensions_dir).glob("*/lock"):  # a killed compilation never unlocks
                lock.unlink(missing_ok=True)
        self._workers = []

    def _call(self, fn, args, kwargs, timeout):
        if "<locals>" in fn.__qualname__ or "<lambda>" in fn.__qualname__:
            raise ValueError(f"{_name(fn)} is not importable: move it to module level")
        request = pickle.dumps((fn.__module__, fn.__qualname__, args, kwargs))
        try:
            self._start()
            for worker in self._workers:
                worker.send(request)
            answers, dead = self._collect(timeout)
            return self._judge(f"{_name(fn)} on {self.world_size} ranks", answers, dead, timeout)
        except BaseException:  # the test's own timeout, Ctrl-C, a failed start
            self.close()
            raise

    def _collect(self, timeout):
        """Answers `{rank: (kind, value, sequence numbers)}` and the dead ranks; the rest is still running."""
        answers, dead = {}, []
        pending = {worker.conn: rank for rank, worker in enumerate(self._workers)}
        deadline = time.monotonic() + timeout
        while pending and (left := deadline - time.monotonic()) > 0:
            for conn in wait(list(pending), left):
                rank = pending.pop(conn)
                try:
                    answers[rank] = pickle.loads(conn.recv_bytes())
                except (EOFError, ConnectionError):
                    dead.append(rank)
                if rank in dead or answers[rank][0] == "error":
                    deadline = min(deadline, time.monotonic() + GRACE)
        return answers, dead

    def _judge(self, what, answers, dead, timeout):
        """The values {rank: value} of the ranks that returned, and the `RanksFailed` if some did not."""
        hung = [rank for rank in range(self.world_size) if rank not in answers and rank not in dead]
        errors = {rank: answer[1] for rank, answer in answers.items() if answer[0] == "error"}
        failure = None
        if errors or dead or hung:
            for rank in hung:
                self._workers[rank].dump_stacks()
            logs = {rank: self._workers[rank].log_tail() for rank in [*dead, *hung]}
            if hung and not errors and not dead:
                what += f", after {timeout} s"
            failure = RanksFailed(what, errors, hung, dead, logs)
        sequences = [sequence for _, _, sequence in answers.values()]
        if len(answers) < self.world_size or any(sequence != sequences[0] for sequence in sequences):
            self.close()  # someone is still in a collective, or has one pending
        return {rank: answer[1] for rank, answer in answers.items() if answer[0] == "ok"}, failure

    def _start(self, tries=3):
        while not self._workers:
            self._workers = [_Worker(rank, self) for rank in range(self.world_size)]
            try:
                self._expect("imported")
                port = _free_port()  # as late as can be, so that nobody else takes it
                for worker in self._workers:
                    worker.send(pickle.dumps(port))
                self._expect("ready")
            except RanksFailed:
                self.close()
                tries -= 1
                if not tries:
                    raise

    def _expect(self, state):
        answers, dead = self._collect(START_TIMEOUT)
        silent = [rank for rank in range(self.world_size) if rank not in answers and rank not in dead]
        if dead or silent:
            logs = {rank: self._workers[rank].log_tail() for rank in [*dead, *silent]}
            raise RanksFailed(f"starting {self.world_size} ranks ({state})", {}, silent, dead, logs)


class PoolCache:
    """One pool per world size; only the `limit` most recently used keep their processes, to save memory."""

    def __init__(self, limit=2):
        self.limit = limit
        self._pools = OrderedDict()

    def get(self, world_size, *, fresh=False):
        pool = self._pools.setdefault(world_size, RankPool(world_size))
        self._pools.move_to_end(world_size)
        if fresh:
            pool.close()
        for other in list(self._pools.values())[: -self.limit]:
            other.close()
        return pool

    def close(self):
        for pool in self._pools.values():
            pool.close()


class _Worker:
    """The test process's end of one worker."""

    def __init__(self, rank, pool):
        ours, theirs = socket.socketpair()
        self.conn = Connection(ours.detach())
        self.log = tempfile.TemporaryFile()
        self._log_start = 0
        env = {
            **os.environ,
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(pool.world_size),
            "LOCAL_WORLD_SIZE": str(pool.world_size),
            "MASTER_ADDR": "127.0.0.1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        }
        if pool.extensions_dir:
            env["TORCH_EXTENSIONS_DIR"] = str(pool.extensions_dir)
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(theirs.fileno()), str(pool.pg_timeout)],
            stdin=subprocess.PIPE,  # never written: its end tells the worker that the test process is gone
            stdout=self.log,
            stderr=self.log,
            cwd=ROOT,
            env={**env, **pool.env},
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()

    def send(self, message):
        self._log_start = os.fstat(self.log.fileno()).st_size
        try:
            self.conn.send_bytes(message)
        except ConnectionError:
            pass  # dead: reading the answer will say so

    def dump_stacks(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGUSR1)
            time.sleep(0.2)

    def log_tail(self):
        size = os.fstat(self.log.fileno()).st_size
        start = max(self._log_start, size - LOG_TAIL)
        return os.pread(self.log.fileno(), size - start, start).decode(errors="replace")

    def kill(self):
        try:
            os.killpg(self.process.pid, signal.SIGKILL)  # its own session: compilers it started go too
        except ProcessLookupError:
            pass
        self.process.wait()
        self.process.stdin.close()
        self.conn.close()
        self.log.close()


def _name(fn):
    return f"{fn.__module__}.{fn.__qualname__}"


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# ---- below: what runs in the worker ----


def serve(fd, pg_timeout):
    """Worker process: join the process group, then answer calls until the test process goes away."""
    os.set_inheritable(fd, False)
    conn = Connection(fd)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    faulthandler.register(signal.SIGUSR1, all_threads=True)

    import deepspeed

    conn.send_bytes(pickle.dumps(("imported",)))
    os.environ["MASTER_PORT"] = str(pickle.loads(conn.recv_bytes()))
    deepspeed.init_distributed("gloo", timeout=timedelta(seconds=pg_timeout), verbose=False)
    conn.send_bytes(pickle.dumps(("ready",)))

    pristine_env = dict(os.environ)
    gc.freeze()
    while True:
        try:
            request = conn.recv_bytes()
        except EOFError:
            return
        _drop_process_groups()  # here, not after the last call: by now every rank has finished with them
        answer = _answer(request)
        _clean(pristine_env)
        conn.send_bytes(answer)


def _die_with_parent():
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)


def _answer(request):
    try:
        module, qualname, args, kwargs = pickle.loads(request)
        fn = importlib.import_module(module)
        for part in qualname.split("."):
            fn = getattr(fn, part)
        value = fn(*args, **kwargs)
        return pickle.dumps(("ok", value, _sequence_numbers()))
    except BaseException as error:  # SystemExit and pytest's own outcomes too
        report = RankError(type(error).__name__, str(error), traceback.format_exc())
        return pickle.dumps(("error", report, _sequence_numbers()))


def _sequence_numbers():
    """Collectives started so far in the group of all ranks; ranks that disagree have one pending."""
    import torch.distributed as dist

    return dist.group.WORLD._get_sequence_number_for_group() if dist.is_initialized() else None


def _clean(pristine_env):
    """Undo what a call leaves behind in the process.

    An engine is never collected by itself: its gradient hooks refer back to it, and autograd holds them out
    of the collector's sight. `destroy()` removes them.
    """
    from deepspeed.comm import comm
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.utils import logger

    gc.collect()
    for engine in [o for o in gc.get_objects() if issubclass(type(o), DeepSpeedEngine)]:
        try:
            engine.destroy()
        except Exception:  # half built, perhaps
            traceback.print_exc()
    engine = None
    gc.collect()
    gc.freeze()  # what is left is there to stay (imported modules): no need to search it after every call
    comm.comms_logger.__init__()
    comm.timers.timers.clear()
    logger.warning_once.cache_clear()
    os.environ.clear()
    os.environ.update(pristine_env)
    os.chdir(ROOT)


def _drop_process_groups():
    """Destroy the groups earlier calls made, except DeepSpeed's copy of the world group, which it reuses."""
    import torch.distributed as dist
    from deepspeed.utils import groups

    keep = groups._WORLD_GROUP
    groups._release_process_group_references()
    groups._WORLD_GROUP = keep
    for group in list(dist.distributed_c10d._world.pg_map):
        if group not in (keep, dist.group.WORLD):
            dist.destroy_process_group(group)
