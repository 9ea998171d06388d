"""The hierarchical reduce-scatter, with nodes that are ranks of this machine."""

import logging
import os

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
        assert "node_size: got 3" in error.message and "a divisor of" in error.message


class Warnings(logging.Handler):
    """What ds_lazyreduce warns of within the `with`."""

    def __enter__(self):
        self.messages = []
        logging.getLogger("ds_lazyreduce").addHandler(self)
        return self.messages

    def __exit__(self, *exc_info):
        logging.getLogger("ds_lazyreduce").removeHandler(self)

    def emit(self, record):
        self.messages.append(record.getMessage())


def on_hosts(partition, host_of_rank, sizes=(8,)):
    """One step of ranks that the `deepspeed` launcher has started on these hosts; report and warnings."""
    host = host_of_rank[_rank()]
    os.environ.pop("LOCAL_WORLD_SIZE")
    os.environ.update(CROSS_RANK=str(host), LOCAL_SIZE=str(host_of_rank.count(host)))
    with Warnings() as messages:
        engine = _engine(Sizes(sizes), partition)
        engine.backward(engine(1.0))
        engine.step()
    return engine.lazy_reduce_report(), messages


@pytest.mark.parametrize(
    "partition,hosts,collective",
    [
        ({}, [0, 0, 0, 0], "all_to_all"),
        ({}, [0, 0, 1, 1], "hierarchical"),
        ({}, [0, 1, 2, 3], "all_to_all"),  # one rank a host: there is nothing to sum inside
        ({"collective": "all_to_all"}, [0, 0, 1, 1], "all_to_all"),
        ({"collective": "hierarchical"}, [0, 0, 0, 0], "all_to_all"),  # one host: one hop
        ({"collective": "hierarchical", "node_size": 2}, [0, 0, 0, 1], "hierarchical"),  # the user says so
    ],
)
def test_auto_takes_two_hops_across_hosts(ranks, partition, hosts, collective):
    for report, warnings in ranks(4).run(on_hosts, partition, hosts):
        assert report["collective"] == collective
        assert not any("is flat" in warning for warning in warnings)  # up to 2 ranks a host it costs no more


@pytest.mark.parametrize(
    "hosts,why", [([0, 1, 1, 1], "the hosts run 1, 3 ranks"), ([0, 1, 0, 1], "lie on hosts 0, 1, 0, 1")]
)
def test_hosts_that_are_no_nodes(ranks, hosts, why):
    results = ranks(4).run(on_hosts, {}, hosts)
    assert [report["collective"] for report, _ in results] == ["all_to_all"] * 4
    said = [warning for warning in results[0][1] if "is flat" in warning]
    assert len(said) == 1 and why in said[0]
    for error in ranks(4).run_expect_error(on_hosts, {"collective": "hierarchical"}, hosts, timeout=60):
        assert error.type == "ConfigError" and why in error.message
        assert 'node_size: got "auto"' in error.message and "a divisor of the 4 ranks" in error.message


def test_a_flat_exchange_that_was_asked_for_says_what_it_costs(ranks):
    results = ranks(4).run(on_hosts, {"collective": "all_to_all"}, [0, 0, 0, 1])
    assert any("1.5 times the bytes of a ring all-reduce" in warning for warning in results[0][1])


NUMEL, BUCKETS = 4096, 3


@pytest.mark.parametrize(
    "partition,inside,across,inside_bytes,across_bytes",
    [
        # per bucket and rank: messages, then bytes, to ranks of this node and of the other one
        ({"collective": "all_to_all"}, 1, 2, NUMEL // 4 * 2, 2 * NUMEL // 4 * 2),
        ({}, 1, 1, NUMEL // 2 * 2, NUMEL // 4 * 4),
        ({"across_dtype": "wire"}, 1, 1, NUMEL // 2 * 2, NUMEL // 4 * 2),
    ],
)
def test_messages_and_bytes(ranks, partition, inside, across, inside_bytes, across_bytes):
    partition = {"bucket_size": NUMEL, **partition}
    for report, _ in ranks(4).run(on_hosts, partition, [0, 0, 1, 1], [NUMEL] * BUCKETS):
        assert report["gradient_collectives"] == BUCKETS
        assert report["messages_sent"] == BUCKETS * (inside + across)
        assert report["messages_sent_across_nodes"] == BUCKETS * across
        assert report["bytes_sent"] == BUCKETS * (inside_bytes + across_bytes)
        assert report["bytes_sent_across_nodes"] == BUCKETS * across_bytes


ENOUGH = 256 * 1024 // 2 * 4  # elements of a bucket whose flat messages to each of 4 ranks are 256 KB in bf16


@pytest.mark.parametrize(
    "partition,hosts,sizes,advice",
    [
        ({"bucket_size": 4096}, [0, 0, 1, 1], [4096] * 65, "4 KB to each rank on other nodes"),
        ({"bucket_size": 8192}, [0, 0, 1, 1], [8192] * 33, "expected at least 262,144 elements"),
        ({"bucket_size": 4096, "collective": "all_to_all"}, [0, 0, 1, 1], [4096, ENOUGH], None),
        ({}, [0, 0, 1, 1], [4096], 'larger ones would need 262,144 elements and the model has 4,096; reduce_every "'),
        ({"reduce_every": "boundary"}, [0, 0, 1, 1], [4096], "the model has 4,096"),
        ({"collective": "all_to_all"}, [0, 0, 1, 1], [ENOUGH // 2], "messages of 128 KB"),
        ({"collective": "all_to_all"}, [0, 0, 1, 1], [ENOUGH], None),
        ({"bucket_size": 4096}, [0, 0, 0, 0], [4096] * 65, None),  # inside a host
    ],
)
def test_messages_that_are_too_small(ranks, partition, hosts, sizes, advice):
    warnings = [messages for _, messages in ranks(4).run(on_hosts, partition, hosts, sizes)]
    said = [warning for warning in warnings[0] if "bound by latency" in warning]
    assert not any(warnings[1:])  # said once in the job
    assert len(said) == (advice is not None)
    assert advice is None or (advice in said[0] and "gradient_partition.bucket_size" in said[0])
