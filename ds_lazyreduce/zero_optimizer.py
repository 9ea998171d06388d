"""The ZeRO-2 optimizer's step: from the gradient partition to updated parameters.

What the base class (``DeepSpeedZeroOptimizer`` of DeepSpeed 0.19.8) still does: flatten the parameters
of each bucket, cut the flat buffer into equal partitions, keep the loss scaler, link parameters to
their fp32 masters.
"""

from __future__ import annotations

import logging
import math

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage_1_and_2 import (
    OPTIMIZER_ALLGATHER_TIMER,
    OPTIMIZER_GRADIENTS_TIMER,
    OPTIMIZER_STEP_TIMER,
    OPTIMIZER_TIMERS,
)

from .failures import during
from .gradient_scalars import HEADER, StepScalars, agree, local_norm_squared
from .parameter_gather import STAGED_ELEMENTS, ParameterGather
from .zero_access import AccessibleZeroOptimizer

logger = logging.getLogger("ds_lazyreduce")


class LazyZeroOptimizer(AccessibleZeroOptimizer):
    """ZeRO-2 with chained fp32 reduce-scatters. Built by the engine in place of the stock class."""

    def __init__(self, *args, allgather_bucket_size, **kwargs):
        self._order_agreed = False
        self._scalar_collectives = 0
        self._warned_no_tokens = False
        super().__init__(*args, allgather_bucket_size=allgather_bucket_size, **kwargs)
        staged = min(int(allgather_bucket_size), STAGED_ELEMENTS)
        self._gather = ParameterGather(self.bit16_groups_flat, self.real_dp_process_group, staged)

    def step(self, closure=None):
        """Completes the window and applies one update, or skips it on all ranks together.

        Skipped: a non-finite gradient where stock checks for it, a window in which a backward failed
        on any rank, a window without tokens under token normalisation.

        Raises:
            RuntimeError: the engine was destroyed, or one built later took over its parameters.
        """
        self._refuse_if_ended()
        self.timers(OPTIMIZER_GRADIENTS_TIMER).start()
        scalars = self._complete_window()
        self._agree_on_order()
        loss_scale = self.loss_scale
        checked = self.check_grad_overflow or (self.compute_grad_norm and self.dtype != torch.bfloat16)
        overflow = checked and not scalars.is_finite and not scalars.void
        empty = self._settings.normalize_tokens and scalars.tokens == 0
        self.overflow = overflow or scalars.void or empty  # what the engine counts as skipped
        if not scalars.void and not empty:
            self._update_scale(overflow)
        tokens = scalars.tokens * self._token_window.prescale if self._settings.normalize_tokens else 1.0
        divisor = loss_scale * tokens
        self._global_grad_norm = None
        if self.compute_grad_norm:
            norm = math.inf if self.overflow else scalars.norm / divisor
            self._global_grad_norm = torch.full((), norm, dtype=torch.float32, device=self.device)
        if not self.overflow:
            self._unscale_and_clip(divisor, scalars.norm)
        elif empty:
            self._warn_no_tokens()
        self.timers(OPTIMIZER_GRADIENTS_TIMER).stop()
        if not self.overflow:
            self._update_parameters()
        self._clear_window(scalars.tokens)
        self.timers.log(OPTIMIZER_TIMERS)

    def _complete_window(self) -> StepScalars:
        self.complete_broken_pass()
        if self._schedule.owes_a_pass():
            # As a backward pass without gradients would: other ranks may have reduced in one, in the wire dtype.
            self.chain.open()
            self.chain.close()
            self._schedule.reduced()
        self.chain.drain()
        late = self.chain.has_accumulated()
        scalars = self._agree_scalars(late)
        if scalars.any_late and not scalars.void:
            self.chain.reduce_accumulated(scalars.late)
            scalars = self._agree_scalars([False] * len(late))
        if scalars.wrong:
            self._verification.stop(self._verification.difference(), self.dp_process_group)
        return scalars

    def _agree_scalars(self, late: list[bool]) -> StepScalars:
        gradients = []
        if self.compute_grad_norm or self.check_grad_overflow:
            for user_group in self._user_groups:
                if user_group.gradient is not None:
                    gradients += [user_group.gradient[start:stop] for start, stop in user_group.counted]
        norm_squared = local_norm_squared(gradients, torch.device(get_accelerator().current_device_name()))
        # The pack is summed over model-parallel ranks, too, and those have the same tokens.
        tokens = self._token_window.total() if self.model_parallel_rank == 0 else 0
        wrong = self._verification.difference() is not None
        return agree(norm_squared, self._void, tokens, late, wrong, self._all_reduce_scalars)

    def _all_reduce_scalars(self, pack: torch.Tensor) -> None:
        self._scalar_collectives += 1
        what = "the step's scalar pack (norm, overflow, tokens, flags)"
        with during(what, "No update was applied.", self.dp_process_group):
            dist.all_reduce(pack, group=self.dp_process_group)
        with during(f"{what} over model-parallel ranks", "No update was applied."):
            self._model_parallel_all_reduce(tensor=pack[:HEADER], op=dist.ReduceOp.SUM)

    def _agree_on_order(self) -> None:
        """Once: from the second window on, buckets leave in the order in which they completed on rank 0."""
        if self._order_agreed or len(self.chain.buckets) < 2:
            return
        self._order_agreed = True
        order = torch.tensor(self.chain.observed_order(), device=get_accelerator().current_device_name())
        with during("the agreement on the order of buckets", "No update was applied.", self.dp_process_group):
            dist.broadcast(order, dist.get_global_rank(self.dp_process_group, 0), group=self.dp_process_group)
        self.chain.set_order(order.tolist())

    def _unscale_and_clip(self, divisor: float, norm: float) -> None:
        if self.clip_grad > 0.0:
            # Rounded to fp32 first, so that the factor is the same for any layout of the buckets.
            rounded = torch.tensor(norm / divisor, dtype=torch.float32).item()
            divisor *= max((rounded + 1e-6) / self.clip_grad, 1.0)
        if divisor != 1.0:
            for user_group in self._user_groups:
                if user_group.gradient is not None:
                    user_group.gradient.mul_(1.0 / divisor)

    def _update_parameters(self) -> None:
        self.timers(OPTIMIZER_STEP_TIMER).start()
        for index, user_group in enumerate(self._user_groups):
            if user_group.master is None:
                continue
            if user_group.gradient is None:  # no backward at all: stock steps with zeros, too
                user_group.gradient = self._zero_gradient(user_group)
            user_group.master.grad = user_group.gradient.to(user_group.master.device)
            self._optimizer_step(index)
            user_group.master.grad = None
        mine = [
            partitions[dist.get_rank(group=group)]
            for partitions, group in zip(
                self.parallel_partitioned_bit16_groups, self.real_dp_process_group, strict=True
            )
        ]
        with torch.no_grad():
            masters = self.single_partition_of_fp32_groups
            if self.cpu_offload:  # rounds on the host, so that only the model dtype crosses the bus
                rounded = self.param_buffer_of_bit16_for_cpu_offload_groups
                torch._foreach_copy_(rounded, masters)
                masters = rounded
            torch._foreach_copy_(mine, masters)
        self.timers(OPTIMIZER_STEP_TIMER).stop()
        self.timers(OPTIMIZER_ALLGATHER_TIMER).start()
        self._gather.gather()
        self._reattach_parameters()
        self.timers(OPTIMIZER_ALLGATHER_TIMER).stop()

    def _clear_window(self, tokens: float) -> None:
        self._void = False
        self._token_window.restart(tokens)
        self._schedule.restart()
        self.averaged_gradients.clear()
        for user_group in self._user_groups:
            if user_group.gradient is not None:
                self._streams.retire(user_group.gradient)
            user_group.gradient = None
        self.chain.discard_accumulated()
        self._verification.begin_window()

    def _warn_no_tokens(self) -> None:
        if not self._warned_no_tokens and dist.get_rank(group=self.dp_process_group) == 0:
            logger.warning("lazy_reduce: no rank had tokens in this window; the update is skipped (said once)")
        self._warned_no_tokens = True

    # -- report ----------------------------------------------------------------------------------

    def lazy_reduce_report(self) -> dict:
        """This optimizer's part of the engine's report; see the README."""
        counters = self.chain.counters
        kinds = {str(bucket.wire_dtype).removeprefix("torch.") for bucket in self.chain.buckets}
        return {
            "gradient_collectives": counters.gradient_collectives,
            "scalar_collectives": self._scalar_collectives,
            "bytes_sent": counters.bytes_sent,
            "bytes_sent_across_nodes": counters.bytes_sent_across_nodes,
            "messages_sent": counters.messages_sent,
            "messages_sent_across_nodes": counters.messages_sent_across_nodes,
            "buckets": len(self.chain.buckets),
            "max_in_flight_seen": counters.max_in_flight_seen,
            "peak_buffer_bytes": self._pool.peak_bytes,
            "collective": self.chain.buckets[0].reduce_scatter.name if self.chain.buckets else "none",
            "wire_dtype": {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[kinds.pop()]
            if len(kinds) == 1
            else "mixed",
            "device_memory_before_warm_up": self._device_memory[0],
            "device_memory_after_warm_up": self._device_memory[1],
        }
