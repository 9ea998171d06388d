"""Saves and loads ZeRO state in the layout of plain DeepSpeed: a level between buckets and the training code.

The base class writes and reads its own format. It does so here inside a *stock view*: for a moment the optimizer
holds the attributes plain ZeRO-2 would have, one group for each of the user's, with partitions on the host that
were exchanged between the ranks on the way in or out.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

import torch
from deepspeed import comm as dist
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from .checkpoint import CheckpointError, raise_on_every_rank
from .layout_exchange import DEVICE_BYTES, LayoutExchange
from .stock_group import StockGroup, place_scalars, replace_settings, replaced, tensors_larger_than_one
from .stock_layout import Placement, plan_transfer, stock_layout
from .zero_offload import MovableStateZeroOptimizer
from .zero_partition import UserGroup
from .zero_universal import UniversalStateZeroOptimizer

_PARTITIONS = "single_partition_of_fp32_groups"
_STATE = "base_optimizer_state"
_ALIGNMENT = "param_alignment_paddings"
_END_PADDING = "group_paddings"
_LOSS_SCALER = "loss_scaler"


class StockStateZeroOptimizer(UniversalStateZeroOptimizer, MovableStateZeroOptimizer):
    """Buckets in memory, plain ZeRO-2 in files."""

    _host_bytes = 0

    def __init__(self, init_optimizer, param_names, *args, round_robin_gradients: bool = False, **kwargs):
        # In the buckets a reordering has no use; files follow the setting, as plain DeepSpeed will expect.
        self._stock_round_robin = round_robin_gradients
        super().__init__(init_optimizer, param_names, *args, round_robin_gradients=False, **kwargs)

    # -- the stock layout ------------------------------------------------------------------------

    @cached_property
    def _stock_groups(self) -> list[StockGroup]:
        return [self._stock_group(user_group) for user_group in self._user_groups]

    def _stock_group(self, user_group: UserGroup) -> StockGroup:
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
        return StockGroup(user_group, layout, dist.get_rank(group=group), group, LayoutExchange(segments, group))

    def stock_parameter_order(self):
        """A context in which the optimizer lists its parameters as plain ZeRO-2 does, for ``param_shapes``."""
        ordered = [[g.user_group.params[i] for i in g.layout.order] for g in self._stock_groups]
        return replaced(self, {"round_robin_bit16_groups": ordered})

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
        # A group that somebody added later is, as in stock, not trained.
        param_groups = [
            {key: value.clone() if torch.is_tensor(value) else value for key, value in group.items()}
            | {"params": [partition]}
            for group, partition in zip(self.optimizer.param_groups, partitions, strict=False)
        ]
        with replaced(self, attributes), replaced(self.optimizer, {"state": state, "param_groups": param_groups}):
            yield

    def _stock_alignment_paddings(self) -> list[list[int]]:
        return [list(g.layout.paddings) for g in self._stock_groups]

    def _slice_mapping(self, group: StockGroup) -> OrderedDict:
        return OrderedDict(
            (self.param_names[group.user_group.params[index]], fragment_address(numel=numel, start=start))
            for index, (start, numel) in group.layout.fragments(group.rank).items()
        )

    # -- save ------------------------------------------------------------------------------------

    def check_state_is_elementwise(self) -> None:
        """Whether all state of the wrapped optimizer has a place in the stock layout. The same on every rank.

        Raises:
            CheckpointError: some is neither one number nor of the shape of the fp32 masters (Adafactor's rows and
                columns, the scales of quantised moments).
        """
        for group in self._stock_groups:
            for key, value in self.optimizer.state.get(group.user_group.master, {}).items():
                if tensors_larger_than_one(value) and not group.is_sharded(value):
                    raise CheckpointError(
                        f"state {key!r} of {type(self.optimizer).__name__} is not elementwise: a checkpoint in plain "
                        "DeepSpeed's layout cannot hold it; lazy_reduce.gradient_partition needs an optimizer whose "
                        "state has the shape of its parameters"
                    )

    def state_dict(self):
        """Plain ZeRO-2's state dict. Collective: every rank of the data-parallel group calls it.

        Tensors are copies on the host, which later steps do not change.

        Raises:
            CheckpointError: see :meth:`check_state_is_elementwise`.
        """
        self.check_state_is_elementwise()
        partitions, states = [], []
        for group in self._stock_groups:
            master = group.user_group.master
            state = dict(self.optimizer.state.get(master, {}))
            sharded = [key for key, value in state.items() if group.is_sharded(value)]
            if master is None:
                partition, pulled = torch.zeros(0), []
            else:
                partition, *pulled = group.pull([master, *(state[key] for key in sharded)])
            partitions.append(partition)
            pulled = dict(zip(sharded, pulled, strict=True))
            states.append({key: pulled[key] if key in pulled else _copy(value) for key, value in state.items()})
        tensors = [*partitions, *(value for state in states for value in state.values() if torch.is_tensor(value))]
        self._host_bytes = max(self._host_bytes, sum(tensor.nbytes for tensor in tensors))
        with self._stock_view(partitions, states):
            state_dict = super().state_dict()
        state_dict[_LOSS_SCALER] = _copy(state_dict[_LOSS_SCALER])
        return state_dict

    def conversion_bytes(self) -> dict[str, int]:
        """Memory that conversions between the layouts have taken on this rank, at most, since construction.

        ``device``: buffers of the exchange, of which ``cap`` is the bound. ``staging``: their copies on the host.
        ``host``: the tensors of a state dict.
        """
        exchanges = [group.exchange for group in self._stock_groups]
        return {
            "device": max((exchange.peak_device_bytes for exchange in exchanges), default=0),
            "cap": DEVICE_BYTES,
            "staging": max((exchange.peak_host_bytes for exchange in exchanges), default=0),
            "host": self._host_bytes,
        }

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
        return [sorted(key for key, value in values.items() if tensors_larger_than_one(value)) for values in per_group]

    def load_state_dict(self, state_dict_list, *args, checkpoint_folder=None, **kwargs):
        """The base class's ``load_state_dict``. Collective.

        Args:
            state_dict_list: a list with the ``state_dict()`` of every rank of the data-parallel group; those of
                other ranks may be None, but for elastic checkpoints. The caller keeps it: later steps do not
                change it.

        Raises:
            CheckpointError: on every rank, if a state dict does not fit this optimizer. Nothing has changed.
        """
        if not checkpoint_folder:
            self._check_state_dicts(state_dict_list)
        super().load_state_dict(state_dict_list, *args, checkpoint_folder=checkpoint_folder, **kwargs)
        self.loss_scaler = _copy(self.loss_scaler)

    def _check_state_dicts(self, states) -> None:
        # Before any of it is exchanged: a rank that finds out alone would leave the others waiting.
        rank, ranks = dist.get_rank(group=self.dp_process_group), dist.get_world_size(group=self.dp_process_group)
        error, keys = None, None
        try:
            if not isinstance(states, (list, tuple)) or len(states) != ranks:
                given = f"{len(states)} of them" if isinstance(states, (list, tuple)) else type(states).__name__
                raise CheckpointError(
                    f"load_state_dict: expected a list of {ranks} state dicts, one a data-parallel rank, got {given}"
                )
            if not isinstance(states[rank], dict):
                raise CheckpointError(f"state_dict_list[{rank}]: not a state dict: {type(states[rank]).__name__}")
            keys = self.check_stock_state(states[rank], f"state_dict_list[{rank}]")
        except Exception as caught:
            error = caught
        for other_rank, other in enumerate(raise_on_every_rank(torch.distributed, error, keys, self.dp_process_group)):
            if other != keys:
                raise CheckpointError(f"rank {other_rank} loads optimizer state {other}, this rank {keys}")

    def _load_legacy_checkpoint(self, state_dict_list, load_optimizer_states=True, load_from_fp32_weights=False):
        """The base class's, from plain ZeRO-2's state dicts. Collective."""
        groups = self._stock_groups
        partitions = [torch.empty(g.layout.partition_size, dtype=self.master_weights_and_grads_dtype) for g in groups]
        with self._stock_view(partitions, [self._blank_state(g) for g in groups]):
            super()._load_legacy_checkpoint(state_dict_list, load_optimizer_states, load_from_fp32_weights)
            # torch's load_state_dict has put new dicts in place of the groups.
            loaded_groups = self.optimizer.param_groups
            loaded_states = [self.optimizer.state.pop(partition, {}) for partition in partitions]
            other_state = {key: _copy(value) for key, value in self.optimizer.state.items()}
        if load_from_fp32_weights:
            for group, partition in zip(groups, partitions, strict=True):
                if group.user_group.master is not None:
                    group.push([partition], [group.user_group.master])
        else:
            self._restore_from_bit16_weights()
        if load_optimizer_states:
            before = dict(self.optimizer.state)
            self.optimizer.state.clear()
            self.optimizer.state.update(other_state)
            for group, ours, loaded, state in zip(
                groups, self.optimizer.param_groups, loaded_groups, loaded_states, strict=False
            ):
                replace_settings(ours, loaded)
                master = group.user_group.master
                if master is not None:
                    self.optimizer.state[master] = self._our_state(group, before.get(master, {}), state)
                    place_scalars(self.optimizer.state[master], ours)
            self._link_optimizer_state()

    def _blank_state(self, group: StockGroup) -> dict:
        # Elastic checkpoints are copied into what state there is. Its values need no exchange: all are replaced,
        # but for padding, which goes nowhere.
        state = self.optimizer.state.get(group.user_group.master, {})
        size = group.layout.partition_size
        return {
            key: torch.empty(size, dtype=value.dtype)
            if group.is_sharded(value)
            else value.detach().cpu().clone()
            if torch.is_tensor(value)
            else value
            for key, value in state.items()
        }

    def _our_state(self, group: StockGroup, current: dict, loaded: dict) -> dict:
        """State with the ``loaded`` values, in the memory of ``current`` where that fits. Collective."""
        master = group.user_group.master
        state, partitions = {}, {}
        for key, value in loaded.items():
            if group.is_partition(value):
                ours = current.get(key)
                if not group.is_sharded(ours) or ours.dtype != value.dtype:
                    ours = torch.zeros_like(master, dtype=value.dtype, requires_grad=False)
                state[key], partitions[key] = ours, value
            else:
                state[key] = _copy(value)
        keys = sorted(partitions)  # the same order on every rank
        group.push([partitions[key] for key in keys], [state[key] for key in keys])
        return state


def _copy(value):
    return value.detach().clone() if torch.is_tensor(value) else copy.deepcopy(value)


def _nothing() -> None:
    pass
