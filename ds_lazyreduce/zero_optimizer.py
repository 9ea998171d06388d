"""The ZeRO-2 optimizer: the only file that overrides DeepSpeed's optimizer internals.

What the base class (``DeepSpeedZeroOptimizer`` of DeepSpeed 0.19.8) still does: flatten the parameters
of each bucket, cut the flat buffer into equal partitions, keep the loss scaler, link parameters to
their fp32 masters, gather updated parameters. What is done here instead: everything between a
parameter's gradient and the wrapped optimizer.

Each *bucket* is a ZeRO param group for the base class. The shards of all buckets of one *user* param
group lie side by side in one flat fp32 master (and one flat fp32 gradient), so that the wrapped
optimizer, schedulers and hooks see the user's own groups with one parameter each, as in stock:

    user group g   master  [ shard of bucket 0 | shard of bucket 2 | ... ]   <- optimizer.param_groups[g]
    bucket 0       params  [ rank 0 | rank 1 | ... ]                         <- bit16_groups_flat[0]
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.constants import PIPE_REPLICATED
from deepspeed.runtime.torch_autocast import get_autocast_dtype, get_comm_dtype, has_comm_dtype
from deepspeed.runtime.utils import all_gather_dp_groups, is_model_parallel_parameter, is_optimized_parameter
from deepspeed.runtime.zero.stage_1_and_2 import (
    OPTIMIZER_ALLGATHER_TIMER,
    OPTIMIZER_GRADIENTS_TIMER,
    OPTIMIZER_STEP_TIMER,
    OPTIMIZER_TIMERS,
    DeepSpeedZeroOptimizer,
    GradPartitionBufferGroup,
)
from deepspeed.utils import lazy_init_hp_params_optimizer_state
from deepspeed.utils.torch import register_grad_hook

from .bucket_chain import Bucket, BucketChain, BufferPool, Slot
from .bucket_layout import ParamSpec, initial_order, split_into_buckets
from .collectives import make_reduce_scatter
from .config import ConfigError
from .gradient_scalars import StepScalars, agree, local_norm_squared
from .token_window import TokenWindow

logger = logging.getLogger("ds_lazyreduce")


@dataclass(frozen=True)
class PartitionSettings:
    """The resolved settings of ``lazy_reduce.gradient_partition``.

    bucket_elements: ``(trainable elements, ranks) -> upper bound of a bucket`` in elements.
    wire_dtype: what travels, unless torch.autocast chose a dtype for the parameter.
    accumulate: ``accumulate(partition [S] fp32, rows [N, S], scale)``, in place.
    node_size: consecutive ranks that share a host.
    normalize_tokens: whether gradients are divided by the window's token count instead of averaged.
    """

    bucket_elements: Callable[[int, int], int]
    wire_dtype: torch.dtype
    accumulate: Callable[[torch.Tensor, torch.Tensor, float], None]
    node_size: int
    max_in_flight: int
    carry_over: bool
    normalize_tokens: bool


@dataclass
class UserGroup:
    """One of the user's param groups and its flat fp32 tensors on this rank.

    buckets: base-class group indices; their shards lie in this order in ``master``.
    master: fp32 masters of all shards, ``[sum of S]``; the wrapped optimizer's only parameter here.
    gradient: fp32 gradient of ``master``, allocated in the first drain of a window, freed by ``step``.
    counted: ranges of ``master`` that enter the gradient norm on this rank (all of it, but for
        parameters that model-parallel ranks replicate).
    """

    group: dict
    buckets: range
    master: torch.Tensor | None = None
    gradient: torch.Tensor | None = None
    counted: list[tuple[int, int]] | None = None


class _DrainingGradients(dict):
    """``averaged_gradients``: whoever reads a gradient first completes what is in flight.

    (Reads come from ``safe_get_full_grad`` and friends, which are collective: every rank reads.)
    """

    def __init__(self, drain: Callable[[], None]):
        super().__init__()
        self._drain = drain

    def __contains__(self, key) -> bool:
        self._drain()
        return super().__contains__(key)

    def __getitem__(self, key):
        self._drain()
        return super().__getitem__(key)

    def get(self, key, default=None):
        self._drain()
        return super().get(key, default)


class LazyZeroOptimizer(DeepSpeedZeroOptimizer):
    """ZeRO-2 with chained fp32 reduce-scatters. Built by the engine in place of the stock class."""

    def __init__(self, init_optimizer, param_names, *args, settings: PartitionSettings, **kwargs):
        self._settings = settings
        self._user_param_groups = init_optimizer.param_groups
        self._registered = {param: index for index, param in enumerate(param_names)}
        self._token_window = TokenWindow()
        self._void = False
        self._order_agreed = False
        self._in_backward = False
        self._graph_task: int | None = None
        self._scalar_collectives = 0
        self._warned_no_tokens = False
        if get_autocast_dtype() == torch.float16:
            raise ConfigError(
                "torch_autocast.dtype: 'float16' is not supported with lazy_reduce.gradient_partition; "
                "use 'bfloat16', or set lazy_reduce.gradient_partition.enabled to false"
            )

        # The base class makes one partition per param group it finds.
        dp_group = kwargs["dp_process_group"]
        self._user_groups, bucket_groups = self._split_user_groups(dist.get_world_size(group=dp_group))
        init_optimizer.param_groups = bucket_groups
        # Gradients are accumulated in fp32 whatever `data_types.grad_accum_dtype` says.
        kwargs["gradient_accumulation_dtype"] = torch.float32
        try:
            super().__init__(init_optimizer, param_names, *args, **kwargs)
        finally:
            init_optimizer.param_groups = self._user_param_groups

    # -- construction ----------------------------------------------------------------------------

    def _split_user_groups(self, ranks: int) -> tuple[list[UserGroup], list[dict]]:
        trainable = [[p for p in g["params"] if is_optimized_parameter(p)] for g in self._user_param_groups]
        limit = self._settings.bucket_elements(sum(p.numel() for ps in trainable for p in ps), ranks)
        user_groups, bucket_groups = [], []
        for group, params in zip(self._user_param_groups, trainable, strict=True):
            # A parameter the model does not register comes last: nothing is known of its gradient.
            specs = [
                ParamSpec(self._registered.get(p, -1), p.numel(), (p.dtype, self._wire_dtype_of(p))) for p in params
            ]
            first = len(bucket_groups)
            for indices in split_into_buckets(specs, limit):
                bucket_groups.append({**group, "params": [params[i] for i in indices]})
            user_groups.append(UserGroup(group, range(first, len(bucket_groups))))
        return user_groups, bucket_groups

    def _wire_dtype_of(self, param: torch.Tensor) -> torch.dtype:
        return get_comm_dtype(param) if has_comm_dtype(param) else self._settings.wire_dtype

    def initialize_gradient_partitioning_data_structures(self):
        # Called once the base class has laid out its partitions and before anything captures
        # `averaged_gradients`: reading a gradient must drain first.
        self.averaged_gradients = _DrainingGradients(self._complete_for_reader)
        super().initialize_gradient_partitioning_data_structures()
        self._build_chain()

    def initialize_optimizer_states(self):
        # The base class would allocate a gradient for every partition (and rebuild Adagrad over bare
        # tensors, losing the user's groups). Here, right before it links parameters to their masters,
        # the masters of one user group move side by side.
        for user_group in self._user_groups:
            self._join_masters(user_group)
        if isinstance(self.optimizer, torch.optim.Adagrad):  # makes its state in its constructor
            rebuilt = torch.optim.Adagrad(self._user_param_groups, **self.optimizer.defaults)
            self.optimizer.state.clear()
            self.optimizer.state.update(rebuilt.state)

    def _join_masters(self, user_group: UserGroup) -> None:
        shards = [self.single_partition_of_fp32_groups[i] for i in user_group.buckets]
        for shard in user_group.group["params"]:
            self.optimizer.state.pop(shard, None)  # state a client optimizer made for the model's parameters
        if not shards:  # every parameter of the group is frozen
            user_group.group["params"] = []
            user_group.counted = []
            return
        user_group.master = torch.cat([shard.detach() for shard in shards]).requires_grad_(True)
        user_group.group["params"] = [user_group.master]
        for i, view in zip(user_group.buckets, user_group.master.detach().split([s.numel() for s in shards])):
            self.single_partition_of_fp32_groups[i] = view
        user_group.counted = self._ranges_in_norm(user_group)

    def _ranges_in_norm(self, user_group: UserGroup) -> list[tuple[int, int]]:
        if self.model_parallel_group is None:
            return [(0, user_group.master.numel())]
        ranges, start = [], 0
        for i in user_group.buckets:
            partition = dist.get_rank(group=self.real_dp_process_group[i])
            for param in self.params_in_partition[i]:
                if getattr(param, PIPE_REPLICATED, False):
                    continue
                if is_model_parallel_parameter(param) or self.model_parallel_rank == 0:
                    key = self.get_param_id(param)
                    offset = self.grad_partition_insertion_offset[i][partition][key]
                    length = min(
                        param.numel() - self.grad_start_offset[i][partition][key], self.partition_size[i] - offset
                    )
                    ranges.append((start + offset, start + offset + length))
            start += self.partition_size[i]
        return ranges

    def _build_chain(self) -> None:
        self._pool = BufferPool(torch.device(get_accelerator().current_device_name()))
        self._slots: dict[torch.Tensor, Slot] = {}
        buckets, last_arrivals = [], []
        for i, params in enumerate(self.round_robin_bit16_groups):
            bucket = Bucket(
                index=i,
                numel=self.bit16_groups_flat[i].numel(),
                wire_dtype=self._wire_dtype_of(params[0]),
                reduce_scatter=make_reduce_scatter(self.real_dp_process_group[i], self._settings.node_size),
            )
            for param, offset in zip(params, self.round_robin_bit16_offsets[i], strict=True):
                slot = Slot(bucket, offset, param.numel(), self.param_names.get(param, "unnamed parameter"))
                bucket.slots.append(slot)
                self._slots[param] = slot
            buckets.append(bucket)
            last_arrivals.append(min(self._registered.get(p, -1) for p in params))
        self._group_of_bucket = [ug for ug in self._user_groups for _ in ug.buckets]
        self._shard_range: list[tuple[int, int]] = []
        for user_group in self._user_groups:
            start = 0
            for i in user_group.buckets:
                self._shard_range.append((start, start + self.partition_size[i]))
                start += self.partition_size[i]
        averaged = self.gradient_average and not self._settings.normalize_tokens
        # As in stock, expert buckets are divided by the size of the whole data-parallel group too.
        ranks = dist.get_world_size(group=self.dp_process_group)
        self._scale = self.sequence_parallel_size / ranks if averaged else 1.0
        self.chain = BucketChain(
            buckets,
            initial_order(last_arrivals),
            self._accumulate_rows,
            self._pool,
            self._settings.max_in_flight,
            self._settings.carry_over,
        )

    @contextmanager
    def _one_param_group_per_bucket(self) -> Iterator[None]:
        """For base-class code that walks ``optimizer.param_groups`` and ``bit16_groups`` together."""
        user_param_groups = self.optimizer.param_groups
        self.optimizer.param_groups = [
            {**self._group_of_bucket[i].group, "params": [shard]}
            for i, shard in enumerate(self.single_partition_of_fp32_groups)
        ]
        try:
            yield
        finally:
            self.optimizer.param_groups = user_param_groups

    def destroy(self):
        with self._one_param_group_per_bucket():
            super().destroy()
        self.chain.discard_accumulated()

    # -- gradients -------------------------------------------------------------------------------

    def create_gradient_handling_hooks(self):
        # Stock's hook counts the parameters of the running graph to find the end of backward; the
        # callback that the engine queues on autograd's graph does that here (`enter_backward`).
        for param, slot in self._slots.items():
            self._grad_acc_hooks.append(register_grad_hook(param, self._make_hook(slot)))
        self._remaining_grad_acc_hooks = 0

    def _make_hook(self, slot: Slot) -> Callable[[torch.Tensor], None]:
        put, put_local = self.chain.put, self.chain.put_local

        def take_gradient(param: torch.Tensor) -> None:
            # A tiled computation runs backward several times and says when the sum is complete.
            if not getattr(param, "ds_grad_is_ready", True):
                return
            grad = param.grad
            param.grad = None
            if grad.layout is not torch.strided:
                grad = grad.to_dense()
            if self._coalesce_grad_reduction:
                put_local(slot, grad)
            else:
                put(slot, grad)

        return take_gradient

    def _accumulate_rows(self, bucket: Bucket, rows: torch.Tensor) -> None:
        user_group = self._group_of_bucket[bucket.index]
        if user_group.gradient is None:
            user_group.gradient = torch.zeros_like(user_group.master, requires_grad=False)
            for i in user_group.buckets:
                start, stop = self._shard_range[i]
                self._publish_gradient(i, user_group.gradient[start:stop])
        start, stop = self._shard_range[bucket.index]
        self._settings.accumulate(user_group.gradient[start:stop], rows, self._scale)

    def _publish_gradient(self, i: int, partition: torch.Tensor) -> None:
        """Makes the partition readable through ``averaged_gradients`` in the base class's form."""
        rank = dist.get_rank(group=self.real_dp_process_group[i])
        views, end = [], 0
        for param in self.params_in_partition[i]:
            key = self.get_param_id(param)
            start = self.grad_partition_insertion_offset[i][rank][key]
            if start > end:  # alignment padding has an entry of its own in the base class's numbering
                views.append(partition[end:start])
            end = start + min(param.numel() - self.grad_start_offset[i][rank][key], partition.numel() - start)
            whole = end - start == param.numel()
            views.append(partition[start:end].view(param.shape) if whole else partition[start:end])
        dict.__setitem__(self.averaged_gradients, i, GradPartitionBufferGroup(views, partition))

    def _complete_for_reader(self) -> None:
        if self.chain.is_open:
            return  # the base class's own bookkeeping within a backward pass
        self.chain.drain()
        if any(self.chain.has_accumulated()):
            names = [bucket.describe() for bucket in self.chain.buckets if bucket.accumulator is not None]
            raise RuntimeError(
                f"lazy_reduce: gradients of {', '.join(names)} arrived outside a reducing backward pass and are "
                "not reduced before step(); read gradients before such a backward, or not at all"
            )

    # -- the backward pass: one micro-step -------------------------------------------------------

    def begin_pass(self, num_tokens: int | torch.Tensor | None) -> None:
        """Begins the backward pass of ``engine.backward``, over ``num_tokens`` tokens if they are counted."""
        self.enter_backward()
        if num_tokens is not None:
            self._token_window.add(num_tokens)
            if isinstance(num_tokens, torch.Tensor):
                self.chain.mute(num_tokens == 0)
            elif num_tokens == 0:
                self.chain.mute(torch.ones((), dtype=torch.bool))

    def enter_backward(self):
        """Begins a micro-step: called before, or by the outputs of a forward pass within, a backward pass."""
        task = torch._C._current_graph_task_id()  # -1 outside a backward pass
        if self._in_backward:
            if task != -1 and self._graph_task in (None, task):
                return  # one more output of the same pass
            self.abort_micro_step()  # an earlier loss.backward() raised and never came to its end
        super().enter_backward()
        self._in_backward = True
        self._graph_task = None if task == -1 else task
        if not self._coalesce_grad_reduction:  # a coalesced pass only feeds the local accumulators
            self.chain.open()

    def overlapping_partition_gradients_reduce_epilogue(self):
        # The end of a backward pass: what has not arrived by now counts as zero.
        self.chain.close()

    def exit_backward(self):
        super().exit_backward()
        self.chain.close()
        self._end_pass()

    def _end_pass(self) -> None:
        # Stock resets this state in the next forward only, so a second loss.backward() would find its
        # end-of-backward callback "already queued" and never get one.
        self._in_backward = False
        self.chain.mute(None)
        self._backward_hook_state.backward_active_depth = 0
        self._backward_hook_state.reset_for_new_step()

    def abort_micro_step(self) -> None:
        """After an exception in backward: completes the collectives, and marks the window as void.

        Ranks may stand at different places in the sequence and what was drained cannot be undone, so
        every rank completes the micro-step and ``step`` discards the whole window on all of them.
        """
        self._void = True
        self.chain.close()
        self._end_pass()
        for param in self._slots:
            param.grad = None

    def reduce_coalesced(self) -> None:
        """Sends the gradients that ``coalesce_grad_reduction`` gathered, each bucket once."""
        if self._in_backward:  # the last loss.backward() raised and was caught
            self.abort_micro_step()
        self.chain.reduce_accumulated([True] * len(self.chain.buckets))

    def finalize_gradient_accumulation_boundary(self):
        # managed_gradient_accumulation: false. Everything is reduced already or completed in step().
        self.set_gradient_accumulation_boundary(True)

    def token_prescale(self) -> float:
        """What the losses of this window are multiplied with; see ``TokenWindow``."""
        return self._token_window.prescale

    # -- the optimizer step ----------------------------------------------------------------------

    def step(self, closure=None):
        """Completes the window and applies one update, or skips it on all ranks together.

        Skipped: a non-finite gradient where stock checks for it, a window in which a backward failed
        on any rank, a window without tokens under token normalisation.
        """
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
            self._global_grad_norm = torch.tensor(norm, dtype=torch.float32, device=self.device)
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
        if self._in_backward:  # a direct loss.backward() raised and was caught
            self.abort_micro_step()
        self.chain.drain()
        late = self.chain.has_accumulated()
        scalars = self._agree_scalars(late)
        if any(scalars.late) and not scalars.void:
            self.chain.reduce_accumulated(scalars.late)
            scalars = self._agree_scalars([False] * len(late))
        return scalars

    def _agree_scalars(self, late: list[bool]) -> StepScalars:
        gradients = []
        if self.compute_grad_norm or self.check_grad_overflow:
            for user_group in self._user_groups:
                if user_group.gradient is not None:
                    gradients += [user_group.gradient[start:stop] for start, stop in user_group.counted]
        norm_squared = local_norm_squared(gradients, torch.device(get_accelerator().current_device_name()))
        return agree(norm_squared, self._void, self._token_window.total(), late, self._all_reduce_scalars)

    def _all_reduce_scalars(self, pack: torch.Tensor) -> None:
        self._scalar_collectives += 1
        dist.all_reduce(pack, group=self.dp_process_group)
        self._model_parallel_all_reduce(tensor=pack, op=dist.ReduceOp.SUM)

    def _agree_on_order(self) -> None:
        """Once: from the second window on, buckets leave in the order in which they completed on rank 0."""
        if self._order_agreed or len(self.chain.buckets) < 2:
            return
        self._order_agreed = True
        order = torch.tensor(self.chain.observed_order(), device=get_accelerator().current_device_name())
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
                user_group.gradient = torch.zeros_like(user_group.master, requires_grad=False)
            user_group.master.grad = user_group.gradient
            self._optimizer_step(index)
            user_group.master.grad = None
        mine = [
            partitions[dist.get_rank(group=group)]
            for partitions, group in zip(self.parallel_partitioned_bit16_groups, self.real_dp_process_group)
        ]
        with torch.no_grad():
            torch._foreach_copy_(mine, self.single_partition_of_fp32_groups)  # rounds to the model dtype
        self.timers(OPTIMIZER_STEP_TIMER).stop()
        self.timers(OPTIMIZER_ALLGATHER_TIMER).start()
        all_gather_dp_groups(
            groups_flat=self.bit16_groups_flat,
            partitioned_param_groups=self.parallel_partitioned_bit16_groups,
            dp_process_group=self.real_dp_process_group,
            start_alignment_factor=self.nccl_start_alignment_factor,
            allgather_bucket_size=self.allgather_bucket_size,
        )
        self.timers(OPTIMIZER_ALLGATHER_TIMER).stop()

    def _lazy_init_hp_params_optimizer_state(self):
        # Stock links optimizer state after its first group only, and to one tensor per group.
        if self._hp_optimizer_states_linked:
            return
        linked = 0
        for user_group in self._user_groups:
            state = self.optimizer.state.get(user_group.master)
            if not state:
                continue
            linked += 1
            for i in user_group.buckets:
                start, stop = self._shard_range[i]
                views = {
                    key: value[start:stop]
                    for key, value in state.items()
                    if torch.is_tensor(value) and value.shape == user_group.master.shape
                }
                shard = self.single_partition_of_fp32_groups[i]
                lazy_init_hp_params_optimizer_state(self.bit16_groups[i], shard, {shard: views})
        self._hp_optimizer_states_linked = linked == sum(ug.master is not None for ug in self._user_groups)

    def _clear_window(self, tokens: float) -> None:
        self._void = False
        self._token_window.restart(tokens)
        self.averaged_gradients.clear()
        for user_group in self._user_groups:
            user_group.gradient = None
        self.chain.discard_accumulated()

    def _warn_no_tokens(self) -> None:
        if not self._warned_no_tokens and dist.get_rank(group=self.dp_process_group) == 0:
            logger.warning("lazy_reduce: no rank had tokens in this window; the update is skipped (said once)")
        self._warned_no_tokens = True

    def offload_states(self, *args, **kwargs):
        # The base class moves each partition by itself, which would tear the joined masters apart.
        raise NotImplementedError("offload_states() is not available with lazy_reduce.gradient_partition yet")

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
            "buckets": len(self.chain.buckets),
            "max_in_flight_seen": counters.max_in_flight_seen,
            "peak_buffer_bytes": self._pool.peak_bytes,
            "collective": "all_to_all",
            "wire_dtype": {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[kinds.pop()]
            if len(kinds) == 1
            else "mixed",
        }
