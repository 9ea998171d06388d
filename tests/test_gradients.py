"""Reduced gradients, masters and losses on real gloo ranks, against plain DeepSpeed and against theory."""

import pytest
import torch

from .harness import CollectiveRecorder, OneVec, base_config, make_engine, masters


def _rank():
    from deepspeed import comm as dist

    return dist.get_rank()


def _partition(**keys):
    return {"gradient_partition": keys}


def _mlp(width=32, layers=4):
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(layers)])


def _decay_groups(model):
    return [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]


def train_mlp(lazy, optimizer="AdamW", steps=20, micro_steps=2, scheduler=False, **over):
    """Losses, per-step group learning rates, masters and last norm of an MLP on rank-dependent data."""
    model = _mlp()
    opt = getattr(torch.optim, optimizer)(_decay_groups(model), lr=1e-2)
    kwargs = {}
    if scheduler:
        kwargs["lr_scheduler"] = torch.optim.lr_scheduler.LambdaLR(
            opt, [lambda step: 1 / (1 + step), lambda step: 0.9**step]
        )
    engine = make_engine(model, opt, base_config(lazy=lazy, gradient_accumulation_steps=micro_steps, **over), **kwargs)
    generator = torch.Generator().manual_seed(_rank())
    losses, rates = [], []
    for _ in range(steps * micro_steps):
        x = torch.randn(4, 32, generator=generator).to(next(model.parameters()).dtype)
        loss = (engine(x) - x.roll(1, -1)).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        rates.append(engine.get_lr())
    result = {
        "losses": losses,
        "rates": rates,
        "masters": masters(engine),
        "norm": engine.get_global_grad_norm(),
        "groups": len(engine.optimizer.param_groups),
        "report": engine.lazy_reduce_report() if lazy else None,
    }
    engine.destroy()
    return result


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_trains_as_plain_deepspeed_does(ranks, world, precision):
    over = {"communication_data_type": "fp32", "gradient_clipping": 1.0, "precision": precision}
    lazy = ranks(world).run(train_mlp, _partition(bucket_size=1500), **over)
    stock = ranks(world).run(train_mlp, None, data_types={"grad_accum_dtype": "fp32"}, **over)
    tolerance = 1e-2 if precision == "bf16" else 1e-5
    for ours, theirs in zip(lazy, stock, strict=True):
        torch.testing.assert_close(
            torch.tensor(ours["losses"]), torch.tensor(theirs["losses"]), rtol=tolerance, atol=tolerance / 100
        )
        torch.testing.assert_close(torch.as_tensor(ours["norm"]), torch.as_tensor(theirs["norm"]), rtol=0.02, atol=0)
    assert lazy[0]["losses"][-1] < lazy[0]["losses"][0]
    assert lazy[0]["report"]["scalar_collectives"] == 20


def one_step(x_of_rank, lazy, micro_steps=1, n=8, **over):
    model = OneVec(n)
    engine = make_engine(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        base_config(lazy=lazy, gradient_accumulation_steps=micro_steps, **over),
    )
    x = torch.full((n,), x_of_rank[_rank()], dtype=torch.bfloat16)
    for _ in range(micro_steps):
        engine.backward(engine(x))
        engine.step()
    return masters(engine)["w"]


def test_small_contributions_survive_and_stock_loses_them(ranks):
    x = [1.0, 2**-8, 2**-8, 2**-8]
    exact = -(1.0 + 3 * 2**-8) / 4
    for master in ranks(4).run(one_step, x, True):
        assert torch.equal(master, torch.full((8,), exact))
    for master in ranks(4).run(one_step, x, None):
        assert not torch.equal(master, torch.full((8,), exact))


def test_micro_steps_accumulate_in_fp32(ranks):  # case 2: DeepSpeed#1800, #2352, #2768
    for master in ranks(2).run(one_step, [1.0, 1.0], True, micro_steps=512):
        assert torch.equal(master, torch.full((8,), -1.0))
    for master in ranks(2).run(one_step, [1.0, 1.0], None, micro_steps=512):
        assert torch.equal(master, torch.full((8,), -0.5))  # bf16 accumulation sticks


def bits(optimizer, keys, clip=0.0, steps=3):
    """Reduced gradients of the first window and masters after some steps."""
    from deepspeed.utils import safe_get_full_grad

    model = _mlp(width=24)
    opt = getattr(torch.optim, optimizer)(_decay_groups(model), lr=1e-2)
    engine = make_engine(
        model, opt, base_config(lazy=_partition(**keys), gradient_accumulation_steps=3, gradient_clipping=clip)
    )
    generator = torch.Generator().manual_seed(_rank())
    grads = None
    for micro_step in range(3 * steps):
        x = torch.randn(4, 24, generator=generator).bfloat16()
        engine.backward((engine(x) - x.roll(1, -1)).float().square().sum())
        if micro_step == 2:
            grads = {n: safe_get_full_grad(p).clone() for n, p in model.named_parameters()}
        engine.step()
    assert engine.get_global_grad_norm() > 1.0
    return grads, masters(engine), engine.lazy_reduce_report()


