"""Deferred metrics for ``PipelineEngine``."""

from __future__ import annotations

from deepspeed.runtime.pipe.engine import PipelineEngine

from .engine import LazyReduceMixin


class LazyPipelineEngine(LazyReduceMixin, PipelineEngine):
    """``PipelineEngine`` with the loss deferred."""

    _is_pipeline = True

    def _metrics_group(self):
        return None  # every stage takes part, the last ones contribute
