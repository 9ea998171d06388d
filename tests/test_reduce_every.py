"""Reducing less often than every micro-step: the schedule alone, and on real ranks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_lazyreduce.reduce_schedule import make_schedule

from .harness import OneVec, base_config, make_engine, masters
from .test_autograd import Branches, Chain, Fragile


def _rank():
    from deepspeed import comm as dist

    return dist.get_rank()


@given(st.lists(st.lists(st.booleans(), max_size=6), max_size=6))
def test_once_per_window_is_exactly_once(windows):
    schedule = make_schedule("boundary")
    for passes in windows:
        reducing = sum(schedule.reduces_now(is_boundary) for is_boundary in passes)
        assert reducing + schedule.owes_a_pass() == 1
        schedule.restart()


@given(st.integers(1, 5), st.lists(st.integers(0, 12), max_size=5))
def test_every_n_counts_from_the_start_of_the_window(n, windows):
    schedule = make_schedule(n)
    for passes in windows:
        pattern = [schedule.reduces_now(k == passes - 1) for k in range(passes)]
        assert pattern == [(k + 1) % n == 0 for k in range(passes)]
        assert not schedule.owes_a_pass()
        schedule.restart()


def _engine(model, reduce_every, **over):
    partition = {"bucket_size": 8, "reduce_every": reduce_every, **over.pop("partition", {})}
    return make_engine(
        model, torch.optim.SGD(model.parameters(), lr=1.0), base_config(lazy={"gradient_partition": partition}, **over)
    )


def integer_windows(reduce_every, micro_steps, **over):
    """Two windows with integer-valued gradients, for which every order of summation is exact."""
    engine = _engine(
        Chain(blocks=3, twice=True),
        reduce_every,
        gradient_accumulation_steps=micro_steps,
        gradient_allreduce_op="sum",  # a third is no integer
        **over,
    )
    generator = torch.Generator().manual_seed(_rank())
    for _ in range(2):
        for block in engine.module.blocks:
            block.w.data.fill_(1)  # so that gradients stay the integers below
        for _ in range(micro_steps):
            x = torch.randint(-8, 8, (8,), generator=generator).bfloat16() * micro_steps
            engine.backward(engine(x))
            engine.step()
    return masters(engine), engine.lazy_reduce_report()


@pytest.mark.parametrize("world", [2, 3])
def test_equal_to_reducing_every_micro_step(ranks, world):
    reference, _ = ranks(world).run(integer_windows, 1, 5)[0]
    for reduce_every in (2, 3, 5, 7, "boundary"):
        for partition in ({}, {"max_in_flight": 4}, {"wire_dtype": "bf16", "bucket_size": 100}):
            for weights, report in ranks(world).run(integer_windows, reduce_every, 5, partition=partition):
                for name, weight in reference.items():
                    assert torch.equal(weights[name], weight), (reduce_every, partition, name)
                if reduce_every == "boundary":
                    assert report["gradient_collectives"] == 2 * report["buckets"]


def many_ones():
    """257 ones: a window summed in bf16 would stick at 256."""
    model = OneVec(8)
    engine = _engine(model, "boundary", gradient_accumulation_steps=257)
    for _ in range(257):
        engine.backward(engine(torch.full((8,), 257.0, dtype=torch.bfloat16)), scale_wrt_gas=False)
        engine.step()
    return masters(engine)["w"][0].item(), engine.lazy_reduce_report()["wire_dtype"]


def test_a_window_is_accumulated_in_fp32(ranks):
    # bf16(257) is 256: 257 micro-steps of it, averaged over equal ranks
    assert ranks(2).run(many_ones) == [(-256.0 * 257, "fp32")] * 2


def unequal_backwards(counts):
    engine = _engine(OneVec(8), "boundary", managed_gradient_accumulation=False)
    for count in counts[_rank()]:
        for _ in range(count):
            engine.backward(engine(torch.ones(8, dtype=torch.bfloat16)), scale_wrt_gas=False)
        engine.step()
    return masters(engine)["w"][0].item(), engine.lazy_reduce_report()["gradient_collectives"]


def test_ranks_may_run_unequal_numbers_of_backwards(ranks):
    assert ranks(2).run(unequal_backwards, [[1, 4, 0], [3, 0, 2]]) == [(-5.0, 3)] * 2


def boundary_set_late():
    engine = _engine(OneVec(8), "boundary", gradient_accumulation_steps=4)
    out = []
    for early in (True, False):
        engine.set_gradient_accumulation_boundary(False)
        for micro_step in range(3):
            engine.set_gradient_accumulation_boundary(early and micro_step == 2)
            engine.backward(engine(torch.full((8,), 4.0, dtype=torch.bfloat16)))
        engine.set_gradient_accumulation_boundary(True)
        engine.step()
        out.append(masters(engine)["w"][0].item())
    return out


def test_caller_owned_boundaries(ranks):
    assert ranks(2).run(boundary_set_late) == [[-3.0, -6.0]] * 2


def unused(reduce_every):
    engine = _engine(Branches(), reduce_every, gradient_accumulation_steps=3)
    for use in ("AAB", "BAA")[_rank()]:
        engine.backward(engine(torch.full((8,), 6.0, dtype=torch.bfloat16), use))
        engine.step()
    return {name: value[0].item() for name, value in masters(engine).items()}


@pytest.mark.parametrize("reduce_every", [2, "boundary"])
def test_branches_that_differ_between_ranks_and_micro_steps(ranks, reduce_every):
    assert ranks(2).run(unused, reduce_every) == [{"A.w": 1 - 4.0, "B.w": 1 - 2.0}] * 2


def failing(reduce_every, fail_at, coalesce=False):
    engine = _engine(Fragile(), reduce_every, gradient_accumulation_steps=2)
    states = []
    for window in range(3):
        for micro_step in range(2):
            try:
                engine.backward(engine(torch.ones(8).bfloat16(), (window, micro_step, _rank()) == fail_at))
            except ArithmeticError:
                assert (window, micro_step, _rank()) == fail_at
            engine.step()
        states.append(({n: v.tolist() for n, v in masters(engine).items()}, engine.skipped_steps))
    return states


@pytest.mark.parametrize("reduce_every", [2, "boundary"])
@pytest.mark.parametrize("micro_step", [0, 1])
def test_a_failed_backward_voids_its_window(ranks, reduce_every, micro_step):
    good = ranks(2).run(failing, reduce_every, None)
    bad = ranks(2).run(failing, reduce_every, (1, micro_step, 1))
    for mine, reference in zip(bad, good, strict=True):
        assert mine[0] == reference[0]
        assert mine[1] == (reference[0][0], 1)
        assert mine[2] == (reference[1][0], 1)


def read_too_early():
    from deepspeed.utils import safe_get_full_grad

    engine = _engine(OneVec(8), "boundary", gradient_accumulation_steps=2)
    engine.backward(engine(torch.ones(8).bfloat16()))
    try:
        safe_get_full_grad(engine.module.w)
    except RuntimeError as error:
        first = str(error)
    engine.step()
    engine.backward(engine(torch.ones(8).bfloat16()))
    return first, safe_get_full_grad(engine.module.w)[0].item()


def test_reading_gradients_before_they_are_reduced_raises_on_every_rank(ranks):
    for error, value in ranks(2).run(read_too_early):
        assert "not reduced before step()" in error and "(w, 8 elements)" in error
        assert value == 1.0


def coalesced(reduce_every):
    engine = _engine(Chain(blocks=3), reduce_every)
    with engine.coalesce_grad_reduction():
        for _ in range(3):
            engine.backward(engine(torch.ones(8).bfloat16()))
    engine.step()
    return {n: v[0].item() for n, v in masters(engine).items()}, engine.lazy_reduce_report()["gradient_collectives"]


@pytest.mark.parametrize("reduce_every", [2, "boundary"])
def test_coalescing_sends_each_bucket_once(ranks, reduce_every):
    for weights, collectives in ranks(2).run(coalesced, reduce_every):
        assert set(weights.values()) == {1 - 3.0} and collectives == 3
