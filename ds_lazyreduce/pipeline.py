"""Deferred metrics for ``PipelineEngine``.

Stock's ``train_batch`` all-reduces every batch's loss over the data-parallel ranks and broadcasts it to the
earlier stages, only to print it and to write it to the monitors. Here the last stage adds its losses to the
deferred metrics, and no rank communicates for the loss but in a report.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import (
    PIPE_RECV_GRAD_TIMER,
    PIPE_RECV_INPUT_TIMER,
    PIPE_SEND_GRAD_TIMER,
    PIPE_SEND_OUTPUT_TIMER,
    TRAIN_BATCH_TIMER,
    PipelineEngine,
)

from .engine import LOSS, LazyReduceMixin


class LazyPipelineEngine(LazyReduceMixin, PipelineEngine):
    """``PipelineEngine`` with the loss deferred; the stock engine where ``deferred_loss`` is off.

    Attributes:
        local_loss: the mean loss of the last batch over this rank's micro-batches, a 0-d device tensor on the
            last stage; None elsewhere.
    """

    _is_pipeline = True
    local_loss: torch.Tensor | None = None
    _batch: dict[str, tuple[torch.Tensor, int]] | None = None

    # The ordinary engine's; here only train_batch is accessible, and stock says so.
    backward = PipelineEngine.backward
    step = PipelineEngine.step

    def _metrics_group(self):
        return None  # every stage takes part, the last ones contribute

    def train_batch(self, data_iter=None):
        """Stock's ``train_batch``, without its per-batch collectives for the loss.

        Returns:
            On every rank, the last reported global loss: a 0-d float32 device tensor, NaN before the first
            report. It is the same everywhere, so that a decision taken from it is, too.
        """
        if not self._lazy.deferred_loss.enabled:
            loss = super().train_batch(data_iter)
            self._metrics.end_of_step(self.global_steps, self.global_samples)
            return loss
        if not torch.is_grad_enabled():
            raise RuntimeError("train_batch() requires gradients enabled. Use eval_batch() instead.")
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        self.module.train()
        self.total_loss = None
        self.total_additional_losses = None
        self._compute_loss = True

        self.timers(TRAIN_BATCH_TIMER).start()
        self._batch = {}
        try:
            self._exec_schedule(self._train_schedule())
        finally:
            batch, self._batch = self._batch, None  # a batch that fails half-way is not counted
        self._defer_losses(batch)
        # Only now: the optimizer step lies inside the schedule, and its report has to have this batch's loss.
        self._metrics.end_of_step(self.global_steps, self.global_samples)
        self.timers(TRAIN_BATCH_TIMER).stop()

        self._print_throughput()
        self.agg_train_loss = self._metrics.last_on_device(LOSS).float()
        self.agg_additional_losses = self._reported_additional_losses(batch)
        return self.agg_train_loss

    def _exec_forward_pass(self, buffer_id):
        if self._batch is not None:
            # Stock adds up in the losses' own dtype, and asks the module for its additional ones (once, which
            # may matter to the module). Emptied before, stock's totals are copies of this micro-batch's.
            self.total_loss = self.total_additional_losses = None
        super()._exec_forward_pass(buffer_id)
        if self._batch is not None and self.is_last_stage():
            self._add_to_batch(LOSS, self.total_loss)
            for name, loss in (self.total_additional_losses or {}).items():
                if name == LOSS:
                    raise ValueError(f"get_additional_losses: {LOSS!r} is the name of the loss itself")
                self._add_to_batch(name, loss)

    # Instructions are looked up here by type, not by the method's name.
    _INSTRUCTION_MAP = {**PipelineEngine._INSTRUCTION_MAP, schedule.ForwardPass: _exec_forward_pass}

    def _add_to_batch(self, name: str, loss: torch.Tensor) -> None:
        total, count = self._batch.get(name, (0.0, 0))
        self._batch[name] = (total + loss.double(), count + 1)

    def _defer_losses(self, batch: dict[str, tuple[torch.Tensor, int]]) -> None:
        for name, (total, count) in batch.items():
            self._metrics.add(name, total, count)
        self.local_loss = None
        self.dp_group_loss = torch.full((), torch.nan, device=self.device)  # in stock known to every stage
        if LOSS in batch:
            total, count = batch[LOSS]
            self.local_loss = self.dp_group_loss = (total / count).to(self.loss.dtype)

    def _reported_additional_losses(self, names) -> OrderedDict[str, torch.Tensor] | None:
        """What ``engine.get_additional_losses`` returns: like ``train_batch``, values of the last report."""
        if not self.is_last_stage():
            names = self.module.get_additional_losses()  # as stock does
        names = [name for name in names or () if name != LOSS]
        return OrderedDict((name, self._metrics.last_on_device(name).float()) for name in names) or None

    def _print_throughput(self) -> None:
        """Stock's line and timers every ``steps_per_print``, less the loss, which our report logs."""
        steps = self.steps_per_print()
        if steps is None or self.global_steps % steps != 0:
            return
        elapsed = self.timers(TRAIN_BATCH_TIMER).elapsed(reset=True) / 1000.0
        if self.global_rank == 0:
            seconds = elapsed / steps
            throughput = self.train_batch_size() / seconds
            print(f"steps: {self.global_steps} iter time (s): {seconds:0.3f} samples/sec: {throughput:0.3f}")
        if self.wall_clock_breakdown():
            self.timers.log([PIPE_SEND_OUTPUT_TIMER, PIPE_SEND_GRAD_TIMER, PIPE_RECV_INPUT_TIMER, PIPE_RECV_GRAD_TIMER])
