"""How parameters, masters and optimizer state lie: the base of the ZeRO-2 optimizer.

DeepSpeed's optimizer internals are overridden in the ``zero_*.py`` files only. Here:
one ZeRO param group per *bucket* for the base class (``DeepSpeedZeroOptimizer`` of DeepSpeed 0.19.8),
one flat fp32 master per *user* param group for everybody else. The shards of all buckets of a user group
lie side by side in its master, so that the wrapped optimizer, schedulers and hooks see the user's own
groups with one parameter each, as in stock:

    user group g   master  [ shard of bucket 0 | shard of bucket 2 | ... ]   <- optimizer.param_groups[g]
    bucket 0       params  [ rank 0 | rank 1 | ... ]                         <- bit16_groups_flat[0]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.constants import PIPE_REPLICATED
from deepspeed.runtime.torch_autocast import get_comm_dtype, has_comm_dtype
from deepspeed.runtime.utils import is_model_parallel_parameter, is_optimized_parameter
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer, GradPartitionBufferGroup
from deepspeed.utils import lazy_init_hp_params_optimizer_state

from .bucket_layout import ParamSpec, split_into_buckets
from .config import ConfigError


@dataclass
class UserGroup:
    """One of the user's param groups and its flat fp32 tensors on this rank.

    params: the trainable parameters in the user's order, which is the order of the stock layout.
    buckets: base-class group indices; their shards lie in this order in ``master``.
    master: fp32 masters of all shards, ``[sum of S]``; the wrapped optimizer's only parameter here.
    gradient: fp32 gradient of ``master``, allocated in the first drain of a window, freed by ``step``.
    counted: ranges of ``master`` that enter the gradient norm on this rank (all of it, but for
        parameters that model-parallel ranks replicate).
    """

    group: dict
    params: list[torch.nn.Parameter]
    buckets: range
    master: torch.Tensor | None = None
    gradient: torch.Tensor | None = None
    counted: list[tuple[int, int]] | None = None


class BucketedZeroOptimizer(DeepSpeedZeroOptimizer):
    """ZeRO-2 partitions of buckets instead of whole param groups.

    Args:
        bucket_elements: ``(trainable elements, ranks) -> upper bound of a bucket`` in elements.
        wire_dtype: what travels, unless torch.autocast chose a dtype for the parameter.

    Everything else goes to the base class.

    Raises:
        ConfigError: a trainable parameter is complex.
    """

    def __init__(
        self,
        init_optimizer,
        param_names,
        *args,
        bucket_elements: Callable[[int, int], int],
        wire_dtype: torch.dtype,
        **kwargs,
    ):
        self._wire_dtype = wire_dtype
        self._user_param_groups = init_optimizer.param_groups
        self._registered = {param: index for index, param in enumerate(param_names)}
        for param in (p for group in self._user_param_groups for p in group["params"]):
            if param.is_complex() and is_optimized_parameter(param):  # its fp32 master would lose the imaginary part
                name, dtype = param_names.get(param, "a parameter"), str(param.dtype).removeprefix("torch.")
                raise ConfigError(
                    f"lazy_reduce.gradient_partition.enabled: got true, but {name} is {dtype}; expected real "
                    "parameters (torch.view_as_real), or false"
                )
        trainable = sum(p.numel() for g in self._user_param_groups for p in g["params"] if is_optimized_parameter(p))
        ranks = dist.get_world_size(group=kwargs["dp_process_group"])
        self._user_groups, bucket_groups = self._split_user_groups(bucket_elements(trainable, ranks))
        # The base class makes one partition per param group it finds.
        init_optimizer.param_groups = bucket_groups
        # Gradients are accumulated in fp32 whatever `data_types.grad_accum_dtype` says.
        kwargs["gradient_accumulation_dtype"] = torch.float32
        try:
            super().__init__(init_optimizer, param_names, *args, **kwargs)
        finally:
            init_optimizer.param_groups = self._user_param_groups

    def _split_user_groups(self, limit: int) -> tuple[list[UserGroup], list[dict]]:
        user_groups, bucket_groups = [], []
        for group in self._user_param_groups:
            params = [p for p in group["params"] if is_optimized_parameter(p)]
            # A parameter the model does not register comes last: nothing is known of its gradient.
            specs = [
                ParamSpec(self._registered.get(p, -1), p.numel(), (p.dtype, self._wire_dtype_of(p))) for p in params
            ]
            first = len(bucket_groups)
            for indices in split_into_buckets(specs, limit):
                bucket_groups.append({**group, "params": [params[i] for i in indices]})
            user_groups.append(UserGroup(group, params, range(first, len(bucket_groups))))
        return user_groups, bucket_groups

    def _wire_dtype_of(self, param: torch.Tensor) -> torch.dtype:
        return get_comm_dtype(param) if has_comm_dtype(param) else self._wire_dtype

    def initialize_gradient_partitioning_data_structures(self):
        # Called once the base class has laid out its partitions.
        super().initialize_gradient_partitioning_data_structures()
        self._group_of_bucket = [user_group for user_group in self._user_groups for _ in user_group.buckets]
        self._shard_range: list[tuple[int, int]] = []
        for user_group in self._user_groups:
            start = 0
            for i in user_group.buckets:
                self._shard_range.append((start, start + self.partition_size[i]))
                start += self.partition_size[i]

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
        master = torch.cat([shard.detach() for shard in shards])
        if self.cpu_offload_pin_memory:
            master = get_accelerator().pin_memory(master)
        user_group.master = master.requires_grad_(True)
        user_group.group["params"] = [user_group.master]
        views = user_group.master.detach().split([shard.numel() for shard in shards])
        for i, view in zip(user_group.buckets, views, strict=True):
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

    def _zero_gradient(self, user_group: UserGroup) -> torch.Tensor:
        # On the accelerator even where masters are offloaded: that is where gradients are summed.
        device = get_accelerator().current_device_name()
        return torch.zeros(user_group.master.numel(), dtype=torch.float32, device=device)

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

    def _reattach_parameters(self) -> None:
        """Makes every parameter a view of its bucket's flat buffer again, as stock does after each step.

        Whoever gave it other memory (``param.data = ...``, ``module.to(memory_format=...)``) would miss all updates.
        """
        for i, flat in enumerate(self.bit16_groups_flat):
            start, size = flat.data_ptr(), flat.element_size()
            placed = zip(self.round_robin_bit16_groups[i], self.round_robin_bit16_offsets[i], strict=True)
            if any(param.data_ptr() != start + offset * size for param, offset in placed):
                self._update_model_bit16_weights(i)

    def _link_all_hp_params(self):
        # With optimizer offload stock links parameters to gradients on the host; ours are summed, read and
        # set on the accelerator, and go to the host in `step`.
        offload, self.cpu_offload = self.cpu_offload, False
        try:
            super()._link_all_hp_params()
        finally:
            self.cpu_offload = offload

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

    def _link_optimizer_state(self) -> None:
        """Links parameters to optimizer state that was replaced."""
        self._hp_optimizer_states_linked = False
        self._lazy_init_hp_params_optimizer_state()
