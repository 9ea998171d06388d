"""The rest of DeepSpeed's config, as far as an enabled ``lazy_reduce`` section cannot ignore it.

:func:`check_against_deepspeed` refuses what cannot be honoured, :func:`stock_key_notes` words a warning for
each stock key that has no effect. Neither communicates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from .config import (
    SECTION,
    GradientPartitionConfig,
    LazyReduceConfig,
    config_error,
    dtype_conflict,
    show,
)


class StockKey(NamedTuple):
    """How a stock key is treated while ``gradient_partition`` is on.

    ``applies`` tells, of a value the user wrote, whether it is one that is refused or has no effect.
    """

    path: str
    treatment: Literal["honoured", "ignored", "refused"]
    reason: str
    applies: Callable[[Any], bool] = lambda value: False


# DeepSpeed's own models are lax, so these read what those would: "True", 1 and 1.0 are all true.
def _text(value: Any) -> str:
    return (value if isinstance(value, str) else show(value)).lower()


def _true(value: Any) -> bool:
    return _text(value) in ("true", "1", "1.0", "yes", "y", "on", "t")


def _false(value: Any) -> bool:
    return _text(value) in ("false", "0", "0.0", "no", "n", "off", "f")


def _not_one(value: Any) -> bool:
    return not isinstance(value, (int, float)) or value != 1


STOCK_KEYS = (
    StockKey("communication_data_type", "honoured", 'what travels; if written it beats wire_dtype "auto"'),
    StockKey("gradient_allreduce_op", "honoured", "mean or sum"),
    StockKey("zero_optimization.compute_grad_norm", "honoured", "the norm rides in the step's scalar pack"),
    StockKey("zero_optimization.elastic_checkpoint", "honoured", "checkpoints are in stock layout"),
    StockKey(
        "data_types.grad_accum_dtype",
        "ignored",
        "gradients are always accumulated in fp32",
        lambda value: _text(value) != "fp32",
    ),
    StockKey(
        "seq_parallel_communication_data_type",
        "ignored",
        "sums are always fp32; set communication_data_type or wire_dtype to choose what travels",
        lambda value: True,
    ),
    StockKey("zero_optimization.overlap_comm", "ignored", "the chain always overlaps", _false),
    StockKey("zero_optimization.contiguous_gradients", "ignored", "buckets are always contiguous buffers", _false),
    StockKey(
        "zero_optimization.round_robin_gradients",
        "ignored",
        "every bucket is spread over all ranks already",
        _true,
    ),
    StockKey(
        "zero_optimization.use_multi_rank_bucket_allreduce",
        "ignored",
        "buckets are never all-reduced: each is one reduce-scatter over all ranks",
        _false,
    ),
    StockKey(
        "prescale_gradients",
        "refused",
        "remove it: the scale is applied after an fp32 sum, so scaling first has no purpose and rounds",
        _true,
    ),
    StockKey(
        "gradient_predivide_factor",
        "refused",
        "expected 1: the scale is applied after an fp32 sum, so dividing first has no purpose and rounds",
        _not_one,
    ),
    StockKey(
        "zero_optimization.reduce_scatter",
        "refused",
        "expected true: gradients are reduce-scattered; to all-reduce them disable gradient_partition",
        _false,
    ),
    StockKey(
        "zero_optimization.offload_optimizer.device",
        "refused",
        'expected "none" or "cpu": offload to other devices is not supported by gradient_partition',
        lambda value: value not in ("none", "cpu"),
    ),
    StockKey(
        "zero_optimization.zenflow",
        "refused",
        "remove it: ZenFlow is not supported by gradient_partition",
        lambda value: True,
    ),
    StockKey(
        "optimizer.type",
        "refused",
        "expected an elementwise optimizer such as AdamW: Muon is not supported by gradient_partition",
        lambda value: _text(value) == "muon",
    ),
    StockKey(
        "expert_parallel.enabled",
        "refused",
        "expected false: AutoEP, which corrects gradients in stock's own hooks, is not supported by gradient_partition",
        _true,
    ),
    StockKey(
        "compile.deepcompile",
        "refused",
        "expected false: DeepCompile is not supported by gradient_partition",
        _true,
    ),
    *(
        StockKey(path, "refused", "expected false: masters and gradient sums are always fp32", _true)
        for path in (
            "bf16.bf16_master_weights_and_grads",
            "bfloat16.bf16_master_weights_and_grads",
            "fp16.fp16_master_weights_and_grads",
        )
    ),
)


def check_against_deepspeed(section: LazyReduceConfig, ds_config: dict[str, Any], *, pipeline: bool = False) -> None:
    """Refuse what cannot be honoured, before any collective runs.

    ``deferred_loss`` alone works at every ZeRO stage and with pipelines. The hybrid engine is a class of its
    own that nothing here extends, so an enabled section on it is always refused rather than ignored.

    Args:
        section: the parsed section.
        ds_config: the whole DeepSpeed config.
        pipeline: whether the engine is a ``PipelineEngine``.

    Raises:
        ConfigError: every refused combination is listed.
    """
    gradients, problems = section.gradient_partition, []
    steps = ds_config.get("steps_per_print")
    if steps is not None and (not isinstance(steps, (int, float)) or not steps):
        # Stock computes step % steps_per_print at the first step and on rank 0 only, for which the others wait.
        problems.append(f"steps_per_print: got {show(steps)}; expected a whole number >= 1, or no such key")
    if _true(_lookup(ds_config, "hybrid_engine.enabled")):
        problems.append(f"{SECTION}.enabled: got true; expected false with a hybrid engine")
    if section.token_normalization.enabled and not gradients.enabled:
        problems.append(
            f"{SECTION}.token_normalization.enabled: got true; expected false, "
            f"or {SECTION}.gradient_partition.enabled true, which it needs"
        )
    if gradients.enabled:
        problems += _gradient_problems(gradients, ds_config, pipeline)
    if problems:
        raise config_error(problems)


def _gradient_problems(gradients: GradientPartitionConfig, ds_config: dict[str, Any], pipeline: bool) -> list[str]:
    prefix = f"{SECTION}.gradient_partition"
    problems = []
    if pipeline:
        problems.append(f"{prefix}.enabled: got true; expected false with a PipelineEngine")
    stage = _zero_stage(ds_config)
    if _text(stage) not in ("2", "2.0"):
        problems.append(
            f"zero_optimization.stage: got {show(stage)}; expected 2, or {prefix}.enabled false "
            "(deferred_loss alone works at every stage)"
        )
    for key, value in _written(ds_config, "refused"):
        problems.append(f"{key.path}: got {show(value)}; {key.reason}")
    node = gradients.node_size
    if node != "auto" and gradients.collective in ("all_to_all", "reduce_scatter"):
        problems.append(f'{prefix}.node_size: got {show(node)}; expected "auto" unless "hierarchical"')
    if gradients.verify_every and gradients.collective == "reduce_scatter":
        problems.append(
            f'{prefix}.verify_every: got {show(gradients.verify_every)}; expected 0 with "reduce_scatter", whose '
            "order of summation is the backend's own, so that no other sum has the same bits"
        )
    travels = _lookup(ds_config, "communication_data_type")
    problems += dtype_conflict(gradients, travels.lower() if isinstance(travels, str) else None)
    return problems


def stock_key_notes(ds_config: dict[str, Any]) -> list[str]:
    """A warning for each stock key that the user set to a value without effect under ``gradient_partition``.

    Keys that are absent, ``null``, ``"auto"`` or at a value that agrees with what happens anyway are silent.
    """
    return [
        f"{key.path}: {show(value)} has no effect with {SECTION}.gradient_partition: {key.reason}"
        for key, value in _written(ds_config, "ignored")
    ]


def _written(ds_config: dict[str, Any], treatment: str) -> list[tuple[StockKey, Any]]:
    """The stock keys of one treatment that the config holds at a value to which it applies."""
    found = [(key, _lookup(ds_config, key.path)) for key in STOCK_KEYS if key.treatment == treatment]
    return [(key, value) for key, value in found if value is not None and key.applies(value)]


def _lookup(ds_config: Any, path: str) -> Any:
    """The value at a dotted path; None if absent, null or "auto" (which DeepSpeed reads as absent)."""
    value = ds_config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return None if isinstance(value, str) and value == "auto" else value


def _zero_stage(ds_config: Any) -> Any:
    whole = _lookup(ds_config, "zero_optimization")
    if isinstance(whole, bool):
        return int(whole)  # DeepSpeed's deprecated form: true is stage 1
    stage = _lookup(whole, "stage")
    return 0 if stage is None else stage
