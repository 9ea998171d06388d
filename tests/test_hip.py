"""The HIP build without an AMD GPU: with ROCm's own hipcc where it is installed, else with clang.

Debian's clang-19 and the runtime's packages (clang-tools-19, lld-19, libamdhip64-dev, rocm-device-libs) stand in for
hipcc; gfx950 (MI355X) is newer than that clang, and is compiled by the one in the wheel ``ziglang``. Nothing runs on a
GPU: what is checked is the code that compilers make, and that the module links, loads and works on the CPU.
"""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils.hipify import hipify_python

from ds_lazyreduce import op_builder
from ds_lazyreduce.op_builder import KernelBuildError

from .gpu_modules import check_module

HEADERS = Path("/usr/include/hip")
DEVICE_LIBRARIES = Path("/usr/lib/x86_64-linux-gnu/amdgcn/bitcode")
NEWEST_CLANG = 22


def hip_version():
    """Of the headers that Debian's package installs, "5.2"."""
    try:
        text = (HEADERS / "hip_version.h").read_text()
    except OSError:
        pytest.skip(f"no HIP headers in {HEADERS} (package libamdhip64-dev)")
    return ".".join(re.search(rf"#define HIP_VERSION_{part} +(\d+)", text)[1] for part in ("MAJOR", "MINOR"))


def clangs():
    """Commands that may be a clang for AMD GPUs, with what each needs said."""
    for version in range(17, NEWEST_CLANG + 1):
        if shutil.which(f"clang++-{version}"):
            yield [f"clang++-{version}"]
    resources = sorted(Path("/usr/lib").glob("llvm-*/lib/clang/*/include/__clang_hip_runtime_wrapper.h"))
    if importlib.util.find_spec("ziglang") and resources:
        # A bare clang: it borrows another's HIP wrappers, and no longer defines what old HIP headers use.
        borrowed = ["-resource-dir", str(resources[-1].parent.parent), "-D__AMDGCN_WAVEFRONT_SIZE=64"]
        yield [sys.executable, "-m", "ziglang", "clang", *borrowed]


def to_assembly(target, source, output):
    """Compile for the GPU alone, with the first compiler that knows ``target``."""
    device = ["-x", "hip", "--cuda-device-only", f"--offload-arch={target}", *op_builder.HOST_FLAGS]
    try:
        compilers = [[op_builder.find_hipcc(), *device]]
    except KernelBuildError:
        flags = [*device, "-nogpulib", f"--hip-version={hip_version()}"]
        compilers = [[*clang, *flags] for clang in clangs()]
    kernel = "__attribute__((global)) void f(float* p) { *p = 1; }"
    for compiler in compilers:
        knows = subprocess.run([*compiler, "-nogpuinc", "-S", "-", "-o", "/dev/null"], input=kernel, text=True,
                               capture_output=True)  # fmt: skip
        if knows.returncode == 0:
            done = subprocess.run([*compiler, "-S", str(source), "-o", str(output)], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-3000:]
            return output.read_text()
    names = [" ".join(compiler[:4]) for compiler in compilers]
    pytest.skip(f"no compiler here knows {target} (tried {', '.join(names) or 'hipcc, clang++-17 and newer'})")


@pytest.fixture(scope="module")
def hipified(tmp_path_factory):
    """csrc/ after torch's own converter, which writes beside its sources."""
    source = tmp_path_factory.mktemp("hip") / "csrc"
    shutil.copytree(op_builder.source_directory(), source)
    hipify_python.hipify(
        project_directory=str(source), output_directory=str(source), includes=["*"],
        extra_files=[str(source / "fused_accumulate_gpu.cu")], is_pytorch_extension=True,
    )  # fmt: skip
    return source / "fused_accumulate_gpu.hip"


def test_the_gpu_source_hipifies(hipified):
    """Other builders run the converter; it must leave a file that still makes sense."""
    text = hipified.read_text()
    assert "hipSetDevice(device)" in text and "cudaSetDevice" not in text


@pytest.mark.parametrize("converted", [False, True], ids=["as it is", "hipified"])
@pytest.mark.parametrize("target", ["gfx90a", "gfx942", "gfx950"])
def test_gpu_code(hipified, tmp_path, target, converted):
    """Packed kernels load and store 16 bytes at once, and nothing spills."""
    source = hipified if converted else op_builder.source_directory() / "fused_accumulate_gpu.cu"
    assembly = to_assembly(target, source, tmp_path / "gpu.s")
    assert f"amdgcn-amd-amdhsa--{target}" in assembly
    kernels = {}
    for body in re.split(r"^(?=_ZN\w*accumulate_kernel\w*:)", assembly, flags=re.MULTILINE)[1:]:
        name = body.partition(":")[0]
        wire, packed = re.search(r"(BF16|FP16|If)E?Lb([01])", name).groups()
        kernels[wire, packed == "1"] = body.partition("s_endpgm")[0]
    assert len(kernels) == 6
    for (_, packed), body in kernels.items():
        assert ("global_load_dwordx4" in body and "global_store_dwordx4" in body) == packed
    assert set(re.findall(r"\.(?:vgpr|sgpr)_spill_count: *(\d+)", assembly)) == {"0"}


@pytest.fixture
def rocm(tmp_path, monkeypatch):
    """ROCM_PATH with a hipcc: ROCm's own, or one put together from Debian's packages."""
    try:
        return op_builder.find_hipcc()
    except KernelBuildError:
        pass
    folder = tmp_path / "rocm"
    libraries = folder / "bitcode"
    libraries.mkdir(parents=True)
    (folder / "bin").mkdir()
    clang = next((f"clang++-{v}" for v in range(17, NEWEST_CLANG + 1) if shutil.which(f"clang++-{v}")), None)
    if clang is None:
        pytest.skip("neither hipcc nor a clang++-17 or newer is here")
    tools = Path(shutil.which(clang)).resolve().parent
    version = hip_version()
    missing = [tool for tool in ("clang-offload-bundler", "lld") if not (tools / tool).exists()]
    if missing or not DEVICE_LIBRARIES.is_dir():
        pytest.skip(f"{clang} cannot link GPU code: {', '.join(missing) or DEVICE_LIBRARIES} is missing")
    for bitcode in DEVICE_LIBRARIES.glob("*.bc"):
        (libraries / bitcode.name).symlink_to(bitcode)
    # Older than gfx942, which is gfx940's successor; the kernel uses nothing of this library but indices.
    with_942 = libraries / "oclc_isa_version_942.bc"
    if not with_942.exists():
        with_942.symlink_to(DEVICE_LIBRARIES / "oclc_isa_version_940.bc")
    hipcc = folder / "bin" / "hipcc"
    hipcc.write_text(f'#!/bin/sh\nexec {clang} --hip-version={version} --rocm-device-lib-path="{libraries}" "$@"\n')
    hipcc.chmod(0o755)
    monkeypatch.setenv("ROCM_PATH", str(folder))
    return str(hipcc)


def test_the_module_builds_links_and_loads(rocm, tmp_path):
    """By the builder's own command; its CPU path runs here, its GPU path needs a GPU."""
    assert op_builder.find_hipcc() == rocm
    binary = tmp_path / "_kernel.so"
    op_builder.compile_module("hip", ["gfx90a", "gfx942"], binary, seconds=240)
    check_module(binary, "hipError")
