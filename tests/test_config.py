"""The JSON section: defaults, strictness, messages, refusals, and the resolution of "auto"."""

import json
import math
import re
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_lazyreduce.config import (
    ConfigError,
    LazyReduceConfig,
    bucket_elements,
    logging_interval,
    parse_section,
    wire_dtype,
)
from ds_lazyreduce.stock_keys import STOCK_KEYS, check_against_deepspeed, stock_key_notes

DEFAULTS = {
    "enabled": True,
    "gradient_partition": {
        "enabled": True,
        "bucket_size": "auto",
        "wire_dtype": "auto",
        "collective": "auto",
        "node_size": "auto",
        "across_dtype": "fp32",
        "max_in_flight": 1,
        "carry_over": True,
        "reduce_every": 1,
        "verify_every": 0,
        "kernel": "auto",
    },
    "deferred_loss": {"enabled": True, "interval": "auto", "tag": "Train/Samples/train_loss"},
    "token_normalization": {"enabled": False, "loss_reduction": "sum"},
}
STOCK_TOPS = sorted({key.path.split(".")[0] for key in STOCK_KEYS})
ZERO2 = {"zero_optimization": {"stage": 2}}


def section(**parts):
    return parse_section({"lazy_reduce": parts})


def gradients(**keys):
    return section(gradient_partition=keys)


