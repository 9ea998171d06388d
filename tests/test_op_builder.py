"""Finding and building the kernel: many ranks at once, and everything that can be missing (CASES 15)."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from ds_lazyreduce import op_builder
from ds_lazyreduce.accumulate import load_kernel
from ds_lazyreduce.op_builder import KernelBuildError

from .gpu_modules import check_module

ROOT = Path(__file__).resolve().parent.parent
LIMIT_SECONDS = 60

# What a rank does: choose a kernel, twice, use it, and report.
RANK = """
import json, logging, sys
import torch
from ds_lazyreduce import accumulate, op_builder

warnings = []
handler = logging.Handler()
handler.emit = lambda record: warnings.append(record.getMessage())
logging.getLogger("ds_lazyreduce").addHandler(handler)

kernel, op_builder.LOCK_SECONDS = sys.argv[1], float(sys.argv[2])
report = {"name": None, "error": None}
try:
    for _ in range(2):
        partition = torch.ones(5)
        accumulate.fused_accumulate(partition, torch.ones(2, 5, dtype=torch.bfloat16), 0.5, kernel=kernel)
        assert partition.tolist() == [2.0] * 5
    report["name"] = accumulate.load_kernel(kernel, "cpu").name
except accumulate.KernelBuildError as error:
    report["error"] = str(error)
