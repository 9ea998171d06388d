"""register(), unregister(), and which engine class a config gets."""

import argparse
import base64
import json
import os
import re
import subprocess
import sys

import pytest
import torch

from .harness import OneVec, base_config, make_engine, masters


def _initialize(config, **kwargs):
    import deepspeed

    model = OneVec(4)
    return deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), config=config, **kwargs
    )[0]


def _train(engine):
    engine.backward(engine(torch.ones(4, dtype=torch.bfloat16)))
    engine.step()
    return masters(engine)["w"][0].item()


def register_and_unregister():
    import deepspeed
    from deepspeed.runtime import engine as ds_engine
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    import ds_lazyreduce

    seen = {}
    ds_lazyreduce.unregister()
    before = _initialize(base_config())
    ds_lazyreduce.register()
    ds_lazyreduce.register()
    stock = _initialize(base_config())
    disabled = _initialize(base_config(lazy={"enabled": False, "no_such_key": 1}))
    lazy = _initialize(base_config(lazy=True))
    seen["stock types"] = [type(e).__name__ for e in (before, stock, disabled)]
    seen["stock is stock"] = all(type(e) is DeepSpeedEngine for e in (before, stock, disabled))
    seen["stock optimizers"] = all(type(e.optimizer) is DeepSpeedZeroOptimizer for e in (before, stock, disabled))
    seen["lazy"] = type(lazy).__name__
    # accelerate and others unwrap engines by isinstance
    seen["isinstance"] = all(isinstance(e, deepspeed.DeepSpeedEngine) for e in (before, stock, lazy))
    seen["issubclass"] = issubclass(type(lazy), deepspeed.DeepSpeedEngine)
    seen["not everything"] = isinstance(torch.nn.Linear(1, 1), deepspeed.DeepSpeedEngine)
    ds_lazyreduce.unregister()
    ds_lazyreduce.unregister()
    seen["restored"] = deepspeed.DeepSpeedEngine is DeepSpeedEngine
    seen["name in engine.py"] = ds_engine.DeepSpeedZeroOptimizer is DeepSpeedZeroOptimizer
    after = _initialize(base_config(lazy=True))
    seen["after"] = type(after) is DeepSpeedEngine
    seen["weights"] = [_train(e) for e in (before, stock, disabled, lazy, after)]
    return seen


def test_register_and_unregister(ranks):
    for seen in ranks(2).run(register_and_unregister):
        assert seen["stock is stock"] and seen["stock optimizers"], seen["stock types"]
        assert seen["lazy"] == "LazyEngine"
        assert seen["isinstance"] and seen["issubclass"] and not seen["not everything"]
        assert seen["restored"] and seen["name in engine.py"] and seen["after"]
        assert seen["weights"] == [-1.0] * 5


def config_forms(path):
    import ds_lazyreduce

    config = base_config(lazy=True)
    args = argparse.Namespace(deepspeed_config=path, local_rank=int(os.environ["LOCAL_RANK"]))
    forms = {
        "dict": {"config": config},
        "path": {"config": path},
        "args": {"args": args},
        "config_params": {"config_params": config},
        "base64": {"config": base64.urlsafe_b64encode(json.dumps(config).encode()).decode()},
    }
    types = {}
    for name, kwargs in forms.items():
        model = OneVec(4)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        engine = ds_lazyreduce.initialize(model=model, optimizer=optimizer, **kwargs)[0]
        types[name] = (type(engine).__name__, _train(engine))
    return types


def test_every_form_of_config(ranks, tmp_path):
    path = tmp_path / "config.hjson"
    path.write_text("# a comment, which hjson allows\n" + json.dumps(base_config(lazy=True), indent=1))
    for types in ranks(2).run(config_forms, str(path)):
        assert types == dict.fromkeys(["dict", "path", "args", "config_params", "base64"], ("LazyEngine", -1.0))


def refused(lazy, over):
    make_engine(OneVec(4), torch.optim.SGD(OneVec(4).parameters(), lr=1.0), base_config(lazy=lazy, **over))


@pytest.mark.parametrize(
    "lazy,over,message",
    [
        ({"gradient_partition": {"max_in_fligth": 2}}, {}, 'max_in_fligth.*did you mean "max_in_flight"'),
        ({"gradient_partition": {"bucket_size": 0}}, {}, r"lazy_reduce.gradient_partition.bucket_size: got 0"),
        ({"deferred_loss": {"interval": 0}}, {}, r"lazy_reduce.deferred_loss.interval: got 0"),
        (True, {"zero_optimization": {"stage": 1}}, "zero_optimization.stage: got 1; expected 2"),
        (True, {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "offload_optimizer.device"),
        (True, {"prescale_gradients": True}, "prescale_gradients"),
        ({"gradient_partition": {"collective": "reduce_scatter", "node_size": 2}}, {}, "node_size: got 2; expected"),
        ({"gradient_partition": {"enabled": False}, "token_normalization": {"enabled": True}}, {}, "which it needs"),
    ],
)
def test_bad_configs_are_refused_on_every_rank(ranks, lazy, over, message):
    for error in ranks(2).run_expect_error(refused, lazy, over, timeout=30):
        assert error.type == "ConfigError"
        assert re.search(message, error.message), error.message


def own_subclass(as_advised):
    import deepspeed
    from deepspeed.runtime.config import DeepSpeedConfig

    import ds_lazyreduce
    from ds_lazyreduce.config import parse_section
    from ds_lazyreduce.engine import LazyEngine

    ds_lazyreduce.register()

    class MyEngine(LazyEngine if as_advised else deepspeed.DeepSpeedEngine):
        pass

    model = OneVec(4)
    config = base_config(lazy=True)
    section = {"lazy_section": parse_section(config)} if as_advised else {}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return MyEngine(
        args=None, model=model, optimizer=optimizer, config=config, config_class=DeepSpeedConfig(config), **section
    ).lazy_reduce_report()["buckets"]


def test_an_engine_class_that_cannot_honour_the_section_says_so(ranks):
    for error in ranks(2).run_expect_error(own_subclass, as_advised=False):
        assert error.type == "ConfigError"
        assert "MyEngine" in error.message and "derive it from ds_lazyreduce.engine.LazyEngine" in error.message
    assert ranks(2).run(own_subclass, as_advised=True) == [1, 1]


def other_deepspeed():
    from deepspeed.runtime.engine import DeepSpeedEngine

    from ds_lazyreduce import registration

    registration.unregister()
    original = DeepSpeedEngine._backward_epilogue
    del DeepSpeedEngine._backward_epilogue
    try:
        registration.register()
    finally:
        DeepSpeedEngine._backward_epilogue = original


def test_another_deepspeed_is_refused(ranks):
    for error in ranks(2).run_expect_error(other_deepspeed):
        assert error.type == "UnsupportedDeepSpeedError"
        assert "DeepSpeedEngine._backward_epilogue does not exist" in error.message
        assert "supports DeepSpeed 0.19.8" in error.message


def test_importing_the_package_does_not_import_deepspeed():
    code = "import sys, ds_lazyreduce; sys.exit('deepspeed' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