def error_of(call, *args, **kwargs):
    with pytest.raises(ConfigError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


# ---- parsing


def test_the_documented_section_is_the_defaults():
    assert section().model_dump() == DEFAULTS
    assert section(**DEFAULTS) == section()


@pytest.mark.parametrize("config", [{}, {"lazy_reduce": {"enabled": False}}, {"train_batch_size": 8}])
def test_without_a_section_or_disabled_there_is_nothing(config):
    assert parse_section(config) is None


def test_a_disabled_section_is_not_looked_at():
    assert parse_section({"lazy_reduce": {"enabled": False, "gradient_partition": 3, "typo": 1}}) is None


@pytest.mark.parametrize(
    "part, key, value",
    [
        ("gradient_partition", "bucket_size", 1),
        ("gradient_partition", "bucket_size", 10**12),
        ("gradient_partition", "wire_dtype", "fp16"),
        ("gradient_partition", "collective", "hierarchical"),
        ("gradient_partition", "node_size", 8),
        ("gradient_partition", "across_dtype", "wire"),
        ("gradient_partition", "max_in_flight", 4),
        ("gradient_partition", "carry_over", False),
        ("gradient_partition", "reduce_every", "boundary"),
        ("gradient_partition", "reduce_every", 3),
        ("gradient_partition", "verify_every", 0),
        ("gradient_partition", "verify_every", 1000),
        ("gradient_partition", "kernel", "native"),
        ("gradient_partition", "enabled", False),
        ("deferred_loss", "interval", 10),
        ("deferred_loss", "tag", "loss/mine"),
        ("token_normalization", "loss_reduction", "mean"),
    ],
)
def test_every_documented_value_is_taken(part, key, value):
    assert getattr(getattr(section(**{part: {key: value}}), part), key) == value


@pytest.mark.parametrize(
    "part, key, value",
    [
        ("gradient_partition", "bucket_size", 0),
        ("gradient_partition", "bucket_size", "AUTO"),
        ("gradient_partition", "max_in_flight", 0),
        ("gradient_partition", "max_in_flight", "1"),
        ("gradient_partition", "max_in_flight", True),
        ("gradient_partition", "max_in_flight", 1.0),
        ("gradient_partition", "max_in_flight", None),
        ("gradient_partition", "max_in_flight", math.nan),
        ("gradient_partition", "max_in_flight", [1]),
        ("gradient_partition", "carry_over", 1),
        ("gradient_partition", "carry_over", "true"),
        ("gradient_partition", "reduce_every", "auto"),
        ("gradient_partition", "reduce_every", False),
        ("gradient_partition", "verify_every", -1),
        ("gradient_partition", "verify_every", False),
        ("gradient_partition", "verify_every", "auto"),
        ("gradient_partition", "wire_dtype", "bfloat16"),
        ("gradient_partition", "node_size", -1),
        ("deferred_loss", "interval", 0),
        ("deferred_loss", "interval", math.inf),
        ("deferred_loss", "tag", ""),
        ("deferred_loss", "tag", "a\nb"),
        ("deferred_loss", "enabled", None),
        ("token_normalization", "loss_reduction", "none"),
    ],
)
def test_a_wrong_value_is_named_once_with_its_path(part, key, value):
    message = error_of(section, **{part: {key: value}})
    lines = message.splitlines()[1:]
    assert len(lines) == 1, message
    assert lines[0].startswith(f"  lazy_reduce.{part}.{key}: got {json.dumps(value)}; expected ")


def test_a_tag_fits_into_the_name_of_a_file():
    assert section(deferred_loss={"tag": 100 * "é"}).deferred_loss.tag == 100 * "é"
    assert "lazy_reduce.deferred_loss.tag: got " in error_of(section, deferred_loss={"tag": 101 * "é"})


def test_all_problems_are_listed_with_what_is_right():
    message = error_of(
        section,
        gradient_partition={"max_in_flight": 0, "bucket_size": 5e6, "kernel": "cuda"},
        deferred_loss=None,
    )
    assert message.splitlines() == [
        "the DeepSpeed config cannot be used with ds_lazyreduce:",
        "  lazy_reduce.gradient_partition.bucket_size: got 5000000.0; expected a whole number of elements "
        '>= 1, or "auto"; a number with a point or an exponent is no whole number in JSON: write 5000000',
        "  lazy_reduce.gradient_partition.max_in_flight: got 0; expected a whole number >= 1",
        '  lazy_reduce.gradient_partition.kernel: got "cuda"; expected "auto" or "native" or "torch"',
        "  lazy_reduce.deferred_loss: got null; expected an object with keys among enabled, interval, tag",
    ]


@pytest.mark.parametrize(
    "parts, path, suggestion",
    [
        ({"gradient_partition": {"max_inflight": 2}}, "gradient_partition.max_inflight", "max_in_flight"),
        ({"gradient_partitioning": {}}, "gradient_partitioning", "gradient_partition"),
        ({"max_in_flight": 2}, "max_in_flight", "lazy_reduce.gradient_partition.max_in_flight"),
        (
            {"deferred_loss": {"bucket_sizes": 2}},
            "deferred_loss.bucket_sizes",
            "gradient_partition.bucket_size",
        ),
    ],
)
def test_an_unknown_key_suggests_the_nearest(parts, path, suggestion):
    message = error_of(section, **parts)
    assert f"lazy_reduce.{path}: got " in message
    assert re.search(rf'unknown key, did you mean "[a-z_.]*{suggestion}"\?', message)


def test_an_unknown_key_near_nothing_lists_the_keys():
    message = error_of(section, deferred_loss={"qqq": 1})
    assert "lazy_reduce.deferred_loss.qqq: got 1; unknown key, expected one of enabled, interval, tag" in message


@pytest.mark.parametrize("value", [None, [], "on", 1, True, 1.5])
def test_a_section_that_is_no_object_is_an_error(value):
    message = error_of(parse_section, {"lazy_reduce": value})
    assert f"lazy_reduce: got {json.dumps(value)}; expected an object" in message


@pytest.mark.parametrize("config", [None, [], "ds.json", 3])
def test_a_config_that_is_no_object_is_an_error(config):
    assert "expected an object" in error_of(parse_section, config)


def test_long_and_deep_values_are_shown_short():
    deep = []
    for _ in range(100_000):
        deep = [deep]
    for value in (deep, "x" * 100_000, 10**5000, {"\ud800": 1}):
        for parts in ({"gradient_partition": {"bucket_size": value}}, {"unknown": value}):
            if value != 10**5000 or "unknown" in parts:
                assert len(error_of(section, **parts)) < 1000


def test_the_section_cannot_be_changed_afterwards():
    with pytest.raises(ValueError):
        section().enabled = False


KEYS = st.sampled_from([*DEFAULTS, *DEFAULTS["gradient_partition"], "interval", "tag", "loss_reduction", "", "\ud800"])
CHOICES = st.sampled_from(["auto", "fp32", "bf16", "boundary", "sum", "torch", "hierarchical", 1, 2, True])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | CHOICES
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.text(max_size=5), inner, max_size=5),
    max_leaves=20,
)


@settings(max_examples=400, deadline=None)
@given(JSON)
def test_arbitrary_json_parses_or_is_a_config_error(value):
    try:
        result = parse_section({"lazy_reduce": value})
    except ConfigError as error:
        str(error).encode()  # printable in any terminal
        assert "lazy_reduce" in str(error)
        assert str(error).count("\n") >= 1
    else:
        assert result is None or isinstance(result, LazyReduceConfig)


