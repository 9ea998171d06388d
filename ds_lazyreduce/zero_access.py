"""Whoever reads or sets gradients, masters and optimizer state from outside (``safe_get_full_*``, ``safe_set_full_*``).

All of these are collective, as in stock. There, what cannot be done fails on the ranks that own a part of the
parameter, and the others wait for those in a collective; small parameters have such ranks. Here every rank fails.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from deepspeed import comm as dist

from .bucket import Slot
from .failures import during
from .zero_backward import ReducingZeroOptimizer
from .zero_partition import UserGroup


class _DrainingGradients(dict):
    """``averaged_gradients``: whoever reads a gradient first completes what is in flight."""

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


class AccessibleZeroOptimizer(ReducingZeroOptimizer):
    """Completes what is asked for, and checks it on every rank, before stock's methods read or set it."""

    def initialize_gradient_partitioning_data_structures(self):
        # Before anything captures `averaged_gradients`.
        self.averaged_gradients = _DrainingGradients(self._complete_for_reader)
        super().initialize_gradient_partitioning_data_structures()

    def _link_all_hp_params(self):
        super()._link_all_hp_params()
        for param, slot in self._slots.items():
            group = self._group_of_bucket[slot.bucket.index]
            _check_first(param, "get_full_hp_grad", partial(self._before_gradient, group, slot))
            _check_first(param, "set_full_hp_grad", partial(self._before_set_gradient, group, slot))
            _check_first(param, "get_full_hp_param", partial(self._before_full_param, param, group, slot, None))
            _check_first(param, "set_full_hp_param", partial(self._before_full_param, param, group, slot))

    # -- masters and optimizer state -------------------------------------------------------------

    def _before_full_param(
        self,
        param: torch.Tensor,
        group: UserGroup,
        slot: Slot,
        value: torch.Tensor | None,
        optim_state_key: str | None = None,
    ) -> None:
        if value is not None:
            _check_numel(slot, value)
        if optim_state_key is None:
            return
        state = self.optimizer.state.get(group.master, {})
        there = [key for key, kept in state.items() if torch.is_tensor(kept) and kept.shape == group.master.shape]
        if optim_state_key not in there:
            listed = ", ".join(map(repr, there)) or "nothing before the first step"
            raise ValueError(
                f"lazy_reduce: {optim_state_key!r} is no optimizer state of {slot.name}; there is {listed}"
            )
        mapping = param._hp_mapping
        linked = mapping and (mapping.optim_fragment or {}).get(optim_state_key)
        if mapping is not None and not _is_view(linked, state[optim_state_key]):
            # The optimizer rebinds its state in `step`, or somebody called its load_state_dict.
            self._link_optimizer_state()

    # -- gradients -------------------------------------------------------------------------------

    def _before_gradient(self, group: UserGroup, slot: Slot) -> None:
        self._complete_on_all_ranks()
        if group.gradient is None:
            raise ValueError(
                f"lazy_reduce: there is no gradient of {slot.name}: it can be read and set after a backward pass "
                "and before step()"
            )

    def _before_set_gradient(self, group: UserGroup, slot: Slot, value: torch.Tensor) -> None:
        _check_numel(slot, value)
        self._before_gradient(group, slot)
        self._verification.forget_window()

    def _complete_on_all_ranks(self) -> None:
        """Ranks agree on what only some of them know."""
        self.complete_broken_pass()
        if self.chain.is_open:  # ranks stand at different places of it
            raise RuntimeError("lazy_reduce: gradients can be read and set after a backward pass, not within one")
        self.chain.drain()
        late = torch.tensor(self.chain.has_accumulated(), dtype=torch.int32, device=self.device)
        with during("the agreement on late gradients", "No gradient was read or set.", self.dp_process_group):
            dist.all_reduce(late, op=dist.ReduceOp.MAX, group=self.dp_process_group)
        which = late.bool().tolist()
        if self._settings.reduce_every != 1 or self._coalesce_grad_reduction:
            self._refuse_unreduced(which)
        elif any(which):  # the others with zeros, so that they have a gradient, too
            self.chain.reduce_accumulated([True] * len(which))

    def _complete_for_reader(self) -> None:
        if self.chain.is_open:
            return  # the base class's own bookkeeping within a backward pass
        self.chain.drain()
        self._refuse_unreduced(self.chain.has_accumulated())

    def _refuse_unreduced(self, which: list[bool]) -> None:
        if any(which):
            names = [bucket.describe() for bucket in self.chain.buckets if which[bucket.index]]
            raise RuntimeError(
                f"lazy_reduce: gradients of {', '.join(names)} are in local accumulators and not reduced before "
                "step(): reduce_every is not 1, or they arrived outside a backward pass of the engine"
            )


def _check_first(param: torch.Tensor, name: str, check: Callable[..., None]) -> None:
    """Calls ``check`` with its arguments before the method ``name`` that stock gave ``param``."""
    stock = getattr(param, name)

    def checked(*args, **kwargs):
        check(*args, **kwargs)
        return stock(*args, **kwargs)

    setattr(param, name, checked)


def _is_view(part: torch.Tensor | None, whole: torch.Tensor) -> bool:
    return part is not None and part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def _check_numel(slot: Slot, value: torch.Tensor) -> None:
    if value.numel() != slot.numel:
        raise ValueError(
            f"lazy_reduce: the new value of {slot.name} has {value.numel()} elements, must have {slot.numel}"
        )
