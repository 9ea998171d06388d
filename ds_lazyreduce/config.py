"""The ``lazy_reduce`` section of a DeepSpeed config: schema, defaults, and what "auto" means.

Three steps, none of which communicates, so that a mistake never leaves other ranks waiting:

1. :func:`parse_section` turns JSON into a :class:`LazyReduceConfig`, or raises :class:`ConfigError`;
2. ``stock_keys.py`` compares the section with the rest of the DeepSpeed config;
3. :func:`bucket_elements`, :func:`wire_dtype` and :func:`logging_interval` resolve the ``"auto"`` values.

Each field's ``description`` says what a right value is; error messages quote it.
"""

from __future__ import annotations

import difflib
import json
import math
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

SECTION = "lazy_reduce"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class ConfigError(ValueError):
    """A config that cannot be honoured. One line per problem: JSON path, value, what is right."""


# ---- the schema


def _printable(text: str) -> str:
    # The tag becomes a file or series name in the monitors, where a control character fails much later, and so does a
    # file name of more than 255 bytes.
    if not text.isprintable() or len(text.encode()) > 200:
        raise ValueError("not printable, or too long")
    return text


_AtLeastOne = Annotated[int, Field(ge=1)]
_Tag = Annotated[str, Field(min_length=1), AfterValidator(_printable)]
_BOOL = "true or false"


def one_of(*values: str) -> str:
    return " or ".join(f'"{value}"' for value in values)


class _Model(BaseModel):
    # strict: "1", 1.0 and true are not the number 1, which lax pydantic would make of them
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class GradientPartitionConfig(_Model):
    """The gradients' reduce-scatter (ZeRO stage 2). Sizes are in elements, not bytes."""

    enabled: bool = Field(True, description=_BOOL)
    bucket_size: _AtLeastOne | Literal["auto"] = Field("auto", description='a whole number of elements >= 1, or "auto"')
    wire_dtype: Literal["auto", "bf16", "fp16", "fp32"] = Field(
        "auto", description=one_of("auto", "bf16", "fp16", "fp32")
    )
    collective: Literal["auto", "all_to_all", "reduce_scatter", "hierarchical"] = Field(
        "auto", description=one_of("auto", "all_to_all", "reduce_scatter", "hierarchical")
    )
    node_size: _AtLeastOne | Literal["auto"] = Field("auto", description='a whole number of ranks >= 1, or "auto"')
    across_dtype: Literal["fp32", "wire"] = Field("fp32", description=one_of("fp32", "wire"))
    max_in_flight: _AtLeastOne = Field(1, description="a whole number >= 1")
    carry_over: bool = Field(True, description=_BOOL)
    reduce_every: _AtLeastOne | Literal["boundary"] = Field(
        1, description='a whole number of micro-steps >= 1, or "boundary"'
    )
    verify_every: Annotated[int, Field(ge=0)] = Field(0, description="a whole number of windows >= 0, where 0 is never")
    kernel: Literal["auto", "native", "torch"] = Field("auto", description=one_of("auto", "native", "torch"))


class DeferredLossConfig(_Model):
    """The loss and metrics that are only logged. ``interval`` is in optimizer steps."""

    enabled: bool = Field(True, description=_BOOL)
    interval: _AtLeastOne | Literal["auto"] = Field(
        "auto", description='a whole number of optimizer steps >= 1, or "auto" for steps_per_print'
    )
    tag: _Tag = Field("Train/Samples/train_loss", description="1 to 200 bytes of printable text")


class TokenNormalizationConfig(_Model):
    """Gradients per token of the whole window. Off by default: ``backward`` then requires ``num_tokens``."""

    enabled: bool = Field(False, description=_BOOL)
    loss_reduction: Literal["sum", "mean"] = Field("sum", description=one_of("sum", "mean"))


class LazyReduceConfig(_Model):
    """The whole section. Writing the section switches it on; ``"enabled": false`` makes it as if absent."""

    enabled: bool = Field(True, description=_BOOL)
    gradient_partition: GradientPartitionConfig = GradientPartitionConfig()
    deferred_loss: DeferredLossConfig = DeferredLossConfig()
    token_normalization: TokenNormalizationConfig = TokenNormalizationConfig()


def parse_section(ds_config: dict[str, Any]) -> LazyReduceConfig | None:
    """Read the ``lazy_reduce`` section of a whole DeepSpeed config.

    Args:
        ds_config: the DeepSpeed config as a dict (a file or string is the caller's to load).

    Returns:
        The section, or None where it is absent or has ``"enabled": false``; a disabled section has no effect
        at all, so its other keys are not looked at.

    Raises:
        ConfigError: unknown keys or wrong values; every problem is listed.
    """
    if not isinstance(ds_config, dict):
        raise ConfigError(f"the DeepSpeed config: got {show(ds_config)}; expected an object")
    if SECTION not in ds_config:
        return None
    section = ds_config[SECTION]
    if isinstance(section, dict) and section.get("enabled") is False:
        return None
    try:
        return LazyReduceConfig.model_validate(section)
    except ValidationError as error:
        # A union reports a problem per branch; the dict keeps one line a path.
        problems = dict(_explain(e) for e in error.errors(include_url=False, include_context=False))
    raise config_error([f"{path}: {text}" for path, text in problems.items()])


def _explain(error: Any) -> tuple[str, str]:
    """(JSON path, what is wrong and what is right) of one pydantic error."""
    model: type[BaseModel] = LazyReduceConfig
    path, value = SECTION, show(error["input"])
    for key in error["loc"]:
        field = model.model_fields.get(key) if isinstance(key, str) else None
        if field is None:
            return f"{path}.{_show_key(key)}", f"got {value}; unknown key, {_nearest(str(key), path, model)}"
        path = f"{path}.{key}"
        if not _is_model(field.annotation):
            right = field.description or ""
            if "whole number" in right:
                right += _float_hint(error["input"])
            return path, f"got {value}; expected {right}"
        model = field.annotation
    return path, f"got {value}; expected an object with keys among {', '.join(model.model_fields)}"


