"""Saves and loads ZeRO state in the layout of plain DeepSpeed: a level between buckets and the training code.

The base class writes and reads its own format. It does so here inside a *stock view*: for a moment the optimizer
holds the attributes plain ZeRO-2 would have, one group for each of the user's, with partitions on the host that
were exchanged between the ranks on the way in or out.
"""

from __future__ import annotations

import math
import os
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address, tensor_fragment

from .checkpoint import CheckpointError
from .layout_exchange import LayoutExchange
from .stock_layout import Placement, StockLayout, plan_transfer, stock_layout
from .zero_partition import BucketedZeroOptimizer, UserGroup

_PARTITIONS = "single_partition_of_fp32_groups"
_STATE = "base_optimizer_state"
_ALIGNMENT = "param_alignment_paddings"
_END_PADDING = "group_paddings"
_ABSENT = object()


@dataclass
class _StockGroup:
    """A user group as plain ZeRO-2 would keep it on rank ``rank`` of ``process_group``."""

    user_group: UserGroup
    layout: StockLayout
    rank: int
    process_group: Any
    exchange: LayoutExchange

    def pull(self, ours: torch.Tensor) -> torch.Tensor:
        """This rank's stock partition of ``ours``, a tensor that lies as the master does. Collective; on the host."""
        partition = torch.zeros(self.layout.partition_size, dtype=ours.dtype)
        self.exchange.forward(ours.detach(), partition)
        return partition

    def push(self, partition: torch.Tensor, ours: torch.Tensor) -> None:
        """The reverse of :meth:`pull`; padding in ``ours`` stays as it is."""
        self.exchange.backward(partition, ours.detach())

    def is_sharded(self, value: Any) -> bool:
        """Whether ``value``, of the wrapped optimizer's state here, lies as the master does."""
        return torch.is_tensor(value) and value.shape == self.user_group.master.shape

    def is_partition(self, value: Any) -> bool:
        """Whether ``value``, of a stock optimizer's state, lies as the stock partition does."""
        return torch.is_tensor(value) and value.shape == (self.layout.partition_size,)


