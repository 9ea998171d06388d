"""Starts jobs with the real `deepspeed` launcher, and leaves no process behind."""

import contextlib
import os
import signal
import socket
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def job_env():
    """The environment of this process, with this checkout importable from any directory."""
    return {**os.environ, "PYTHONPATH": str(ROOT)}


@contextlib.contextmanager
def started(module, arguments, cwd, *, ranks=2):
    """A running `deepspeed --module` job, a process group of its own; killed as a whole at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launcher = ["deepspeed", "--num_accelerators", str(ranks), "--master_port", str(port)]
    job = subprocess.Popen(
        [*launcher, "--module", module, *map(str, arguments)],
        cwd=cwd,
        env=job_env(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield job
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.stdout.close()
        job.stderr.close()
        job.wait()


def launch(module, arguments, cwd, *, ranks=2, timeout=120):
    """Run a job to its end; returns `(exit code, stdout, stderr)`."""
    with started(module, arguments, cwd, ranks=ranks) as job:
        stdout, stderr = job.communicate(timeout=timeout)
        return job.returncode, stdout, stderr
