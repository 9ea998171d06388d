"""The doctor's page, here and on machines that lack something: it names what is missing, and never fails itself."""

import json
import os
import subprocess
import sys
import time

import pytest
import torch

from ds_lazyreduce import doctor, op_builder
from ds_lazyreduce.op_builder import KernelBuildError

from .launcher import ROOT


def run_doctor(cwd, **environment):
    """The page as `{name: finding}` and the exit code."""
    done = subprocess.run(
        [sys.executable, "-m", "ds_lazyreduce.doctor", "--json"],
        cwd=cwd, env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    return by_name(found for section in json.loads(done.stdout).values() for found in section), done.returncode


def by_name(findings):
    return {found["name"]: found for found in findings}


def statuses(findings):
    return [finding.status for finding in findings]


def test_this_machine(extensions_dir, tmp_path):
    page, code = run_doctor(tmp_path)
    assert code == 0, page
    assert page["torch"]["detail"].startswith(torch.__version__)
    assert page["this DeepSpeed"]["status"] == "ok"
    assert page["all-to-all, 2 local ranks, gloo"]["status"] == "ok"
    try:
        op_builder.find_cxx()
    except KernelBuildError:
        return
    assert page["kernel on cpu"]["status"] == "ok"


def test_no_compiler_and_no_cache(tmp_path):
    """The kernel has its torch path; DeepSpeed on the CPU has none, and is named."""
    (tmp_path / "file").touch()
    page, code = run_doctor(tmp_path, PATH=str(tmp_path), CXX="", TORCH_EXTENSIONS_DIR=str(tmp_path / "file"))
    assert code == 1, page
    assert page["C++ compiler"]["status"] == "fail" and "install g++" in page["C++ compiler"]["detail"]
    assert page["ninja"]["status"] == "fail" and "pip install ninja" in page["ninja"]["detail"]
    assert "TORCH_EXTENSIONS_DIR names another" in page["cache directory"]["detail"]
    assert page["kernel on cpu"]["status"] == "warn" and "torch path is used" in page["kernel on cpu"]["detail"]
    assert page["all-to-all, 2 local ranks, gloo"]["status"] == "ok"


def test_an_unsupported_deepspeed(monkeypatch):
    from ds_lazyreduce import registration

    owner = registration.DeepSpeedEngine
    monkeypatch.setitem(registration._SEAMS, (owner, "_gone"), set())
    monkeypatch.setattr(doctor, "kernel_test", lambda: [])
    page = doctor.examine(seconds=1)
    (finding,) = page["DeepSpeed"]
    assert finding.status == "fail"
    assert (
        'pip install "deepspeed==0.19.8"' in finding.detail and "DeepSpeedEngine._gone does not exist" in finding.detail
    )
    assert "not tried" in page["self-test"][-1].detail


def test_a_deepspeed_that_cannot_be_imported(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ds_lazyreduce.registration", None)
    monkeypatch.setattr(doctor, "kernel_test", lambda: [])
    assert doctor.main([]) == 1
    assert "[FAIL] this DeepSpeed" in capsys.readouterr().out


def test_a_stale_lock_of_deepspeed(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    fresh, stale = tmp_path / "fresh_op" / "lock", tmp_path / "stale_op" / "lock"
    for lock in (fresh, stale, tmp_path / "ds_lazyreduce" / "cpu-0" / "lock"):  # ours are harmless
        lock.parent.mkdir(parents=True)
        lock.touch()
        if lock != fresh:
            os.utime(lock, (time.time() - 3600,) * 2)
    (finding,) = [f for f in doctor.what_can_be_compiled() if f.status == "fail"]
    assert str(stale) in finding.name and "60 minutes old" in finding.detail and "delete it" in finding.detail


def test_a_kernel_that_is_wrong(monkeypatch):
    class Wrong:
        def __call__(self, partition, received, scale):
            partition.add_(received.sum(0), alpha=scale)  # rounds to the wire dtype at every add

    monkeypatch.setattr(doctor, "load_kernel", lambda name, device: Wrong() if name == "native" else LOAD(name, device))
    (finding,) = doctor.kernel_test()
    assert finding.status == "fail" and "torch.bfloat16 [3, 4097]" in finding.detail


LOAD = doctor.load_kernel


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("raise SystemExit('no interface found')", "rank 0: no interface found"),
        ("import time; time.sleep(60)", "did not finish within 1 s"),
    ],
)
def test_ranks_that_fail_or_hang(monkeypatch, tmp_path, code, expected):
    stand_in = tmp_path / "python"
    stand_in.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{code}"\n')
    stand_in.chmod(0o755)
    monkeypatch.setattr(doctor.sys, "executable", str(stand_in))
    failure = doctor.run_ranks(2, seconds=1 if "sleep" in code else 60)
    assert expected in failure


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "soon"])
def test_no_time_for_the_self_test_is_refused(seconds, capsys):
    with pytest.raises(SystemExit) as refused:
        doctor.main(["--timeout", seconds])
    assert refused.value.code == 2 and "argument --timeout" in capsys.readouterr().err


def test_a_variable_that_disables_overlap(monkeypatch):
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    assert "warn" in statuses(doctor.accelerator())
