"""One user param group in two layouts, and small tools for presenting it in the other one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from .layout_exchange import LayoutExchange
from .stock_layout import StockLayout
from .zero_partition import UserGroup

_ABSENT = object()


@dataclass
class StockGroup:
    """A user group as plain ZeRO-2 would keep it on rank ``rank`` of ``process_group``."""

    user_group: UserGroup
    layout: StockLayout
    rank: int
    process_group: Any
    exchange: LayoutExchange

    def pull(self, ours: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """This rank's stock partitions of tensors that lie as the master does. Collective; on the host."""
        partitions = [torch.empty(self.layout.partition_size, dtype=tensor.dtype) for tensor in ours]
        for partition in partitions:
            for start, stop in self.layout.gaps(self.rank):
                partition[start:stop] = 0
        self.exchange.forward([tensor.detach() for tensor in ours], partitions)
        return partitions

    def push(self, partitions: Sequence[torch.Tensor], ours: Sequence[torch.Tensor]) -> None:
        """The reverse of :meth:`pull`; padding in ``ours`` stays as it is."""
        self.exchange.backward(partitions, [tensor.detach() for tensor in ours])

    def is_sharded(self, value: Any) -> bool:
        """Whether ``value``, of the wrapped optimizer's state here, lies as the master does."""
        return torch.is_tensor(value) and value.shape == self.user_group.master.shape

    def is_partition(self, value: Any) -> bool:
        """Whether ``value``, of a stock optimizer's state, lies as the stock partition does."""
        return torch.is_tensor(value) and value.shape == (self.layout.partition_size,)


@contextmanager
def replaced(target: Any, attributes: dict[str, Any]) -> Iterator[None]:
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


def replace_settings(group: dict, loaded: dict) -> None:
    """Makes ``group`` what ``loaded`` is, in place, with its own parameters: the user may hold a reference."""
    params = group["params"]
    settings = {key: value for key, value in loaded.items() if key != "params"}
    group.clear()
    group["params"] = params
    group.update(settings)


def place_scalars(state: dict, group: dict) -> None:
    """Moves one-element tensors to where torch's optimizers keep them: a plain ``step`` on the host.

    Args:
        state: the wrapped optimizer's, of the one parameter of its param group ``group``.
    """
    (master,) = group["params"]
    on_host = {} if group.get("fused") or group.get("capturable") else {"step"}
    for key, value in state.items():
        if torch.is_tensor(value) and value.numel() == 1 and key not in on_host:
            state[key] = value.to(master.device)


def tensors_larger_than_one(value: Any) -> bool:
    if torch.is_tensor(value):
        return value.numel() > 1
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, (list, tuple)) and any(tensors_larger_than_one(item) for item in value)
