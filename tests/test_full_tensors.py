"""safe_get_full_* and safe_set_full_*: what cannot be done is refused on every rank, also on those that own nothing."""

import pytest
import torch

from .harness import OneVec, base_config, make_engine
from .test_autograd import Block


def _ones(n=8):
    return torch.ones(n, dtype=torch.bfloat16)


def _engine(model, optimizer):
    return make_engine(model, optimizer, base_config(lazy={"gradient_partition": {"bucket_size": 8}}))


def refusals():
    """A parameter of one element: one rank owns all of it. In stock the other one waits for ever."""
    from deepspeed import utils as u

    model = OneVec(1)
    w = model.w
    engine = _engine(model, torch.optim.AdamW(model.parameters(), lr=0.5))
    seen = []

    def refused(call, *args):
        with pytest.raises(ValueError) as caught:
            call(*args)
        seen.append(str(caught.value))

    refused(u.safe_get_full_grad, w)
    refused(u.safe_set_full_grad, w, torch.ones(1))
    refused(u.safe_get_full_optimizer_state, w, "exp_avg")
    engine.backward(engine(_ones(1)))
    refused(u.safe_set_full_grad, w, torch.ones(2))
    assert u.safe_get_full_grad(w).tolist() == [1.0]
    engine.step()
    refused(u.safe_get_full_grad, w)
    refused(u.safe_get_full_optimizer_state, w, "exp_average")
    refused(u.safe_set_full_optimizer_state, w, torch.ones(3), "exp_avg")
    refused(u.safe_set_full_optimizer_state, w, torch.ones(1), "step")
    refused(u.safe_set_full_fp32_param, w, torch.ones(4))
    u.safe_set_full_optimizer_state(w, torch.full((1,), 7.0), "exp_avg")
    u.safe_set_full_fp32_param(w, torch.full((1,), 3.0))
    return seen, u.safe_get_full_optimizer_state(w, "exp_avg").tolist(), u.safe_get_full_fp32_param(w).tolist()


class Rebinding(torch.optim.SGD):
    """Makes its state anew in every step."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["kept"] = param.grad + self.state[param].get("kept", 0)


def state_made_anew():
    from deepspeed import utils as u

    model = OneVec(5)
    engine = _engine(model, Rebinding(model.parameters(), lr=0.5))
    wrapped = engine.optimizer.optimizer
    (master,) = wrapped.param_groups[0]["params"]
    wrapped.state[master]["kept"] = torch.full_like(master, 0.5)  # before the first step
    seen = [u.safe_get_full_optimizer_state(model.w, "kept").tolist()]
    wrapped.state.clear()
    for _ in range(3):
        engine.backward(engine(_ones(5)))
        engine.step()
        seen.append(u.safe_get_full_optimizer_state(model.w, "kept").tolist())
        u.safe_set_full_optimizer_state(model.w, 10 * torch.tensor(seen[-1]), "kept")
    return seen


def test_state_that_the_optimizer_makes_anew_in_every_step(ranks):
    for seen in ranks(3).run(state_made_anew, timeout=40):
        assert seen == [[0.5] * 5, [1.0] * 5, [11.0] * 5, [111.0] * 5]


def test_what_is_not_there_is_refused_on_every_rank(ranks):
    for seen, state, master in ranks(3).run(refusals, timeout=40):
        assert (state, master) == ([7.0], [3.0])
        no_gradient = "there is no gradient of w: it can be read and set after a backward pass and before step()"
        assert [message.removeprefix("lazy_reduce: ") for message in seen] == [
            no_gradient,
            no_gradient,
            "'exp_avg' is no optimizer state of w; there is nothing before the first step",
            "the new value of w has 2 elements, must have 1",
            no_gradient,
            "'exp_average' is no optimizer state of w; there is 'exp_avg', 'exp_avg_sq'",
            "the new value of w has 3 elements, must have 1",
            "'step' is no optimizer state of w; there is 'exp_avg', 'exp_avg_sq'",
            "the new value of w has 4 elements, must have 1",
        ]


class TwoGroups(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used = Block()
        self.unused = torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))

    def forward(self, x):
        return self.used(x).sum()


def outside_a_pass():
    """All that arrived came outside a backward pass of the engine, and nothing for the second group."""
    from deepspeed.utils import safe_get_full_grad

    model = TwoGroups()
    groups = [{"params": [model.used.w]}, {"params": [model.unused]}]
    engine = _engine(model, torch.optim.SGD(groups, lr=1.0))
    engine.module(_ones()).backward()
    return [safe_get_full_grad(p).flatten()[0].item() for p in (model.used.w, model.unused)]


def test_a_group_without_gradients_reads_as_zero_beside_others(ranks):
    assert ranks(2).run(outside_a_pass, timeout=40) == [[1.0, 0.0]] * 2


def within_a_pass():
    from deepspeed.utils import safe_get_full_grad

    model = TwoGroups()
    engine = _engine(model, torch.optim.SGD(model.parameters(), lr=1.0))
    x = _ones().requires_grad_()
    x.register_hook(lambda grad: safe_get_full_grad(model.used.w))
    with pytest.raises(RuntimeError, match="after a backward pass, not within one"):
        engine.backward(engine(x))
    return True


def test_within_a_backward_pass(ranks):
    assert ranks(2).run(within_a_pass, timeout=40) == [True, True]
