"""gpu_check.sh without a GPU: its rehearsal on the CPU, and what it says where it cannot run."""

import json
import os
import subprocess

import pytest
import torch

from .gpu_check_ranks import covered
from .launcher import ROOT


def run_check(*arguments, **environment):
    command = ["bash", str(ROOT / "tests" / "gpu_check.sh"), *arguments]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=240)


def test_rehearsal(warm_extensions, tmp_path):
    done = run_check("--device", "cpu", OUT=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "gpu_check.json").read_text())
    assert found["machine"]["device"].startswith("CPU: a rehearsal")
    checks = found["checks"]
    status = {name: check["status"] for name, check in checks.items()}
    assert status.pop("sanitizer") == "skipped"
    assert set(status.values()) == {"ok"} and len(status) == 5
    assert checks["correctness"]["data"]["cases"] > 190
    assert [case["buckets"] for case in checks["memory"]["data"]["buckets"]] == [4, 16, 64]
    assert checks["memory"]["data"]["ranks"] == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu():
    done = run_check()
    assert done.returncode == 2 and "no GPU" in done.stdout


def test_without_torch(tmp_path):
    done = run_check(PYTHON="/bin/false")
    assert done.returncode == 2 and "/bin/false has no torch" in done.stdout


def test_covered_time():
    spans = [(0.0, 10.0, 1), (20.0, 30.0, 1)]
    assert covered(spans, [(5.0, 8.0, 2), (6.0, 12.0, 2), (29.0, 40.0, 3)]) == 6.0
    assert covered(spans, []) == 0.0
