"""Checkpoints written here load in plain DeepSpeed and the other way round, bit for bit."""

import copy
import dataclasses
import glob
import os
import subprocess
import sys

import pytest
import torch

from .harness import base_config, make_engine


class Net(torch.nn.Module):
    """Tied, frozen, odd-sized and large parameters."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Linear(7, 13, bias=False)
        self.frozen = torch.nn.Linear(13, 13).requires_grad_(False)
        self.body = torch.nn.Linear(13, 11)
        self.odd = torch.nn.Parameter(torch.randn(1))
        self.wide = torch.nn.Linear(11, 40)
        self.back = torch.nn.Linear(40, 13)
        self.again = torch.nn.Linear(7, 13, bias=False)
        self.again.weight = self.embed.weight

    def forward(self, x):
        y = self.wide(self.body(self.frozen(self.embed(x))).tanh() * self.odd)
        return (self.back(y.tanh()) - self.again(x)).float().square().mean()


class Momentum(torch.optim.Optimizer):
    """Momentum, with its step count in the group, as the optimizers that elastic checkpoints are made for have it."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "step": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] += 1
            for param in group["params"]:
                average = self.state[param].setdefault("average", torch.zeros_like(param))
                average.lerp_(param.grad, 0.5)
                param.add_(average, alpha=-group["lr"] / group["step"])


OPTIMIZERS = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "amsgrad": lambda groups: torch.optim.Adam(groups, lr=1e-2, amsgrad=True),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9),
    "stepping": lambda groups: Momentum(groups, lr=1e-2),
    "Adafactor": lambda groups: Rows(groups),
}


class Rows(torch.optim.SGD):
    """Keeps state that is not elementwise."""

    def __init__(self, groups):
        super().__init__(groups, lr=1e-2)

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["row"] = torch.zeros(3)


def build(bucket=None, optimizer="AdamW", zero=(), one_group=False, tiny_group=False, **over):
    """An engine over `Net`: ours if a bucket size is given, else plain DeepSpeed's."""
    model = Net()
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trainable if p.dim() == 1], "weight_decay": 0.0},
    ]
    if one_group:
        groups = [{"params": trainable}]
    if tiny_group:
        groups = [{"params": [model.odd]}, {"params": [p for p in trainable if p is not model.odd]}]
    config = base_config(
        lazy={"gradient_partition": {"bucket_size": bucket}} if bucket else None,
        zero_optimization={"stage": 2, **dict(zero)},
        **over,
    )
    return make_engine(model, OPTIMIZERS[optimizer](groups), config)


def train(engine, first, last):
    from deepspeed import comm as dist

    for step in range(first, last):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        x = torch.randn(3, 7, generator=generator).to(engine.module.odd.dtype)
        engine.backward(engine(x))
        engine.step()


def weights(engine):
    return {name: param.detach().clone() for name, param in engine.module.named_parameters()}


def trainable_masters(engine):
    from deepspeed.utils import safe_get_full_fp32_param

    return {
        name: safe_get_full_fp32_param(param).clone()
        for name, param in engine.module.named_parameters()
        if param.requires_grad
    }


def moments(engine, key):
    from deepspeed.utils import safe_get_full_optimizer_state

    if not hasattr(engine, "lazy_reduce_report"):  # plain DeepSpeed links the state of its first group only
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    return {
        name: safe_get_full_optimizer_state(param, key).clone()
        for name, param in engine.module.named_parameters()
        if param.requires_grad
    }


def assert_same(one, other, where=""):
    """Equality to the bit of what pickles hold."""
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and torch.equal(one, other), where
    elif isinstance(one, dict):
        assert list(one) == list(other), where
        for key in one:
            assert_same(one[key], other[key], f"{where}[{key!r}]")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), where
        for index, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, f"{where}[{index}]")
    elif dataclasses.is_dataclass(one) or not hasattr(one, "__dict__"):
        assert one == other, where
    else:
        assert vars(one) == vars(other), where


def zero_files(folder):
    files = sorted(glob.glob(os.path.join(folder, "*", "*_optim_states.pt")))
    assert files
    return [torch.load(file, weights_only=False)["optimizer_state_dict"] for file in files]


