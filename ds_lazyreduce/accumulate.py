"""Fused accumulate: ``partition += scale * (received[0] + received[1] + ... + received[N-1])``.

All in fp32, rows in order, scaled after the sum, with one fused multiply-add per element. The native
kernel (``csrc/``) does it in one pass; the torch path is its fallback and its oracle, equal to the bit.

Hot code picks its kernel once::

    kernel = load_kernel("auto", "cuda")     # kernel.name is "native" or "torch"
    kernel(partition, received, scale)       # no checks, no choices
"""

from __future__ import annotations

import functools
import logging
import math
from numbers import Real
from types import ModuleType
from typing import Protocol

import torch

from . import op_builder
from .op_builder import KernelBuildError

__all__ = ["Kernel", "KernelBuildError", "fused_accumulate", "load_kernel"]

logger = logging.getLogger("ds_lazyreduce")

# Elements per pass of the torch path: bounds its scratch to 2 MB, and keeps it in the cache.
TORCH_TILE = 512 * 1024

# The codes of csrc/fused_accumulate.h.
_WIRE_CODES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_KERNELS = ("auto", "native", "torch")


class Kernel(Protocol):
    """A chosen kernel: ``kernel(partition, received, scale)``, in place.

    It does no checks: arguments must be what :func:`fused_accumulate` accepts, on the device type the
    kernel was loaded for. ``name`` is ``"native"`` or ``"torch"``.
    """

    name: str

    def __call__(self, partition: torch.Tensor, received: torch.Tensor, scale: float) -> None: ...


class TorchKernel:
    """Sums tiles in an fp32 scratch."""

    name = "torch"

    @torch.no_grad()
    def __call__(self, partition: torch.Tensor, received: torch.Tensor, scale: float) -> None:
        rows, size = received.shape
        scratch = torch.empty(min(size, TORCH_TILE), dtype=torch.float32, device=partition.device)
        for begin in range(0, size, TORCH_TILE):
            tile = received[:, begin : begin + TORCH_TILE]
            total = scratch[: tile.shape[1]]
            total.copy_(tile[0])
            for row in range(1, rows):
                total.add_(tile[row])  # promotes to fp32, exactly
            partition[begin : begin + TORCH_TILE].add_(total, alpha=scale)


class NativeCpuKernel:
    """One pass, on as many threads as torch uses."""

    name = "native"

    def __init__(self, module: ModuleType) -> None:
        self._accumulate = module.accumulate_cpu

    def __call__(self, partition: torch.Tensor, received: torch.Tensor, scale: float) -> None:
        rows, size = received.shape
        wire = _WIRE_CODES[received.dtype]
        self._accumulate(
            partition.data_ptr(), received.data_ptr(), received.stride(0), rows, size, wire, scale,
            torch.get_num_threads(),
        )  # fmt: skip


class NativeGpuKernel:
    """One pass, queued on the current stream of the tensors' device."""

    name = "native"

    def __init__(self, module: ModuleType) -> None:
        self._accumulate = module.accumulate_gpu

    def __call__(self, partition: torch.Tensor, received: torch.Tensor, scale: float) -> None:
        rows, size = received.shape
        wire = _WIRE_CODES[received.dtype]
        device = partition.get_device()
        self._accumulate(
            partition.data_ptr(), received.data_ptr(), received.stride(0), rows, size, wire, scale,
            device, torch.cuda.current_stream(device).cuda_stream,
        )  # fmt: skip


def load_kernel(name: str = "auto", device: torch.device | str | None = None) -> Kernel:
    """Choose the kernel for tensors on ``device``; may compile it, at most once per process.

    Args:
        name: ``"native"``, ``"torch"``, or ``"auto"``: native if it can be had, else torch with one
            warning per process (logger ``ds_lazyreduce``).
        device: where the tensors will be; by default the GPU if torch sees one, else the CPU.

    Raises:
        ValueError: an unknown ``name``.
        KernelBuildError: ``name`` is ``"native"`` and the kernel can be neither found nor built.
    """
    if name not in _KERNELS:
        raise ValueError(f"kernel: {name!r} is not a kernel; use one of {', '.join(map(repr, _KERNELS))}")
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return _load_kernel(name, torch.device(device).type)


