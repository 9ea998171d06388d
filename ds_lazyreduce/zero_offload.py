"""``offload_states`` and ``reload_states``: moves masters, state, gradients and weights to the host and back."""

from __future__ import annotations

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum

from .stock_group import replaced
from .zero_partition import BucketedZeroOptimizer


class MovableStateZeroOptimizer(BucketedZeroOptimizer):
    """Moves a user group's flat tensors as one; the base class, bucket by bucket, would tear them apart."""

    def _settle_gradients(self) -> None:
        """Completes what is in flight into the gradients. For the class that sends them."""

    def offload_states(self, include=None, device=OffloadDeviceEnum.cpu, pin_memory=True, non_blocking=False):
        """The base class's ``offload_states``. Nothing but ``reload_states`` and checkpoints works in between."""
        wanted = [kind for kind in OffloadStateTypeEnum if include is None or kind in include]
        wanted = [kind for kind in wanted if kind not in self.offloaded_states]
        if OffloadStateTypeEnum.optim_states in wanted:
            self._scalar_devices = self._devices_of_scalars()
        if OffloadStateTypeEnum.lp_grads in wanted:
            self._move_gradients(device.value, non_blocking)
            self.offloaded_states.add(OffloadStateTypeEnum.lp_grads)
        others = [kind for kind in wanted if kind != OffloadStateTypeEnum.lp_grads]
        with replaced(self, {"single_partition_of_fp32_groups": self._masters()}):
            super().offload_states(others, device, pin_memory, non_blocking)
        self._cut_masters()
        if not self.offloaded_states & {OffloadStateTypeEnum.hp_params, OffloadStateTypeEnum.lp_params}:
            self._link_optimizer_state()  # or the links would keep the state's device memory

    def reload_states(self, non_blocking=False):
        """The base class's ``reload_states``."""
        gradients = OffloadStateTypeEnum.lp_grads in self.offloaded_states
        scalars = OffloadStateTypeEnum.optim_states in self.offloaded_states
        self.offloaded_states.discard(OffloadStateTypeEnum.lp_grads)
        if gradients:
            self._move_gradients(get_accelerator().current_device_name(), non_blocking)
        view = {"single_partition_of_fp32_groups": self._masters(), "_link_all_hp_params": lambda: None}
        with replaced(self, view):
            super().reload_states(non_blocking)
        self._cut_masters()
        if scalars:
            for (master, key), device in self._scalar_devices.items():
                state = self.optimizer.state.get(master, {})
                if torch.is_tensor(state.get(key)):  # a checkpoint that was loaded meanwhile may lack it
                    state[key] = state[key].to(device)
        with self._one_param_group_per_bucket():
            self._link_all_hp_params()
        self._link_optimizer_state()

    def _masters(self) -> list[torch.Tensor]:
        return [user_group.master for user_group in self._user_groups if user_group.master is not None]

    def _cut_masters(self) -> None:
        # A moved master has new storage.
        for user_group in self._user_groups:
            for i in user_group.buckets:
                start, stop = self._shard_range[i]
                self.single_partition_of_fp32_groups[i] = user_group.master.detach()[start:stop]

    def _devices_of_scalars(self) -> dict:
        # Stock reloads an optimizer's step onto the device, where torch's optimizers keep it on the host.
        return {
            (master, key): value.device
            for master in self._masters()
            for key, value in self.optimizer.state.get(master, {}).items()
            if torch.is_tensor(value) and value.numel() == 1
        }

    def _move_gradients(self, device: str, non_blocking: bool) -> None:
        self._settle_gradients()
        for user_group in self._user_groups:
            if user_group.gradient is None:
                continue
            user_group.gradient = user_group.gradient.to(device, non_blocking=non_blocking)
            for i in user_group.buckets:
                start, stop = self._shard_range[i]
                self._publish_gradient(i, user_group.gradient[start:stop])