def model_file(folder):
    (file,) = glob.glob(os.path.join(folder, "*", "mp_rank_00_model_states.pt"))
    return torch.load(file, weights_only=False)


def assert_same_checkpoints(one, other, mappings=True):
    for ours, theirs in zip(zero_files(one), zero_files(other), strict=True):
        if not mappings:
            del ours["param_slice_mappings"], theirs["param_slice_mappings"]
        assert_same(ours, theirs)
    ours, theirs = model_file(one), model_file(other)
    for key in ("module", "param_shapes", "shared_params", "frozen_param_shapes", "frozen_param_fragments"):
        assert_same(ours[key], theirs[key], key)


def there_and_back(folder, optimizer, zero, over):
    """Saves here, loads and saves in plain DeepSpeed, loads and saves here: training continues as if uninterrupted."""
    lazy = build(150, optimizer, zero, **over)
    train(lazy, 0, 2)
    lazy.save_checkpoint(f"{folder}/lazy")
    saved = trainable_masters(lazy)
    train(lazy, 2, 4)
    uninterrupted = trainable_masters(lazy)
    lazy.destroy()

    plain = build(None, optimizer, zero, **over)
    plain.load_checkpoint(f"{folder}/lazy")
    if not dict(zero).get("round_robin_gradients"):  # plain DeepSpeed's addresses are wrong then
        assert_same(saved, trainable_masters(plain))
    plain.save_checkpoint(f"{folder}/plain")
    plain.destroy()

    again = build(400, optimizer, zero, **over)
    again.load_checkpoint(f"{folder}/plain")
    assert_same(saved, trainable_masters(again))
    again.save_checkpoint(f"{folder}/again")
    train(again, 2, 4)
    assert_same(uninterrupted, trainable_masters(again))


VARIANTS = [
    *[(world, "AdamW", {}, {}) for world in (1, 2, 3, 4)],
    (2, "amsgrad", {}, {"precision": "fp32"}),
    (2, "momentum", {}, {}),
    (3, "AdamW", {"parameter_alignment": True}, {}),
    (3, "AdamW", {"round_robin_gradients": True}, {}),
    (2, "stepping", {"elastic_checkpoint": True}, {}),
    (2, "AdamW", {"offload_optimizer": {"device": "cpu"}}, {"zero_force_ds_cpu_optimizer": False}),
]


@pytest.mark.parametrize("world,optimizer,zero,over", VARIANTS)
def test_there_and_back(ranks, tmp_path, world, optimizer, zero, over):
    ranks(world).run(there_and_back, str(tmp_path), optimizer, zero, over)
    assert_same_checkpoints(tmp_path / "lazy", tmp_path / "plain", mappings=not zero.get("round_robin_gradients"))
    assert_same_checkpoints(tmp_path / "lazy", tmp_path / "again")


def from_plain(folder):
    plain = build(None)
    train(plain, 0, 2)
    plain.save_checkpoint(f"{folder}/plain")
    saved, first, second = trainable_masters(plain), moments(plain, "exp_avg"), moments(plain, "exp_avg_sq")
    plain.destroy()
    lazy = build(150)
    path, _ = lazy.load_checkpoint(f"{folder}/plain")
    assert path is not None and lazy.global_steps == 2
    assert_same(saved, trainable_masters(lazy))
    assert_same(first, moments(lazy, "exp_avg"))
    assert_same(second, moments(lazy, "exp_avg_sq"))
    lazy.save_checkpoint(f"{folder}/lazy")


@pytest.mark.parametrize("world", [2, 3])
def test_what_plain_deepspeed_trained(ranks, tmp_path, world):
    ranks(world).run(from_plain, str(tmp_path))
    assert_same_checkpoints(tmp_path / "plain", tmp_path / "lazy")


