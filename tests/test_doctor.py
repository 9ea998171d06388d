"""The doctor's page: each thing that can be amiss is simulated, and named together with what would be right."""

import os
import subprocess
import sys
import time

import pytest

from ds_lazyreduce import doctor, op_builder

from .launcher import job_env


def page(**environment):
    """The exit code and text of the page."""
    command = [sys.executable, "-m", "ds_lazyreduce.doctor"]
    done = subprocess.run(command, env={**job_env(), **environment}, capture_output=True, text=True, timeout=150)
    assert "Traceback" not in done.stdout + done.stderr
    return done.returncode, done.stdout


def failures(rows):
    return {row.name: f"{row.finding}; {row.advice}" for row in rows if row.advice}


def test_all_is_well(extensions_dir):
    code, text = page()
    assert code == 0, text
    for line in ("this DeepSpeed: supported", "kernel, cpu: native, equal", "gloo: works", "all is well"):
        assert line in text


def test_an_unsupported_deepspeed_without_a_compiler(tmp_path):
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").write_text('__version__ = "9.9.9"\n')
    code, text = page(
        PYTHONPATH=os.pathsep.join([str(tmp_path), job_env()["PYTHONPATH"]]),
        CXX="no-such-compiler",
        TORCH_EXTENSIONS_DIR=str(tmp_path / "cache"),
    )
    assert code == 1
    assert "deepspeed: 9.9.9" in text and "[FAIL] this DeepSpeed: not supported" in text
    assert "[FAIL] C++ compiler: no C++ compiler was found on PATH (CXX asks for 'no-such-compiler')" in text
    assert "[FAIL] kernel, cpu: no native kernel" in text and "gloo: works" in text


def test_a_deepspeed_that_lacks_a_seam(monkeypatch):
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    monkeypatch.delattr(DeepSpeedZeroOptimizer, "create_gradient_handling_hooks")
    message = failures(doctor.support())["this DeepSpeed"]
    assert (
        "DeepSpeedZeroOptimizer.create_gradient_handling_hooks does not exist" in message
        and "deepspeed==0.19.8" in message
    )


def test_a_missing_gpu_compiler(monkeypatch, tmp_path):
    monkeypatch.setattr(op_builder, "gpu_backend", lambda: ("hip", ["gfx942"]))
    monkeypatch.setenv("PATH", str(tmp_path))
    found = failures(doctor.compilers())
    assert "ROCM_PATH" in found["hipcc"] and "install g++" in found["C++ compiler"]


def test_a_cache_that_is_no_directory(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "file"))
    assert "TORCH_EXTENSIONS_DIR" in failures(doctor.cache())["cache"]


@pytest.mark.parametrize("minutes, amiss", [(0, False), (60, True)])
def test_locks(monkeypatch, tmp_path, minutes, amiss):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    for extension in ("deepspeed_shm_comm", "ds_lazyreduce/cpu-0"):  # ours is no trouble at any age
        lock = tmp_path / extension / "lock"
        lock.parent.mkdir(parents=True)
        lock.touch()
        os.utime(lock, (time.time() - 60 * minutes,) * 2)
    found = failures(doctor.cache())
    assert list(found) == (["stale lock"] if amiss else [])
    assert not amiss or str(tmp_path / "deepspeed_shm_comm") in found["stale lock"]


def test_a_kernel_that_is_wrong(monkeypatch):
    from ds_lazyreduce import accumulate

    real = accumulate.load_kernel

    def load(name, device):
        kernel = real("torch", device)
        return kernel if name == "torch" else lambda out, received, scale: kernel(out, received, scale * 1.000001)

    monkeypatch.setattr(accumulate, "load_kernel", load)
    assert "differ in bfloat16, float16, float32" in failures(doctor.kernel())["kernel, cpu"]


@pytest.mark.parametrize("program, finding", [("import time; time.sleep(60)", "within 1 s"), ("1 / 0", "ZeroDivision")])
def test_ranks_that_hang_or_die(monkeypatch, program, finding):
    monkeypatch.setattr(doctor, "_RANK", program)
    seconds = 1 if "sleep" in program else 60
    (message,) = failures(doctor.collective(seconds=seconds)).values()
    assert finding in message


def test_a_check_that_raises_is_a_row(monkeypatch):
    def broken():
        raise OSError("no luck")

    monkeypatch.setattr(doctor, "SECTIONS", {"One": (broken,)})
    assert list(doctor.examine()) == [("One", [doctor.Row("broken", "OSError: no luck", "see the rows above")])]
