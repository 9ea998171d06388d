"""The hierarchical reduce-scatter, with nodes that are ranks of this machine."""

import pytest
import torch

from .harness import CollectiveRecorder, base_config, make_engine, masters
from .test_autograd import Chain, Fragile
from .test_gradients import Sizes


def _rank():
    from deepspeed import comm as dist

    return dist.get_rank()


def _engine(model, partition, **over):
    return make_engine(
        model, torch.optim.SGD(model.parameters(), lr=1.0), base_config(lazy={"gradient_partition": partition}, **over)
    )


def train(partition, sizes, micro_steps=2):
    engine = _engine(Sizes(sizes), partition, gradient_accumulation_steps=micro_steps, gradient_allreduce_op="sum")
    with CollectiveRecorder() as record:
        for _ in range(2 * micro_steps):
            engine.backward(engine(float(_rank() + 1) * micro_steps))
            engine.step()
    return masters(engine), engine.lazy_reduce_report(), record.named("all_to_all_single", "reduce_scatter_tensor")


SIZES = [1, 300, 5, 4097]


@pytest.mark.parametrize("across", ["fp32", "wire"])
@pytest.mark.parametrize("extra", [{}, {"max_in_flight": 3}, {"carry_over": False}, {"reduce_every": "boundary"}])
def test_equals_the_flat_all_to_all(ranks, extra, across):
    flat = ranks(4).run(train, {"bucket_size": 64, "collective": "all_to_all", **extra}, SIZES)
    two_hops = {"bucket_size": 64, "collective": "hierarchical", "node_size": 2, "across_dtype": across, **extra}
    for (weights, report, calls), (flat_weights, _, _) in zip(ranks(4).run(train, two_hops, SIZES), flat, strict=True):
        for name, weight in flat_weights.items():
            assert torch.equal(weights[name], weight)  # integers: every order of summation is exact
        assert report["collective"] == "hierarchical"
        assert report["bytes_sent"] == sum(call.bytes_to_peers for call in calls)  # what the report says went out


def test_bytes_across_nodes(ranks):
    numel = 4096
    across = {}
    for name, partition in {
        "flat": {"collective": "all_to_all", "node_size": "auto"},
        "fp32": {"collective": "hierarchical", "node_size": 2},
        "wire": {"collective": "hierarchical", "node_size": 2, "across_dtype": "wire"},
    }.items():
        report = ranks(4).run(train, partition, [numel], 1)[0][1]
        across[name] = report["bytes_sent_across_nodes"] / 2  # two steps
    assert across["fp32"] == numel // 2 * 4 // 2  # one row of fp32 for the one other node
    assert across["wire"] == across["fp32"] / 2
    # the flat one knows of one host here: by its arithmetic two of four ranks would be remote
    assert across["flat"] == 0 and numel * 2 * 2 // 4 == across["fp32"] * 2 / 2


def small_contributions():
    from .harness import OneVec

    model = OneVec(8)
    engine = _engine(model, {"collective": "hierarchical", "node_size": 2})
    engine.backward(engine(torch.full((8,), [1.0, 2**-8, 2**-8, 2**-8][_rank()], dtype=torch.bfloat16)))
    engine.step()
    return masters(engine)["w"][0].item()


def test_small_contributions_survive_both_hops(ranks):
    assert ranks(4).run(small_contributions) == [-(1.0 + 3 * 2**-8) / 4] * 4


def read_and_fail():
    """Reads of gradients, which are collective here, and a failed backward on one rank."""
    from deepspeed.utils import safe_get_full_grad

    partition = {"bucket_size": 8, "collective": "hierarchical", "node_size": 2}
    engine = _engine(Chain(blocks=3), partition, gradient_accumulation_steps=2)
    engine.backward(engine(torch.ones(8).bfloat16()))
    partial = [safe_get_full_grad(p)[0].item() for p in engine.module.parameters()]
    engine.destroy()
    engine = _engine(Fragile(), partition)
    for window in range(2):
        try:
            engine.backward(engine(torch.ones(8).bfloat16(), window == 0 and _rank() == 2))
        except ArithmeticError:
            pass
        engine.step()
    return partial, masters(engine)["first.w"][0].item(), engine.skipped_steps


def test_reads_and_failures(ranks):
    assert ranks(4).run(read_and_fail, timeout=60) == [([0.5] * 3, 0.0, 1)] * 4


def wrong_node_size():
    _engine(Chain(blocks=1), {"collective": "hierarchical", "node_size": 3})


def test_a_node_size_that_does_not_fit_is_refused_on_every_rank(ranks):
    for error in ranks(4).run_expect_error(wrong_node_size, timeout=60):
        assert error.type == "ConfigError"
        assert "node_size: got 3" in error.message and "a divisor of the 4 ranks" in error.message


def chosen(partition, local):
    import os

    os.environ["LOCAL_WORLD_SIZE"] = str(local)
    report = _engine(Chain(blocks=1), partition).lazy_reduce_report()
    return report["collective"]


@pytest.mark.parametrize(
    "partition,local,collective",
    [
        ({}, 4, "all_to_all"),
        ({}, 2, "hierarchical"),
        ({}, 1, "all_to_all"),  # one rank a host: there is nothing to sum inside
        ({"collective": "all_to_all"}, 2, "all_to_all"),
        ({"collective": "hierarchical"}, 4, "all_to_all"),  # one host: one hop
    ],
)
def test_auto_takes_two_hops_across_hosts(ranks, partition, local, collective):
    assert ranks(4).run(chosen, partition, local) == [collective] * 4