def in_small_rounds(folder):
    from ds_lazyreduce import layout_exchange, zero_state

    class Small(layout_exchange.LayoutExchange):
        def __init__(self, segments, group):
            super().__init__(segments, group, round_bytes=8 * 50)

    lazy = build(150)
    train(lazy, 0, 1)
    lazy.save_checkpoint(f"{folder}/large")
    lazy.destroy()
    original, zero_state.LayoutExchange = zero_state.LayoutExchange, Small
    try:
        lazy = build(150)
        lazy.load_checkpoint(f"{folder}/large")
        lazy.save_checkpoint(f"{folder}/small")
        exchange = lazy.optimizer._stock_groups[0].exchange
        assert len(exchange._rounds) > 3
    finally:
        zero_state.LayoutExchange = original


def test_exchanges_in_rounds_of_bounded_size(ranks, tmp_path):
    ranks(2).run(in_small_rounds, str(tmp_path))
    assert_same_checkpoints(tmp_path / "large", tmp_path / "small")


def save_trained(folder, bucket=150, steps=2, **keys):
    engine = build(bucket, **keys)
    train(engine, 0, steps)
    engine.save_checkpoint(folder)
    return trainable_masters(engine), moments(engine, "exp_avg")


WITHOUT_US = """
import glob, sys
sys.modules["ds_lazyreduce"] = None  # importing it fails from here on
import torch
for file in glob.glob(sys.argv[1] + "/*/*.pt"):
    torch.load(file, weights_only=False)
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
torch.save({k: v.clone() for k, v in get_fp32_state_dict_from_zero_checkpoint(sys.argv[1]).items()}, sys.argv[2])
"""


