"""The engine mixin: hooks around DeepSpeed's ``backward`` and ``step``. Overrides engine internals here only.

``LazyReduceMixin`` brings the gradient partitioner, deferred metrics and token normalisation to
``DeepSpeedEngine``; see ``pipeline.py`` for ``PipelineEngine``.
"""

from __future__ import annotations

import logging
import os
from functools import partial

import torch
from deepspeed import comm as dist
from deepspeed.runtime import engine as ds_engine
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import log_dist

from . import config as lazy_config
from .agreement import check_agreement
from .autograd_graph import reached_leaves
from .checkpoint import latest_tag, on_rank_zero, read_window, window_path, write_window
from .checkpoint_guard import CheckpointGuardMixin
from .collective_choice import choose_reduce_scatter
from .config import LazyReduceConfig
from .failures import CollectiveError, during, inherit_timeout
from .hosts import host_of_each_rank
from .kernel_choice import agree_on_kernel
from .metrics import DeferredMetrics, Scalar, over_group
from .reduction_stream import overlap_notes
from .stock_keys import check_against_deepspeed, stock_key_notes
from .version import __version__
from .zero_backward import PartitionSettings
from .zero_optimizer import LazyZeroOptimizer

logger = logging.getLogger("ds_lazyreduce")

LOSS = "train_loss"


