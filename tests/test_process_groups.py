"""Data-parallel groups smaller than the world, each against plain ZeRO-2 on 4 ranks."""

import os

import pytest
import torch

from .harness import OneVec, base_config, make_engine, masters

COLLECTIVES = ("all_to_all", "reduce_scatter")


def _partition(bucket_size, collective):
    return collective and {"gradient_partition": {"bucket_size": bucket_size, "collective": collective}}


class TensorParallel:
    """An mpu of 2 tensor-parallel x 2 data-parallel ranks: {0, 1} and {2, 3} are tensor parallel."""

    def __init__(self):
        from deepspeed import comm as dist

        rank = dist.get_rank()
        self.model, self.data = None, None
        for ranks in ([0, 1], [2, 3]):
            group = dist.new_group(ranks)
            self.model = group if rank in ranks else self.model
        for ranks in ([0, 2], [1, 3]):
            group = dist.new_group(ranks)
            self.data = group if rank in ranks else self.data
        self.model_rank, self.data_rank = rank % 2, rank // 2

    def get_model_parallel_rank(self):
        return self.model_rank

    def get_model_parallel_world_size(self):
        return 2

    def get_model_parallel_group(self):
        return self.model

    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_group = get_model_parallel_group

    def get_data_parallel_rank(self):
        return self.data_rank

    def get_data_parallel_world_size(self):
        return 2

    def get_data_parallel_group(self):
        return self.data


class Sharded(torch.nn.Module):
    """A weight that is sharded over tensor-parallel ranks and one that they replicate."""

    def __init__(self, model_rank):
        super().__init__()
        self.sharded = torch.nn.Parameter(torch.ones(24))
        self.sharded.model_parallel = True
        self.replicated = torch.nn.Parameter(torch.ones(9))
        self.model_rank = model_rank

    def forward(self, x):
        return ((1 + self.model_rank) * x * self.sharded).sum() + (x * self.replicated).sum()


def tensor_parallel(collective):
    mpu = TensorParallel()
    model = Sharded(mpu.model_rank)
    engine = make_engine(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        base_config(lazy=_partition(10, collective), gradient_clipping=1.0, precision="fp32"),
        mpu=mpu,
    )
    norms = []
    for _ in range(3):
        engine.backward(engine(1.0 + mpu.data_rank))
        engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    return norms, masters(engine)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_tensor_parallel_ranks(ranks, collective):
    stock = ranks(4).run(tensor_parallel, None)
    lazy = ranks(4).run(tensor_parallel, collective)
    for (norms, weights), (stock_norms, stock_weights) in zip(lazy, stock, strict=True):
        torch.testing.assert_close(norms, stock_norms, rtol=1e-6, atol=0)
        for name, weight in stock_weights.items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-6, atol=1e-7)
    # the replicated weight counts once: 24 * (1.5^2 + 3^2) + 9 * 1.5^2
    assert abs(lazy[0][0][0] ** 2 - (24 * (1.5**2 + 3.0**2) + 9 * 1.5**2)) < 1e-3


class Uneven(torch.nn.Module):
    """Two tensor-parallel ranks with parameters, and so numbers of buckets, of their own."""

    def __init__(self, model_rank):
        super().__init__()
        self.parts = torch.nn.ParameterList(torch.ones(9) for _ in range(1 + 2 * model_rank))
        for part in self.parts:
            part.model_parallel = True

    def forward(self, x):
        return sum((x * part).sum() for part in self.parts)


def uneven_tensor_parallel(lazy, late_rank):
    mpu = TensorParallel()
    model = Uneven(mpu.model_rank)
    engine = make_engine(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        base_config(lazy=lazy and _partition(9, "all_to_all"), gradient_clipping=1.0, precision="fp32"),
        mpu=mpu,
    )
    norms = []
    for _ in range(3):
        engine.backward(engine(1.0 + mpu.data_rank))
        if lazy and mpu.model_rank == late_rank:
            engine.module(1.0 + mpu.data_rank).backward()  # around the engine: a late gradient
        engine.step()
        norms.append(float(engine.get_global_grad_norm()))
    return norms, masters(engine)


