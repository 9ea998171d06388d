"""Finds the prebuilt kernel module ``ds_lazyreduce._kernel``, or compiles ``csrc/`` at first use.

A build is three files and no ninja, so the compilers are called directly. What is built is kept under
``TORCH_EXTENSIONS_DIR`` (else ``~/.cache/torch_extensions``) in a folder named after everything the
binary depends on; it gets there by a rename, so a module that exists is complete. Ranks that start at
once wait for the one that builds. The lock is the operating system's (``flock``) and dies with its
holder; it only saves work, so a rank that has waited long enough builds by itself.

setup.py loads this file by its path, before the package or torch exist: nothing but the standard
library is imported at the top.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.machinery
import importlib.util
import os
import platform
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

try:
    import fcntl
except ImportError:  # not a POSIX system: no waiting, every process builds for itself
    fcntl = None

MODULE = "ds_lazyreduce._kernel"
HOST_FLAGS = ["-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off"]
NVCC_FLAGS = ["-O3", "-std=c++17", "-fmad=false", "-Xcompiler", "-fPIC,-fvisibility=hidden"]
HIPCC_FLAGS = [*HOST_FLAGS, "-x", "hip"]

# Together they keep a process from waiting more than a minute, whatever happens to the others.
LOCK_SECONDS = 20.0
COMPILE_SECONDS = 35.0


class KernelBuildError(RuntimeError):
    """The native kernel is not available here; the message says why."""


@functools.cache
def _load_or_reason(device_type: str) -> ModuleType | str:
    try:
        return _find_or_build(device_type)
    except KernelBuildError as error:
        return str(error)


def load(device_type: str = "cpu") -> ModuleType:
    """The kernel module for tensors on ``device_type`` (``"cpu"`` or ``"cuda"``, which includes HIP).

    The first call may compile; its outcome, good or bad, holds for the life of the process.

    Raises:
        KernelBuildError: it can be neither found nor built; the message gives the reason.
    """
    outcome = _load_or_reason(device_type)
    if isinstance(outcome, str):
        raise KernelBuildError(outcome)
    return outcome


def _find_or_build(device_type: str) -> ModuleType:
    if device_type not in ("cpu", "cuda"):
        raise KernelBuildError(f"there is no native kernel for {device_type!r} tensors")
    entry = "accumulate_cpu" if device_type == "cpu" else "accumulate_gpu"
    with contextlib.suppress(ImportError):
        prebuilt = importlib.import_module(MODULE)
        if hasattr(prebuilt, entry):
            return prebuilt

    backend, targets = gpu_backend() if device_type == "cuda" else ("cpu", [])
    binary = cache_directory() / build_key(backend, targets) / "_kernel.so"
    _build_once(backend, targets, binary)
    check_trusted(binary)
    return import_binary(binary)


def check_trusted(binary: Path) -> None:
    """Refuses a built module that somebody else may have put there or changed: loading it runs its code.

    In the default place it, its folder and the folder of all builds must belong to this user or root, and nobody
    else may write there. A directory that ``TORCH_EXTENSIONS_DIR`` names may be shared, but not with everybody.
    """
    chosen = bool(os.environ.get("TORCH_EXTENSIONS_DIR"))
    for path in (binary.parent.parent, binary.parent, binary):
        try:
            facts = path.stat()
        except OSError as error:
            raise KernelBuildError(f"{path} cannot be looked at: {error}") from error
        open_to = facts.st_mode & (stat.S_IWOTH if chosen else stat.S_IWOTH | stat.S_IWGRP)
        if open_to:
            raise KernelBuildError(
                f"{path} is writable by others, so its code is not trusted; chmod go-w it, or delete it"
            )
        if not chosen and hasattr(os, "geteuid") and facts.st_uid not in (os.geteuid(), 0):
            raise KernelBuildError(
                f"{path} belongs to another user (uid {facts.st_uid}), so its code is not trusted; delete it, or set "
                "TORCH_EXTENSIONS_DIR"
            )


def import_binary(binary: Path) -> ModuleType:
    """Import the built module at ``binary``."""
    loader = importlib.machinery.ExtensionFileLoader(MODULE, str(binary))
    spec = importlib.util.spec_from_file_location(MODULE, str(binary), loader=loader)
    registered = sys.modules.get(MODULE)
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except (ImportError, OSError) as error:
        raise KernelBuildError(f"{binary} does not load ({error}); delete it to build anew") from error
    # Python registers such a module by itself; left there it would be taken for a prebuilt one.
    if registered is None:
        sys.modules.pop(MODULE, None)
    else:
        sys.modules[MODULE] = registered
    return module


def source_directory() -> Path:
    """``csrc/``: inside the installed package, or beside it in a checkout."""
    here = Path(__file__).resolve().parent
    for folder in (here / "csrc", here.parent / "csrc"):
        if (folder / "binding.cpp").is_file():
            return folder
    raise KernelBuildError(f"the kernel's sources (csrc) are neither in {here} nor in {here.parent}")


def cache_directory() -> Path:
    """The folder of all builds; it need not exist."""
    chosen = os.environ.get("TORCH_EXTENSIONS_DIR")
    if chosen:
        return Path(chosen).absolute() / "ds_lazyreduce"
    default = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not default.is_absolute():  # to be ignored, by its specification; it would be the working directory's
        try:
            default = Path.home() / ".cache"
        except RuntimeError:
            raise KernelBuildError("there is no home directory to build in: set TORCH_EXTENSIONS_DIR") from None
    return default.absolute() / "torch_extensions" / "ds_lazyreduce"


def build_key(backend: str, targets: list[str]) -> str:
    """Names a build after all it depends on, so that unlike builds never meet in a shared cache."""
    import torch

    facts = [backend, *targets, *HOST_FLAGS, *NVCC_FLAGS, *HIPCC_FLAGS, torch.__version__]
    facts += [str(sysconfig.get_config_var("SOABI")), platform.machine(), *platform.libc_ver()]
    digest = hashlib.sha256("\n".join(facts).encode())
    for source in sorted(source_directory().glob("*.*")):
        digest.update(source.name.encode() + source.read_bytes())
    return f"{backend}-{digest.hexdigest()[:20]}"


def _which(program: str, folders: list[str] | None = None) -> str | None:
    """The absolute path of ``program`` in ``folders`` or on PATH, never in the working directory.

    A relative entry of PATH, and an empty one, means the working directory, which may hold anything.
    """
    listed = [*(folders or []), *os.environ.get("PATH", os.defpath).split(os.pathsep)]
    path = os.pathsep.join(folder for folder in listed if os.path.isabs(folder))
    found = shutil.which(program, path=path or os.defpath)
    return None if found is None else os.path.abspath(found)


def _find_program(program: str, roots: list[str | None]) -> str:
    folders = [str(Path(root) / "bin") for root in roots if root]
    found = _which(program, folders)
    if found is None:
        raise KernelBuildError(f"{program} was found neither on PATH nor in {folders}")
    return found


def find_cxx() -> list[str]:
    """The C++ compiler: ``$CXX`` (it may carry arguments), else the first of c++, g++, clang++."""
    chosen = os.environ.get("CXX", "").split()
    for name, *arguments in [chosen] if chosen else [["c++"], ["g++"], ["clang++"]]:
        found = _which(name)
        if found:
            return [found, *arguments]
    wanted = f"CXX asks for {chosen[0]!r}" if chosen else "tried c++, g++, clang++"
    raise KernelBuildError(f"no C++ compiler was found on PATH ({wanted})")


def find_nvcc() -> str:
    return _find_program("nvcc", [os.environ.get("CUDA_HOME"), "/usr/local/cuda"])


def rocm_root() -> str:
    return os.environ.get("ROCM_PATH", "/opt/rocm")


def find_hipcc() -> str:
    return _find_program("hipcc", [rocm_root()])


def gpu_backend() -> tuple[str, list[str]]:
    """``("cuda", ["90", ...])`` or ``("hip", ["gfx942", ...])`` for the devices of this process."""
    import torch

    if not torch.cuda.is_available():
        raise KernelBuildError("torch sees no GPU")
    devices = range(torch.cuda.device_count())
    if torch.version.hip:
        return "hip", sorted({torch.cuda.get_device_properties(i).gcnArchName.split(":")[0] for i in devices})
    return "cuda", sorted({"{}{}".format(*torch.cuda.get_device_capability(i)) for i in devices})


def compile_module(backend: str, targets: list[str], binary: Path, seconds: float = COMPILE_SECONDS) -> None:
    """Compile and link ``csrc/`` to ``binary``, an absolute path, in a folder that exists.

    Args:
        backend: ``"cpu"``, or ``"cuda"`` / ``"hip"`` for a module that also has the GPU entry point.
        targets: compute capabilities (``"90"``, with PTX for later ones ``"90+PTX"``) or gfx names; none with CUDA
            means all major ones.
        seconds: what all the compilers together may take.
    """
    deadline, folder = time.monotonic() + seconds, binary.parent
    source = source_directory()
    cxx = find_cxx()
    inputs = [str(source / "binding.cpp"), str(source / "fused_accumulate_cpu.cpp")]
    libraries: list[str] = []
    if backend != "cpu":
        gpu_source, gpu_object = str(source / "fused_accumulate_gpu.cu"), str(binary.with_name("gpu.o"))
        if backend == "cuda":
            nvcc = find_nvcc()
            arch = [_gencode(target) for target in targets] or ["-arch=all-major"]
            host = ["-ccbin", _without_launcher(cxx)] if os.environ.get("CXX") else []
            _run([nvcc, *NVCC_FLAGS, *arch, *host, "-c", gpu_source, "-o", gpu_object], folder, deadline)
            root = Path(nvcc).resolve().parent.parent
            libraries = [f"-L{root}/lib64", f"-L{root}/lib", "-lcudart_static", "-ldl", "-lrt", "-lpthread"]
        else:
            hipcc, rocm = find_hipcc(), rocm_root()
            arch = [f"--offload-arch={t}" for t in targets]
            _run([hipcc, *HIPCC_FLAGS, *arch, "-c", gpu_source, "-o", gpu_object], folder, deadline)
            libraries = [f"-L{rocm}/lib", f"-Wl,-rpath,{rocm}/lib", "-lamdhip64"]
        inputs += [gpu_object, "-DDSLR_GPU"]
    include = f"-I{sysconfig.get_paths()['include']}"
    link = [*cxx, *HOST_FLAGS, "-shared", include, *inputs, *libraries, "-o", str(binary)]
    try:
        _run([*link, "-fopenmp"], folder, deadline)
    except KernelBuildError:
        _run(link, folder, deadline)  # a compiler without OpenMP: one thread, the same bits


def _gencode(target: str) -> str:
    number = target.removesuffix("+PTX")
    code = f"[sm_{number},compute_{number}]" if target.endswith("+PTX") else f"sm_{number}"
    return f"-gencode=arch=compute_{number},code={code}"


def _without_launcher(cxx: list[str]) -> str:
    """The compiler itself, which nvcc calls with arguments of its own, where ``CXX`` is "ccache g++"."""
    if len(cxx) > 1 and Path(cxx[0]).name in ("ccache", "sccache", "distcc", "icecc"):
        return _find_program(cxx[1], [])
    return cxx[0]


def _run(command: list[str], folder: Path, deadline: float) -> None:
    """Runs a compiler, without a shell, in ``folder``: not in the working directory, which may hold anything."""
    left = max(deadline - time.monotonic(), 1.0)
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace", timeout=left)
    except subprocess.TimeoutExpired:
        raise KernelBuildError(f"{command[0]} did not finish within {left:.0f} s") from None
    except OSError as error:
        raise KernelBuildError(f"{command[0]} could not be started: {error}") from error
    if done.returncode != 0:
        last = "\n".join((done.stderr or done.stdout).strip().splitlines()[-8:])
        raise KernelBuildError(f"{command[0]} failed with status {done.returncode}:\n{last}")


def _build_once(backend: str, targets: list[str], binary: Path) -> None:
    folder, failure = binary.parent, binary.with_name("failure.txt")
    try:
        if binary.exists():  # also in a cache that only others may write
            return
        folder.parent.parent.mkdir(parents=True, exist_ok=True)  # the user's, or torch's own
        for ours in (folder.parent, folder):
            ours.mkdir(mode=0o700, exist_ok=True)
        seen = _stamp(failure)
        with _lock(folder / "lock"):
            if binary.exists():
                return
            if _stamp(failure) != seen:  # the build this process waited for failed: so would its own
                raise KernelBuildError(failure.read_text())
            with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as scratch:
                try:
                    compile_module(backend, targets, Path(scratch, binary.name))
                except KernelBuildError as error:
                    Path(scratch, failure.name).write_text(str(error))
                    os.replace(Path(scratch, failure.name), failure)
                    raise
                built = Path(scratch, binary.name)
                built.chmod(built.stat().st_mode & ~(stat.S_IWGRP | stat.S_IWOTH))  # whatever the umask is
                os.replace(built, binary)
    except OSError as error:
        reason = f"cache directory {folder} is not writable ({error}); TORCH_EXTENSIONS_DIR names another"
        raise KernelBuildError(reason) from error


def _stamp(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold ``path`` if that is possible within ``LOCK_SECONDS``, else go on without it."""
    with open(path, "a") as handle:
        deadline = time.monotonic() + LOCK_SECONDS
        while fcntl is not None and time.monotonic() < deadline:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
            except OSError:  # a file system without locks
                break
        yield
