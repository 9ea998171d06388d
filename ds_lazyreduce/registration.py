"""Makes ``deepspeed.initialize`` build our engines for configs with an enabled ``lazy_reduce`` section.

DeepSpeed has no plug-in point: ``deepspeed.initialize`` builds its engines by the names bound in
``deepspeed/__init__.py``. ``register()`` rebinds those names to stand-ins that look at the config and
build either the stock class itself or ours. A stand-in is indistinguishable from the stock class for
``isinstance`` and ``issubclass``, because accelerate and others unwrap engines that way.
"""

from __future__ import annotations

import inspect

import deepspeed
import torch
from deepspeed.runtime import engine as ds_engine
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.hybrid_engine import DeepSpeedHybridEngine
from deepspeed.runtime.pipe.dualpipev import DualPipeVEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero import stage_1_and_2

from .config import ConfigError, parse_section
from .engine import LazyEngine
from .pipeline import LazyPipelineEngine
from .version import __version__


class UnsupportedDeepSpeedError(RuntimeError):
    """This DeepSpeed lacks something the extension builds on."""


_ENGINES = {
    "DeepSpeedEngine": (DeepSpeedEngine, LazyEngine),
    "PipelineEngine": (PipelineEngine, LazyPipelineEngine),
    "DeepSpeedHybridEngine": (DeepSpeedHybridEngine, None),
    "DualPipeVEngine": (DualPipeVEngine, None),
}

# What we override or call, with the parameters we rely on: compared with what is installed, because a
# version number says little about internals.
_SEAMS = {
    (stage_1_and_2.DeepSpeedZeroOptimizer, "__init__"): {"init_optimizer", "param_names", "dp_process_group"},
    (stage_1_and_2.DeepSpeedZeroOptimizer, "initialize_gradient_partitioning_data_structures"): set(),
    (stage_1_and_2.DeepSpeedZeroOptimizer, "initialize_optimizer_states"): set(),
    (stage_1_and_2.DeepSpeedZeroOptimizer, "create_gradient_handling_hooks"): set(),
    (stage_1_and_2.DeepSpeedZeroOptimizer, "overlapping_partition_gradients_reduce_epilogue"): set(),
    (stage_1_and_2.DeepSpeedZeroOptimizer, "finalize_gradient_accumulation_boundary"): set(),
    (stage_1_and_2.DeepSpeedZeroOptimizer, "enter_backward"): set(),
    (stage_1_and_2.DeepSpeedZeroOptimizer, "exit_backward"): set(),
    (stage_1_and_2.DeepSpeedZeroOptimizer, "step"): {"closure"},
    (stage_1_and_2.DeepSpeedZeroOptimizer, "_optimizer_step"): {"group_no"},
    (stage_1_and_2.DeepSpeedZeroOptimizer, "_update_scale"): {"has_overflow"},
    (stage_1_and_2.DeepSpeedZeroOptimizer, "_lazy_init_hp_params_optimizer_state"): set(),
    (stage_1_and_2.DeepSpeedZeroOptimizer, "_model_parallel_all_reduce"): {"tensor", "op"},
    (DeepSpeedEngine, "_configure_zero_optimizer"): {"optimizer"},
    (DeepSpeedEngine, "_flush_coalesced_reduction_zero12"): {"optimizer"},
    (DeepSpeedEngine, "backward"): {"loss", "retain_graph", "scale_wrt_gas"},
    (DeepSpeedEngine, "step"): {"lr_kwargs"},
    (DeepSpeedEngine, "_backward_prologue"): set(),
    (DeepSpeedEngine, "_backward_epilogue"): set(),
    (PipelineEngine, "train_batch"): {"data_iter"},
    (PipelineEngine, "_train_schedule"): set(),
    (PipelineEngine, "_exec_schedule"): {"pipe_schedule"},
    (PipelineEngine, "_exec_forward_pass"): {"buffer_id"},
}


def _takes(function, wanted: set[str]) -> bool:
    parameters = set(inspect.signature(function).parameters)
    return wanted <= parameters or parameters == {"args", "kwargs"}  # hidden by DeepSpeed's profiling decorator