print(json.dumps({**report, "warnings": warnings, "deepspeed": "deepspeed" in sys.modules}))
"""


@pytest.fixture
def needs_compiler():
    try:
        op_builder.find_cxx()
    except KernelBuildError as error:
        pytest.skip(str(error))


def start_ranks(count, cache, kernel="auto", lock_seconds=20.0, **environment):
    env = {key: value for key, value in os.environ.items() if key not in ("CXX", "TORCH_EXTENSIONS_DIR")}
    env |= {"TORCH_EXTENSIONS_DIR": str(cache), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    env |= environment
    command = [sys.executable, "-c", RANK, kernel, str(lock_seconds)]
    return [subprocess.Popen(command, env=env, stdout=subprocess.PIPE) for _ in range(count)]


def reports_of(ranks):
    """The ranks' reports; the deadline is the cases' own: nobody may wait longer for a kernel."""
    deadline = time.monotonic() + LIMIT_SECONDS
    try:
        outputs = [rank.communicate(timeout=max(deadline - time.monotonic(), 0.1))[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * len(ranks)
    reports = [json.loads(output) for output in outputs]
    assert not any(report["deepspeed"] for report in reports)  # 5 s that a kernel does not need
    return reports


def assert_all_native(reports):
    assert [report["name"] for report in reports] == ["native"] * len(reports)
    assert all(report["warnings"] == [] for report in reports)


def assert_all_fall_back(reports, reason):
    assert [report["name"] for report in reports] == ["torch"] * len(reports)
    for report in reports:
        assert len(report["warnings"]) == 1 and reason in report["warnings"][0]


def assert_all_refuse(reports, reason):
    for report in reports:
        assert report["name"] is None and reason in report["error"] and report["warnings"] == []


def binaries(cache):
    return sorted(cache.rglob("*.so"))


def test_four_ranks_build_once_in_a_cold_cache(needs_compiler, tmp_path):
    # A compiler that counts its calls.
    calls, compiler = tmp_path / "calls", tmp_path / "counting-c++"
    compiler.write_text(f'#!/bin/sh\necho call >> "{calls}"\nexec {op_builder.find_cxx()[0]} "$@"\n')
    compiler.chmod(0o755)
    cache = tmp_path / "a cache; with $(odd) characters"
    assert_all_native(reports_of(start_ranks(4, cache, CXX=str(compiler))))
    assert calls.read_text().split() == ["call"]

    (binary,) = binaries(cache)
    assert binary.parent.stat().st_mode & 0o777 == 0o700
    assert {path.name for path in binary.parent.iterdir()} == {binary.name, "lock"}

    # Once built, neither a compiler nor a writable cache is needed.
    assert_all_native(reports_of(start_ranks(1, cache, kernel="native", PATH="/nowhere")))


@pytest.mark.parametrize("kernel", ["auto", "native"])
def test_four_ranks_without_a_compiler(tmp_path, kernel):
    reports = reports_of(start_ranks(4, tmp_path, kernel, PATH=str(tmp_path)))
    check = assert_all_fall_back if kernel == "auto" else assert_all_refuse
    check(reports, "no C++ compiler was found on PATH (tried c++, g++, clang++)")


@pytest.mark.parametrize("kernel", ["auto", "native"])
def test_four_ranks_with_a_compiler_that_fails(tmp_path, kernel):
    compiler = tmp_path / "broken-c++"
    compiler.write_text("#!/bin/sh\nsleep 1\necho 'error: out of patience' >&2\nexit 3\n")
    compiler.chmod(0o755)
    reports = reports_of(start_ranks(4, tmp_path / "cache", kernel, CXX=str(compiler)))
    check = assert_all_fall_back if kernel == "auto" else assert_all_refuse
    check(reports, "failed with status 3:\nerror: out of patience")
    assert binaries(tmp_path) == []


@pytest.mark.parametrize("kernel", ["auto", "native"])
def test_four_ranks_with_a_cache_that_cannot_be_written(tmp_path, kernel):
    """A file where the folder should be, since no permission stops root."""
    cache = tmp_path / "file"
    cache.write_text("")
    reports = reports_of(start_ranks(4, cache, kernel))
    check = assert_all_fall_back if kernel == "auto" else assert_all_refuse
    check(reports, f"cache directory {cache}")
    check(reports, "is not writable")


# ---- whose code is run


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    binary = tmp_path_factory.mktemp("built") / "_kernel.so"
    op_builder.compile_module("cpu", [], binary)
    return binary


@pytest.fixture
def copies_instead_of_compiling(needs_compiler, built, monkeypatch):
    monkeypatch.setattr(op_builder, "compile_module", lambda backend, targets, binary: shutil.copyfile(built, binary))


def built_in(cache, monkeypatch, chosen=True):
    """A built module in ``cache``, chosen by TORCH_EXTENSIONS_DIR or the default place: (binary, its folder)."""
    for name, value in {"TORCH_EXTENSIONS_DIR": chosen and cache, "XDG_CACHE_HOME": not chosen and cache}.items():
        monkeypatch.setenv(name, str(value)) if value else monkeypatch.delenv(name, raising=False)
    folder = op_builder.cache_directory() / op_builder.build_key("cpu", [])
    op_builder._build_once("cpu", [], folder / "_kernel.so")
    return folder / "_kernel.so", folder


def find_or_build():
    sys.modules.pop(op_builder.MODULE, None)  # as in a new process
    return op_builder._find_or_build("cpu")


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o000])
def test_what_is_built_is_private_and_trusted_under_any_umask(
    copies_instead_of_compiling, tmp_path, monkeypatch, umask
):
    before = os.umask(umask)
    try:
        binary, folder = built_in(tmp_path, monkeypatch, chosen=False)
    finally:
        os.umask(before)
    for path in (folder, folder.parent):
        assert path.stat().st_mode & 0o777 == 0o700
    assert binary.stat().st_mode & 0o022 == 0
    op_builder.check_trusted(binary)


@pytest.mark.parametrize("chosen", [True, False])
@pytest.mark.parametrize("what", ["binary", "folder", "cache"])
def test_a_module_that_others_may_change_is_not_loaded(
    copies_instead_of_compiling, tmp_path, monkeypatch, chosen, what
):
    binary, folder = built_in(tmp_path, monkeypatch, chosen)
    path = {"binary": binary, "folder": folder, "cache": folder.parent}[what]
    path.chmod(0o770)  # a directory that the user chose may belong to a group
    if chosen:
        find_or_build()
    else:
        with pytest.raises(KernelBuildError, match=f"{path.name} is writable by others, so its code is not trusted"):
            find_or_build()
    path.chmod(0o707)
    with pytest.raises(KernelBuildError, match=f"{path.name} is writable by others, so its code is not trusted"):
        find_or_build()


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a file away needs root")
def test_a_module_of_another_user_is_loaded_from_a_chosen_directory_only(
    copies_instead_of_compiling, tmp_path, monkeypatch
):
    binary, _ = built_in(tmp_path, monkeypatch, chosen=False)
    os.chown(binary, 12345, -1)
    with pytest.raises(KernelBuildError, match=r"_kernel.so belongs to another user \(uid 12345\)"):
        find_or_build()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "torch_extensions"))
    assert find_or_build().accumulate_cpu


def test_no_program_comes_from_the_working_directory(tmp_path, monkeypatch):
    for name in ("c++", "nvcc"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    for path in ("", ".", ":/nowhere", "/nowhere:"):
        monkeypatch.setenv("PATH", path)
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("CUDA_HOME", "/nowhere")
        for find in (lambda: op_builder.find_cxx()[0], op_builder.find_nvcc):
            try:
                found = find()
            except KernelBuildError:
                continue
            assert os.path.isabs(found) and not found.startswith(str(tmp_path))


def test_the_default_cache_is_never_in_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/of/somebody")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert op_builder.cache_directory() == Path("/home/of/somebody/.cache/torch_extensions/ds_lazyreduce")


def test_no_shell_reads_what_the_environment_says(tmp_path, monkeypatch):
    """And compilers are run in the folder of the build, where nobody has put anything."""
    seen = tmp_path / "seen"
    compiler = tmp_path / "c++"
    compiler.write_text(f'#!/bin/sh\npwd > "{seen}"\nprintf "%s\\n" "$@" >> "{seen}"\nexit 1\n')
    compiler.chmod(0o755)
    folder = tmp_path / "$(touch pwned); `touch pwned`"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CXX", f"{compiler} -DX=$(touch${{IFS}}pwned) ;touch pwned")
    with pytest.raises(KernelBuildError, match="failed with status 1"):
        op_builder.compile_module("cpu", [], folder / "_kernel.so")
    cwd, *arguments = seen.read_text().splitlines()
    assert cwd == str(folder)
    assert arguments[:3] == ["-DX=$(touch${IFS}pwned)", ";touch", "pwned"]
    assert not list(tmp_path.rglob("pwned"))


def test_four_ranks_with_a_stale_lock_file(needs_compiler, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    folder = op_builder.cache_directory() / op_builder.build_key("cpu", [])
    folder.mkdir(parents=True)
    (folder / "lock").write_text("left by a process that died")
    (folder / "failure.txt").write_text("of an earlier run")
    assert_all_native(reports_of(start_ranks(4, tmp_path)))
    assert len(binaries(tmp_path)) == 1


def test_a_lock_whose_holder_hangs(needs_compiler, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    folder = op_builder.cache_directory() / op_builder.build_key("cpu", [])
    folder.mkdir(parents=True)
    with open(folder / "lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert_all_native(reports_of(start_ranks(2, tmp_path, lock_seconds=1.0)))
    assert len(binaries(tmp_path)) == 1


def test_waiting_and_compiling_together_stay_below_the_limit():
    assert op_builder.LOCK_SECONDS + op_builder.COMPILE_SECONDS < LIMIT_SECONDS


def test_a_compiler_that_hangs_is_stopped(tmp_path, monkeypatch):
    compiler = tmp_path / "hanging-c++"
    compiler.write_text("#!/bin/sh\nexec sleep 30\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(KernelBuildError, match="did not finish within"):
        op_builder.compile_module("cpu", [], tmp_path / "_kernel.so", seconds=1)


def test_a_broken_binary_is_named(tmp_path):
    binary = tmp_path / "_kernel.so"
    binary.write_bytes(b"not a library")
    with pytest.raises(KernelBuildError, match="_kernel.so does not load .*; delete it to build anew"):
        op_builder.import_binary(binary)


def test_a_missing_compiler_that_cxx_names(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    with pytest.raises(KernelBuildError, match="CXX asks for 'no-such-compiler'"):
        op_builder.find_cxx()


def test_the_key_depends_on_sources_and_targets(tmp_path, monkeypatch):
    shutil.copytree(op_builder.source_directory(), tmp_path / "csrc")
    builds = [("cpu", []), ("cuda", ["90"]), ("cuda", [])]
    keys = {op_builder.build_key(backend, targets) for backend, targets in builds}
    monkeypatch.setattr(op_builder, "source_directory", lambda: tmp_path / "csrc")
    assert op_builder.build_key("cpu", []) in keys
    with open(tmp_path / "csrc" / "binding.cpp", "a") as source:
        source.write("\n")
    keys.add(op_builder.build_key("cpu", []))
    assert len(keys) == 4


def test_devices_without_a_native_kernel():
    with pytest.raises(KernelBuildError, match="no native kernel for 'xpu' tensors"):
        op_builder.load("xpu")
    assert load_kernel("auto", "meta").name == "torch"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_native_on_a_gpu_that_is_not_there():
    with pytest.raises(KernelBuildError, match="torch sees no GPU"):
        load_kernel("native", "cuda")


def test_the_cuda_module_builds_links_and_loads(needs_compiler, tmp_path):
    """For three generations at once; its CPU path runs here, its GPU path needs a driver."""
    try:
        op_builder.find_nvcc()
    except KernelBuildError as error:
        pytest.skip(str(error))
    binary = tmp_path / "_kernel.so"
    op_builder.compile_module("cuda", ["80", "90", "100"], binary, seconds=240)
    check_module(binary, ".*driver")


def test_targets_with_ptx_and_a_launcher_in_cxx(needs_compiler, tmp_path, monkeypatch):
    """What ``TORCH_CUDA_ARCH_LIST`` and ``CXX`` may say reaches nvcc, whose host compiler is no launcher."""
    nvcc, cxx = tmp_path / "nvcc", op_builder.find_cxx()[0]
    nvcc.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments; exit 1\n')
    (tmp_path / "ccache").write_text('#!/bin/sh\nexec "$@"\n')
    for program in (nvcc, tmp_path / "ccache"):
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CXX", f"ccache {cxx}")
    monkeypatch.setattr(op_builder, "find_nvcc", lambda: str(nvcc))
    with pytest.raises(KernelBuildError, match="nvcc failed with status 1"):
        op_builder.compile_module("cuda", ["80", "90+PTX"], tmp_path / "_kernel.so")
    arguments = (tmp_path / "arguments").read_text().split()
    assert "-gencode=arch=compute_80,code=sm_80" in arguments
    assert "-gencode=arch=compute_90,code=[sm_90,compute_90]" in arguments
    assert arguments[arguments.index("-ccbin") + 1] == cxx


def test_setup_passes_on_the_architectures_asked_for(monkeypatch):
    lines = (ROOT / "setup.py").read_text().split("setup(\n")[0]
    setup = {"__file__": str(ROOT / "setup.py"), "__name__": "setup"}
    exec(compile(lines, "setup.py", "exec"), setup)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0 10.0+PTX")
    assert setup["cuda_targets"]() == ["80", "90", "100+PTX"]