def test_files_need_nothing_of_this_package(ranks, tmp_path):
    saved, _ = ranks(2).run(save_trained, str(tmp_path / "lazy"))[0]
    command = [sys.executable, "-c", WITHOUT_US, str(tmp_path / "lazy"), str(tmp_path / "fp32.pt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    consolidated = torch.load(tmp_path / "fp32.pt")
    assert "frozen.weight" in consolidated and "again.weight" in consolidated
    for name, master in saved.items():
        assert torch.equal(consolidated[name], master), name


def weights_only(folder):
    expected = build(150)
    expected.load_checkpoint(folder)
    expected.save_16bit_model(folder, "model.bin")
    saved = weights(expected)
    expected.destroy()
    for arguments in ({"load_module_only": True}, {"load_optimizer_states": False}):
        engine = build(400)
        train(engine, 5, 6)
        before = moments(engine, "exp_avg")
        engine.load_checkpoint(folder, **arguments)
        assert_same(saved, weights(engine))
        assert_same({name: saved[name].float() for name in before}, trainable_masters(engine))
        assert_same(before, moments(engine, "exp_avg"))
        train(engine, 6, 7)
        engine.destroy()


def test_weights_alone(ranks, tmp_path):
    folder = str(tmp_path / "lazy")
    ranks(2).run(save_trained, folder)
    ranks(2).run(weights_only, folder)
    assert set(torch.load(f"{folder}/model.bin")) == set(Net().state_dict())


def masters_from_bit16(folder):
    engine = build(150, zero={"load_from_fp32_weights": False})
    engine.load_checkpoint(folder)
    bit16 = {name: value.float() for name, value in weights(engine).items()}
    for name, master in trainable_masters(engine).items():
        assert torch.equal(master, bit16[name])
    return moments(engine, "exp_avg")


def test_masters_from_bit16_weights(ranks, tmp_path):
    ranks(2).run(save_trained, str(tmp_path))
    assert ranks(2).run(masters_from_bit16, str(tmp_path))[0]["wide.weight"].abs().sum() > 0


def before_the_first_step(folder, bucket, other):
    engine = build(bucket)
    engine.save_checkpoint(folder)
    train(engine, 0, 2)
    expected = trainable_masters(engine)
    engine.destroy()
    engine = build(other)
    engine.load_checkpoint(folder)
    train(engine, 0, 2)
    return expected, trainable_masters(engine)


def test_a_checkpoint_without_optimizer_state(ranks, tmp_path):
    for expected, loaded in ranks(2).run(before_the_first_step, str(tmp_path / "lazy"), 150, 400):
        assert_same(expected, loaded)
    ranks(2).run(before_the_first_step, str(tmp_path / "mixed"), None, 150)


def the_users_group_stays(folder):
    engine = build(150)
    group = engine.optimizer.param_groups[1]
    train(engine, 0, 1)
    group["lr"] = 0.5
    engine.save_checkpoint(folder)
    group["lr"] = 0.25
    engine.load_checkpoint(folder)
    assert engine.optimizer.param_groups[1] is group and group["lr"] == 0.5
    assert [p.dim() for p in group["params"]] == [1]


def test_settings_are_loaded_into_the_groups_the_user_holds(ranks, tmp_path):
    ranks(2).run(the_users_group_stays, str(tmp_path))


def reloaded_by_its_own_method(folder):
    """The wrapped optimizer's own `load_state_dict` makes new groups, and new state."""
    engine = build(150)
    train(engine, 0, 1)
    wrapped = engine.optimizer.optimizer
    wrapped.load_state_dict(copy.deepcopy(wrapped.state_dict()))
    wrapped.param_groups[1]["lr"] = 0.5
    train(engine, 1, 2)
    saved = moments(engine, "exp_avg")
    engine.save_checkpoint(folder)
    wrapped.param_groups[1]["lr"] = 0.25
    train(engine, 2, 3)
    engine.load_checkpoint(folder)
    assert wrapped.param_groups[1]["lr"] == 0.5
    assert_same(saved, moments(engine, "exp_avg"))


def test_groups_and_state_that_somebody_replaced(ranks, tmp_path):
    ranks(2).run(reloaded_by_its_own_method, str(tmp_path))
    for state in zero_files(tmp_path):
        assert [group["lr"] for group in state["base_optimizer_state"]["param_groups"]] == [1e-2, 0.5]


def state_of_no_parameter(folder):
    """torch's optimizers may keep state under any key."""
    engine = build(150)
    train(engine, 0, 1)
    state = engine.optimizer.optimizer.state
    state["whole"] = {"count": 3, "scale": torch.tensor(2.0)}
    engine.save_checkpoint(folder)
    state["whole"]["scale"].add_(1)
    state["later"] = {}
    engine.load_checkpoint(folder)
    seen = [{key: value for key, value in state.items() if isinstance(key, str)}]
    engine.destroy()
    for bucket in (None, 400):
        engine = build(bucket)
        engine.load_checkpoint(folder)
        seen.append({key: value for key, value in engine.optimizer.optimizer.state.items() if isinstance(key, str)})
        engine.destroy()
    return seen


def test_state_that_belongs_to_no_parameter(ranks, tmp_path):
    for seen in ranks(2).run(state_of_no_parameter, str(tmp_path)):
        assert_same(seen, 3 * [{"whole": {"count": 3, "scale": torch.tensor(2.0)}}])


def refused_save(folder):
    engine = build(150, "Adafactor")
    train(engine, 0, 1)
    engine.save_checkpoint(folder)


def test_state_that_is_not_elementwise_is_refused(ranks, tmp_path):
    for error in ranks(2).run_expect_error(refused_save, str(tmp_path)):
        assert error.type == "CheckpointError" and "'row'" in error.message and "elementwise" in error.message


def refused_load(folder, keys):
    """The error of a load that must change nothing."""
    engine = build(150, **keys)
    train(engine, 7, 8)
    before = weights(engine), trainable_masters(engine), moments(engine, "exp_avg"), engine.get_lr()
    try:
        engine.load_checkpoint(folder)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    else:
        raise AssertionError("no error")
    assert_same(before, (weights(engine), trainable_masters(engine), moments(engine, "exp_avg"), engine.get_lr()))
    train(engine, 8, 9)  # nobody is left waiting
    return message


def damaged(folder, pattern, content=None):
    (file,) = glob.glob(os.path.join(folder, "*", pattern))
    if content is None:
        os.truncate(file, os.path.getsize(file) // 2)
    else:
        torch.save(content, file)
    return file


@pytest.mark.parametrize(
    "pattern,content",
    [
        ("*_pp_rank_1_*_optim_states.pt", None),
        ("*_pp_rank_1_*_optim_states.pt", {"something": 1}),
        ("*_pp_rank_0_*_optim_states.pt", {"optimizer_state_dict": {"fp32_flat_groups": []}}),
        ("*model_states.pt", None),
        ("*model_states.pt", [1, 2]),
        ("*model_states.pt", {"something": 1}),
    ],
)
def test_damaged_files_are_named_on_every_rank(ranks, tmp_path, pattern, content):
    ranks(2).run(save_trained, str(tmp_path), steps=1)
    file = damaged(str(tmp_path), pattern, content)
    for message in ranks(2).run(refused_load, str(tmp_path), {}):
        assert message.startswith("CheckpointError") and file in message


def test_a_missing_file_is_named_on_every_rank(ranks, tmp_path):
    ranks(2).run(save_trained, str(tmp_path), steps=1)
    (file,) = glob.glob(str(tmp_path / "*" / "*_pp_rank_1_*_optim_states.pt"))
    os.remove(file)
    for message in ranks(2).run(refused_load, str(tmp_path), {}):
        assert file in message


def nothing_but_weights(folder):
    engine = build(150)
    engine.load_checkpoint(folder, load_module_only=True)
    masters = trainable_masters(engine)
    engine.load_checkpoint(folder, load_optimizer_states=False)
    assert_same(masters, trainable_masters(engine))
    return masters


def test_weights_alone_need_no_list_of_the_optimizers_parameters(ranks, tmp_path):
    saved, _ = ranks(2).run(save_trained, str(tmp_path), steps=1)[0]
    content = model_file(tmp_path)
    del content["param_shapes"]
    file = damaged(str(tmp_path), "*model_states.pt", content)
    rounded = {name: master.bfloat16().float() for name, master in saved.items()}
    assert_same(rounded, ranks(2).run(nothing_but_weights, str(tmp_path))[0])
    for message in ranks(2).run(refused_load, str(tmp_path), {}):
        assert f"{file}: lacks ['param_shapes']" in message


def test_a_tag_that_does_not_exist(ranks, tmp_path):
    (tmp_path / "latest").write_text("global_step7")
    for message in ranks(2).run(refused_load, str(tmp_path), {}):
        assert message == f"CheckpointError: {tmp_path}: there is no checkpoint with tag global_step7"


def loaded_where_one_rank_has_latest(folder, has_it):
    """Each rank on storage of its own; rank 0 alone, or rank 1 alone, finds the file `latest`."""
    from deepspeed import comm as dist

    own = folder if dist.get_rank() == has_it else f"{folder}/elsewhere"
    if dist.get_rank() != has_it:
        os.symlink(f"{folder}/global_step1", f"{own}/global_step1")
    engine = build(150)
    path, _ = engine.load_checkpoint(own)
    return os.path.dirname(path), trainable_masters(engine)


def test_latest_on_rank_zero_only_names_the_tag_for_all(ranks, tmp_path):
    saved, _ = ranks(2).run(save_trained, str(tmp_path), steps=1)[0]
    (tmp_path / "elsewhere").mkdir()
    loaded = ranks(2).run(loaded_where_one_rank_has_latest, str(tmp_path), 0)
    assert_same([saved, saved], [masters for _, masters in loaded])
    paths = [str(tmp_path / "global_step1"), str(tmp_path / "elsewhere" / "global_step1")]
    assert [path for path, _ in loaded] == paths
    (tmp_path / "elsewhere" / "global_step1").unlink()
    for error in ranks(2).run_expect_error(loaded_where_one_rank_has_latest, str(tmp_path), 1):
        expected = "latest: not there on rank 0, and names 'global_step1' on rank 1"
        assert error.type == "CheckpointError" and error.message.endswith(expected)


@pytest.mark.parametrize(
    "keys,expected",
    [
        ({"one_group": True}, "2 param groups"),
        ({"zero": {"parameter_alignment": True}}, "parameter_alignment"),
        ({"zero": {"round_robin_gradients": True}}, "param group 0 has"),
    ],
)
def test_other_structure_is_refused(ranks, tmp_path, keys, expected):
    ranks(2).run(save_trained, str(tmp_path), steps=1)
    for message in ranks(2).run(refused_load, str(tmp_path), keys):
        assert expected in message, message


def test_another_number_of_ranks_is_refused(ranks, tmp_path):
    ranks(2).run(save_trained, str(tmp_path), steps=1)
    for message in ranks(3).run(refused_load, str(tmp_path), {}):
        assert "saved by 2 data-parallel ranks, now there are 3" in message


def to_universal(folder):
    """Converts the checkpoint as DeepSpeed's tool does; returns the folder that holds it."""
    from argparse import Namespace

    from deepspeed.checkpoint.ds_to_universal import main

    (source,) = glob.glob(os.path.join(folder, "global_step*"))
    target = f"{folder}/universal"
    arguments = dict(num_extract_workers=1, num_merge_workers=1, keep_temp_folder=False, strict=True)
    main(Namespace(input_folder=source, output_folder=target, inject_missing_state=True, **arguments))
    with open(f"{folder}/latest_universal", "w", encoding="utf-8") as file:
        file.write("universal")


UNIVERSAL = {"checkpoint": {"load_universal": True}}


def load_universal(folder, bucket):
    engine = build(bucket, **UNIVERSAL)
    engine.load_checkpoint(folder)
    state = trainable_masters(engine), weights(engine), moments(engine, "exp_avg")
    train(engine, 2, 3)
    return state, engine.optimizer.param_groups[0]["weight_decay"]


@pytest.mark.parametrize("saved_by", [150, None])
def test_universal_checkpoints(ranks, tmp_path, saved_by):
    saved, first = ranks(2).run(save_trained, str(tmp_path), bucket=saved_by)[0]
    to_universal(str(tmp_path))
    for world, bucket in ((1, 100), (2, 100), (3, 100), (2, None)):
        for (masters, bit16, moment), weight_decay in ranks(world).run(load_universal, str(tmp_path), bucket):
            assert_same(saved, masters)
            assert_same(first, moment)
            assert weight_decay == 0.1
            for name, master in saved.items():
                assert torch.equal(bit16[name], master.bfloat16())


def continued(folder, bucket, steps):
    engine = build(bucket, tiny_group=True)
    train(engine, 0, 2)
    engine.save_checkpoint(folder)
    train(engine, 2, 2 + steps)
    return trainable_masters(engine)


def continued_from_universal(folder, bucket, steps):
    engine = build(bucket, tiny_group=True, **UNIVERSAL)
    engine.load_checkpoint(folder)
    train(engine, 2, 2 + steps)
    return trainable_masters(engine)


def test_a_rank_that_owns_nothing_of_a_group_learns_its_state(ranks, tmp_path):
    # A group of one element: ranks 1 and 2 have padding only, and plain DeepSpeed cannot load it.
    expected = ranks(3).run(continued, str(tmp_path), 150, 2)
    to_universal(str(tmp_path))
    assert_same(expected, ranks(3).run(continued_from_universal, str(tmp_path), 1, 2))


def test_a_universal_checkpoint_that_lacks_a_parameter(ranks, tmp_path):
    ranks(2).run(save_trained, str(tmp_path))
    to_universal(str(tmp_path))
    os.remove(tmp_path / "universal" / "zero" / "odd" / "fp32.pt")
    for message in ranks(2).run(refused_load, str(tmp_path), UNIVERSAL):
        assert "odd" in message and "missing" in message


def offloaded(folder, kinds):
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

    include = [OffloadStateTypeEnum(kind) for kind in kinds] if kinds else None
    engine = build(150)
    train(engine, 0, 2)
    engine.save_checkpoint(f"{folder}/before")
    saved = trainable_masters(engine), moments(engine, "exp_avg"), weights(engine)
    engine.backward(engine(torch.ones(3, 7, dtype=torch.bfloat16)))
    engine.offload_states(include=include, pin_memory=False)
    engine.save_checkpoint(f"{folder}/offloaded")
    engine.reload_states()
    assert_same(saved, (trainable_masters(engine), moments(engine, "exp_avg"), weights(engine)))
    for user_group in engine.optimizer._user_groups:
        for i in user_group.buckets:
            shard = engine.optimizer.single_partition_of_fp32_groups[i]
            assert shard.untyped_storage().data_ptr() == user_group.master.untyped_storage().data_ptr()
    engine.step()
    train(engine, 2, 3)
    return trainable_masters(engine)


def not_offloaded():
    engine = build(150)
    train(engine, 0, 2)
    engine.backward(engine(torch.ones(3, 7, dtype=torch.bfloat16)))
    engine.step()
    train(engine, 2, 3)
    return trainable_masters(engine)


def test_offloaded_states_come_back(ranks, tmp_path):
    expected = ranks(2).run(not_offloaded)
    for kinds in ([], ["hp_params"], ["lp_params"], ["optim_states"], ["lp_grads"]):
        folder = tmp_path / "_".join(["all", *kinds])
        assert_same(expected, ranks(2).run(offloaded, str(folder), kinds))
        assert_same_checkpoints(folder / "before", folder / "offloaded")


def loaded_while_offloaded(folder):
    engine = build(150)
    engine.save_checkpoint(folder)
    train(engine, 0, 2)
    expected = trainable_masters(engine)
    engine.offload_states(pin_memory=False)
    engine.load_checkpoint(folder)  # it has no optimizer state
    engine.reload_states()
    train(engine, 0, 2)
    assert_same(expected, trainable_masters(engine))


def test_a_checkpoint_without_optimizer_state_while_that_is_offloaded(ranks, tmp_path):
    ranks(2).run(loaded_while_offloaded, str(tmp_path))


def with_frozen_group(folder):
    """Plain DeepSpeed cannot be built with such a group; here it is empty in the files."""
    model = Net()
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": list(model.frozen.parameters())}, {"params": trainable}]
    config = base_config(lazy={"gradient_partition": {"bucket_size": 150}})
    engine = make_engine(model, torch.optim.AdamW(groups, lr=1e-2), config)
    train(engine, 0, 2)
    engine.save_checkpoint(folder)
    saved = trainable_masters(engine), moments(engine, "exp_avg")
    train(engine, 2, 3)
    engine.load_checkpoint(folder)
    assert_same(saved, (trainable_masters(engine), moments(engine, "exp_avg")))


def test_a_group_of_frozen_parameters(ranks, tmp_path):
    ranks(2).run(with_frozen_group, str(tmp_path))
    assert [dict(shapes) for shapes in model_file(tmp_path)["param_shapes"]][0] == {}


class Experts(torch.nn.Module):
    def __init__(self):
        from deepspeed.moe.layer import MoE

        super().__init__()
        torch.manual_seed(0)
        self.dense = torch.nn.Linear(8, 8)
        self.moe = MoE(8, torch.nn.Linear(8, 8), num_experts=2, ep_size=2, k=1, use_rts=False, capacity_factor=4.0)

    def forward(self, x):
        y, loss, _ = self.moe(self.dense(x))
        return y.float().square().mean() + loss.float()


def build_experts(bucket):
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    model = Experts()
    params = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})
    lazy = {"gradient_partition": {"bucket_size": bucket}} if bucket else None
    return make_engine(model, torch.optim.AdamW(params, lr=1e-2), base_config(lazy=lazy))


def experts_there_and_back(folder):
    from deepspeed import comm as dist

    lazy = build_experts(50)
    for step in range(2):
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        lazy.backward(lazy(torch.randn(6, 8, generator=generator).bfloat16()))
        lazy.step()
    lazy.save_checkpoint(f"{folder}/lazy")
    saved = trainable_masters(lazy)
    lazy.destroy()
    plain = build_experts(None)
    plain.load_checkpoint(f"{folder}/lazy")
    assert_same(saved, trainable_masters(plain))
    plain.save_checkpoint(f"{folder}/plain")
    plain.destroy()
    again = build_experts(1000)
    again.load_checkpoint(f"{folder}/plain")
    assert_same(saved, trainable_masters(again))
    again.save_checkpoint(f"{folder}/again")


def test_experts_are_exchanged_in_their_own_groups(ranks, tmp_path):
    ranks(4).run(experts_there_and_back, str(tmp_path))
    assert zero_files(tmp_path / "lazy")[0]["partition_count"] == [4, 2]
    assert_same(zero_files(tmp_path / "lazy"), zero_files(tmp_path / "plain"))
    assert_same(zero_files(tmp_path / "lazy"), zero_files(tmp_path / "again"))