HUGE = st.sampled_from([10**400, -(10**400), 1e308, -1e308, math.inf, -math.inf, math.nan, 2**63, 5e6, -0.0])
TEXTS = st.text(max_size=8) | st.sampled_from(["\ud800", "\0", "\u202e", "auto\n", "1", "true", "x" * 5000])
ODD = st.recursive(
    SCALARS | HUGE | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | TEXTS, inner, max_size=4),
    max_leaves=10,
)
NESTED = st.builds(lambda depth, wrap: _nested(depth, wrap), st.sampled_from([10, 500, 5000]), st.booleans())


def _nested(depth, in_lists):
    value = 1
    for _ in range(depth):
        value = [value] if in_lists else {"gradient_partition": value}
    return value


def _sections(values):
    """Sections of known keys, so that values get past the first check; some keys unknown."""
    return st.fixed_dictionaries(
        {},
        optional={
            name: st.fixed_dictionaries({}, optional={key: values for key in part}) | values
            if isinstance(part, dict)
            else values
            for name, part in DEFAULTS.items()
        },
    )


def _parses_or_is_a_config_error(call):
    try:
        call()
    except ConfigError as error:
        str(error).encode()  # printable in any terminal
        assert len(str(error)) < 20_000


@settings(max_examples=400, deadline=None)
@given(_sections(ODD | NESTED) | NESTED)
def test_known_keys_with_any_value_parse_or_are_a_config_error(value):
    _parses_or_is_a_config_error(lambda: parse_section({"lazy_reduce": value}))


@settings(max_examples=200, deadline=None)
@given(
    st.just({}) | _sections(CHOICES | HUGE),
    st.dictionaries(st.sampled_from([*STOCK_TOPS, "steps_per_print"]), ODD, max_size=3),
    st.booleans(),
)
def test_any_section_beside_any_stock_config_is_resolved_or_a_config_error(value, config, is_zero_2):
    """All that an engine does with its config before anything communicates."""
    if is_zero_2:
        config["zero_optimization"] = {"stage": 2}

    def resolve():
        parsed = parse_section({**config, "lazy_reduce": value})
        if parsed is None:
            return
        check_against_deepspeed(parsed, config)
        stock_key_notes(config)
        bucket_elements(parsed, 500_000_000, 10**6, 4)
        wire_dtype(parsed, torch.bfloat16, config.get("communication_data_type"))
        logging_interval(parsed.deferred_loss, config.get("steps_per_print"))

    _parses_or_is_a_config_error(resolve)


def test_a_registered_engine_refuses_a_broken_section_before_anything_else():
    """The way from `deepspeed.initialize` to the parser, without a model, a process group or a device."""
    import deepspeed

    import ds_lazyreduce

    ds_lazyreduce.register()
    try:
        for value in (None, [], 1, {"gradient_partition": math.nan}, {"\ud800": {}}, {"verify_every": 1}):
            for name in ("DeepSpeedEngine", "PipelineEngine"):
                error = error_of(getattr(deepspeed, name), config={"train_batch_size": 1, "lazy_reduce": value})
                assert "lazy_reduce" in error
    finally:
        ds_lazyreduce.unregister()


def test_nothing_of_deepspeed_is_imported():
    code = "import sys, ds_lazyreduce.config; assert 'deepspeed' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# ---- what is refused beside the section


@pytest.mark.parametrize("stage", [2, 2.0, "2"])
def test_zero_2_is_accepted(stage):
    check_against_deepspeed(section(), {"zero_optimization": {"stage": stage}})


@pytest.mark.parametrize(
    "zero, shown",
    [(None, 0), ({}, 0), (True, 1), ({"stage": 0}, 0), ({"stage": 3}, 3), ({"stage": "auto"}, 0)],
)
def test_other_stages_are_refused(zero, shown):
    message = error_of(check_against_deepspeed, section(), {"zero_optimization": zero})
    assert f"zero_optimization.stage: got {shown}; expected 2" in message


def with_zero(**keys):
    return {"zero_optimization": {"stage": 2, **keys}}


