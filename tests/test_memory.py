"""Transient memory: it does not grow with the number of buckets, and hardly with how groups are split."""

import pytest
import torch

from .harness import base_config, make_engine

LAYERS, WIDTH = 64, 32
BUCKET = WIDTH * WIDTH + WIDTH  # elements of a layer


class VisionTowerLast(torch.nn.Module):
    """Registered far from the order of execution: the second half runs first, the head is tied to the first layer."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x):
        for layer in [*self.layers[LAYERS // 2 :], *self.layers[: LAYERS // 2]]:
            x = x + layer(x)
        return x.float().square().mean()


class InOrder(VisionTowerLast):
    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x.float().square().mean()


def _split(model, how):
    if how == "one group":
        return [{"params": list(model.parameters())}]
    if how == "decay and no decay":
        return [
            {"params": [p for p in model.parameters() if p.dim() > 1]},
            {"params": [p for p in model.parameters() if p.dim() == 1]},
        ]
    return [{"params": list(layer.parameters())} for layer in model.layers]


def train_for_report(model_class, buckets, split="one group", partition=()):
    model = model_class()
    partition = {"bucket_size": BUCKET * LAYERS // buckets, **dict(partition)}
    engine = make_engine(
        model,
        torch.optim.SGD(_split(model, split), lr=1e-3),
        base_config(lazy={"gradient_partition": partition}, gradient_accumulation_steps=2),
    )
    for _ in range(4):
        engine.backward(engine(torch.ones(1, WIDTH, dtype=torch.bfloat16)))
        engine.step()
    return engine.lazy_reduce_report()


def peak(model_class, buckets, split="one group", max_in_flight=1):
    report = train_for_report(model_class, buckets, split, {"max_in_flight": max_in_flight})
    return report["peak_buffer_bytes"], report["buckets"], report["max_in_flight_seen"]


@pytest.mark.parametrize("model_class", [InOrder, VisionTowerLast])
def test_peak_in_buckets_does_not_depend_on_their_number(ranks, model_class):
    for buckets in (4, 16, 64):
        for peak_bytes, seen, in_flight in ranks(2).run(peak, model_class, buckets):
            assert seen == buckets and in_flight == 1
            # one receive buffer, one send buffer in flight, one being filled
            assert peak_bytes <= 3 * 2 * BUCKET * LAYERS // buckets


@pytest.mark.parametrize("split", ["decay and no decay", "one group per layer"])
@pytest.mark.parametrize("model_class", [InOrder, VisionTowerLast])
def test_split_groups_overlap_as_well(ranks, model_class, split):
    for peak_bytes, _, in_flight in ranks(2).run(peak, model_class, 16, split):
        assert in_flight == 1
        # weights and biases of a layer go to two buckets, both open at once
        assert peak_bytes <= 4 * 2 * BUCKET * LAYERS // 16


@pytest.mark.parametrize("max_in_flight", [2, 4])
def test_peak_grows_with_what_is_allowed_in_flight(ranks, max_in_flight):
    for peak_bytes, _, in_flight in ranks(2).run(peak, InOrder, 16, max_in_flight=max_in_flight):
        assert in_flight <= max_in_flight
        assert peak_bytes <= (2 * max_in_flight + 1) * 2 * BUCKET * LAYERS // 16


def test_two_hops_need_no_more_than_the_flat_exchange(ranks):
    partition = {"collective": "hierarchical", "node_size": 2}
    for report in ranks(4).run(train_for_report, InOrder, 16, partition=partition):
        # the send buffer is free once it has been packed, and becomes the receive buffer
        assert report["collective"] == "hierarchical"
        assert report["peak_buffer_bytes"] <= 3 * 2 * BUCKET * LAYERS // 16