@pytest.mark.parametrize("optimizer,clip", [("SGD", 0.0), ("AdamW", 0.0), ("AdamW", 1.0)])
def test_the_same_bits_for_any_bucket_size_and_chain(ranks, optimizer, clip):
    variants = [
        {"bucket_size": 100_000},
        {"bucket_size": 100_000},  # run to run
        {"bucket_size": 600},
        {"bucket_size": 1},
        {"bucket_size": 1200, "max_in_flight": 3, "carry_over": False},
        {"bucket_size": 600, "max_in_flight": 9, "carry_over": True},
        {"bucket_size": 600, "kernel": "torch"},
    ]
    results = [ranks(3).run(bits, optimizer, keys, clip) for keys in variants]
    reference = results[0][0]
    assert reference[2]["buckets"] == 2 and results[3][0][2]["buckets"] == 8
    for per_rank in results:
        for grads, weights, _ in per_rank:
            for name in reference[0]:
                assert torch.equal(grads[name], reference[0][name]), name
                assert torch.equal(weights[name], reference[1][name]), name


def parameters_moved_to_other_memory():
    engine = make_engine(
        model := torch.nn.Conv2d(2, 2, 3),
        torch.optim.SGD(model.parameters(), lr=1.0),
        base_config(precision="fp32", lazy=_partition(bucket_size=20)),
    )
    model.weight.data = model.weight.data.clone()
    model.to(memory_format=torch.channels_last)
    engine.backward(engine(torch.ones(1, 2, 3, 3)).sum())
    engine.step()
    return {n: (p.detach(), masters(engine)[n]) for n, p in model.named_parameters()}


def test_an_update_reaches_parameters_that_were_given_other_memory(ranks):  # as in an exchange of averaged weights
    for weights in ranks(2).run(parameters_moved_to_other_memory):
        for weight, master in weights.values():
            assert torch.equal(weight, master)


def complex_parameter():
    model = torch.nn.Linear(2, 2)
    model.spectrum = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    make_engine(model, torch.optim.SGD(model.parameters(), lr=1.0), base_config(precision="fp32", lazy=_partition()))


def test_a_complex_parameter_is_refused(ranks):  # plain ZeRO-2 keeps its real part only
    for error in ranks(2).run_expect_error(complex_parameter):
        assert error.type == "ConfigError" and "spectrum is complex64" in error.message


def test_decay_groups_with_one_lambda_per_group(ranks):
    over = {"communication_data_type": "fp32", "scheduler": True, "micro_steps": 1}
    lazy = ranks(2).run(train_mlp, _partition(bucket_size=1500), **over)
    stock = ranks(2).run(train_mlp, None, data_types={"grad_accum_dtype": "fp32"}, **over)
    assert lazy[0]["groups"] == 2
    assert lazy[0]["rates"] == stock[0]["rates"]
    torch.testing.assert_close(torch.tensor(lazy[0]["losses"]), torch.tensor(stock[0]["losses"]), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("reduce_every", [1, "boundary"])
def test_offloaded_optimizer_trains_as_plain_zero_offload_does(ranks, reduce_every):
    partition = _partition(bucket_size=1500, reduce_every=reduce_every)
    offload = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    over = {"communication_data_type": "fp32", "gradient_clipping": 0.5, "zero_force_ds_cpu_optimizer": False}
    over |= offload
    lazy = ranks(2).run(train_mlp, partition, **over)
    stock = ranks(2).run(train_mlp, None, data_types={"grad_accum_dtype": "fp32"}, **over)
    on_device = ranks(2).run(train_mlp, partition, gradient_clipping=0.5, communication_data_type="fp32")
    torch.testing.assert_close(torch.tensor(lazy[0]["losses"]), torch.tensor(stock[0]["losses"]), rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(torch.as_tensor(lazy[0]["norm"]), torch.as_tensor(stock[0]["norm"]), rtol=0.02, atol=0)
    for name, master in on_device[0]["masters"].items():
        assert torch.equal(lazy[0]["masters"][name], master)


class TwoBranches(torch.nn.Module):
    """``a`` and ``b`` with gradients 1 and 2, used in an order that depends on the rank."""

    def __init__(self):
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(64))
        self.b = torch.nn.Parameter(torch.zeros(64))

    def forward(self, a_first):
        if a_first:
            y = self.a.sum()
            return y + 2 * self.b.sum()
        y = 2 * self.b.sum()
        return y + self.a.sum()


def branches_in_different_orders(lazy, steps):
    model = TwoBranches()
    config = base_config(lazy=lazy, zero_optimization={"stage": 2, "reduce_bucket_size": 64})
    engine = make_engine(model, torch.optim.SGD(model.parameters(), lr=1.0), config)
    for _ in range(steps):
        engine.backward(engine(_rank() == 0))
        engine.step()
    return {name: value[0].item() for name, value in masters(engine).items()}


def test_branches_in_different_orders_are_not_mixed_up(ranks):
    for result in ranks(2).run(branches_in_different_orders, _partition(bucket_size=64), 2):
        assert result == {"a": -2.0, "b": -4.0}
    # negative control: plain ZeRO-2 reduces whatever each rank has ready
    assert ranks(2).run(branches_in_different_orders, None, 1)[0] == {"a": -1.5, "b": -1.5}


def eight_linears():
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64, bias=False) for _ in range(8)])
    engine = make_engine(
        model, torch.optim.SGD(model.parameters(), lr=1.0), base_config(lazy=_partition(bucket_size=8192))
    )
    loss = engine(torch.ones(2, 64, dtype=torch.bfloat16)).float().sum()
    with CollectiveRecorder() as backward:
        engine.backward(loss)
    engine.step()
    return backward.calls, engine.lazy_reduce_report()