REFUSED = [
    (with_zero(offload_optimizer={"device": "nvme"}), "zero_optimization.offload_optimizer.device"),
    (with_zero(zenflow={}), "zero_optimization.zenflow"),
    (with_zero(reduce_scatter=False), "zero_optimization.reduce_scatter"),
    ({**ZERO2, "optimizer": {"type": "MuOn"}}, "optimizer.type"),
    ({**ZERO2, "expert_parallel": {"enabled": True, "autoep_size": 2}}, "expert_parallel.enabled"),
    ({**ZERO2, "compile": {"deepcompile": True}}, "compile.deepcompile"),
    ({**ZERO2, "prescale_gradients": True}, "prescale_gradients"),
    ({**ZERO2, "gradient_predivide_factor": 2.0}, "gradient_predivide_factor"),
    ({**ZERO2, "bf16": {"bf16_master_weights_and_grads": True}}, "bf16.bf16_master_weights_and_grads"),
    (
        {**ZERO2, "bfloat16": {"bf16_master_weights_and_grads": True}},
        "bfloat16.bf16_master_weights_and_grads",
    ),
    ({**ZERO2, "fp16": {"fp16_master_weights_and_grads": True}}, "fp16.fp16_master_weights_and_grads"),
]


@pytest.mark.parametrize("config, path", REFUSED)
def test_stock_features_are_refused_by_path_with_gradient_partition_only(config, path):
    assert f"\n  {path}: got " in error_of(check_against_deepspeed, section(), config)
    check_against_deepspeed(gradients(enabled=False), config)


def test_every_refused_key_is_tested():
    assert {path for _, path in REFUSED} == {key.path for key in STOCK_KEYS if key.treatment == "refused"}


def test_harmless_forms_of_refused_keys_are_accepted():
    config = with_zero(offload_optimizer={"device": "none"}, cpu_offload=False, zenflow=None, reduce_scatter=True)
    config |= {"prescale_gradients": False, "gradient_predivide_factor": 1.0, "optimizer": {"type": "AdamW"}}
    config |= {
        "compile": {"deepcompile": False},
        "bf16": {"enabled": True},
        "hybrid_engine": {"enabled": False},
        "expert_parallel": {"enabled": False},
        "steps_per_print": math.inf,
    }
    check_against_deepspeed(section(), config)


def test_pipelines_take_the_deferred_loss_only():
    assert "PipelineEngine" in error_of(check_against_deepspeed, section(), ZERO2, pipeline=True)
    check_against_deepspeed(gradients(enabled=False), {}, pipeline=True)


def test_the_hybrid_engine_is_refused_whatever_is_enabled():
    message = error_of(check_against_deepspeed, gradients(enabled=False), {"hybrid_engine": {"enabled": True}})
    assert "lazy_reduce.enabled: got true; expected false with a hybrid engine" in message


def test_token_normalization_needs_gradient_partition():
    on = {"enabled": True}
    check_against_deepspeed(section(token_normalization=on), ZERO2)
    alone = section(token_normalization=on, gradient_partition={"enabled": False})
    message = error_of(check_against_deepspeed, alone, ZERO2)
    assert "lazy_reduce.token_normalization.enabled" in message
    assert "lazy_reduce.gradient_partition.enabled" in message


def test_sums_in_an_order_of_the_backends_own_cannot_be_verified():
    asked = gradients(collective="reduce_scatter", verify_every=3)
    assert "gradient_partition.verify_every: got 3; expected 0" in error_of(check_against_deepspeed, asked, ZERO2)
    check_against_deepspeed(gradients(collective="reduce_scatter"), ZERO2)
    check_against_deepspeed(gradients(verify_every=3), ZERO2)


def test_all_refusals_are_listed_at_once():
    config = with_zero(stage=1, zenflow={}) | {"optimizer": {"type": "muon"}}
    assert error_of(check_against_deepspeed, section(), config, pipeline=True).count("\n") == 4


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from([key.path.split(".")[0] for key in STOCK_KEYS]), JSON))
def test_arbitrary_stock_config_gives_config_errors_only(config):
    assert all(isinstance(note, str) for note in stock_key_notes(config))
    try:
        check_against_deepspeed(section(), config)
    except ConfigError:
        pass


# ---- stock keys without effect


def test_keys_without_effect_are_noted_each_with_a_reason():
    config = {
        "data_types": {"grad_accum_dtype": "bf16"},
        "seq_parallel_communication_data_type": "fp32",
        **with_zero(
            overlap_comm=False,
            contiguous_gradients=False,
            round_robin_gradients=True,
            use_multi_rank_bucket_allreduce=False,
        ),
    }
    notes = stock_key_notes(config)
    ignored = [key for key in STOCK_KEYS if key.treatment == "ignored"]
    assert len(notes) == len(ignored)
    for note, key in zip(notes, ignored, strict=True):
        assert note.startswith(f"{key.path}: ") and note.endswith(key.reason)


