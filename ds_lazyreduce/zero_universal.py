"""Universal checkpoints: one folder a parameter, written by DeepSpeed's converter for any number of ranks."""

from __future__ import annotations

import os

import torch
from deepspeed.utils.tensor_fragment import fragment_address, tensor_fragment

from .checkpoint import CheckpointError
from .stock_group import place_scalars, replaced
from .zero_partition import BucketedZeroOptimizer, UserGroup


class UniversalStateZeroOptimizer(BucketedZeroOptimizer):
    """Loads universal checkpoints into buckets."""

    def check_universal_folder(self, folder: str) -> None:
        """Whether the universal checkpoint in ``folder`` has what this optimizer needs.

        Raises:
            CheckpointError: it has not; names the file. Nothing has changed.
        """
        if any(user_group.master is None for user_group in self._user_groups):
            raise CheckpointError("a universal checkpoint cannot be loaded with a param group of frozen parameters")
        path = os.path.join(folder, "optimizer_state.pt")
        try:
            # As DeepSpeed reads this file of its own right afterwards: it trusts whoever wrote its checkpoints.
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
            with replaced(self, {"bit16_groups": params}):
                super()._load_universal_checkpoint(checkpoint_folder, load_optimizer_states, load_from_fp32_weights)
        finally:
            with self._one_param_group_per_bucket():
                self._link_all_hp_params()
        for user_group, group in zip(self._user_groups, self.optimizer.param_groups, strict=False):
            place_scalars(self.optimizer.state[user_group.master], group)
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
