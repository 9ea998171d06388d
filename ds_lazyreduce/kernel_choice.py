"""One kernel for all ranks: native everywhere if every rank has it, else torch everywhere."""

from __future__ import annotations

import logging

import torch
from deepspeed import comm as dist

from .accumulate import Kernel, KernelBuildError, load_kernel

logger = logging.getLogger("ds_lazyreduce")


def agree_on_kernel(requested: str, group, device: torch.device) -> Kernel:
    """Chooses the fused accumulation for this engine. Collective over ``group``.

    Both kernels give the same bits, so this is for the user's sake: one speed, one warning, one line in
    the report, instead of a rank that is slower for a reason only its own log tells.

    Args:
        requested: ``"auto"``, ``"native"`` or ``"torch"``.

    Raises:
        KernelBuildError: on every rank, if ``"native"`` is requested and any rank lacks it.
    """
    if requested == "torch":
        return load_kernel("torch", device)
    native, reason = None, ""
    try:
        native = load_kernel("native", device)
    except KernelBuildError as error:
        reason = str(error)
    lacking = torch.tensor([float(native is None)], device=device)
    dist.all_reduce(lacking, group=group)
    missing = int(lacking.item())
    if missing == 0:
        return native
    here = f" ({reason})" if reason else ""
    summary = f"the native kernel is not available on {missing} of {dist.get_world_size(group=group)} ranks{here}"
    if requested == "native":
        raise KernelBuildError(f'lazy_reduce.gradient_partition.kernel is "native", but {summary}')
    if dist.get_rank(group=group) == 0:
        logger.warning("lazy_reduce: %s; every rank uses the torch path, which gives the same bits, slower", summary)
    return load_kernel("torch", device)
