"""What users do with optimizers and param groups, beside plain ZeRO-2."""

import pytest
import torch

from .harness import base_config, make_engine, masters


def _rank():
    from deepspeed import comm as dist

    return dist.get_rank()


def _lazy(on):
    return {"gradient_partition": {"bucket_size": 300}} if on else None


def _model():
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(4)])


def _groups(model):
    return [
        {"params": [p for p in model.parameters() if p.dim() > 1], "lr": 0.05},
        {"params": [p for p in model.parameters() if p.dim() == 1], "lr": 0.01},
    ]


def _train(engine, steps, dtype=torch.float32):
    generator = torch.Generator().manual_seed(_rank())
    for _ in range(steps):
        engine.backward((engine(torch.randn(3, 16, generator=generator).to(dtype)) - 1).square().mean())
        engine.step()


def _config(lazy, **over):
    return base_config(lazy=_lazy(lazy), precision="fp32", gradient_clipping=0.1, **over)


class StepCounter(torch.optim.Optimizer):
    """Counts its steps in the param group, like DeepSpeed's FusedAdam; its update depends on the count."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] / group["step"])


OPTIMIZERS = {
    "SGD": lambda groups: torch.optim.SGD(groups, momentum=0.9),
    "AdamW": lambda groups: torch.optim.AdamW(groups, weight_decay=0.1, amsgrad=True),
    "RMSprop": torch.optim.RMSprop,
    "StepCounter": StepCounter,
}


def train_with(name, lazy):
    model = _model()
    engine = make_engine(model, OPTIMIZERS[name](_groups(model)), _config(lazy))
    _train(engine, 5)
    counts = [group.get("step") for group in engine.optimizer.param_groups]
    return masters(engine), counts


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_trains_as_in_stock(ranks, name):
    stock, lazy = ranks(2).run(train_with, name, False), ranks(2).run(train_with, name, True)
    for (weights, counts), (stock_weights, stock_counts) in zip(lazy, stock, strict=True):
        assert counts == stock_counts
        for key, weight in stock_weights.items():
            # RMSprop divides by the root of tiny squares, which magnifies the last bit of a gradient
            torch.testing.assert_close(weights[key], weight, rtol=1e-5, atol=1e-5 if name == "RMSprop" else 1e-7)


def adagrad(lazy, two_groups):
    model = _model()
    groups = _groups(model) if two_groups else list(model.parameters())
    engine = make_engine(model, torch.optim.Adagrad(groups, lr=0.05, initial_accumulator_value=0.1), _config(lazy))
    _train(engine, 5)
    return masters(engine)


def test_adagrad(ranks):
    stock, lazy = ranks(2).run(adagrad, False, False), ranks(2).run(adagrad, True, False)
    for key, weight in stock[0].items():
        torch.testing.assert_close(lazy[0][key], weight, rtol=1e-5, atol=1e-7)
    ranks(2).run(adagrad, True, True)  # stock raises with more than one group


def hooks_and_hyperparameters(lazy):
    model = _model()
    optimizer = torch.optim.SGD(_groups(model))
    calls = []
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: calls.append(("pre", len(opt.param_groups))))
    optimizer.register_step_post_hook(lambda opt, args, kwargs: calls.append(("post", len(opt.param_groups))))
    engine = make_engine(model, optimizer, _config(lazy))
    seen = [[(g["lr"], len(g["params"])) for g in engine.optimizer.param_groups]]
    _train(engine, 1)
    before = masters(engine)
    optimizer.param_groups[0]["lr"] = 0.0  # as a scheduler of the user's would
    engine.optimizer.param_groups[1]["lr"] = 0.5
    _train(engine, 1)
    moved = {name: not torch.equal(value, before[name]) for name, value in masters(engine).items()}
    return calls, seen, engine.get_lr(), moved


def test_step_hooks_and_hyperparameters(ranks):
    stock, lazy = ranks(2).run(hooks_and_hyperparameters, False), ranks(2).run(hooks_and_hyperparameters, True)
    assert lazy == stock
    calls, seen, rates, moved = lazy[0]
    assert len(calls) == 8 and seen == [[(0.05, 1), (0.01, 1)]] and rates == [0.0, 0.5]
    for name, has_moved in moved.items():
        assert has_moved == name.endswith("bias")


def lora(lazy):
    """A frozen base, adapters in group 0, a second group, a scheduler with one lambda per group."""
    torch.manual_seed(0)
    model = _model()
    for layer in model[:3]:
        layer.requires_grad_(False)
    head = torch.nn.Linear(16, 16)
    model.append(head)
    optimizer = torch.optim.AdamW(
        [{"params": list(model.parameters())[:8]}, {"params": list(head.parameters())}, {"params": []}], lr=0.1
    )
    engine = make_engine(
        model,
        optimizer,
        base_config(lazy=lazy and {"gradient_partition": {"bucket_size": 300}}),
        lr_scheduler=lambda opt: torch.optim.lr_scheduler.LambdaLR(
            opt, [lambda s: 1 / (1 + s), lambda s: 0.5**s][: len(opt.param_groups)]
        ),
    )
    rates = []
    for _ in range(3):
        _train(engine, 1, torch.bfloat16)
        rates.append(engine.get_lr())
    sent = engine.lazy_reduce_report()["bytes_sent"] if lazy else None
    return rates, sent


def test_lora_empty_group_and_scheduler(ranks):  # case 14: OpenRLHF#1234, ms-swift#8299, DeepSpeed#4055
    stock, lazy = ranks(2).run(lora, False), ranks(2).run(lora, True)
    assert lazy[0][0] == stock[0][0]
    trainable = 2 * (16 * 16 + 16)
    assert lazy[0][1] == 3 * trainable * 2 // 2  # half of the bf16 bytes goes to the other rank


def aligned(lazy, round_robin):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3), torch.nn.Linear(3, 5))
    zero = {"stage": 2, "parameter_alignment": True, "round_robin_gradients": round_robin}
    engine = make_engine(
        model,
        torch.optim.AdamW(model.parameters(), lr=0.01),
        base_config(
            lazy=lazy and {"gradient_partition": {"bucket_size": 40}}, zero_optimization=zero, precision="fp32"
        ),
    )
    from deepspeed.utils import safe_get_full_grad

    generator = torch.Generator().manual_seed(_rank())
    for step in range(3):
        engine.backward(engine(torch.randn(2, 5, generator=generator)).square().sum())
        if step == 2:
            grads = {n: safe_get_full_grad(p) for n, p in model.named_parameters()}
        engine.step()
    return grads, masters(engine)


@pytest.mark.parametrize("round_robin", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_parameter_alignment_and_round_robin(ranks, world, round_robin):
    lazy = ranks(world).run(aligned, True, round_robin)[0]
    stock = ranks(world).run(aligned, False, False)[0]
    for ours, theirs in zip(lazy, stock, strict=True):
        for name, value in theirs.items():
            torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6)


def optimizer_state():
    from deepspeed.utils import safe_get_full_optimizer_state, safe_set_full_fp32_param, safe_set_full_optimizer_state

    model = _model()
    engine = make_engine(model, torch.optim.AdamW(_groups(model)), _config(True))
    _train(engine, 2)
    state = {n: safe_get_full_optimizer_state(p, "exp_avg").clone() for n, p in model.named_parameters()}
    for param in model.parameters():
        safe_set_full_optimizer_state(param, torch.full_like(param, 3.0), "exp_avg")
        safe_set_full_fp32_param(param, torch.full_like(param, 2.0))
    again = {n: safe_get_full_optimizer_state(p, "exp_avg") for n, p in model.named_parameters()}
    return state, again, masters(engine)


def test_optimizer_state_of_every_group_is_readable_and_writable(ranks):
    for state, again, weights in ranks(2).run(optimizer_state):
        assert all(value.abs().sum() > 0 for value in state.values())
        assert all(torch.equal(value, torch.full_like(value, 3.0)) for value in again.values())
        assert all(torch.equal(value, torch.full_like(value, 2.0)) for value in weights.values())


def overflow(lazy):
    """bf16 with check_grad_overflow takes the path of fp16: a non-finite gradient skips the step."""
    model = torch.nn.Linear(4, 4, bias=False)
    engine = make_engine(
        model,
        torch.optim.SGD(model.parameters(), lr=0.5),
        base_config(lazy=lazy, bf16={"enabled": True, "check_grad_overflow": True}),
    )
    states = []
    for step in range(3):
        x = torch.ones(1, 4, dtype=torch.bfloat16)
        if step == 1 and _rank() == 1:
            x[0, 0] = float("inf")
        engine.backward(engine(x).sum())
        engine.step()
        states.append((engine.skipped_steps, float(engine.get_global_grad_norm()), masters(engine)["weight"].tolist()))
    return states


def test_a_non_finite_gradient_on_one_rank_skips_the_step_everywhere(ranks):
    stock, lazy = ranks(2).run(overflow, None), ranks(2).run(overflow, True)
    for ours, theirs in zip(lazy, stock, strict=True):
        assert [state[0] for state in ours] == [state[0] for state in theirs] == [0, 1, 1]
        assert ours[1][1] == theirs[1][1] == float("inf")
        assert ours[1][2] == ours[0][2] != ours[2][2]
