"""The order of work on an accelerator: the real chain, pool and collectives on simulated streams.

Every wait of the package is left out in turn, and each time a race must be found.
"""

import itertools
import random
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ds_lazyreduce import collectives, two_hops
from ds_lazyreduce.accumulate import TorchKernel
from ds_lazyreduce.bucket import Bucket, Slot
from ds_lazyreduce.bucket_chain import AccumulatingChain, BucketChain
from ds_lazyreduce.buffer_pool import BufferPool
from ds_lazyreduce.collectives import AllToAll, BackendReduceScatter, SingleRank
from ds_lazyreduce.reduction_stream import InOrder, ReductionStream, make_streams, overlap_notes
from ds_lazyreduce.two_hops import TwoHops

from .stream_simulator import Simulator

# Ranks of each process group. Rank j of a group contributes j + 1 times what this rank, the first of each, does.
GROUPS = {"world": 4, "inside": 2, "across": 2}
TIMES = {"all_to_all": 10, "reduce_scatter": 10, "two hops": 9, "single": 1}
SMALL, LARGE = 24, 16 * 1024 + 8  # elements; the chain copies those of the second size one by one


@dataclass(frozen=True)
class Program:
    """What is trained.

    sizes: of each bucket the elements of its parameters.
    producers: streams on which gradients are made, in turn.
    homes: streams that call backward, one per micro-step in turn.
    closer: the stream on which autograd calls back at the end, if it is not the one that called backward.
    missing: every so many-th gradient does not arrive.
    """

    collective: str = "all_to_all"
    sizes: tuple[tuple[int, ...], ...] = ((SMALL, LARGE), (LARGE, SMALL), (LARGE,), (SMALL, LARGE))
    max_in_flight: int = 1
    carry_over: bool = True
    wire_dtype: torch.dtype = torch.bfloat16
    accumulating: bool = False
    producers: tuple[str, ...] = ("home",)
    homes: tuple[str, ...] = ("home",)
    closer: str | None = None
    stepper: str = "home"
    reader: str | None = None  # reads and changes gradients within the window
    missing: int = 0
    late: bool = False
    muted: bool = False
    windows: int = 2


class FakeComm:
    """``deepspeed.comm`` as far as the collectives use it."""

    def __init__(self, sim):
        self.sim = sim

    def get_rank(self, group):
        return 0

    def get_world_size(self, group):
        return GROUPS[group]

    def get_global_rank(self, group, rank):
        return rank

    def all_to_all_single(self, receive, send, group, async_op=False):
        return self.sim.collective("all_to_all", group, receive, send, lambda: _rows(receive, send, group), async_op)

    def reduce_scatter_tensor(self, receive, send, group, async_op=False):
        def compute():
            rows = torch.empty_like(send)
            receive.copy_(_rows(rows, send, group).sum(0))

        return self.sim.collective("reduce_scatter", group, receive, send, compute, async_op)


def _rows(receive, send, group):
    ranks = GROUPS[group]
    rows, mine = receive.view(ranks, -1), send.view(ranks, -1)[0]
    for rank in range(ranks):
        rows[rank].copy_(mine * (rank + 1))
    return rows


class WatchedPool(BufferPool):
    """Tells the simulator what goes back to the allocator."""

    def _drop(self, memory):
        assert self.sim._memory(memory.raw).pool != "reduction", "allocated in the pool of the reduction stream"
        super()._drop(memory)
        self.sim.free(memory.raw)


class Param:
    def __init__(self, slot):
        self.slot, self.grad = slot, None


