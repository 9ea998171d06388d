"""The first collective of each communicator runs at construction, and says what is wrong if it does not."""

from types import SimpleNamespace

import pytest
import torch

from ds_lazyreduce import collectives, warm_up

from .harness import CollectiveRecorder, OneVec, base_config, make_engine


def _engine(partition):
    model = OneVec(8)
    config = base_config(lazy={"gradient_partition": partition})
    return make_engine(model, torch.optim.SGD(model.parameters(), lr=1.0), config)


def warmed_up(partition):
    with CollectiveRecorder() as record:
        report = _engine(partition).lazy_reduce_report()
    moved = record.named("all_to_all_single", "reduce_scatter_tensor")
    return [(call.name, call.group_size, call.dtype) for call in moved], report


@pytest.mark.parametrize(
    "partition, expected",
    [
        ({}, [("all_to_all_single", 4, torch.bfloat16)]),
        ({"collective": "reduce_scatter"}, [("reduce_scatter_tensor", 4, torch.bfloat16)]),
        ({"reduce_every": "boundary"}, [("all_to_all_single", 4, torch.float32)]),
        (
            {"collective": "hierarchical", "node_size": 2},
            [("all_to_all_single", 2, torch.bfloat16), ("all_to_all_single", 2, torch.float32)],
        ),
    ],
)
def test_each_communicator_is_used_once_at_construction_and_not_counted(ranks, partition, expected):
    for calls, report in ranks(4).run(warmed_up, partition):
        assert calls == expected
        for counter in ("gradient_collectives", "bytes_sent", "bytes_sent_across_nodes", "peak_buffer_bytes"):
            assert report[counter] == 0
        assert report["device_memory_before_warm_up"] is report["device_memory_after_warm_up"] is None  # a CPU


def _replaced(name, call):
    """An engine over a ``deepspeed.comm`` in which one collective is another."""
    dist = collectives.dist
    collectives.dist = SimpleNamespace(get_rank=dist.get_rank, **{name: call})
    try:
        _engine({"collective": "reduce_scatter"})
    finally:
        collectives.dist = dist


def unsupported():
    def call(receive, send, group, async_op):
        raise RuntimeError("Invalid scalar type")

    _replaced("reduce_scatter_tensor", call)


def wrong():
    def call(receive, send, group, async_op):
        receive.fill_(7)
        return SimpleNamespace(wait=lambda: None)

    _replaced("reduce_scatter_tensor", call)


def test_a_backend_that_cannot_is_named_on_every_rank_before_the_first_step(ranks):
    for error in ranks(2).run_expect_error(unsupported, timeout=40):
        assert error.type == "WarmUpError"
        assert "the first reduce_scatter over 2 ranks in bfloat16 failed: Invalid scalar type" in error.message
        assert "choose another lazy_reduce.gradient_partition.collective" in error.message
    for error in ranks(2).run_expect_error(wrong, timeout=40):
        assert "the first reduce_scatter over 2 ranks in bfloat16 summed to 7.0, not 1" in error.message


def started_with_different_collectives():
    from deepspeed import comm as dist

    _engine({"collective": ["all_to_all", "reduce_scatter"][dist.get_rank()]})


def test_ranks_that_were_started_differently_never_come_to_it(ranks):
    for error in ranks(2).run_expect_error(started_with_different_collectives, timeout=40):
        assert error.type == "DisagreementError" and "reduce_scatter" in error.message


class Accelerator:
    def __init__(self, name):
        self.name = name

    def device_name(self):
        return self.name

    def total_memory(self):
        return 100

    def available_memory(self):
        return 30


def test_device_memory_is_everybodys(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (20, 100))
    assert warm_up.device_memory_in_use(Accelerator("cpu")) is None
    assert warm_up.device_memory_in_use(Accelerator("cuda")) == 80
    assert warm_up.device_memory_in_use(Accelerator("xpu")) == 70
