"""Builds a pure wheel with the kernel's sources in it; they are compiled at first use.

``DS_BUILD_LAZYREDUCE=1 pip install --no-build-isolation .`` compiles them now, as
``ds_lazyreduce._kernel``: with the GPU code if a CUDA torch and nvcc are here, else for the CPU only.
"""

import importlib.util
import os
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


def load_op_builder():
    """The package's builder, without importing the package (and with it torch)."""
    spec = importlib.util.spec_from_file_location("op_builder", ROOT / "ds_lazyreduce" / "op_builder.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def has_cuda_torch(op_builder):
    try:
        import torch

        op_builder.find_nvcc()
    except (ImportError, op_builder.KernelBuildError):
        return False
    return torch.version.cuda is not None


def cuda_targets():
    """TORCH_CUDA_ARCH_LIST ("8.0;9.0+PTX") as ["80", "90+PTX"]; without it nvcc's all major ones."""
    listed = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").split()
    return [target.replace(".", "") for target in listed]


class BuildKernel(build_ext):
    """Runs the commands that a first use would run."""

    def build_extension(self, ext):
        op_builder = load_op_builder()
        binary = Path(self.get_ext_fullpath(ext.name)).resolve()
        binary.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(self.build_temp).resolve()
        scratch.mkdir(parents=True, exist_ok=True)
        backend, targets = ("cuda", cuda_targets()) if has_cuda_torch(op_builder) else ("cpu", [])
        built = scratch / binary.name
        op_builder.compile_module(backend, targets, built, seconds=900)
        self.copy_file(str(built), str(binary))


prebuild = os.environ.get("DS_BUILD_LAZYREDUCE") == "1"
sources = ["csrc/binding.cpp", "csrc/fused_accumulate_cpu.cpp"]

setup(
    ext_modules=[Extension("ds_lazyreduce._kernel", sources)] if prebuild else [],
    cmdclass={"build_ext": BuildKernel},
)
