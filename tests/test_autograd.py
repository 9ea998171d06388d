"""Autograd's corners: whatever order, number and kind of gradients a backward pass produces."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from .harness import OneVec, base_config, make_engine, masters


def _rank():
    from deepspeed import comm as dist

    return dist.get_rank()


def _sgd_engine(model, *, bucket=64, **over):
    return make_engine(
        model,
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0),
        base_config(lazy={"gradient_partition": {"bucket_size": bucket}}, **over),
    )


def _ones(n=8):
    return torch.ones(n, dtype=torch.bfloat16)


class Block(torch.nn.Module):
    def __init__(self, n=8):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(n))

    def forward(self, x):
        return x * self.w


class Chain(torch.nn.Module):
    """``x * w0 * w1 * ...`` with every w = 1; ``twice`` applies the first block once more at the end."""

    def __init__(self, blocks=3, reentrant=None, twice=False):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(blocks))
        self.reentrant, self.twice = reentrant, twice

    def forward(self, x):
        x = x.clone().requires_grad_()
        for block in [*self.blocks, *(self.blocks[:1] if self.twice else [])]:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x.sum()


def run_chain(reentrant, twice, direct, micro_steps):
    model = Chain(reentrant=reentrant, twice=twice)
    engine = _sgd_engine(model, bucket=8, gradient_accumulation_steps=micro_steps)
    for _ in range(micro_steps):
        loss = engine(_ones() * (_rank() + 1))
        if direct:
            engine.scale(loss).backward()
        else:
            engine.backward(loss)
        engine.step()
    return {name: value[0].item() for name, value in masters(engine).items()}, engine.lazy_reduce_report()


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_checkpointing_and_a_module_applied_twice(ranks, reentrant, twice, direct):
    for weights, report in ranks(2).run(run_chain, reentrant, twice, direct, 2):
        # mean of x over ranks is 1.5; the block that is applied twice gets twice the gradient
        assert weights["blocks.0.w"] == 1.0 - (3.0 if twice else 1.5)
        assert weights["blocks.1.w"] == weights["blocks.2.w"] == 1.0 - 1.5
        assert report["scalar_collectives"] <= 2


def tied():
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Block(), Block()
            self.second.w = self.first.w

        def forward(self, x):
            return self.second(self.first(x)).sum()

    engine = _sgd_engine(Tied())
    engine.backward(engine(_ones()))
    engine.step()
    return masters(engine)["first.w"][0].item()


def test_tied_weights(ranks):
    assert ranks(2).run(tied) == [-1.0, -1.0]


def several_losses():
    engine = _sgd_engine(Chain(blocks=2), bucket=8)
    y = engine(_ones())
    engine.backward(y, retain_graph=True)
    engine.backward(2 * y)
    engine.step()
    return {name: value[0].item() for name, value in masters(engine).items()}


def test_several_losses_with_retain_graph(ranks):
    for weights in ranks(2).run(several_losses):
        assert weights == {"blocks.0.w": -2.0, "blocks.1.w": -2.0}


def two_direct_backwards(forwards):
    engine = _sgd_engine(Chain(blocks=2), bucket=8)
    losses = [engine(_ones()) for _ in range(forwards)]
    losses[0].backward(retain_graph=True)
    losses[-1].backward()
    engine.step()
    return {name: value[0].item() for name, value in masters(engine).items()}


@pytest.mark.parametrize("forwards", [1, 2])
def test_two_direct_backwards(ranks, forwards):
    for weights in ranks(2).run(two_direct_backwards, forwards):
        assert weights == {"blocks.0.w": -1.0, "blocks.1.w": -1.0}


def two_forwards_one_loss(direct):
    engine = _sgd_engine(Chain(blocks=2), bucket=8)
    loss = engine(_ones()) + engine(2 * _ones())
    loss.backward() if direct else engine.backward(loss)
    engine.step()
    return masters(engine)["blocks.0.w"][0].item()


@pytest.mark.parametrize("direct", [False, True])
def test_two_forwards_and_one_loss(ranks, direct):
    assert ranks(2).run(two_forwards_one_loss, direct) == [-2.0, -2.0]


def around_the_engine():
    """Without engine.forward nothing says where a direct backward begins or ends."""
    engine = _sgd_engine(Chain(blocks=2), bucket=8)
    engine.module(_ones() * (_rank() + 1)).backward()
    engine.step()
    return masters(engine)["blocks.1.w"][0].item()


def test_backward_around_the_engine(ranks):
    assert ranks(2).run(around_the_engine) == [-0.5, -0.5]


def input_gradient_on_one_rank():
    """torch.autograd.grad reaches no parameter: what one rank looks at costs the others nothing."""
    engine = _sgd_engine(Chain(blocks=2), bucket=8)
    x = _ones().requires_grad_()
    seen = None
    if _rank() == 0:
        (seen,) = torch.autograd.grad(engine(x), x)
        seen = seen.tolist()
    collectives = engine.lazy_reduce_report()["gradient_collectives"]
    engine.backward(engine(_ones()))
    engine.step()
    return seen, collectives, masters(engine)["blocks.0.w"][0].item()


def test_input_gradients_on_one_rank(ranks):
    assert ranks(2).run(input_gradient_on_one_rank, timeout=30) == [([1.0] * 8, 0, 0.0), (None, 0, 0.0)]


def grad_on_one_rank(then):
    """In the second of three steps rank 0 calls torch.autograd.grad on what the engine returned."""
    engine = _sgd_engine(OneVec(8))
    weights = []
    for step in range(3):
        special = step == 1 and _rank() == 0
        x = _ones().requires_grad_()
        loss = engine(_Failing.apply(x, special and then == "it raises"))
        if special:
            try:
                torch.autograd.grad(loss, x, retain_graph=True)
            except ArithmeticError:
                loss = engine(x)
        if then == "direct":
            loss.backward()
        elif not special or then != "no backward":
            engine.backward(loss)
        engine.step()
        weights.append(masters(engine)["w"][0].item())
    return weights, engine.skipped_steps


@pytest.mark.parametrize("then", ["engine.backward", "direct", "no backward", "it raises"])
def test_autograd_grad_is_no_backward_pass(ranks, then):
    expected = [-1.0, -1.5, -2.5] if then == "no backward" else [-1.0, -2.0, -3.0]
    assert ranks(2).run(grad_on_one_rank, then, timeout=30) == [(expected, 0)] * 2


def grad_before_direct_backward():
    """The direct backward after it is a micro-step like any other, on the wire in the model dtype."""
    engine = _sgd_engine(Chain(blocks=2), bucket=8)
    x = _ones().requires_grad_()
    loss = engine(x)
    torch.autograd.grad(loss, engine.module.blocks[0].w, retain_graph=True)
    loss.backward()
    engine.step()
    return masters(engine)["blocks.0.w"][0].item(), engine.lazy_reduce_report()["gradient_collectives"]


def test_a_direct_backward_after_autograd_grad(ranks):
    assert ranks(2).run(grad_before_direct_backward) == [(0.0, 2)] * 2


class FailsFirst(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x, fail):
        return _Failing.apply(self.block(x).sum(), fail)


def fails_before_the_first_gradient(direct):
    engine = _sgd_engine(FailsFirst(), bucket=8)
    for window in range(2):
        loss = engine(_ones(), window == 0 and _rank() == 1)
        try:
            loss.backward() if direct else engine.backward(loss)
        except ArithmeticError:
            pass
        engine.step()
    return masters(engine)["block.w"][0].item(), engine.skipped_steps


@pytest.mark.parametrize("direct", [False, True])
def test_a_backward_that_fails_before_its_first_gradient(ranks, direct):
    assert ranks(2).run(fails_before_the_first_gradient, direct, timeout=30) == [(0.0, 1)] * 2


def skips_a_backward(reduce_every, skipped, raises):
    config = base_config(lazy={"gradient_partition": {"reduce_every": reduce_every}}, gradient_accumulation_steps=2)
    model = OneVec(8)
    engine = make_engine(model, torch.optim.SGD(model.parameters(), lr=1.0), config)
    weights = []
    for micro_step in range(4):
        if micro_step != skipped or _rank() == 0:
            engine.backward(engine(_ones()))
        elif raises:
            with pytest.raises(TypeError):
                engine("not a batch")
        engine.step()
        if micro_step % 2:
            weights.append(masters(engine)["w"][0].item())
    return weights, engine.skipped_steps


@pytest.mark.parametrize("reduce_every", [1, 2, "boundary"])
@pytest.mark.parametrize("skipped, raises", [(0, False), (1, False), (1, True)])
def test_a_micro_step_without_backward_counts_as_zero(ranks, reduce_every, skipped, raises):
    expected = [-0.75, -1.75]  # three of four gradients of 1, then four of four
    assert ranks(2).run(skips_a_backward, reduce_every, skipped, raises, timeout=30) == [(expected, 0)] * 2


class Branches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.A, self.B = Block(), Block()

    def forward(self, x, use):
        return (self.A(x) if use == "A" else self.B(x)).sum()


def unused_branches(by_rank):
    engine = _sgd_engine(Branches(), bucket=8, gradient_accumulation_steps=2)
    for _ in range(2):
        engine.backward(engine(_ones() * (_rank() + 1), by_rank[_rank()]))
        engine.step()
    return {name: value[0].item() for name, value in masters(engine).items()}


def test_unused_branches(ranks):  # case 6: DeepSpeed#777, #1266; accelerate#2194
    for weights in ranks(2).run(unused_branches, "AA", timeout=30):
        assert weights == {"A.w": 1 - 1.5, "B.w": 1.0}
    for weights in ranks(2).run(unused_branches, "AB", timeout=30):
        assert weights == {"A.w": 1 - 0.5, "B.w": 1 - 1.0}


class Tiled(torch.nn.Module):
    """Runs backward by itself, tile by tile, and says with the last one that the gradient is complete."""

    def __init__(self):
        super().__init__()
        self.block = Block()
        self.head = Block()

    def forward(self, x):
        return _TiledSum.apply(self.head(x), self.block, 4)


class _TiledSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, block, tiles):
        ctx.save_for_backward(x)
        ctx.block, ctx.tiles = block, tiles
        with torch.no_grad():
            return block(x).sum()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        for tile in range(ctx.tiles):
            ctx.block.w.ds_grad_is_ready = tile == ctx.tiles - 1
            with torch.enable_grad():
                y = ctx.block(x / ctx.tiles).sum()
            torch.autograd.backward(y, grad)
        return x.grad, None, None


def tiled():
    engine = _sgd_engine(Tiled(), bucket=8)
    engine.backward(engine(_ones()))
    engine.step()
    return {name: value[0].item() for name, value in masters(engine).items()}


def test_gradients_that_are_not_ready_stay_until_they_are(ranks):
    for weights in ranks(2).run(tiled):
        assert weights == {"block.w": 0.0, "head.w": 0.0}


class Odd(torch.nn.Module):
    """A frozen, an empty and a shared parameter, one that gets no gradient, and a sparse gradient."""

    def __init__(self):
        super().__init__()
        self.frozen = torch.nn.Parameter(torch.ones(8), requires_grad=False)
        self.empty = torch.nn.Parameter(torch.zeros(0, 8))
        self.w = torch.nn.Parameter(torch.ones(8))
        self.unused = torch.nn.Parameter(torch.ones(3))
        self.embedding = torch.nn.Embedding(4, 8, sparse=True)
        torch.nn.init.ones_(self.embedding.weight)

    def forward(self, x):
        return (x * self.frozen * self.w + self.embedding(torch.tensor([1, 1])).sum(0)).sum() + self.empty.sum()


def odd_parameters():
    engine = _sgd_engine(Odd(), bucket=16)
    engine.backward(engine(_ones()))
    engine.step()
    trainable = {n: p for n, p in engine.module.named_parameters() if p.requires_grad and p.numel()}
    from deepspeed.utils import safe_get_full_fp32_param

    return {n: safe_get_full_fp32_param(p) for n, p in trainable.items()}, engine.module.frozen.tolist()


def test_frozen_empty_unused_and_sparse(ranks):
    for weights, frozen in ranks(2).run(odd_parameters):
        assert frozen == [1.0] * 8
        assert torch.equal(weights["w"], torch.zeros(8))
        assert torch.equal(weights["unused"], torch.ones(3))
        assert weights["embedding.weight"][:, 0].tolist() == [1.0, -1.0, 1.0, 1.0]


def caller_owned_boundary():
    model = OneVec(4)
    engine = _sgd_engine(model, managed_gradient_accumulation=False)
    deltas = []
    before = masters(engine)["w"]
    for backwards in (1, 3, 2):
        for _ in range(backwards):
            engine.backward(engine(_ones(4)), scale_wrt_gas=False)
        engine.step()
        after = masters(engine)["w"]
        deltas.append((after - before)[0].item())
        before = after
    return deltas


def coalesced(failing):
    engine = _sgd_engine(Chain(blocks=3), bucket=8)
    with engine.coalesce_grad_reduction():
        for _ in range(4):
            engine.backward(engine(_ones()))
    collectives = engine.lazy_reduce_report()["gradient_collectives"]
    engine.step()
    return {n: v[0].item() for n, v in masters(engine).items()}, collectives


def test_caller_owned_boundary_and_coalescing(ranks):  # case 7: DeepSpeed#7992, #8203
    assert ranks(2).run(caller_owned_boundary) == [[-1.0, -3.0, -2.0]] * 2
    for weights, collectives in ranks(2).run(coalesced, False):
        assert weights == {"blocks.0.w": -3.0, "blocks.1.w": -3.0, "blocks.2.w": -3.0}
        assert collectives == 3


def boundary_by_hand(after_last_backward):
    engine = _sgd_engine(OneVec(4), gradient_accumulation_steps=4)
    out = []
    for _ in range(2):
        engine.set_gradient_accumulation_boundary(False)
        for micro_step in range(3):
            if micro_step == 2 and not after_last_backward:
                engine.set_gradient_accumulation_boundary(True)
            engine.backward(engine(4 * _ones(4)))
        engine.set_gradient_accumulation_boundary(True)
        engine.step()
        out.append(masters(engine)["w"][0].item())
    return out


@pytest.mark.parametrize("after_last_backward", [False, True])
def test_boundary_set_by_hand(ranks, after_last_backward):
    assert ranks(2).run(boundary_by_hand, after_last_backward) == [[-3.0, -6.0]] * 2


class Fragile(torch.nn.Module):
    """Raises in the backward of its middle when told to."""

    def __init__(self):
        super().__init__()
        self.first, self.last = Block(), Block()

    def forward(self, x, fail):
        return self.last(_Failing.apply(self.first(x), fail)).sum()


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fail):
        ctx.fail = fail
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.fail:
            raise ArithmeticError("broken backward")
        return grad, None


def failing_backward(failing_ranks, direct, coalesce):
    """One good window, one in which a backward fails, one good window."""
    engine = _sgd_engine(Fragile(), bucket=8, gradient_accumulation_steps=1 if coalesce else 2)

    def window(fail):
        caught = 0
        with engine.coalesce_grad_reduction() if coalesce else torch.enable_grad():
            for micro_step in range(2):
                try:
                    loss = engine(_ones() * (_rank() + 1), fail and micro_step == 0)
                    loss.backward() if direct else engine.backward(loss)
                except ArithmeticError:
                    caught += 1
                if not coalesce:
                    engine.step()
        if coalesce:
            engine.step()
        return caught

    states = []
    for fail in (False, _rank() in failing_ranks, False):
        caught = window(fail)
        assert caught == int(fail)
        states.append(({n: v.tolist() for n, v in masters(engine).items()}, engine.skipped_steps))
    return states


@pytest.mark.parametrize("coalesce", [False, True])
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("failing_ranks", [[0, 1], [1]])
def test_a_failed_backward_voids_its_window_on_all_ranks(ranks, failing_ranks, direct, coalesce):
    good = ranks(2).run(failing_backward, [], direct, coalesce, timeout=60)
    for mine, reference in zip(ranks(2).run(failing_backward, failing_ranks, direct, coalesce), good, strict=True):
        assert mine[0] == reference[0]
        assert mine[1] == (reference[0][0], 1)  # nothing applied, counted as skipped
        assert mine[2] == (reference[1][0], 1)  # the next window is what it would have been


def read_gradients():
    from deepspeed.utils import safe_get_full_grad

    engine = _sgd_engine(Chain(blocks=3), bucket=8, gradient_accumulation_steps=2)
    engine.backward(engine(_ones() * (_rank() + 1)))
    partial = [safe_get_full_grad(p)[0].item() for p in engine.module.parameters()]
    engine.step()
    engine.backward(engine(_ones() * (_rank() + 1)))
    return partial, [safe_get_full_grad(p)[0].item() for p in engine.module.parameters()]


def test_reading_gradients_drains_first(ranks):
    assert ranks(2).run(read_gradients) == [([0.75] * 3, [1.5] * 3)] * 2


def second_engine():
    """Two engines at once, then a third after they are gone."""
    engines = [_sgd_engine(Chain(blocks=2), bucket=8) for _ in range(2)]
    for x, engine in enumerate(engines, start=1):
        engine.backward(engine(x * _ones()))
    for engine in reversed(engines):
        engine.step()
    results = [masters(engine)["blocks.0.w"][0].item() for engine in engines]
    for engine in engines:
        engine.destroy()
    engine = _sgd_engine(Chain(blocks=2), bucket=8)
    engine.backward(engine(_ones()))
    engine.step()
    return [*results, masters(engine)["blocks.0.w"][0].item()]


def test_several_engines_in_one_process(ranks):
    assert ranks(2).run(second_engine) == [[0.0, -1.0, 0.0]] * 2


def joint_backward(direct):
    """One loss through two engines; in the second of three steps it raises on rank 0 between the two."""
    engines = [_sgd_engine(Block(), bucket=8) for _ in range(2)]
    for step in range(3):
        x = _Failing.apply(engines[0](_ones()), step == 1 and _rank() == 0)
        loss = engines[1](x).sum()
        try:
            loss.backward() if direct else engines[0].backward(loss)
        except ArithmeticError:
            pass
        for engine in engines:
            engine.step()
    return [(masters(engine)["w"][0].item(), engine.skipped_steps) for engine in engines]


@pytest.mark.parametrize("direct", [False, True])
def test_a_backward_through_two_engines_that_fails_on_one_rank(ranks, direct):
    results = ranks(2).run(joint_backward, direct, timeout=30)
    assert results[0] == results[1]
    # A direct backward that raises before it comes to an engine's output is, for that engine, none at all.
    assert [skipped for _, skipped in results[0]] == [0 if direct else 1, 1]


def a_second_engine_for_the_same_model(destroy):
    model = OneVec(8)
    first = _sgd_engine(model)
    first.backward(first(_ones()))
    first.step()
    if destroy:
        first.destroy()
    second = _sgd_engine(model)
    second.backward(second(_ones()))
    second.step()
    for call in (lambda: first.backward(first(_ones())), lambda: first(_ones()).backward(), first.step):
        with pytest.raises(RuntimeError, match="built later over the same parameters [(]w, "):
            call()
    weight = masters(second)["w"][0].item()
    second.destroy()
    with pytest.raises(RuntimeError, match="it was destroyed"):
        second.backward(second(_ones()))
    return weight


@pytest.mark.parametrize("destroy", [False, True])
def test_a_second_engine_takes_over_the_parameters(ranks, destroy):
    assert ranks(2).run(a_second_engine_for_the_same_model, destroy) == [-2.0, -2.0]


def autocast():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4))
    engine = _sgd_engine(
        model,
        bucket=1000,
        precision="fp32",
        torch_autocast={"enabled": True, "dtype": "bfloat16"},
    )
    wires = sorted({str(bucket.wire_dtype) for bucket in engine.optimizer.chain.buckets})
    before = masters(engine)
    engine.backward(engine(torch.ones(2, 16)).float().square().sum())
    engine.step()
    moved = {n: not torch.equal(v, before[n]) for n, v in masters(engine).items()}
    return wires, moved, engine.lazy_reduce_report()


def test_torch_autocast_with_several_wire_dtypes(ranks):
    for wires, moved, report in ranks(2, fresh=True).run(autocast):
        assert wires == ["torch.bfloat16", "torch.float32"]
        assert all(moved.values())
        assert report["max_in_flight_seen"] == 1
        assert report["wire_dtype"] == "mixed"
    ranks(2, fresh=True)  # DeepSpeed keeps "autocast is on" for the life of the process
