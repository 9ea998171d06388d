"""Checks a checkpoint as a whole: the engine's side of stock-layout state.

Stock's save lets rank 0 name the new tag in ``latest`` while another rank fails to write its file, and empties
``latest`` where the disk is full. Here all ranks first agree that every file is there; else all raise, and
``latest`` names the tag it named before.

Stock loads the module first and finds out afterwards, on one rank, that the optimizer's file is damaged or made
for another number of ranks. State in stock layout is exchanged between ranks on the way in, so that the others
would wait for that rank. Here every rank reads its files first, all agree, and either all load or all raise.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from deepspeed import comm as dist

from .checkpoint import CheckpointError, on_rank_zero, raise_on_every_rank, replace_file
from .stock_group import replaced


@dataclass
class _Load:
    """One ``load_checkpoint`` in progress."""

    directory: str
    tag: str
    reads_zero_files: bool
    checks_names: bool
    agreed: bool = False
    zero_states: list | None = None
    zero_files: list[str] = field(default_factory=list)


class CheckpointGuardMixin:
    """What an engine with a gradient partition does around stock's ``save_checkpoint`` and ``load_checkpoint``."""

    _load: _Load | None = None

    def _get_zero_param_shapes(self):
        if not self._lazy.gradient_partition.enabled:
            return super()._get_zero_param_shapes()
        with self.optimizer.stock_parameter_order():
            return super()._get_zero_param_shapes()

    def save_checkpoint(self, save_dir, tag=None, client_state=None, save_latest=True, exclude_frozen_parameters=False):
        arguments = dict(client_state=client_state or {}, exclude_frozen_parameters=exclude_frozen_parameters)
        if self._lazy.gradient_partition.enabled:
            self.optimizer.check_state_is_elementwise()  # rather than once half the files are written
        if not self._guards_saves():
            return super().save_checkpoint(save_dir, tag, save_latest=save_latest, **arguments)
        with self._write_errors_kept() as errors:
            result = super().save_checkpoint(save_dir, tag, save_latest=False, **arguments)
        raise_on_every_rank(torch.distributed, errors[0] if errors else None)
        if save_latest:
            on_rank_zero(torch.distributed, lambda: replace_file(os.path.join(save_dir, "latest"), str(tag)))
        return result

    def _guards_saves(self) -> bool:
        # A decoupled checkpoint engine writes, and names the tag in ``latest``, when the call has returned.
        return self._lazy.gradient_partition.enabled and not self.checkpoint_engine.is_decoupled()

    @contextmanager
    def _write_errors_kept(self) -> Iterator[list[CheckpointError]]:
        """Errors of writing a file, kept for later: a rank that left at once would leave the others waiting for it."""
        errors: list[CheckpointError] = []

        def keeping(write, path_of):
            def keep(*args, **kwargs):
                try:
                    return write(*args, **kwargs)
                except Exception as error:  # of the disk, or of pickling what the user handed over
                    errors.append(_write_error(path_of(*args, **kwargs), error))

            return keep

        writes = keeping(self.checkpoint_engine.save, lambda state_dict, path: path)
        copies = keeping(self._copy_recovery_script, lambda save_path: save_path)
        with replaced(self.checkpoint_engine, {"save": writes}), replaced(self, {"_copy_recovery_script": copies}):
            yield errors

    def _load_checkpoint(
        self,
        load_dir,
        tag,
        load_module_strict=True,
        load_optimizer_states=True,
        load_lr_scheduler_states=True,
        load_module_only=False,
        custom_load_fn=None,
    ):
        arguments = dict(
            load_module_strict=load_module_strict,
            load_optimizer_states=load_optimizer_states,
            load_lr_scheduler_states=load_lr_scheduler_states,
            load_module_only=load_module_only,
            custom_load_fn=custom_load_fn,
        )
        if not self._lazy.gradient_partition.enabled:
            return super()._load_checkpoint(load_dir, tag, **arguments)
        self._load = load = _Load(
            directory=load_dir,
            tag=str(tag),
            reads_zero_files=load_optimizer_states and not load_module_only and not self.load_universal_checkpoint(),
            checks_names=load_module_strict and custom_load_fn is None,
        )
        with self._errors_that_name_the_file():
            try:
                if not self._get_all_ckpt_names(load_dir, tag):  # stock says only that an assertion failed
                    raise CheckpointError(f"{load_dir}: there is no checkpoint with tag {load.tag}")
                if self.load_universal_checkpoint():
                    self.optimizer.check_universal_folder(os.path.join(load_dir, load.tag, "zero"))
                result = super()._load_checkpoint(load_dir, tag, **arguments)
            except Exception as error:
                if not load.agreed:
                    self._agree(load, error)
                raise
        if not load.agreed:  # nothing to load was found, or a universal checkpoint, whose weights follow
            self._agree(load, None)
        return result

    def load_module_state_dict(self, checkpoint, *args, **kwargs):
        """Stock's ``load_module_state_dict``; within ``load_checkpoint`` all ranks first check what they read."""
        load = self._load
        if load is not None and not load.agreed:
            error, signature = None, None
            try:
                signature = self._check_files(load, checkpoint)
            except Exception as caught:
                error = caught
            self._agree(load, error, signature)
        return super().load_module_state_dict(checkpoint, *args, **kwargs)

    def _check_files(self, load: _Load, checkpoint: dict):
        where = f"{load.directory}, tag {load.tag}"
        needed = {"module", "dp_world_size"} | ({"param_shapes"} if load.reads_zero_files else set())
        missing = needed - set(checkpoint)
        if missing:
            raise CheckpointError(f"{self._get_ckpt_name(load.directory, load.tag)}: lacks {sorted(missing)}")
        if not load.reads_zero_files:
            return None
        saved_ranks = checkpoint["dp_world_size"]
        if saved_ranks != self.seq_dp_world_size:
            raise CheckpointError(
                f"{where}: saved by {saved_ranks} data-parallel ranks, now there are {self.seq_dp_world_size}; convert "
                "it to a universal checkpoint, or load with load_optimizer_states=False"
            )
        self._check_shapes(where, checkpoint["param_shapes"], load.checks_names)
        before = getattr(self, "loaded_checkpoint_dp_world_size", None)
        self.loaded_checkpoint_dp_world_size = saved_ranks
        try:
            load.zero_states = self._get_all_zero_checkpoints(load.directory, load.tag)
            return self._check_zero_states(load)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            own = load.zero_files[dist.get_rank(group=self.optimizer.dp_process_group)]
            raise CheckpointError(f"{own}: not a ZeRO checkpoint: {type(error).__name__}: {error}") from error
        finally:
            self.loaded_checkpoint_dp_world_size = before

    def _check_zero_states(self, load: _Load):
        own = dist.get_rank(group=self.optimizer.dp_process_group)
        signature = None
        for rank, (state, file) in enumerate(zip(load.zero_states, load.zero_files, strict=True)):
            if state is None and rank != own:
                continue  # only an elastic checkpoint is read as a whole by every rank
            if not isinstance(state, dict):
                raise CheckpointError(f"{file}: not a ZeRO checkpoint")
            keys = self.optimizer.check_stock_state(state, file)
            signature = keys if rank == own else signature
        return signature

    def _check_shapes(self, where: str, saved, checks_names: bool) -> None:
        ours = self._get_zero_param_shapes()
        if saved is None or len(saved) != len(ours):
            count = None if saved is None else len(saved)
            raise CheckpointError(f"{where}: has {count} param groups, the optimizer {len(ours)}")
        for g, (theirs, mine) in enumerate(zip(saved, ours, strict=True)):
            if len(theirs) != len(mine):
                raise CheckpointError(f"{where}: param group {g} has {len(theirs)} parameters, expected {len(mine)}")
            for (name, shape), (own_name, own_shape) in zip(theirs.items(), mine.items(), strict=True):
                if tuple(shape) != tuple(own_shape) or (checks_names and name != own_name):
                    raise CheckpointError(
                        f"{where}: param group {g} has {name!r} {tuple(shape)} where the optimizer has "
                        f"{own_name!r} {tuple(own_shape)}"
                    )

    def _get_all_zero_checkpoint_state_dicts(self, zero_ckpt_names):
        load = self._load
        if load is None:
            return super()._get_all_zero_checkpoint_state_dicts(zero_ckpt_names)
        if load.zero_states is None:
            load.zero_files = list(zero_ckpt_names)
            return super()._get_all_zero_checkpoint_state_dicts(zero_ckpt_names)
        states, load.zero_states = load.zero_states, None
        return states

    @contextmanager
    def _errors_that_name_the_file(self) -> Iterator[None]:
        """Errors of reading a file say which: torch's mention neither name nor place."""
        engine = self.checkpoint_engine
        read = engine.load

        def load(path, *args, **kwargs):
            try:
                content = read(path, *args, **kwargs)
            except Exception as error:
                raise CheckpointError(f"{path}: cannot be read: {type(error).__name__}: {error}") from error
            if not isinstance(content, dict):
                raise CheckpointError(f"{path}: not a DeepSpeed checkpoint")
            return content

        engine.load = load
        try:
            yield
        finally:
            del engine.load

    def _agree(self, load: _Load, error: Exception | None, signature=None) -> None:
        """Raises on every rank if ``error`` is set on any, or if what they read differs. Collective."""
        load.agreed = True
        try:
            for rank, other in enumerate(raise_on_every_rank(torch.distributed, error, signature)):
                if other != signature:
                    where = f"{load.directory}, tag {load.tag}"
                    raise CheckpointError(f"{where}: rank {rank} read optimizer state {other}, this rank {signature}")
        except BaseException:
            load.zero_states = None
            raise


def _write_error(path: str, error: Exception) -> CheckpointError:
    # torch's message of a full disk speaks of positions in a stream.
    try:
        room = f", {shutil.disk_usage(os.path.dirname(path) or '.').free:,} bytes are free there"
    except OSError:
        room = ""
    written = CheckpointError(f"{path}: cannot be written: {type(error).__name__}: {error}{room}")
    written.__cause__ = error
    return written