def test_real_reduce_scatter(ranks):  # case 1: DeepSpeed#6463, #5758, #7059
    for calls, report in ranks(4).run(eight_linears):
        exchanges = [call for call in calls if call.name == "all_to_all_single"]
        assert len(exchanges) == report["buckets"] == report["gradient_collectives"] == 4
        assert all(call.via_deepspeed for call in exchanges)
        assert not [call for call in calls if call.name == "all_reduce" and call.numel > 16]
        assert report["bytes_sent"] == sum(call.bytes_to_peers for call in exchanges) == 4 * 8192 * 2 * 3 // 4


class Sizes(torch.nn.Module):
    """Parameters of the given sizes; the gradient of element i of parameter k is (k + 1) * x * (i % 7 + 1)."""

    def __init__(self, sizes):
        super().__init__()
        self.params = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(n)) for n in sizes)

    def forward(self, x):
        total = 0.0
        for k, p in enumerate(self.params):
            total = total + (p.float() * (k + 1) * x * (torch.arange(p.numel()) % 7 + 1)).sum()
        return total


def odd_sizes(sizes, bucket, wire, steps=2):
    model = Sizes(sizes)
    engine = make_engine(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        base_config(lazy=_partition(bucket_size=bucket, wire_dtype=wire)),
    )
    with CollectiveRecorder() as record:
        for _ in range(steps):
            engine.backward(engine(float(_rank() + 1)))
            live = engine.optimizer._pool.live_bytes
            engine.step()
    return masters(engine), record.named("all_to_all_single"), live, engine.lazy_reduce_report()


@pytest.mark.parametrize(
    "sizes,bucket,wire",
    [
        ([1, 3, 5, 7, 1025], 64, "auto"),  # case 4: DeepSpeed#3151, #5868
        ([1, 1, 1], 64, "auto"),
        ([1, 1, 1], 1, "auto"),
        ([5000, 10, 5000], 1000, "bf16"),  # case 5: DeepSpeed#7653
        ([5000, 10, 5000], 1000, "fp32"),
    ],
)
@pytest.mark.parametrize("world", [2, 4])
def test_awkward_sizes(ranks, world, sizes, bucket, wire):
    mean = sum(range(1, world + 1)) / world
    for weights, exchanges, live, report in ranks(world).run(odd_sizes, sizes, bucket, wire):
        for k, numel in enumerate(sizes):
            expected = -2 * (k + 1) * mean * (torch.arange(numel) % 7 + 1).float()
            assert torch.equal(weights[f"params.{k}"], expected)
        assert all(call.numel > 0 for call in exchanges)
        assert len(exchanges) == 2 * report["buckets"]
        assert live == 0  # at the boundary no buffer outlives the backward pass
        assert report["wire_dtype"] == ("fp32" if wire == "fp32" else "bf16")


def bytes_after_backward(sizes, carry_over):
    model = Sizes(sizes)
    engine = make_engine(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        base_config(lazy=_partition(carry_over=carry_over), gradient_accumulation_steps=2),
    )
    engine.backward(engine(1.0))
    return engine.optimizer._pool.live_bytes


def test_only_what_is_carried_over_outlives_a_backward_pass(ranks):
    assert ranks(2).run(bytes_after_backward, [5000, 10, 3000], False) == [0, 0]
    # send and receive buffer of the last bucket, which holds all of the small model
    assert ranks(2).run(bytes_after_backward, [5000, 10, 3000], True) == [2 * 2 * 8012] * 2


def gradient_sum():
    model = OneVec(4)
    engine = make_engine(
        model, torch.optim.SGD(model.parameters(), lr=1.0), base_config(lazy=True, gradient_allreduce_op="sum")
    )
    engine.backward(engine(torch.ones(4, dtype=torch.bfloat16)))
    engine.step()
    return masters(engine)["w"]


def test_gradient_allreduce_op_sum_does_not_divide(ranks):
    for master in ranks(2).run(gradient_sum):
        assert torch.equal(master, torch.full((4,), -2.0))