class StockStateZeroOptimizer(BucketedZeroOptimizer):
    """Buckets in memory, plain ZeRO-2 in files."""

    def __init__(self, init_optimizer, param_names, *args, round_robin_gradients: bool = False, **kwargs):
        # In the buckets a reordering has no use; files follow the setting, as plain DeepSpeed will expect.
        self._stock_round_robin = round_robin_gradients
        super().__init__(init_optimizer, param_names, *args, round_robin_gradients=False, **kwargs)

    # -- the stock layout ------------------------------------------------------------------------

    @cached_property
    def _stock_groups(self) -> list[_StockGroup]:
        return [self._stock_group(user_group) for user_group in self._user_groups]

    def _stock_group(self, user_group: UserGroup) -> _StockGroup:
        group = self.dp_process_group
        placements = {}
        for i in user_group.buckets:
            group = self.real_dp_process_group[i]
            for param, start in zip(self.round_robin_bit16_groups[i], self.round_robin_bit16_offsets[i], strict=True):
                placements[param] = Placement(start, self.partition_size[i], self._shard_range[i][0])
        params, alignment = user_group.params, 1
        if self.parameter_alignment and params:
            alignment = 16 // math.gcd(16, params[0].element_size())
        numels = [param.numel() for param in params]
        layout = stock_layout(
            numels, dist.get_world_size(group=group), round_robin=self._stock_round_robin, alignment=alignment
        )
        segments = plan_transfer(numels, [placements[param] for param in params], layout.placements())
        return _StockGroup(user_group, layout, dist.get_rank(group=group), group, LayoutExchange(segments, group))

    def stock_parameter_order(self):
        """A context in which the optimizer lists its parameters as plain ZeRO-2 does, for ``param_shapes``."""
        ordered = [[g.user_group.params[i] for i in g.layout.order] for g in self._stock_groups]
        return _replaced(self, {"round_robin_bit16_groups": ordered})

    @contextmanager
    def _stock_view(self, partitions: list[torch.Tensor], states: list[dict]) -> Iterator[None]:
        """Plain ZeRO-2's attributes, over host ``partitions`` and the wrapped optimizer's ``states``, one a group."""
        groups = self._stock_groups
        attributes = {
            "bit16_groups": [g.user_group.params for g in groups],
            "round_robin_bit16_groups": [[g.user_group.params[i] for i in g.layout.order] for g in groups],
            "round_robin_bit16_padding": self._stock_alignment_paddings(),
            "round_robin_bit16_offsets": [list(g.layout.offsets) for g in groups],
            "bit16_groups_flat": [torch.empty(g.layout.numel, device="meta") for g in groups],  # for their length
            "single_partition_of_fp32_groups": partitions,
            "partition_size": [g.layout.partition_size for g in groups],
            "partition_count": [g.layout.ranks for g in groups],
            "groups_padding": [g.layout.end_padding(g.rank) for g in groups],
            "real_dp_process_group": [g.process_group for g in groups],
            "_param_slice_mappings": [self._slice_mapping(g) for g in groups],
            "device": "cpu",  # where the base class makes optimizer state that did not exist
            # The view's tensors are nobody's masters: links and weights are brought up to date afterwards.
            "_link_all_hp_params": _nothing,
            "_restore_from_bit16_weights": _nothing,
        }
        masters = {g.user_group.master for g in groups}
        state = defaultdict(dict, {key: value for key, value in self.optimizer.state.items() if key not in masters})
        state.update((partition, values) for partition, values in zip(partitions, states, strict=True) if values)
        param_groups = [
            {**g.user_group.group, "params": [partition]} for g, partition in zip(groups, partitions, strict=True)
        ]
        with _replaced(self, attributes), _replaced(self.optimizer, {"state": state, "param_groups": param_groups}):
            yield

    def _stock_alignment_paddings(self) -> list[list[int]]:
        return [list(g.layout.paddings) for g in self._stock_groups]

    def _slice_mapping(self, group: _StockGroup) -> OrderedDict:
        return OrderedDict(
            (self.param_names[group.user_group.params[index]], fragment_address(numel=numel, start=start))
            for index, (start, numel) in group.layout.fragments(group.rank).items()
        )

    # -- save ------------------------------------------------------------------------------------

    def state_dict(self):
        """Plain ZeRO-2's state dict, on the host. Collective: every rank of the data-parallel group calls it.

        Raises:
            CheckpointError: the wrapped optimizer keeps state that is neither one number nor of the shape of the
                fp32 masters (Adafactor's rows and columns, blockwise quantised moments): it has no stock layout.
        """
        ours = [self.optimizer.state.get(g.user_group.master, {}) for g in self._stock_groups]
        for group, state in zip(self._stock_groups, ours, strict=True):
            for key, value in state.items():
                if _tensors_larger_than_one(value) and not group.is_sharded(value):
                    raise CheckpointError(
                        f"state {key!r} of {type(self.optimizer).__name__} is not elementwise: a checkpoint in plain "
                        "DeepSpeed's layout cannot hold it; lazy_reduce.gradient_partition needs an optimizer whose "
                        "state has the shape of its parameters"
                    )
        partitions, states = [], []
        for group, state in zip(self._stock_groups, ours, strict=True):
            master = group.user_group.master
            partitions.append(torch.zeros(0) if master is None else group.pull(master))
            states.append({k: group.pull(v) if group.is_sharded(v) else v for k, v in state.items()})
        with self._stock_view(partitions, states):
            return super().state_dict()

    # -- load ------------------------------------------------------------------------------------

    def check_stock_state(self, state: dict, source: str) -> list[list[str]]:
        """Whether ``state``, one rank's part of a checkpoint, fits this optimizer.

        Args:
            source: what the error calls it: the file's name.

        Returns:
            For each group the names of the optimizer's elementwise state, which all ranks must share.

        Raises:
            CheckpointError: it does not. Nothing has changed.
        """
        missing = {_PARTITIONS, _STATE, _END_PADDING, "zero_stage", "ds_version"} - set(state)
        if missing:
            raise CheckpointError(f"{source}: not a ZeRO-1 or ZeRO-2 checkpoint, it lacks {sorted(missing)}")
        if state["zero_stage"] not in (ZeroStageEnum.optimizer_states, ZeroStageEnum.gradients):
            raise CheckpointError(f"{source}: of ZeRO stage {state['zero_stage']}, expected 1 or 2")
        groups, partitions = self._stock_groups, state[_PARTITIONS]
        if len(partitions) != len(groups):
            raise CheckpointError(f"{source}: has {len(partitions)} param groups, the optimizer {len(groups)}")
        if _ALIGNMENT in state:
            if state[_ALIGNMENT] != self._stock_alignment_paddings():
                raise CheckpointError(
                    f"{source}: saved with another zero_optimization.parameter_alignment or other parameters; load "
                    "with the setting it was saved with, or with load_optimizer_states=False"
                )
            for g, (group, partition, padding) in enumerate(zip(groups, partitions, state[_END_PADDING], strict=True)):
                numel = partition.numel() + padding
                if numel != group.layout.partition_size:
                    expected = group.layout.partition_size
                    raise CheckpointError(f"{source}: param group {g} has {numel} elements a rank, expected {expected}")
        saved = state[_STATE]
        rigid = isinstance(saved, dict)
        per_group = [saved["state"].get(g, {}) for g in range(len(groups))] if rigid else saved
        return [sorted(key for key, value in values.items() if _tensors_larger_than_one(value)) for values in per_group]

    def _load_legacy_checkpoint(self, state_dict_list, load_optimizer_states=True, load_from_fp32_weights=False):
        """The base class's, from plain ZeRO-2's state dicts. Collective."""
        groups = self._stock_groups
        partitions = [torch.zeros(g.layout.partition_size, dtype=self.master_weights_and_grads_dtype) for g in groups]
        with self._stock_view(partitions, [self._blank_state(g) for g in groups]):
            super()._load_legacy_checkpoint(state_dict_list, load_optimizer_states, load_from_fp32_weights)
            # torch's load_state_dict has put new dicts in place of the groups.
            loaded_groups = self.optimizer.param_groups
            loaded_states = [self.optimizer.state.get(partition, {}) for partition in partitions]
        if load_from_fp32_weights:
            for group, partition in zip(groups, partitions, strict=True):
                if group.user_group.master is not None:
                    group.push(partition, group.user_group.master)
        else:
            self._restore_from_bit16_weights()
        if load_optimizer_states:
            for group, loaded_group, state in zip(groups, loaded_groups, loaded_states, strict=True):
                _replace_settings(group.user_group.group, loaded_group)
                if group.user_group.master is not None:
                    self.optimizer.state[group.user_group.master] = self._our_state(group, state)
            self._link_optimizer_state()

    def _blank_state(self, group: _StockGroup) -> dict:
        # Elastic checkpoints are copied into what state there is. Its values need no exchange: all are replaced.
        state = self.optimizer.state.get(group.user_group.master, {})
        size = group.layout.partition_size
        return {
            key: torch.zeros(size, dtype=value.dtype)
            if group.is_sharded(value)
            else value.detach().cpu().clone()
            if torch.is_tensor(value)
            else value
            for key, value in state.items()
        }

    def _our_state(self, group: _StockGroup, loaded: dict) -> dict:
        master = group.user_group.master
        current = self.optimizer.state.get(master, {})
        state = {}
        for key in sorted(loaded):  # exchanges in the same order on every rank
            value = loaded[key]
            if group.is_partition(value):
                ours = current.get(key)
                if not group.is_sharded(ours) or ours.dtype != value.dtype:
                    ours = torch.zeros_like(master, dtype=value.dtype, requires_grad=False)
                group.push(value, ours)
                value = ours
            state[key] = value
        _place_scalars(state, group.user_group)
        return {key: state[key] for key in loaded}

    def _link_optimizer_state(self) -> None:
        self._hp_optimizer_states_linked = False
        self._lazy_init_hp_params_optimizer_state()

    def check_universal_folder(self, folder: str) -> None:
        """Whether the universal checkpoint in ``folder`` has what this optimizer needs.

        Raises:
            CheckpointError: it has not; names the file. Nothing has changed.
        """
        if any(user_group.master is None for user_group in self._user_groups):
            raise CheckpointError("a universal checkpoint cannot be loaded with a param group of frozen parameters")
        path = os.path.join(folder, "optimizer_state.pt")
        try:
            groups = torch.load(path, map_location="cpu", weights_only=False)["param_groups"]
        except Exception as error:
            raise CheckpointError(f"{path}: cannot be read: {type(error).__name__}: {error}") from error
        if len(groups) != len(self._user_groups):
            raise CheckpointError(f"{path}: has {len(groups)} param groups, the optimizer {len(self._user_groups)}")
        for user_group in self._user_groups:
            for param in user_group.params:
                file = os.path.join(folder, self.param_names[param], "fp32.pt")
                if not os.path.isfile(file):
                    raise CheckpointError(f"{file}: missing; it should hold {tuple(param.shape)} weights")

    def _load_universal_checkpoint(self, checkpoint_folder, load_optimizer_states, load_from_fp32_weights):
        """The base class's. It needs no exchange: every rank reads its fragments of every parameter's file."""
        params = [user_group.params for user_group in self._user_groups]
        try:
            for user_group in self._user_groups:
                self._address_within_master(user_group)
            with _replaced(self, {"bit16_groups": params}):
                super()._load_universal_checkpoint(checkpoint_folder, load_optimizer_states, load_from_fp32_weights)
        finally:
            with self._one_param_group_per_bucket():
                self._link_all_hp_params()
        for user_group in self._user_groups:
            _place_scalars(self.optimizer.state[user_group.master], user_group)
        self._link_optimizer_state()

    def _address_within_master(self, user_group: UserGroup) -> None:
        """Makes the user group one flat partition to the base class, which puts optimizer state together by address."""
        fragments = 0
        for i in user_group.buckets:
            base = self._shard_range[i][0]
            for param in self.bit16_groups[i]:
                mapping = param._hp_mapping
                if mapping is not None:
                    fragments += 1
                    address = mapping.hp_fragment_address
                    mapping.hp_fragment_address = fragment_address(numel=address.numel, start=base + address.start)
        if not fragments:
            # The rank has padding only. With an empty fragment it still learns the state's names and step.
            param = user_group.params[0]
            param._hp_mapping = tensor_fragment(
                lp_fragment=param.detach().flatten()[:0],
                lp_fragment_address=fragment_address(numel=0, start=0),
                hp_fragment=user_group.master.detach()[:0],
                hp_fragment_address=fragment_address(numel=0, start=0),
                gradient_dict=self.averaged_gradients,
                offload_gradient_dict=self.offload_gradient_dict,
                use_offload=False,
                param_group_index=user_group.buckets[0],
            )


