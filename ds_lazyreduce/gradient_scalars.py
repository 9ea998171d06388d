"""The scalars that all ranks must agree on once per optimizer step, in one packed all-reduce.

    [ norm squared | non-finite | void | tokens | wrong | late | late flag of bucket 0 | bucket 1 | ... ]
      `------------------ HEADER ------------------------------'

It replaces stock ZeRO-2's one all-reduce per param group for the norm, the overflow check's own and
those of the expert groups. Every rank owns different elements of the gradient, so sums over the
data-parallel group count each element once. Model-parallel ranks have buckets of their own, so sums over them
are of the header only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

HEADER = 6
_BLOCK = 128 * 1024


@dataclass(frozen=True)
class StepScalars:
    """The agreed values, the same on every rank.

    norm_squared: of the summed gradient, before loss-scale or token normalisation.
    is_finite: whether every gradient element of every rank is finite.
    void: whether any rank's backward failed in this window.
    tokens: sum of the token counts of all ranks in this window.
    wrong: whether any rank found a sum of gradients to be wrong.
    any_late: whether any rank, of any data-parallel group, holds gradients in a local accumulator.
    late: for each bucket whether any rank of its own data-parallel group does.
    """

    norm_squared: float
    is_finite: bool
    void: bool
    tokens: float
    wrong: bool
    any_late: bool
    late: list[bool]

    @property
    def norm(self) -> float:
        return math.sqrt(self.norm_squared) if self.is_finite else math.inf


def local_norm_squared(gradients: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Sum of squares of fp32 tensors as a 0-d tensor.

    Summed in float64 where the device has it: products of fp32 numbers are exact there, and the sum's
    rounding is so far below fp32 that the clipping factor does not depend on how elements are
    distributed over buckets and ranks (up to one rounding of the norm in about 10^8).
    """
    total = torch.zeros((), dtype=scalar_dtype(device), device=device)
    sum_of_squares = _sum_of_squares_on_cpu if device.type == "cpu" else _sum_of_squares
    for gradient in gradients:
        total += sum_of_squares(gradient, total.dtype)
    return total


def _sum_of_squares(gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.linalg.vector_norm(gradient, dtype=dtype).square()


def _sum_of_squares_on_cpu(gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # torch's norm with a wider dtype is 20 times slower there than a copy to a cached scratch and a dot
    total = torch.zeros((), dtype=dtype)
    scratch = torch.empty(min(gradient.numel(), _BLOCK), dtype=dtype)
    for block in gradient.split(_BLOCK):
        wide = scratch[: block.numel()].copy_(block)
        total += torch.dot(wide, wide)
    return total


def scalar_dtype(device: torch.device) -> torch.dtype:
    """float64, or float32 on devices without it."""
    return torch.float32 if device.type in ("mps", "hpu") else torch.float64


def agree(
    norm_squared: torch.Tensor,
    void: bool,
    tokens: torch.Tensor | float,
    late: Sequence[bool],
    wrong: bool,
    all_reduce: Callable[[torch.Tensor], None],
) -> StepScalars:
    """Sums the scalars over all ranks with one call of ``all_reduce`` and reads them on the host."""
    pack = torch.zeros(HEADER + len(late), dtype=norm_squared.dtype, device=norm_squared.device)
    finite = torch.isfinite(norm_squared)
    pack[0] = torch.where(finite, norm_squared, 0)  # so that NaN does not hide in the sum
    pack[1] = ~finite
    # `pack[2] = 1.0` would copy from the host, which waits there for all that the device has been given.
    for index, value in enumerate((float(void), tokens, float(wrong), float(any(late))), start=2):
        pack[index].fill_(value)
    for index in (index for index, flag in enumerate(late, start=HEADER) if flag):
        pack[index].fill_(1.0)
    all_reduce(pack)
    norm, non_finite, voided, total_tokens, wrong_anywhere, any_late, *late_anywhere = pack.tolist()
    is_finite = non_finite == 0 and math.isfinite(norm)
    return StepScalars(
        norm_squared=norm,
        is_finite=is_finite,
        void=voided > 0,
        tokens=total_tokens,
        wrong=wrong_anywhere > 0,
        any_late=any_late > 0,
        late=[flag > 0 for flag in late_anywhere],
    )
