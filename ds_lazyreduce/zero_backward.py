"""From a parameter's gradient to the gradient partition: hooks and the backward pass."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.torch_autocast import get_autocast_dtype
from deepspeed.utils.torch import register_grad_hook
from torch.utils.weak import WeakTensorKeyDictionary

from .autograd_graph import reached_leaves
from .bucket import Bucket, Slot
from .bucket_chain import AccumulatingChain, BucketChain
from .bucket_layout import initial_order
from .buffer_pool import BufferPool
from .collectives import ReduceScatter
from .config import ConfigError
from .failures import inherit_timeout
from .message_size import small_messages
from .reduce_schedule import make_schedule
from .reduction_stream import make_streams
from .token_window import TokenWindow
from .verification import make_verification
from .warm_up import device_memory_in_use, warm_up
from .zero_state import StockStateZeroOptimizer

logger = logging.getLogger("ds_lazyreduce")

_NO_GRAPH_TASK = -1
# Of all engines of the process, which share process groups, in the order in which they began: optimizers within a
# backward pass, and chains with an open micro-step.
_OPEN_PASSES: list[ReducingZeroOptimizer] = []
_OPEN_CHAINS: list[BucketChain] = []
# parameter -> weak reference to the optimizer that takes its gradients
_TAKERS = WeakTensorKeyDictionary()


@dataclass(frozen=True)
class PartitionSettings:
    """The resolved settings of ``lazy_reduce.gradient_partition``.

    bucket_elements, wire_dtype: see ``BucketedZeroOptimizer``.
    accumulate: ``accumulate(partition [S] fp32, rows [N, S], scale)``, in place.
    reduce_scatter: ``process group -> the reduce-scatter of its buckets``; called once a group.
    normalize_tokens: whether gradients are divided by the window's token count instead of averaged.
    verify_every: windows between two verifications of a bucket, 0 for none.
    """

    bucket_elements: Callable[[int, int], int]
    wire_dtype: torch.dtype
    accumulate: Callable[[torch.Tensor, torch.Tensor, float], None]
    reduce_scatter: Callable[[Any], ReduceScatter]
    max_in_flight: int
    carry_over: bool
    reduce_every: int | str
    normalize_tokens: bool
    verify_every: int = 0


class ReducingZeroOptimizer(StockStateZeroOptimizer):
    """ZeRO-2 whose gradients go through a ``BucketChain`` into the fp32 gradient partition."""

    def __init__(self, init_optimizer, param_names, *args, settings: PartitionSettings, **kwargs):
        self._settings = settings
        self._token_window = TokenWindow()
        self._schedule = make_schedule(settings.reduce_every)
        self._streams = make_streams(get_accelerator())
        self._void = False
        self._passed = False  # a micro-step was begun, or a coalesced block ended, since the engine's last step
        self._ended = ""  # why it gets no gradients any more
        self._graph_task: int | None = None
        if get_autocast_dtype() == torch.float16:
            raise ConfigError(
                "torch_autocast.dtype: 'float16' is not supported with lazy_reduce.gradient_partition; "
                "use 'bfloat16', or set lazy_reduce.gradient_partition.enabled to false"
            )
        super().__init__(
            init_optimizer,
            param_names,
            *args,
            bucket_elements=settings.bucket_elements,
            wire_dtype=settings.wire_dtype,
            **kwargs,
        )
        self._warm_up()

    # -- construction ----------------------------------------------------------------------------

    def initialize_gradient_partitioning_data_structures(self):
        super().initialize_gradient_partitioning_data_structures()
        self._build_chain()

    def _build_chain(self) -> None:
        inherit_timeout(self.model_parallel_group)
        self._pool = BufferPool(torch.device(get_accelerator().current_device_name()), self._streams)
        self._slots: dict[torch.Tensor, Slot] = {}
        buckets, last_arrivals = [], []
        self._reduce_scatters: dict[Any, ReduceScatter] = {}
        for i, params in enumerate(self.round_robin_bit16_groups):
            bucket = Bucket(
                index=i,
                numel=self.bit16_groups_flat[i].numel(),
                wire_dtype=self._wire_dtype_of(params[0]),
                reduce_scatter=self._reduce_scatter_of(self.real_dp_process_group[i]),
                group=self.real_dp_process_group[i],
            )
            for param, offset in zip(params, self.round_robin_bit16_offsets[i], strict=True):
                slot = Slot(bucket, offset, param.numel(), self.param_names.get(param, "unnamed parameter"))
                bucket.slots.append(slot)
                self._slots[param] = slot
            buckets.append(bucket)
            last_arrivals.append(min(self._registered.get(p, -1) for p in params))
        averaged = self.gradient_average and not self._settings.normalize_tokens
        # As in stock, expert buckets are divided by the size of the whole data-parallel group too.
        ranks = dist.get_world_size(group=self.dp_process_group)
        self._scale = self.sequence_parallel_size / ranks if averaged else 1.0
        chain = BucketChain if self._settings.reduce_every == 1 else AccumulatingChain
        self.chain = chain(
            buckets,
            initial_order(last_arrivals),
            self._accumulate_rows,
            self._pool,
            self._settings.max_in_flight,
            self._settings.carry_over,
            _OPEN_CHAINS,
        )
        kernel = getattr(self._settings.accumulate, "name", "unknown")
        self._verification = make_verification(
            self._settings.verify_every, self.chain.buckets, self._gradient_shard, self._scale, kernel
        )
        warning = small_messages(buckets, self._settings.reduce_every)
        if warning and dist.get_rank() == 0:
            logger.warning(warning)

    def _reduce_scatter_of(self, group) -> ReduceScatter:
        if group not in self._reduce_scatters:
            inherit_timeout(group)
            self._reduce_scatters[group] = self._settings.reduce_scatter(group)
        return self._reduce_scatters[group]

    def _warm_up(self) -> None:
        uses = {}
        for bucket, group in zip(self.chain.buckets, self.real_dp_process_group, strict=True):
            uses[group, bucket.wire_dtype] = (group, self._reduce_scatter_of(group), bucket.wire_dtype)
        accelerator = get_accelerator()
        before = device_memory_in_use(accelerator)
        warm_up(uses.values(), torch.device(accelerator.current_device_name()))
        self._device_memory = (before, device_memory_in_use(accelerator))

    def destroy(self):
        super().destroy()
        self._ended = self._ended or "it was destroyed"
        self._forget_pass()
        self.chain.forget()
        while self._reduce_scatters:
            self._reduce_scatters.popitem()[1].close()

    # -- gradients -------------------------------------------------------------------------------

    def create_gradient_handling_hooks(self):
        # Stock's hook counts the parameters of the running graph to find the end of backward; the
        # callback that the engine queues on autograd's graph does that here (`enter_backward`).
        for param, slot in self._slots.items():
            earlier = _TAKERS[param]() if param in _TAKERS else None
            if earlier is not None:  # of an engine that was given up without destroy(), or is used no more
                earlier._yield_parameters()
            _TAKERS[param] = weakref.ref(self)
            self._grad_acc_hooks.append(register_grad_hook(param, self._make_hook(slot)))
        self._remaining_grad_acc_hooks = 0

    def _yield_parameters(self) -> None:
        for hook in self._grad_acc_hooks:
            hook.remove()
        self._grad_acc_hooks.clear()
        name = next(iter(self._slots.values())).name
        self._ended = f"an engine that was built later over the same parameters ({name}, ...) takes their gradients"

    def _refuse_if_ended(self) -> None:
        if self._ended:
            raise RuntimeError(f"lazy_reduce: this engine cannot train any more: {self._ended}")

    def _make_hook(self, slot: Slot) -> Callable[[torch.Tensor], None]:
        put, put_local = self.chain.put, self.chain.put_local

        def take_gradient(param: torch.Tensor) -> None:
            # A tiled computation runs backward several times and says when the sum is complete.
            if not getattr(param, "ds_grad_is_ready", True):
                return
            grad = param.grad.detach()  # with create_graph it is part of a graph
            param.grad = None
            if grad.layout is not torch.strided:
                grad = grad.to_dense()
            if self._coalesce_grad_reduction:
                put_local(slot, grad)
            else:
                put(slot, grad)

        return self._streams.bring_home(take_gradient)

    def _accumulate_rows(self, bucket: Bucket, rows: torch.Tensor) -> None:
        user_group = self._group_of_bucket[bucket.index]
        if user_group.gradient is None:
            with self._streams.allocating():  # this runs on the reduction stream
                user_group.gradient = self._zero_gradient(user_group)
            for i in user_group.buckets:
                start, stop = self._shard_range[i]
                self._publish_gradient(i, user_group.gradient[start:stop])
        start, stop = self._shard_range[bucket.index]
        self._settings.accumulate(user_group.gradient[start:stop], rows, self._scale)

    def _gradient_shard(self, index: int) -> torch.Tensor | None:
        gradient = self._group_of_bucket[index].gradient
        return None if gradient is None else gradient[slice(*self._shard_range[index])]

    def _settle_gradients(self) -> None:
        self.chain.drain()

    # -- the backward pass: one micro-step -------------------------------------------------------

    def begin_pass(self, num_tokens: int | torch.Tensor | None) -> None:
        """Begins the backward pass of ``engine.backward``, over ``num_tokens`` tokens if they are counted."""
        self.enter_backward()
        if num_tokens is not None:
            self._token_window.add(num_tokens)
            if isinstance(num_tokens, torch.Tensor):
                self.chain.mute(num_tokens == 0)
            elif num_tokens == 0:
                self.chain.mute(torch.ones((), dtype=torch.bool, device=get_accelerator().current_device_name()))

    def enter_backward(self):
        """Begins a micro-step: called before, or by the outputs of a forward pass within, a backward pass."""
        task = torch._C._current_graph_task_id()  # -1 outside a backward pass
        if self in _OPEN_PASSES and task != -1:
            if self._graph_task in (None, task):
                return  # one more output of the same pass
            self._abort_pass()  # an earlier loss.backward() raised and never came to its end
        self._refuse_if_ended()
        self.complete_broken_pass()
        super().enter_backward()
        _OPEN_PASSES.append(self)
        self._streams.settle()
        self._graph_task = None if task == -1 else task
        if self._coalesce_grad_reduction:  # a coalesced pass only feeds the local accumulators
            return
        if task == -1 or reached_leaves() == "all":
            self._begin_micro_step()
        else:  # a backward that names its inputs, which need not be parameters of ours
            self.chain.arm(self._begin_micro_step)

    def awaits_pass(self) -> bool:
        """Whether no backward pass is under way and none has been since the engine's last step."""
        return not self._passed and self not in _OPEN_PASSES

    def _begin_micro_step(self) -> None:
        self._passed = True
        if self._schedule.reduces_now(self.is_gradient_accumulation_boundary()):
            self.chain.open()

    def overlapping_partition_gradients_reduce_epilogue(self):
        # The end of a backward pass: what has not arrived by now counts as zero.
        self.chain.close()
        if self.is_gradient_accumulation_boundary():  # nothing follows under which the rest could be drained
            self.chain.drain()

    def exit_backward(self):
        super().exit_backward()
        self.chain.close()
        self._end_pass()

    def _end_pass(self) -> None:
        # Stock resets this state in the next forward only, so a second loss.backward() would find its
        # end-of-backward callback "already queued" and never get one.
        self._forget_pass()
        self.chain.mute(None)
        self._backward_hook_state.backward_active_depth = 0
        self._backward_hook_state.reset_for_new_step()

    def _forget_pass(self) -> None:
        if self in _OPEN_PASSES:
            _OPEN_PASSES.remove(self)

    def abort_pass(self) -> None:
        """After an exception in ``engine.backward``, which other engines' passes may have been part of."""
        self._abort_pass()
        self.complete_broken_pass()

    def _abort_pass(self) -> None:
        """Completes the collectives of the micro-step, and marks the window as void.

        Ranks may stand at different places in the sequence and what was drained cannot be undone, so
        every rank completes the micro-step and ``step`` discards the whole window on all of them.
        """
        self._void = True
        self.chain.fire()  # it failed before its first gradient, but other ranks have opened a micro-step
        self.chain.close()
        self._end_pass()
        for param in self._slots:
            param.grad = None

    def leave_broken(self) -> None:
        """After a KeyboardInterrupt in backward, under which no collective should start: the next call completes."""
        self._graph_task = _NO_GRAPH_TASK

    def complete_broken_pass(self) -> None:
        """Before a collective: completes what a backward pass that raised and was caught owes, as others wait for it.

        Of every engine: other ranks have reduced all gradients of a pass through several of them before this call.
        """
        if torch._C._current_graph_task_id() == -1:
            for optimizer in list(_OPEN_PASSES):
                optimizer._abort_pass()

    def complete_skipped_pass(self) -> None:
        """At each ``engine.step``: a rank that ran no backward since the last one takes part with zeros.

        It skipped a bad batch, or its forward raised and was caught; other ranks reduce in theirs.
        """
        self._refuse_if_ended()
        self.complete_broken_pass()
        if not self._passed:
            self._begin_micro_step()
            self.chain.close()
        self._passed = False

    def reduce_coalesced(self) -> None:
        """Sends the gradients that ``coalesce_grad_reduction`` gathered, each bucket once."""
        self.complete_broken_pass()
        self.chain.reduce_accumulated([True] * len(self.chain.buckets))
        self._passed = True  # also on a rank that ran no backward in the block
        self._schedule.reduced()

    def finalize_gradient_accumulation_boundary(self):
        # managed_gradient_accumulation: false. Everything is reduced already or completed in step().
        self.set_gradient_accumulation_boundary(True)

    def token_prescale(self) -> float:
        """What the losses of this window are multiplied with; see ``TokenWindow``."""
        return self._token_window.prescale