class LazyReduceMixin(CheckpointGuardMixin):
    """What an engine with an enabled ``lazy_reduce`` section does beside its stock class.

    Args:
        lazy_section: the parsed section; everything else goes to the stock class.

    Raises:
        ConfigError: the section cannot be honoured with the rest of the config, before any collective.
    """

    _is_pipeline = False

    def __init__(self, *args, lazy_section: LazyReduceConfig, **kwargs):
        self._lazy = lazy_section
        self._kernel = "torch"
        ds_config = kwargs["config"]
        check_against_deepspeed(lazy_section, ds_config, pipeline=self._is_pipeline)
        if lazy_section.gradient_partition.enabled:
            for note in stock_key_notes(ds_config):
                _warn_once_per_engine(note)
        # Resolved before the stock constructor communicates, so that a bad value leaves nobody waiting.
        self._interval = lazy_config.logging_interval(lazy_section.deferred_loss, ds_config.get("steps_per_print"))
        super().__init__(*args, **kwargs)
        inherit_timeout(self._metrics_group())
        all_reduce, gather_names = over_group(dist, torch.distributed, self._metrics_group())
        self._metrics = DeferredMetrics(
            device=self.device,
            interval=self._interval,
            all_reduce=all_reduce,
            gather_names=gather_names,
            publish=self._publish_metrics,
        )
        self._metrics.finish_at_exit()
        self._additive_calls = 0
        if lazy_section.deferred_loss.enabled and self._interval is None:
            _warn_once_per_engine(
                "lazy_reduce.deferred_loss: the loss is not reported, since neither lazy_reduce.deferred_loss.interval "
                "nor steps_per_print (which accelerate sets to inf) gives an interval; engine.flush_metrics() still "
                "reports"
            )

    # -- construction ----------------------------------------------------------------------------

    def _configure_zero_optimizer(self, optimizer):
        # Stock builds the class bound to this name in its own module and offers no other choice; the name
        # is ours only while this engine is being built.
        if not self._lazy.gradient_partition.enabled:
            return super()._configure_zero_optimizer(optimizer)
        inherit_timeout(self.seq_data_parallel_group)
        with during("the exchange of settings between ranks", "Nothing was trained."):
            self._check_agreement(optimizer)
            settings = self._partition_settings()
        stock = ds_engine.DeepSpeedZeroOptimizer
        ds_engine.DeepSpeedZeroOptimizer = partial(LazyZeroOptimizer, settings=settings)
        try:
            with during("building the ZeRO optimizer", "Nothing was trained."):
                return super()._configure_zero_optimizer(optimizer)
        finally:
            ds_engine.DeepSpeedZeroOptimizer = stock

    def _check_agreement(self, optimizer) -> None:
        group = self.seq_data_parallel_group

        def gather(mine):
            everyone = [None] * dist.get_world_size(group=group)
            # Not through deepspeed.comm: its comms logger does not know the call and ends the process.
            torch.distributed.all_gather_object(everyone, mine, group=group)
            return everyone

        def layout():
            for index, param_group in enumerate(getattr(optimizer, "param_groups", ())):
                for p in param_group["params"]:
                    name = self.param_names.get(p, "an unnamed parameter")
                    trained = "trained" if p.requires_grad else "frozen"
                    yield f"{name} {list(p.shape)} {str(p.dtype).removeprefix('torch.')} {trained}, group {index}"

        facts = {
            "the version of ds_lazyreduce": __version__,
            "the lazy_reduce section": self._lazy.model_dump_json(),
            "zero_optimization.reduce_bucket_size": str(self.zero_reduce_bucket_size()),
            "communication_data_type": str(self.config.get("communication_data_type")),
        }
        check_agreement(facts, lambda: list(layout()), gather)

    def _partition_settings(self) -> PartitionSettings:
        section = self._lazy.gradient_partition
        model_dtype, _ = self.get_data_types()
        # As written: DeepSpeed overwrites its own copy under sequence parallelism.
        written = self.config.get("communication_data_type")
        kernel = agree_on_kernel(section.kernel, self.seq_data_parallel_group, self.device)
        self._kernel = kernel.name
        backend = torch.distributed.get_backend(self.seq_data_parallel_group)
        for note in overlap_notes(self._config.comms_config.comms_logger_enabled, backend, os.environ):
            _warn_once_per_engine(note)
        groups = [self.seq_data_parallel_group]
        if self.mpu is not None and not hasattr(self.mpu, "initialize_sequence_parallel"):  # as in the base class
            groups.append(self.mpu.get_model_parallel_group())
        wire = lazy_config.wire_dtype(self._lazy, model_dtype, None if written == "auto" else written)
        return PartitionSettings(
            bucket_elements=partial(lazy_config.bucket_elements, self._lazy, self.zero_reduce_bucket_size()),
            wire_dtype=wire,
            accumulate=kernel,
            reduce_scatter=partial(choose_reduce_scatter, section, kernel, host_of_each_rank(*groups)),
            max_in_flight=section.max_in_flight,
            carry_over=section.carry_over,
            reduce_every=section.reduce_every,
            normalize_tokens=self._lazy.token_normalization.enabled,
            verify_every=section.verify_every,
        )

    def _metrics_group(self):
        return self.seq_data_parallel_group

    # -- training --------------------------------------------------------------------------------

    def backward(self, loss, retain_graph=False, scale_wrt_gas=True, num_tokens=None):
        """Stock's ``backward``, with the loss recorded for the deferred report.

        Args:
            loss: 0-d tensor. Under token normalisation the sum (or mean, by ``loss_reduction``) over this
                rank's ``num_tokens`` tokens; it is then divided neither by the accumulation steps nor by ranks.
            num_tokens: int or 0-d tensor (a device tensor is not synchronised), tokens that ``loss`` covers.
                Without token normalisation ``loss`` is taken as the mean over them and only the log is weighted.

        Returns:
            What stock's returns: ``loss``, divided by the accumulation steps where ``scale_wrt_gas`` applies.

        Raises:
            ValueError: token normalisation is on and ``num_tokens`` is missing, or it is negative.
        """
        num_tokens = _checked_tokens(num_tokens)
        normalize = self._lazy.token_normalization
        if normalize.enabled:
            if num_tokens is None:
                raise ValueError(
                    "engine.backward: lazy_reduce.token_normalization is enabled, so num_tokens is needed: "
                    "engine.backward(loss, num_tokens=n)"
                )
            is_mean = normalize.loss_reduction == "mean"
            total = _masked(loss * num_tokens, num_tokens) if is_mean else loss
            self._begin_pass(num_tokens)
            scaled, scaled_wrt_gas = total * self.optimizer.token_prescale(), False
        else:
            self._begin_pass(None)
            scaled, scaled_wrt_gas = loss, scale_wrt_gas
        try:
            result = super().backward(scaled, retain_graph=retain_graph, scale_wrt_gas=scaled_wrt_gas)
        except CollectiveError:
            raise
        except Exception:
            self._abort_pass()
            raise
        except BaseException:
            if self._lazy.gradient_partition.enabled:
                self.optimizer.leave_broken()
            raise
        if self._lazy.deferred_loss.enabled:  # a backward that failed is not counted
            self._record_loss(loss.detach(), num_tokens, scale_wrt_gas)
        return loss if normalize.enabled else result

    def _record_loss(self, loss: torch.Tensor, num_tokens, scale_wrt_gas: bool) -> None:
        normalize = self._lazy.token_normalization
        if num_tokens is not None:
            is_sum = normalize.enabled and normalize.loss_reduction == "sum"
            total = loss if is_sum else loss.double() * num_tokens
            self._metrics.add(LOSS, _masked(total, num_tokens), num_tokens)
        elif scale_wrt_gas:
            self._metrics.add(LOSS, loss, 1.0)
        else:  # Hugging Face passes losses that are already divided by the window's items
            self._metrics.add(LOSS, loss, 1.0 / self.gradient_accumulation_steps())
            self._additive_calls += 1

    def _begin_pass(self, num_tokens) -> None:
        if self._lazy.gradient_partition.enabled:
            self._mirror_boundary()
            self.optimizer.begin_pass(num_tokens)

    def _mirror_boundary(self) -> None:
        # Stock tells the optimizer once the pass has begun, which is too late to choose whether it reduces.
        if self._lazy.gradient_partition.enabled:
            self.optimizer.set_gradient_accumulation_boundary(self.is_gradient_accumulation_boundary())

    def _abort_pass(self) -> None:
        if self._lazy.gradient_partition.enabled:
            self.optimizer.abort_pass()

    def _complete_broken_pass(self) -> None:
        if self._lazy.gradient_partition.enabled:
            self.optimizer.complete_broken_pass()

    def _complete_skipped_pass(self) -> None:
        # Without managed accumulation a step takes any number of passes, and none is owed to it.
        if self._lazy.gradient_partition.enabled and self.managed_gradient_accumulation():
            self._mirror_boundary()
            self.optimizer.complete_skipped_pass()

    def _backward_prologue(self):
        if self._lazy.gradient_partition.enabled and not self._running_engine_backward and reached_leaves() == "none":
            return  # a torch.autograd.grad
        if self._lazy.token_normalization.enabled and not self._running_engine_backward:
            raise ValueError(
                "lazy_reduce.token_normalization is enabled: a direct loss.backward() cannot say how many tokens the "
                "loss covers; call engine.backward(loss, num_tokens=n)"
            )
        self._mirror_boundary()
        super()._backward_prologue()

    def _backward_prologue_per_tensor(self, grad):
        # Stock runs the prologue once for each forward, which a torch.autograd.grad may have used up.
        if self._lazy.gradient_partition.enabled and self.optimizer.awaits_pass():
            self._backward_prologue()
        return super()._backward_prologue_per_tensor(grad)

    def _flush_coalesced_reduction_zero12(self, optimizer):
        # The gradients of the block are in local fp32 accumulators, not on the parameters.
        if self._lazy.gradient_partition.enabled:
            optimizer.reduce_coalesced()
        else:
            super()._flush_coalesced_reduction_zero12(optimizer)

    def step(self, *args, **kwargs):
        self._complete_skipped_pass()
        steps_before = self.global_steps
        super().step(*args, **kwargs)
        if self.global_steps != steps_before:
            self._complete_additive_weight()
            self._metrics.end_of_step(self.global_steps, self.global_samples)

    def _complete_additive_weight(self) -> None:
        # Losses that add up weigh 1 per window, also where it has fewer calls than accumulation steps: the last
        # one of an epoch in Hugging Face's Trainer, or one whose boundary the caller owns.
        missing = 1.0 - self._additive_calls / self.gradient_accumulation_steps()
        if self._additive_calls and missing and self._lazy.deferred_loss.enabled:
            self._metrics.add(LOSS, 0.0, missing)
        self._additive_calls = 0

    # -- metrics ---------------------------------------------------------------------------------

    def record_metric(self, name: str, total: Scalar, count: Scalar) -> None:
        """Adds to a metric that is reported with the loss, as sum over sum of counts of all ranks.

        No collective and no host read; floats, ints or one-element tensors. Names may differ between ranks.

        Raises:
            TypeError, ValueError: a wrong name or number, see ``OpenWindow.add``.
        """
        self._metrics.add(name, total, count)

    def flush_metrics(self) -> dict[str, float]:
        """Reports the open logging window now. Collective: every rank calls it. Returns ``{name: value}``."""
        self._complete_broken_pass()
        return self._metrics.flush(self.global_samples)

    @property
    def last_metrics(self) -> dict[str, float]:
        """``{name: value}`` of the last reported window, on every rank; the loss is ``"train_loss"``."""
        return self._metrics.last

    def _publish_metrics(self, values: dict[str, float], samples: int) -> None:
        if self.global_rank != 0:
            return
        if self.monitor.enabled:
            self.monitor.write_events([(self._metric_tag(name), value, samples) for name, value in values.items()])
        listed = ", ".join(f"{name}={value:.6g}" for name, value in values.items())
        log_dist(f"samples={samples}, {listed}", ranks=[0])

    def _metric_tag(self, name: str) -> str:
        return self._lazy.deferred_loss.tag if name == LOSS else f"Train/Samples/{name}"

    def lazy_reduce_report(self) -> dict:
        """Counters of this rank since construction; free of collectives. The README documents each field."""
        report = {
            "gradient_collectives": 0,
            "scalar_collectives": 0,
            "metric_collectives": self._metrics.collectives,
            "bytes_sent": 0,
            "bytes_sent_across_nodes": 0,
            "messages_sent": 0,
            "messages_sent_across_nodes": 0,
            "buckets": 0,
            "max_in_flight_seen": 0,
            "peak_buffer_bytes": 0,
            "kernel": self._kernel,
            "collective": "none",
            "wire_dtype": "none",
            "device_memory_before_warm_up": None,
            "device_memory_after_warm_up": None,
        }
        if self._lazy.gradient_partition.enabled:
            report.update(self.optimizer.lazy_reduce_report())
        return report

    # -- state -----------------------------------------------------------------------------------

    def save_checkpoint(self, save_dir, tag=None, *args, **kwargs):
        """Stock's ``save_checkpoint``, with the open logging window of all ranks in a file of its own."""
        self._complete_broken_pass()
        tag = f"global_step{self.global_steps}" if tag is None else tag
        is_whole = (
            "`latest` names a whole checkpoint." if self._guards_saves() else "This checkpoint may be incomplete."
        )
        with during(f"saving checkpoint {tag}", is_whole):
            if save_dir:  # else stock's to refuse
                window = self._metrics.export_open_window()
                # First, so that whoever finds the checkpoint by its "latest" file finds the window, too.
                on_rank_zero(torch.distributed, lambda: write_window(window_path(save_dir, tag), window))
            return super().save_checkpoint(save_dir, tag, *args, **kwargs)

    def load_checkpoint(
        self,
        load_dir,
        tag=None,
        load_module_strict=True,
        load_optimizer_states=True,
        load_lr_scheduler_states=True,
        load_module_only=False,
        custom_load_fn=None,
    ):
        """Stock's ``load_checkpoint``; the open logging window becomes that of the checkpoint.

        It is empty where the checkpoint has none, and stays as it is with ``load_module_only``, or where
        stock loads nothing.

        Raises:
            CheckpointError: the window's file or ``latest`` is damaged; on every rank, before anything is loaded.
        """
        self._complete_broken_pass()
        window = None
        with during(f"loading a checkpoint from {load_dir}", "It may be half loaded."):
            if tag is None:  # all or none must go on: where one loads nothing, the others wait for it
                latest = "latest_universal" if self.load_universal_checkpoint() else "latest"
                tag = latest_tag(torch.distributed, load_dir, latest)
            if tag is not None and not load_module_only:
                window = on_rank_zero(torch.distributed, lambda: read_window(window_path(load_dir, tag)))
            loaded = super().load_checkpoint(
                load_dir,
                tag,
                load_module_strict=load_module_strict,
                load_optimizer_states=load_optimizer_states,
                load_lr_scheduler_states=load_lr_scheduler_states,
                load_module_only=load_module_only,
                custom_load_fn=custom_load_fn,
            )
        if window is not None and loaded[0] is not None:
            first = dist.get_rank(group=self._metrics_group()) == 0
            self._metrics.import_open_window(window, is_first_rank=first)
        return loaded

    def destroy(self):
        metrics = self.__dict__.get("_metrics")
        if metrics is not None:
            metrics.finish()
        super().destroy()


