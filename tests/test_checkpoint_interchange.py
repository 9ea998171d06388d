"""Checkpoints written here load in plain DeepSpeed and the other way round, bit for bit."""

import dataclasses
import glob
import os
import subprocess
import sys

import pytest
import torch

from .harness import base_config, make_engine, masters


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


def build(bucket=None, optimizer="AdamW", zero=(), one_group=False, **over):
    """An engine over `Net`: ours if a bucket size is given, else plain DeepSpeed's."""
    model = Net()
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trainable if p.dim() == 1], "weight_decay": 0.0},
    ]
    if one_group:
        groups = [{"params": trainable}]
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


def assert_same_checkpoints(one, other):
    assert_same(zero_files(one), zero_files(other))
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
]


@pytest.mark.parametrize("world,optimizer,zero,over", VARIANTS)
def test_there_and_back(ranks, tmp_path, world, optimizer, zero, over):
    ranks(world).run(there_and_back, str(tmp_path), optimizer, zero, over)
    if zero.get("round_robin_gradients"):
        for file in [*zero_files(tmp_path / "plain"), *zero_files(tmp_path / "lazy"), *zero_files(tmp_path / "again")]:
            file["param_slice_mappings"] = None
        assert_same_checkpoints(tmp_path / "lazy", tmp_path / "again")
        return
    assert_same_checkpoints(tmp_path / "lazy", tmp_path / "plain")
    assert_same_checkpoints(tmp_path / "plain", tmp_path / "again")