class Rig:
    """A chain that trains a program on the simulator; ``read`` is what the steps saw, ``truth`` what it should be."""

    def __init__(self, sim, program):
        self.sim, self.program = sim, program
        self.streams = make_streams(sim)
        assert isinstance(self.streams, ReductionStream)
        pool = WatchedPool(torch.device("cpu"), self.streams)
        pool.sim = sim
        kernel = TorchKernel()
        reduce_scatter = {
            "all_to_all": lambda: AllToAll("world", [0] * 4),
            "reduce_scatter": lambda: BackendReduceScatter("world", [0] * 4),
            "two hops": lambda: TwoHops("world", 2, kernel, across_in_wire_dtype=True),
            "single": SingleRank,
        }[program.collective]()
        self.kernel, self.params, buckets = kernel, [], []
        for index, sizes in enumerate(program.sizes):
            offsets = [0, *itertools.accumulate(sizes)]
            bucket = Bucket(index, -(-offsets[-1] // 8) * 8 + 8, program.wire_dtype, reduce_scatter)
            bucket.slots = [Slot(bucket, at, n, f"p{index}") for at, n in zip(offsets, sizes, strict=False)]
            self.params += [Param(slot) for slot in bucket.slots]
            buckets.append(bucket)
        chain = AccumulatingChain if program.accumulating else BucketChain
        order = range(len(buckets))
        self.chain = chain(buckets, order, self.accumulate, pool, program.max_in_flight, program.carry_over)
        self.shards = 1 if program.collective == "single" else 4
        self.partitions = [None] * len(buckets)
        self.held, self.read, self.truth, self.waited_in_backward = [], [], [], []
        self.totals = {param: 0 for param in self.params}
        self.hook = self.streams.bring_home(self.take)

    def accumulate(self, bucket, rows):
        if self.partitions[bucket.index] is None:
            with self.streams.allocating():
                self.partitions[bucket.index] = torch.zeros(bucket.numel // self.shards)
        self.kernel(self.partitions[bucket.index], rows, 1.0)
        self.sim.current.last = "accumulate"

    def take(self, param):
        grad, param.grad = param.grad, None
        (self.chain.put_local if self.local else self.chain.put)(param.slot, grad)

    def arrive(self, param, value, producer, local=False):
        sim, self.local = self.sim, local
        with sim.on(producer):
            grad = torch.empty(param.slot.numel, dtype=torch.bfloat16)
            grad.fill_(value)
            param.grad = grad
            self.hook(param)
        self.held.append(grad)
        waiting = [held for bucket in self.chain.buckets for _, held in bucket.held]
        for kept in [kept for kept in self.held if not any(kept is held for held in waiting)]:
            sim.free(kept)
        self.held = [kept for kept in self.held if any(kept is held for held in waiting)]
        self.totals[param] += value

    def micro_step(self, number, is_last):
        sim, program = self.sim, self.program
        home = program.homes[number % len(program.homes)]
        producers = [home if name == "home" else name for name in program.producers]
        waited = sim.named(home).waited_for
        before_waits = len(waited)
        with sim.on(home):
            self.streams.settle()
            muted = program.muted and number % 2 == 1
            if not program.accumulating or is_last:
                self.chain.open()
            if muted:
                self.chain.mute(torch.ones((), dtype=torch.bool))
            before = dict(self.totals)
            for index, param in enumerate(self.params):
                if not program.missing or (number + index) % program.missing:
                    self.arrive(param, 1 + (number + index) % 3, producers[index % len(producers)])
            if program.late:
                self.arrive(self.params[0], 1, producers[-1], local=number % 2 == 0)
            if muted:
                self.totals = before
        with sim.on(program.closer or home):
            self.chain.close()
            self.chain.mute(None)
            self.waited_in_backward.append(waited[before_waits:])
            if is_last:
                self.chain.drain()
        for grad in self.held:
            sim.free(grad)
        self.held = []

    def window(self):
        program, sim = self.program, self.sim
        for number in range(3):
            self.micro_step(number, is_last=number == 2)
            if program.reader and number == 1 and not program.accumulating:
                with sim.on(program.reader):
                    self.chain.drain()
                    for partition in self.partitions:
                        partition.mul_(1.0)
        with sim.on(program.stepper):
            self.chain.drain()
            if any(self.chain.has_accumulated()):
                self.chain.reduce_accumulated([True] * len(self.partitions))
            for bucket, partition in zip(self.chain.buckets, self.partitions, strict=True):
                partition.mul_(1.0)
                self.read.append(partition.clone())
                self.truth.append(partial(self.sum_of, bucket, dict(self.totals)))
                self.streams.retire(partition)
                sim.free(partition)
            self.partitions = [None] * len(self.partitions)
            self.chain.discard_accumulated()
        self.totals = dict.fromkeys(self.params, 0)

    def sum_of(self, bucket, totals):
        flat = torch.zeros(bucket.numel)
        for param, total in totals.items():
            if param.slot.bucket is bucket:
                flat[param.slot.offset : param.slot.offset + param.slot.numel] = total
        return flat[: bucket.numel // self.shards] * TIMES[self.program.collective]


def train(monkeypatch, program, without=None):
    """Issues the program's work; returns the rig. Nothing has run yet."""
    sim = Simulator(without)
    comm = FakeComm(sim)
    monkeypatch.setattr(collectives, "dist", comm)
    monkeypatch.setattr(two_hops, "dist", comm)
    monkeypatch.setattr(two_hops, "_new_groups", lambda *wanted: ["inside", "across"])
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: sim.record_stream(tensor, stream))
    with sim:
        rig = Rig(sim, program)
        for _ in range(program.windows):
            rig.window()
    return rig


def schedules(sim, count):
    """Orders in which streams may run: each one as early and as late as it can, and random ones."""
    names = list(sim.streams)
    for name in names:
        yield lambda ready, name=name: name if name in ready else ready[-1]
        yield lambda ready, name=name: next((other for other in ready if other != name), name)
    for seed in range(count):
        yield random.Random(seed).choice


def is_right(rig, choose):
    rig.sim.run(choose)
    return all(torch.equal(read, truth()) for read, truth in zip(rig.read, rig.truth, strict=True))


PROGRAMS = {
    "plain": Program(),
    "three in flight": Program(max_in_flight=3),
    "drained by each backward": Program(carry_over=False, max_in_flight=2),
    "reduce_scatter": Program("reduce_scatter"),
    "two hops": Program("two hops", max_in_flight=2),
    "two hops, drained": Program("two hops", carry_over=False),
    "single rank": Program("single", max_in_flight=2),
    "growing buckets": Program(sizes=((SMALL,), (LARGE,), (LARGE, LARGE), (LARGE, LARGE, SMALL))),
    "several producers": Program(producers=("home", "side", "other"), max_in_flight=2, missing=5),
    "all on another stream": Program(producers=("side",), late=True),
    "homes that move": Program(homes=("home", "compute"), closer="compute", stepper="home", missing=4),
    "read and changed elsewhere": Program(reader="reader", stepper="stepper"),
    "late gradients": Program(late=True, carry_over=False, producers=("home", "side")),
    "muted": Program(muted=True, late=True),
    "accumulating": Program(accumulating=True, producers=("home", "side"), wire_dtype=torch.float32),
    "accumulating, rounded": Program("two hops", accumulating=True, max_in_flight=2, homes=("home", "compute")),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_right_in_any_order_that_the_events_allow(monkeypatch, name):
    rig = train(monkeypatch, PROGRAMS[name])
    assert rig.sim.races == []
    for choose in schedules(rig.sim, 5):
        assert is_right(rig, choose)


_STREAMS = st.lists(st.sampled_from(["home", "side", "other"]), min_size=1, max_size=3).map(tuple)


@settings(deadline=None, max_examples=25, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    st.builds(
        Program,
        collective=st.sampled_from(sorted(TIMES)),
        sizes=st.lists(st.sampled_from([(8,), (SMALL, 8), (LARGE,), (LARGE, SMALL)]), min_size=1, max_size=5).map(
            tuple
        ),
        max_in_flight=st.integers(1, 3),
        carry_over=st.booleans(),
        wire_dtype=st.sampled_from([torch.bfloat16, torch.float32]),
        accumulating=st.booleans(),
        producers=_STREAMS,
        homes=_STREAMS,
        closer=st.sampled_from([None, "home", "side"]),
        stepper=st.sampled_from(["home", "side", "stepper"]),
        reader=st.sampled_from([None, "home", "reader"]),
        missing=st.sampled_from([0, 2, 3]),
        late=st.booleans(),
        muted=st.booleans(),
    )
)
def test_random_programs_have_no_race(program):
    with pytest.MonkeyPatch.context() as monkeypatch:
        rig = train(monkeypatch, program)
        assert rig.sim.races == []
        for choose in schedules(rig.sim, 1):
            assert is_right(rig, choose)


def test_each_wait_is_needed_and_each_missing_wait_is_found(monkeypatch):
    found_by = {}
    for program in PROGRAMS.values():
        for place in train(monkeypatch, program).sim.waits:
            found_by.setdefault(place, None)
    for place, name in itertools.product(found_by, PROGRAMS):
        if found_by[place] is None and train(monkeypatch, PROGRAMS[name], without=place).sim.races:
            found_by[place] = name
    assert [place for place, name in found_by.items() if name is None] == []
    # settle, a producer's gradient and its memory, dispatch, join, new memory, reuse, memory whose home has moved,
    # and the collectives' own waits in either kind of handle
    assert len(found_by) == 10, sorted(found_by)


@pytest.mark.parametrize("what", ["dispatching", "join", "reuse", "collectives.py", "two_hops.py", "on_home: wait"])
def test_without_a_wait_some_order_gives_wrong_gradients(monkeypatch, what):
    name = {"two_hops.py": "two hops", "on_home: wait": "several producers"}.get(what, "plain")
    (place,) = [place for place in train(monkeypatch, PROGRAMS[name]).sim.waits if what in place]
    rig = train(monkeypatch, PROGRAMS[name], without=place)
    assert not all(is_right(rig, choose) for choose in schedules(rig.sim, 0))


def test_a_send_buffer_that_is_freed_before_the_wait_is_found(monkeypatch):
    def too_early(handle):
        handle._pool.give(handle._send)
        handle._work.wait()
        return handle._receive.data.view(handle._rows, -1)

    monkeypatch.setattr(collectives._FlatHandle, "wait", too_early)
    assert train(monkeypatch, PROGRAMS["plain"]).sim.races


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
@pytest.mark.parametrize("collective", ["all_to_all", "reduce_scatter"])
def test_backward_waits_only_for_send_buffers_that_have_not_left(monkeypatch, collective, max_in_flight):
    sizes = tuple((n, LARGE + SMALL - n) for n in range(1, 6))
    rig = train(monkeypatch, Program(collective, sizes, max_in_flight))
    waits = [event for events in rig.waited_in_backward for event in events]
    # Had the event been recorded after the accumulate, or the other buffer been taken, it would follow the accumulate.
    assert waits and {(event.stream, event.after) for event in waits} == {("reduction", "work.wait")}


def test_the_host_never_reads():
    """Every program above would have failed here."""
    with Simulator(), pytest.raises(AssertionError, match="waits for the device"):
        torch.ones(1).item()


def test_a_hook_leaves_the_current_stream_as_it_was_and_passes_on_a_parameter_without_gradient():
    sim = Simulator()
    seen = []
    hook = make_streams(sim).bring_home(lambda param: seen.append((param, sim.current_stream().name)))
    param = Param(None)
    with sim.on("side"):
        hook(param)
        assert sim.current_stream().name == "side"
    assert seen == [(param, "home")]


def test_a_sparse_gradient_of_another_stream_is_made_dense_there(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: recorded.append(tensor.layout))
    sim, recorded, taken = Simulator(), [], []
    param = Param(None)
    param.grad = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.tensor([2.0]), (3,), check_invariants=True)
    hook = make_streams(sim).bring_home(lambda param: taken.append(param.grad.tolist()))
    with sim.on("side"):
        hook(param)
    assert recorded == [torch.strided] and taken == [[0.0, 2.0, 0.0]]


def test_a_device_without_streams_needs_nothing():
    class Cpu:
        def current_stream(self):
            return None

    streams = make_streams(Cpu())
    assert type(streams) is InOrder
    assert streams.bring_home(print) is print


def test_what_takes_overlap_away_is_said():
    harmless = {"TORCH_NCCL_BLOCKING_WAIT": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    assert overlap_notes(False, "nccl", {}) == overlap_notes(False, "nccl", harmless) == []
    assert overlap_notes(False, "gloo", {"TORCH_NCCL_BLOCKING_WAIT": "1"}) == []
    for name in ("TORCH_NCCL_BLOCKING_WAIT", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS"):
        (note,) = overlap_notes(False, "nccl", {name: "1"})
        assert note.startswith(f"{name} is 1: ")
    (note,) = overlap_notes(True, "gloo", {})
    assert note.startswith("comms_logger makes every collective wait")
