"""Ranks of which one fails, stops early, reads or runs other graphs: no hang, nothing mixed up, nothing lost."""

import pytest
import torch

from .harness import OneVec, base_config, make_engine, masters
from .test_autograd import Block, Branches, Chain, Fragile


def _rank():
    from deepspeed import comm as dist

    return dist.get_rank()


def _ones(n=8):
    return torch.ones(n, dtype=torch.bfloat16)


def _engine(model, *, partition=(), **over):
    lazy = {"gradient_partition": {"bucket_size": 8, **dict(partition)}}
    return make_engine(model, torch.optim.SGD(model.parameters(), lr=1.0), base_config(lazy=lazy, **over))


def _first(engine):
    return {name: value.flatten()[0].item() for name, value in masters(engine).items()}


class MaybeUnused(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x, use):
        return ((self.block(x) if use else x) * 1).sum()


def a_rank_without_parameters(reduce_every):
    """A loss.backward() that reaches no parameter on one rank is a micro-step all the same."""
    engine = _engine(MaybeUnused(), partition={"reduce_every": reduce_every}, gradient_accumulation_steps=4)
    for _ in range(4):
        engine(_ones().requires_grad_(), _rank() == 0).backward()
        engine.step()
    return _first(engine)


@pytest.mark.parametrize("reduce_every", [1, 2, "boundary"])
def test_a_rank_whose_loss_reaches_no_parameter(ranks, reduce_every):
    assert ranks(2).run(a_rank_without_parameters, reduce_every, timeout=40) == [{"block.w": 0.5}] * 2


def collective_after_a_failure(what, directory):
    from deepspeed.utils import safe_get_full_grad

    engine = _engine(Fragile())
    try:
        engine(_ones(), _rank() == 1).backward()
    except ArithmeticError:
        pass
    if what == "read":
        safe_get_full_grad(engine.module.first.w)
    elif what == "flush":
        engine.record_metric("seen", 1, 1)
        engine.flush_metrics()
    else:
        engine.save_checkpoint(directory)
    engine.step()
    engine.backward(engine(_ones(), False))
    engine.step()
    return _first(engine), engine.skipped_steps


@pytest.mark.parametrize("what", ["read", "flush", "save"])
def test_a_collective_after_a_failure_on_one_rank(ranks, tmp_path, what):
    expected = ({"first.w": 0.0, "last.w": 0.0}, 1)
    assert ranks(2).run(collective_after_a_failure, what, str(tmp_path), timeout=40) == [expected] * 2


def late_on_one_rank():
    from deepspeed.utils import safe_get_full_grad

    engine = _engine(Chain(blocks=2))
    engine.backward(engine(_ones()))
    if _rank() == 1:
        engine.module(2 * _ones()).backward()
    read = [safe_get_full_grad(p)[0].item() for p in engine.module.parameters()]
    engine.step()
    return read, _first(engine)


def test_reading_gradients_that_are_late_on_one_rank(ranks):
    expected = ([2.0, 2.0], {"blocks.0.w": -1.0, "blocks.1.w": -1.0})
    assert ranks(2).run(late_on_one_rank, timeout=40) == [expected] * 2


def unreduced_on_one_rank():
    """Elements of which only one rank owns any: every rank refuses."""
    from deepspeed.utils import safe_get_full_grad

    engine = _engine(OneVec(1), partition={"reduce_every": "boundary"}, gradient_accumulation_steps=2)
    engine.backward(engine(_ones(1)))
    with pytest.raises(RuntimeError, match="not reduced before step"):
        safe_get_full_grad(engine.module.w)
    return True


def test_every_rank_refuses_to_read_what_is_not_reduced(ranks):
    assert ranks(2).run(unreduced_on_one_rank, timeout=40) == [True, True]


def reduced_in_backward_and_in_step(wire):
    partition = {"reduce_every": "boundary", "wire_dtype": wire}
    engine = _engine(OneVec(8), partition=partition, gradient_accumulation_steps=2)
    engine.backward(engine(_ones() * 2))
    engine.step()
    if _rank() == 0:
        engine.backward(engine(_ones() * 2))
    engine.step()
    return _first(engine)


@pytest.mark.parametrize("wire", ["bf16", "fp16", "fp32"])
def test_ranks_that_reduce_in_backward_and_in_step_send_the_same_dtype(ranks, wire):
    assert ranks(2).run(reduced_in_backward_and_in_step, wire, timeout=40) == [{"w": -1.5}] * 2


def one_backward_through_two_engines():
    """The ranks' graphs differ, so that the engines' buckets complete in different orders."""
    first, second = _engine(Branches()), _engine(Branches())
    x = _ones() * (_rank() + 1)
    (first(x, "AB"[_rank()]) + second(x, "BA"[_rank()])).backward()
    first.step()
    second.step()
    return _first(first), _first(second)


def test_one_backward_through_two_engines(ranks):
    expected = ({"A.w": 0.5, "B.w": 0.0}, {"A.w": 0.0, "B.w": 0.5})
    assert ranks(2).run(one_backward_through_two_engines, timeout=40) == [expected] * 2


def create_graph():
    engine = _engine(Chain(blocks=2), gradient_accumulation_steps=2)
    for _ in range(2):
        engine(_ones()).backward(create_graph=True)
        engine.step()
    return _first(engine)


def test_a_backward_that_creates_a_graph(ranks):
    assert ranks(2).run(create_graph) == [{"blocks.0.w": 0.0, "blocks.1.w": 0.0}] * 2


class _Interrupt(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise KeyboardInterrupt


class Interrupted(Fragile):
    def forward(self, x, interrupt):
        y = self.first(x)
        return self.last(_Interrupt.apply(y) if interrupt else y).sum()


def interrupted(interrupted_ranks, direct):
    """Ctrl-C in engine.backward, caught; the next pass is a direct one or not."""
    engine = _engine(Interrupted(), gradient_accumulation_steps=2)
    states = []
    for window in range(2):
        for micro_step in range(2):
            loss = engine(_ones(), window == micro_step == 0 and _rank() in interrupted_ranks)
            try:
                loss.backward() if direct and micro_step else engine.backward(loss)
            except KeyboardInterrupt:
                pass
            engine.step()
        states.append((_first(engine), engine.skipped_steps))
    return states


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("interrupted_ranks", [[0, 1], [1]])
def test_an_interrupted_backward_voids_its_window(ranks, interrupted_ranks, direct):
    before, after = {"first.w": 1.0, "last.w": 1.0}, {"first.w": 0.0, "last.w": 0.0}
    expected = [(before, 1), (after, 1)]
    assert ranks(2).run(interrupted, interrupted_ranks, direct, timeout=40) == [expected] * 2
