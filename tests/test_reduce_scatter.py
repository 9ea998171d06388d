"""``"collective": "reduce_scatter"``: the backend's own, summed in the wire dtype."""

import pytest
import torch

from .harness import OneVec, base_config, make_engine, masters
from .test_memory import BUCKET, LAYERS, InOrder, train_for_report
from .test_two_hops import SIZES, train


def _rank():
    from deepspeed import comm as dist

    return dist.get_rank()


@pytest.mark.parametrize("world", [1, 3, 4])
@pytest.mark.parametrize("extra", [{}, {"max_in_flight": 3}, {"carry_over": False}, {"reduce_every": "boundary"}])
def test_equals_the_all_to_all_where_sums_are_exact(ranks, extra, world):
    flat = ranks(world).run(train, {"bucket_size": 64, "collective": "all_to_all", **extra}, SIZES)
    own = ranks(world).run(train, {"bucket_size": 64, "collective": "reduce_scatter", **extra}, SIZES)
    for (weights, report, calls), (flat_weights, flat_report, _) in zip(own, flat, strict=True):
        for name, weight in flat_weights.items():
            assert torch.equal(weights[name], weight)  # integers: every order of summation is exact
        assert report["bytes_sent"] == flat_report["bytes_sent"] == sum(call.bytes_to_peers for call in calls)
        assert report["wire_dtype"] == flat_report["wire_dtype"]
        if world > 1:
            assert report["collective"] == "reduce_scatter"
            assert {call.name for call in calls} == {"reduce_scatter_tensor"}
            assert all(call.via_deepspeed for call in calls)
            assert len(calls) == report["gradient_collectives"]


def test_a_receive_buffer_is_a_shard(ranks):
    peaks = {}
    for collective in ("all_to_all", "reduce_scatter"):
        found = ranks(4).run(train_for_report, InOrder, 16, partition={"collective": collective})
        peaks[collective] = [report["peak_buffer_bytes"] for report in found]
    bucket = 2 * BUCKET * LAYERS // 16  # bytes
    assert peaks["all_to_all"] == [3 * bucket] * 4  # received, sent, being filled
    assert peaks["reduce_scatter"] == [2 * bucket + bucket // 4] * 4


def small_contributions(wire_dtype):
    model = OneVec(8)
    partition = {"collective": "reduce_scatter", "wire_dtype": wire_dtype}
    config = base_config(lazy={"gradient_partition": partition})
    engine = make_engine(model, torch.optim.SGD(model.parameters(), lr=1.0), config)
    engine.backward(engine(torch.full((8,), [1.0, 2**-8, 2**-8, 2**-8][_rank()], dtype=torch.bfloat16)))
    engine.step()
    return masters(engine)["w"][0].item()


def test_sums_are_rounded_to_the_wire_dtype(ranks):
    exact = -(1.0 + 3 * 2**-8) / 4
    assert ranks(4).run(small_contributions, "fp32") == [exact] * 4
    for value in ranks(4).run(small_contributions, "bf16"):  # the documented price: the sum itself is not a bf16
        assert value != exact and abs(value - exact) <= 2**-8


def across(local):
    import os

    os.environ["LOCAL_WORLD_SIZE"] = str(local)
    weights, report, _ = train({"collective": "reduce_scatter"}, [4096], 1)
    return report["bytes_sent"], report["bytes_sent_across_nodes"]


def test_bytes_across_nodes_are_those_of_a_ring(ranks):
    sent = 2 * 4096 * 2 * 3 // 4  # two steps
    assert ranks(4).run(across, 2) == [(sent, 0), (sent, sent), (sent, 0), (sent, sent)]
    assert ranks(4).run(across, 4) == [(sent, 0)] * 4


def logged():
    config = base_config(
        lazy={"gradient_partition": {"collective": "reduce_scatter"}},
        comms_logger={"enabled": True, "verbose": False, "prof_all": True},
    )
    model = OneVec(8)
    engine = make_engine(model, torch.optim.SGD(model.parameters(), lr=1.0), config)
    engine.backward(engine(torch.full((8,), 1.0 + _rank(), dtype=torch.bfloat16)))
    engine.step()
    from deepspeed import comm

    calls = sum(entry[0] for entry in comm.comm.comms_logger.comms_dict["reduce_scatter_tensor"].values())
    return masters(engine)["w"][0].item(), calls


def test_the_comms_logger_sees_it(ranks):
    assert ranks(2).run(logged) == [(-1.5, 2)] * 2  # the warm-up and the step