def _float_hint(value: Any) -> str:
    # 5e6 is a natural way to write a bucket size, and JSON makes it a float
    if not isinstance(value, float) or not value.is_integer() or not 1 <= value < 1e15:
        return ""
    return f"; a number with a point or an exponent is no whole number in JSON: write {int(value)}"


def _nearest(key: str, path: str, model: type[BaseModel]) -> str:
    """The likeliest known key: in this object first, then anywhere in the section."""
    own = difflib.get_close_matches(key, model.model_fields, n=1)
    if own:
        return f'did you mean "{own[0]}"?'
    elsewhere = {}
    for name, field in LazyReduceConfig.model_fields.items():
        if _is_model(field.annotation):
            elsewhere.update({inner: f"{SECTION}.{name}.{inner}" for inner in field.annotation.model_fields})
        elsewhere[name] = f"{SECTION}.{name}"
    other = difflib.get_close_matches(key, elsewhere, n=1)
    if other:
        return f'did you mean "{elsewhere[other[0]]}"?'
    return f"expected one of {', '.join(model.model_fields)}"


# ---- resolving the "auto" values


def bucket_elements(section: LazyReduceConfig, reduce_bucket_size: int, trainable_numel: int, ranks: int) -> int:
    """Upper bound of a bucket, in elements.

    ``"auto"`` is min(``reduce_bucket_size``, max(``trainable_numel`` / 16, 128 Ki x ``ranks``)): about
    sixteen buckets to overlap, with messages of 128 Ki elements a rank or more, never above stock's bound.
    """
    size = section.gradient_partition.bucket_size
    if size != "auto":
        return size
    sixteenth = -(-trainable_numel // 16)  # rounded up, or a remainder would make a tiny seventeenth bucket
    return max(1, min(int(reduce_bucket_size), max(sixteenth, 128 * 1024 * ranks)))


def wire_dtype(
    section: LazyReduceConfig, model_dtype: torch.dtype, communication_data_type: torch.dtype | str | None
) -> torch.dtype:
    """The dtype in which gradients travel; they are summed in fp32 whatever it is.

    In order: an explicit ``wire_dtype``; an explicit ``communication_data_type`` (None where the user wrote
    none; DeepSpeed's ``engine.communication_data_type`` fills in a default and must not be passed here); fp32
    where windows are accumulated locally, since bf16 rounds and fp16 overflows there; the model dtype.

    Raises:
        ConfigError: both are explicit and differ, or ``communication_data_type`` is none of bf16, fp16, fp32.
    """
    gradients = section.gradient_partition
    names = {dtype: name for name, dtype in DTYPES.items()}
    explicit = communication_data_type  # whatever the user's JSON has there
    if isinstance(explicit, torch.dtype):
        explicit = names.get(explicit, str(explicit))
    if explicit is not None:
        explicit = str(explicit).lower()
        if explicit not in DTYPES:
            right = one_of(*DTYPES)
            raise config_error([f"communication_data_type: got {show(str(communication_data_type))}; expected {right}"])
    conflict = dtype_conflict(gradients, explicit)
    if conflict:
        raise config_error(conflict)
    if gradients.wire_dtype != "auto":
        return DTYPES[gradients.wire_dtype]
    if explicit is not None:
        return DTYPES[explicit]
    return model_dtype if gradients.reduce_every == 1 else torch.float32


def dtype_conflict(gradients: GradientPartitionConfig, explicit: str | None) -> list[str]:
    if gradients.wire_dtype == "auto" or explicit is None or explicit == gradients.wire_dtype:
        return []
    return [
        f'{SECTION}.gradient_partition.wire_dtype: got "{gradients.wire_dtype}"; expected "auto" or '
        f'"{explicit}", since communication_data_type is "{explicit}"'
    ]


def logging_interval(deferred: DeferredLossConfig, steps_per_print: int | float | None) -> int | None:
    """Optimizer steps between two reports, or None where nothing is reported (the caller warns once).

    The section's own ``interval`` wins. ``"auto"`` follows ``steps_per_print``, which is None by default and
    ``inf`` under accelerate; those, and less than 0, mean None.

    Raises:
        ConfigError: ``steps_per_print`` is followed and is no whole number.
    """
    if not deferred.enabled:
        return None
    if deferred.interval != "auto":
        return deferred.interval
    steps = steps_per_print
    if steps is None:
        return None
    is_number = isinstance(steps, (int, float)) and not isinstance(steps, bool)
    if is_number and (steps < 0 or steps == math.inf):
        return None
    if not is_number or steps == 0 or steps % 1:  # of NaN, too
        raise config_error(
            [
                f"steps_per_print: got {show(steps)}; expected a whole number of optimizer steps >= 1, "
                f"or set {SECTION}.deferred_loss.interval"
            ]
        )
    return int(steps)


# ---- wording of errors


def config_error(problems: list[str]) -> ConfigError:
    return ConfigError("\n  ".join(["the DeepSpeed config cannot be used with ds_lazyreduce:", *problems]))


def show(value: Any) -> str:
    """The value as its JSON text, on one line and not too long."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):  # no JSON, too many digits, or too deep
        text = type(value).__name__
    return text if len(text) <= 80 else text[:77] + "..."


def _show_key(key: Any) -> str:
    return key if isinstance(key, str) and key.isidentifier() and key.isascii() else show(str(key))


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
