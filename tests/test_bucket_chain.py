"""The chain with a fake collective that reads its input late and fills its output only at ``wait()``.

So whoever reuses a send buffer before the wait, or reads a receive buffer before it, gets wrong numbers.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_lazyreduce.bucket import Bucket, Slot
from ds_lazyreduce.bucket_chain import BucketChain, ReductionError
from ds_lazyreduce.buffer_pool import BufferPool
from ds_lazyreduce.collectives import Traffic

RANKS = 2  # the other rank of the fake sends 100 times what this one does


class FakeHandle:
    def __init__(self, log, send, buffer, pool):
        self.log, self.send, self.receive, self.pool = log, send, buffer.data, pool
        self.release = lambda: pool.give(buffer)

    def wait(self):
        if self.log.fail_at == len(self.log.waits):
            raise RuntimeError("connection closed by peer")
        self.log.waits.append(self.send)
        shard = self.send.data[: self.send.data.numel() // RANKS].clone()
        self.pool.give(self.send)
        rows = self.receive.view(RANKS, -1)
        rows[0].copy_(shard)
        rows[1].copy_(shard * 100)
        return rows


class FakeReduceScatter:
    name = "fake"

    def __init__(self, log):
        self.log = log

    def start(self, send, pool):
        buffer = pool.take(send.data.numel(), send.data.dtype)
        buffer.data.fill_(float("nan"))
        self.log.starts.append(send.data.numel())
        return FakeHandle(self.log, send, buffer, pool)

    def traffic(self, numel, dtype):
        return Traffic(messages=1, bytes=numel * dtype.itemsize // 2, messages_across_nodes=0, bytes_across_nodes=0)


class Log:
    def __init__(self):
        self.starts, self.waits, self.fail_at = [], [], -1


class Rig:
    """Buckets of the given parameter sizes; ``sums[b]`` is this rank's fp32 partition of bucket b."""

    def __init__(self, sizes, max_in_flight=1, carry_over=False, order=None):
        self.log = Log()
        self.buckets, self.slots = [], []
        for index, params in enumerate(sizes):
            padded = -(-sum(params) // (2 * RANKS)) * 2 * RANKS
            bucket = Bucket(index, padded, torch.bfloat16, FakeReduceScatter(self.log))
            offset = 0
            for n, numel in enumerate(params):
                bucket.slots.append(Slot(bucket, offset, numel, f"p{index}.{n}"))
                offset += numel
            self.buckets.append(bucket)
            self.slots.append(bucket.slots)
        self.sums = [torch.zeros(b.numel // RANKS) for b in self.buckets]
        self.pool = BufferPool(torch.device("cpu"))
        self.chain = BucketChain(
            self.buckets, order or range(len(sizes)), self.accumulate, self.pool, max_in_flight, carry_over
        )

    def accumulate(self, bucket, rows):
        self.sums[bucket.index] += rows.float().sum(0)

    def put(self, b, p, value):
        slot = self.slots[b][p]
        self.chain.put(slot, torch.full((slot.numel,), float(value), dtype=torch.bfloat16))

    def expected(self, b, values):
        """The partition if parameter p of bucket b has summed up to ``values[p]``."""
        flat = torch.zeros(self.buckets[b].numel)
        for slot, value in zip(self.slots[b], values, strict=True):
            flat[slot.offset : slot.offset + slot.numel] = value
        return flat[: len(self.sums[b])] * 101


@pytest.mark.parametrize("max_in_flight", [1, 2, 5])
@pytest.mark.parametrize("carry_over", [False, True])
def test_sums_are_right_and_at_most_max_in_flight_are_in_flight(max_in_flight, carry_over):
    rig = Rig([[4], [3, 5], [8], [1]], max_in_flight, carry_over)
    for step in range(3):
        rig.chain.open()
        for b in range(4):
            for p in range(len(rig.slots[b])):
                rig.put(b, p, b + p + step)
            assert len(rig.log.starts) - len(rig.log.waits) <= max_in_flight
        rig.chain.close()
    rig.chain.drain()
    for b in range(4):
        assert torch.equal(rig.sums[b], rig.expected(b, [3 * (b + p) + 3 for p in range(len(rig.slots[b]))]))
    assert rig.chain.counters.max_in_flight_seen == min(max_in_flight, 12 if carry_over else 4)
    assert rig.chain.counters.gradient_collectives == 12
    assert rig.pool.live_bytes == 0


def test_dispatch_drains_the_predecessor_before_it_takes_a_receive_buffer():
    rig = Rig([[8]] * 6)
    rig.chain.open()
    for b in range(6):
        rig.put(b, 0, 1)
    assert len(rig.log.waits) == 5
    rig.chain.close()
    # one receive buffer, one send buffer in flight and one being filled, of 8 bf16 elements
    assert rig.pool.peak_bytes <= 3 * 8 * 2


def test_peak_does_not_grow_with_the_number_of_buckets():
    peaks = []
    for count in (4, 16, 64):
        rig = Rig([[16]] * count, max_in_flight=2)
        for _ in range(2):
            rig.chain.open()
            for b in range(count):
                rig.put(b, 0, 1)
            rig.chain.close()
        peaks.append(rig.pool.peak_bytes)
    assert peaks[0] == peaks[1] == peaks[2]


def test_dispatch_follows_the_agreed_order_whatever_arrives_first():
    rig = Rig([[2], [4], [8]], order=[2, 0, 1])
    rig.chain.open()
    rig.put(0, 0, 1)
    rig.put(1, 0, 1)
    assert rig.log.starts == []
    rig.put(2, 0, 1)
    assert rig.log.starts == [8, 4, 4]  # 2 is padded to 4
    rig.chain.close()
    assert rig.chain.observed_order() == [0, 1, 2]


def test_what_is_missing_counts_as_zero_also_in_a_reused_buffer():
    rig = Rig([[4, 4], [4, 4]], carry_over=False)
    rig.chain.open()
    for b in range(2):
        for p in range(2):
            rig.put(b, p, 7)
    rig.chain.close()
    rig.chain.open()
    rig.put(0, 0, 1)  # parameter 1 of bucket 0 and all of bucket 1 get no gradient
    rig.chain.close()
    assert torch.equal(rig.sums[0], rig.expected(0, [8, 7]))
    assert torch.equal(rig.sums[1], rig.expected(1, [7, 7]))


def test_padding_is_zero_even_in_a_reused_buffer():
    rig = Rig([[8], [1]])
    rig.chain.open()
    rig.put(0, 0, 9)
    rig.chain.close()
    rig.chain.open()
    rig.put(0, 0, 9)
    rig.put(1, 0, 5)
    rig.chain.close()
    assert torch.equal(rig.sums[1], torch.tensor([505.0, 0.0]))


def test_a_second_gradient_in_a_micro_step_is_kept_in_fp32_and_reduced_on_request():
    rig = Rig([[4], [4]])
    rig.chain.open()
    rig.put(0, 0, 256)
    rig.put(0, 0, 1)  # bucket 0 has left already
    rig.put(0, 0, 1)  # 256 + 1 + 1 would be 256 in bf16
    rig.chain.close()
    assert rig.chain.has_accumulated() == [True, False]
    rig.chain.reduce_accumulated([True, False])
    assert torch.equal(rig.sums[0], rig.expected(0, [258]))
    assert rig.chain.has_accumulated() == [False, False]
    assert rig.pool.live_bytes == 0


def test_a_rank_without_late_gradients_joins_the_supplementary_pass_with_zeros():
    rig = Rig([[4], [4]])
    rig.chain.reduce_accumulated([False, True])
    assert rig.log.starts == [4]
    assert not rig.sums[1].any()


def test_draining_and_closing_twice_does_nothing():
    rig = Rig([[4]], carry_over=True)
    rig.chain.open()
    rig.put(0, 0, 1)
    for _ in range(2):
        rig.chain.close()
        rig.chain.drain()
    assert len(rig.log.waits) == 1
    assert torch.equal(rig.sums[0], rig.expected(0, [1]))


def test_muted_gradients_count_as_zero_even_if_nan():
    rig = Rig([[4]])
    rig.chain.open()
    rig.chain.mute(torch.tensor(True))
    rig.put(0, 0, float("nan"))
    rig.put(0, 0, float("nan"))
    rig.chain.close()
    rig.chain.mute(None)
    rig.chain.reduce_accumulated([True])
    assert not rig.sums[0].any()


def test_a_failed_reduction_names_its_bucket_and_is_final():
    rig = Rig([[4], [4, 4]])
    rig.log.fail_at = 1
    rig.chain.open()
    rig.put(0, 0, 1)
    rig.put(1, 0, 1)
    rig.put(1, 1, 1)
    with pytest.raises(ReductionError, match=r"bucket 1 \(p1.0 .. p1.1, 8 elements\).*connection closed"):
        rig.chain.close()
    started = len(rig.log.starts)
    for call in (rig.chain.close, rig.chain.drain, rig.chain.open):
        with pytest.raises(ReductionError, match="bucket 1"):
            call()
    assert len(rig.log.starts) == started


def test_the_order_cannot_change_within_a_micro_step():
    rig = Rig([[4], [4]])
    rig.chain.open()
    with pytest.raises(RuntimeError, match="within a micro-step"):
        rig.chain.set_order([1, 0])


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=6),
    st.integers(1, 4),
    st.booleans(),
    st.integers(0, 3),
    st.randoms(use_true_random=False),
)
def test_any_arrival_pattern_sums_up(sizes, max_in_flight, carry_over, micro_steps, random):
    """Random orders, missing parameters and repeated gradients against plain addition."""
    order = list(range(len(sizes)))
    random.shuffle(order)
    rig = Rig(sizes, max_in_flight, carry_over, order)
    totals = [[0] * len(params) for params in sizes]
    everything = [(b, p) for b, params in enumerate(sizes) for p in range(len(params))]
    for _ in range(micro_steps):
        rig.chain.open()
        for b, p in random.choices(everything, k=len(everything) + 2):
            value = random.randint(-8, 8)
            totals[b][p] += value
            rig.put(b, p, value)
            assert len(rig.log.starts) - len(rig.log.waits) <= max_in_flight
        rig.chain.close()
    rig.chain.drain()
    rig.chain.reduce_accumulated([True] * len(sizes))
    for b in range(len(sizes)):
        assert torch.equal(rig.sums[b], rig.expected(b, totals[b]))
    assert rig.pool.live_bytes == 0