def test_tensor_parallel_ranks_with_other_numbers_of_buckets(ranks):
    stock = ranks(4).run(uneven_tensor_parallel, False, None)
    lazy = ranks(4).run(uneven_tensor_parallel, True, None, timeout=60)
    for (norms, weights), (stock_norms, stock_weights) in zip(lazy, stock, strict=True):
        torch.testing.assert_close(norms, stock_norms, rtol=1e-6, atol=0)
        for name, weight in stock_weights.items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-6, atol=1e-7)
    for late_rank, parts in ((0, 1), (1, 3)):
        for norms, _ in ranks(4).run(uneven_tensor_parallel, True, late_rank, timeout=60):
            once, twice = 9 * (4 - parts) * 1.5**2, 9 * parts * 3.0**2
            assert abs(norms[0] ** 2 - (once + twice)) < 1e-3


class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        from deepspeed.moe.layer import MoE

        torch.manual_seed(0)
        self.dense = torch.nn.Linear(8, 8)
        self.moe = MoE(
            hidden_size=8, expert=torch.nn.Linear(8, 8), num_experts=2, ep_size=2, k=1, min_capacity=0, use_rts=False
        )

    def forward(self, x):
        y, loss, _ = self.moe(self.dense(x))
        return y.square().mean() + loss * 0.01


def experts(collective):
    from deepspeed import comm as dist
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    model = Experts()
    params = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})
    engine = make_engine(
        model,
        torch.optim.AdamW(params, lr=1e-2),
        base_config(lazy=_partition(70, collective), gradient_clipping=0.01, precision="fp32"),
    )
    generator = torch.Generator().manual_seed(dist.get_rank())
    norms, losses = [], []
    for _ in range(4):
        loss = engine(torch.randn(6, 8, generator=generator))
        engine.backward(loss)
        engine.step()
        norms.append(float(engine.get_global_grad_norm()))
        losses.append(loss.item())
    return norms, losses, masters(engine)


def test_expert_parallel_groups(ranks):
    stock = ranks(4, fresh=True).run(experts, None)
    for collective in COLLECTIVES:
        lazy = ranks(4, fresh=True).run(experts, collective)
        for (norms, losses, weights), (stock_norms, stock_losses, stock_weights) in zip(lazy, stock, strict=True):
            torch.testing.assert_close(losses, stock_losses, rtol=1e-5, atol=0)
            torch.testing.assert_close(norms, stock_norms, rtol=1e-5, atol=0)
            for name, weight in stock_weights.items():
                torch.testing.assert_close(weights[name], weight, rtol=1e-5, atol=1e-6)


class FirstHalf:
    """An mpu of data-parallel ranks {0, 1}, and one of {2, 3} that trains nothing."""

    def __init__(self):
        from deepspeed import comm as dist

        self.rank = dist.get_rank()
        halves, alone = [dist.new_group(half) for half in ([0, 1], [2, 3])], [dist.new_group([r]) for r in range(4)]
        self.data, self.model = halves[self.rank // 2], alone[self.rank]

    def get_model_parallel_rank(self):
        return 0

    def get_model_parallel_world_size(self):
        return 1

    def get_model_parallel_group(self):
        return self.model

    def get_data_parallel_rank(self):
        return self.rank % 2

    def get_data_parallel_world_size(self):
        return 2

    def get_data_parallel_group(self):
        return self.data


def on_half_of_the_ranks(ranks_per_host):
    mpu = FirstHalf()
    if mpu.rank >= 2:
        return None
    os.environ["CROSS_RANK"] = str(mpu.rank // ranks_per_host)
    model = OneVec(8)
    config = base_config(lazy=_partition(8, "auto"))
    engine = make_engine(model, torch.optim.SGD(model.parameters(), lr=1.0), config, mpu=mpu)
    engine.backward(engine(torch.full((8,), 1.0 + mpu.rank).bfloat16()))
    engine.step()
    return masters(engine)["w"][0].item()


@pytest.mark.parametrize("ranks_per_host", [1, 2])
def test_an_engine_on_some_ranks_of_a_job(ranks, ranks_per_host):
    results = ranks(4, fresh=True).run(on_half_of_the_ranks, ranks_per_host, timeout=60)
    assert results == [-1.5, -1.5, None, None]