def test_keys_that_agree_or_are_honoured_are_silent():
    config = {
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "gradient_allreduce_op": "sum",
        **with_zero(overlap_comm=True, contiguous_gradients=True, round_robin_gradients=False, compute_grad_norm=False),
    }
    assert stock_key_notes(config) == []
    assert stock_key_notes({"zero_optimization": {"overlap_comm": "auto"}}) == []
    check_against_deepspeed(section(), config)


# ---- "auto"


@pytest.mark.parametrize(
    "size, stock, trainable, ranks, expected",
    [
        (1000, 10, 10**9, 8, 1000),  # an explicit value is taken as it is
        ("auto", 5 * 10**8, 16 * 10**7, 2, 10**7),
        ("auto", 5 * 10**8, 16 * 10**7 + 1, 2, 10**7 + 1),  # no tiny seventeenth bucket
        ("auto", 5 * 10**8, 1000, 4, 4 * 128 * 1024),
        ("auto", 2000, 10**9, 4, 2000),
        ("auto", 5 * 10**8, 10**12, 4, 5 * 10**8),
        ("auto", 5 * 10**8, 0, 1, 128 * 1024),
    ],
)
def test_bucket_elements(size, stock, trainable, ranks, expected):
    assert bucket_elements(gradients(bucket_size=size), stock, trainable, ranks) == expected


@pytest.mark.parametrize(
    "keys, stock, expected",
    [
        ({}, None, torch.bfloat16),
        ({}, torch.float32, torch.float32),
        ({}, "FP16", torch.float16),
        ({"wire_dtype": "fp32"}, None, torch.float32),
        ({"wire_dtype": "fp16"}, "fp16", torch.float16),
        ({"reduce_every": 2}, None, torch.float32),
        ({"reduce_every": "boundary"}, None, torch.float32),
        ({"reduce_every": 2}, "bf16", torch.bfloat16),
        ({"reduce_every": 2, "wire_dtype": "bf16"}, None, torch.bfloat16),
    ],
)
def test_wire_dtype(keys, stock, expected):
    assert wire_dtype(gradients(**keys), torch.bfloat16, stock) == expected


def test_two_explicit_wire_dtypes_that_differ_are_refused_naming_both():
    wire = gradients(wire_dtype="bf16")
    for call, args in (
        (wire_dtype, (wire, torch.bfloat16, torch.float32)),
        (check_against_deepspeed, (wire, {**ZERO2, "communication_data_type": "fp32"})),
    ):
        message = error_of(call, *args)
        assert 'lazy_reduce.gradient_partition.wire_dtype: got "bf16"' in message
        assert 'communication_data_type is "fp32"' in message


@pytest.mark.parametrize("stock", ["int8", torch.float64])
def test_a_wire_dtype_that_cannot_travel_is_refused(stock):
    assert "communication_data_type: got" in error_of(wire_dtype, section(), torch.bfloat16, stock)


@pytest.mark.parametrize(
    "steps, expected",
    [
        (None, None),
        (math.inf, None),
        (-1, None),
        (1, 1),
        (10, 10),
        (1e1, 10),
    ],
)
def test_logging_interval_follows_steps_per_print(steps, expected):
    assert logging_interval(section().deferred_loss, steps) == expected


@pytest.mark.parametrize("steps", [None, math.inf, 7, 2.5])
def test_its_own_logging_interval_wins(steps):
    assert logging_interval(section(deferred_loss={"interval": 3}).deferred_loss, steps) == 3
    off = section(deferred_loss={"enabled": False, "interval": 3}).deferred_loss
    assert logging_interval(off, steps) is None


@pytest.mark.parametrize("steps", [2.5, math.nan, "often", True, [1], 0])
def test_a_steps_per_print_that_is_no_number_of_steps_is_refused(steps):
    message = error_of(logging_interval, section().deferred_loss, steps)
    assert "steps_per_print: got" in message and "lazy_reduce.deferred_loss.interval" in message


@pytest.mark.parametrize("steps", [0, 0.0, False, "10", "inf", [10]])
@pytest.mark.parametrize("enabled", [True, False])
def test_a_steps_per_print_on_which_stock_fails_in_the_first_step_is_refused(steps, enabled):
    parsed = section(gradient_partition={"enabled": enabled}, deferred_loss={"interval": 3})
    message = error_of(check_against_deepspeed, parsed, {**ZERO2, "steps_per_print": steps})
    assert "\n  steps_per_print: got" in message