@functools.cache
def _load_kernel(name: str, device_type: str) -> Kernel:
    if name == "torch":
        return TorchKernel()
    try:
        return _load_native(device_type)
    except KernelBuildError as error:
        if name == "native":
            raise
        _warn_fallback(str(error))
        return TorchKernel()


def _load_native(device_type: str) -> Kernel:
    module = op_builder.load(device_type)
    kernel = NativeCpuKernel(module) if device_type == "cpu" else NativeGpuKernel(module)
    # A module built for other devices or another driver loads, and fails only when it is run.
    partition = torch.ones(1, device=device_type)
    try:
        kernel(partition, torch.ones(2, 1, dtype=torch.bfloat16, device=device_type), 0.5)
        result = partition.item()
    except RuntimeError as error:
        raise KernelBuildError(f"the native kernel does not run on {device_type}: {error}") from error
    if result != 2.0:
        raise KernelBuildError(f"the native kernel is wrong on {device_type}: {result} for 1 + 0.5 * (1 + 1)")
    return kernel


_fallback_warned = False


def _warn_fallback(reason: str) -> None:
    global _fallback_warned
    if not _fallback_warned:
        _fallback_warned = True
        logger.warning("no native kernel, using the torch path (same results, slower): %s", reason)


def fused_accumulate(partition: torch.Tensor, received: torch.Tensor, scale: float, kernel: str = "auto") -> None:
    """Add ``scale * received.sum(0)`` to ``partition``, in place, summed in fp32 in row order.

    Args:
        partition: ``[S]``, fp32, contiguous; S may be 0.
        received: ``[N, S]``, N >= 1, bf16, fp16 or fp32, on the same device, each row contiguous (the
            rows may lie apart); must not overlap ``partition``.
        scale: a Python number within the range of fp32, applied once, after the sum.
        kernel: ``"auto"``, ``"native"`` or ``"torch"``; see :func:`load_kernel`. All give the same bits.

    On a GPU the work is queued on the current stream.

    Raises:
        TypeError: an argument is of the wrong type or dtype.
        ValueError: a wrong shape, layout, device, scale or kernel name.
        KernelBuildError: ``kernel="native"`` and it can be neither found nor built.

    Source of the method: Megatron-Core's ``reduce_scatter_with_fp32_accumulation``, here in one pass.
    """
    _check(partition, received, scale)
    load_kernel(kernel, partition.device)(partition, received, float(scale))


def _check(partition: torch.Tensor, received: torch.Tensor, scale: float) -> None:
    for name, tensor in (("partition", partition), ("received", received)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    if partition.dtype != torch.float32:
        raise TypeError(f"partition: dtype is {partition.dtype}, must be torch.float32")
    if received.dtype not in _WIRE_CODES:
        wanted = ", ".join(map(str, _WIRE_CODES))
        raise TypeError(f"received: dtype is {received.dtype}, must be one of {wanted}")
    if not isinstance(scale, Real):
        raise TypeError(f"scale: expected a Python number, got {type(scale).__name__}")
    if torch.finfo(torch.float32).max < abs(scale) < math.inf:
        raise ValueError(f"scale: {scale} is beyond the range of fp32")

    if partition.dim() != 1:
        raise ValueError(f"partition: shape is {list(partition.shape)}, must be [S]")
    size = partition.shape[0]
    if received.dim() != 2 or received.shape[0] < 1 or received.shape[1] != size:
        raise ValueError(f"received: shape is {list(received.shape)}, must be [N, {size}] with N >= 1")
    if received.device != partition.device:
        raise ValueError(f"received: is on {received.device}, must be on {partition.device} as partition is")
    if not partition.is_contiguous():
        raise ValueError(f"partition: stride is {partition.stride(0)}, must be contiguous (stride 1)")
    if size > 1 and received.stride(1) != 1:
        raise ValueError(f"received: strides are {received.stride()}, each row must be contiguous (stride 1)")