class LazyEngine(LazyReduceMixin, DeepSpeedEngine):
    """``DeepSpeedEngine`` with lazy reductions."""


def _checked_tokens(num_tokens):
    """Counts on the host become ints, others stay device tensors; negative ones are refused."""
    if num_tokens is None:
        return None
    if isinstance(num_tokens, torch.Tensor):
        if num_tokens.numel() != 1:
            raise ValueError(f"engine.backward: num_tokens has shape {tuple(num_tokens.shape)}, expected a 0-d tensor")
        if num_tokens.device.type != "cpu":
            return num_tokens.reshape(())
        num_tokens = num_tokens.item()
    try:
        count = -1 if isinstance(num_tokens, (bool, str)) else int(num_tokens)
    except (TypeError, ValueError, OverflowError):  # of NaN and infinity, too
        count = -1
    if count < 0 or count != num_tokens:
        raise ValueError(f"engine.backward: num_tokens is {num_tokens!r}, expected a whole number >= 0")
    return count


def _masked(value: torch.Tensor, weight):
    """``value``, or 0 where ``weight`` is 0: a mean over no tokens is NaN, and 0 * NaN would stay NaN."""
    if isinstance(weight, torch.Tensor):
        return torch.where(weight > 0, value, torch.zeros_like(value))
    if weight:
        return value
    return torch.where(torch.zeros_like(value, dtype=torch.bool), value, 0)  # still a result of autograd


def _warn_once_per_engine(message: str) -> None:
    if dist.get_rank() == 0:
        logger.warning(message)