def _nothing() -> None:
    pass


@contextmanager
def _replaced(target: Any, attributes: dict[str, Any]) -> Iterator[None]:
    """Instance attributes of ``target`` for the length of the context."""
    own = vars(target)
    before = {name: own.get(name, _ABSENT) for name in attributes}
    own.update(attributes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is _ABSENT:
                own.pop(name, None)
            else:
                own[name] = value


def _replace_settings(group: dict, loaded: dict) -> None:
    """Makes ``group`` what ``loaded`` is, in place, with its own parameters: the user may hold a reference."""
    params = group["params"]
    settings = {key: value for key, value in loaded.items() if key != "params"}
    group.clear()
    group["params"] = params
    group.update(settings)


def _place_scalars(state: dict, user_group: UserGroup) -> None:
    """Moves one-element tensors to where torch's optimizers keep them: a plain ``step`` on the host."""
    on_host = {} if user_group.group.get("fused") or user_group.group.get("capturable") else {"step"}
    for key, value in state.items():
        if torch.is_tensor(value) and value.numel() == 1 and key not in on_host:
            state[key] = value.to(user_group.master.device)


def _tensors_larger_than_one(value: Any) -> bool:
    if torch.is_tensor(value):
        return value.numel() > 1
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, (list, tuple)) and any(_tensors_larger_than_one(item) for item in value)