def check_deepspeed() -> None:
    """Raises :class:`UnsupportedDeepSpeedError`, naming each difference, if this DeepSpeed is not supported."""
    problems = []
    if getattr(ds_engine, "DeepSpeedZeroOptimizer", None) is not stage_1_and_2.DeepSpeedZeroOptimizer:
        problems.append("deepspeed.runtime.engine does not bind DeepSpeedZeroOptimizer")
    for name, (stock, _) in _ENGINES.items():
        if getattr(deepspeed, name, None) is not stock:
            problems.append(f"deepspeed.{name} is not {stock.__module__}.{stock.__name__} (rebound by something else?)")
    for (owner, name), wanted in _SEAMS.items():
        function = getattr(owner, name, None)
        if function is None:
            problems.append(f"{owner.__name__}.{name} does not exist")
        elif not _takes(function, wanted):
            problems.append(f"{owner.__name__}.{name} does not take {', '.join(sorted(wanted))}")
    if not hasattr(torch._C, "_current_graph_task_id"):
        problems.append("torch does not expose the id of the running backward pass")
    if problems:
        raise UnsupportedDeepSpeedError(
            f"ds_lazyreduce {__version__} supports DeepSpeed 0.19.8, found {deepspeed.__version__} "
            f"(torch {torch.__version__}), which differs in what the extension builds on: " + "; ".join(problems)
        )


def _make_stand_in(stock: type, lazy: type | None) -> type:
    class StandInMeta(type):
        def __call__(cls, *args, **kwargs):
            ds_config = kwargs.get("config")
            section = parse_section(ds_config) if isinstance(ds_config, dict) else None
            if cls is not stand_in:  # a user's subclass, made after register()
                if section is not None:
                    derive = lazy and (
                        f"derive it from {lazy.__module__}.{lazy.__name__} and construct it with "
                        "lazy_section=ds_lazyreduce.config.parse_section(config), or "
                    )
                    raise ConfigError(
                        f"lazy_reduce is enabled, but {cls.__module__}.{cls.__qualname__} is an engine class of your "
                        f"own; {derive or ''}set lazy_reduce.enabled to false"
                    )
                return super().__call__(*args, **kwargs)
            if section is None:
                return stock(*args, **kwargs)
            if lazy is None:
                raise ConfigError(
                    f"lazy_reduce is enabled, but {stock.__name__} cannot honour it; set lazy_reduce.enabled to false"
                )
            return lazy(*args, lazy_section=section, **kwargs)

        def __instancecheck__(cls, instance):
            return isinstance(instance, stock) if cls is stand_in else super().__instancecheck__(instance)

        def __subclasscheck__(cls, subclass):
            return issubclass(subclass, stock) if cls is stand_in else super().__subclasscheck__(subclass)

    stand_in = StandInMeta(stock.__name__, (stock,), {"__doc__": stock.__doc__, "__module__": stock.__module__})
    return stand_in


_registered: dict[str, type] = {}


def register() -> None:
    """Rebinds DeepSpeed's engine names. Idempotent; engines without our config section stay stock.

    Raises:
        UnsupportedDeepSpeedError: the installed DeepSpeed lacks something the extension builds on.
    """
    if _registered:
        return
    check_deepspeed()
    for name, (stock, lazy) in _ENGINES.items():
        _registered[name] = _make_stand_in(stock, lazy)
        setattr(deepspeed, name, _registered[name])


def unregister() -> None:
    """Restores DeepSpeed's own names; engines that exist keep working. Idempotent."""
    for name, stand_in in _registered.items():
        if getattr(deepspeed, name) is stand_in:  # else someone rebound it after us: leave theirs
            setattr(deepspeed, name, _ENGINES[name][0])
    _registered.clear()


def initialize(*args, **kwargs):
    """``deepspeed.initialize`` with the extension registered; same arguments, same result."""
    register()
    return deepspeed.initialize(*args, **kwargs)
