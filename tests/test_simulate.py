"""The simulator: cases small enough to be played by hand, properties, and the real chain beside the model of it."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ds_lazyreduce import collectives, simulate, two_hops
from ds_lazyreduce.bucket import Bucket, Slot
from ds_lazyreduce.bucket_chain import AccumulatingChain, BucketChain
from ds_lazyreduce.buffer_pool import BufferPool
from ds_lazyreduce.reduce_schedule import make_schedule
from ds_lazyreduce.simulate_delays import KINDS, draw
from ds_lazyreduce.simulate_model import (
    Cluster,
    Costs,
    Link,
    Setting,
    Workload,
    costs_of,
    peak_buffer_bytes,
    play,
    program,
    traffic,
)
from ds_lazyreduce.simulate_settings import NAMES, STOCK, resolve
from ds_lazyreduce.simulate_validation import predict, read

FREE = Costs(hops_s=(0.0,), meet_s=0.0, gather_s=0.0)
BLOCKING = Setting("all_reduce", blocking=True)
FLAT = Setting("all_to_all")


def step_of(setting, delays, *, buckets=2, forward=0.0, backward=2.0, costs=FREE, node_size=1, streams=False):
    """(step time, idle time of each rank) of one window with ``delays`` ``[ranks][micro_steps]``."""
    delays = torch.tensor([delays], dtype=torch.float64)
    workload = Workload(delays.shape[2], buckets, 1, forward, backward)
    ops = program(setting, workload.micro_steps, buckets)
    outcome = play(ops, workload, costs, delays, node_size, streams)
    return outcome.step_s.item(), outcome.idle_s[0].tolist()


# ---- played by hand


@pytest.mark.parametrize("name", [n for n in NAMES if n != "lazy-flat"])
@pytest.mark.parametrize("streams", [False, True])
def test_without_delays_and_costs_nobody_waits(name, streams):
    setting, _ = resolve(name, Cluster(2, 2, Link(0, 1), Link(0, 1)), Workload(3, 2, 1, 0, 0))
    assert step_of(setting, [[0.0] * 3] * 2, forward=1.0, streams=streams) == (9.0, [0.0, 0.0])


@pytest.mark.parametrize("setting", [*STOCK.values(), FLAT, Setting("all_to_all", reduce_every="boundary")])
def test_one_rank_waits_for_nobody(setting):
    assert step_of(setting, [[0.5, 1.5, 0.0]], forward=1.0) == (11.0, [0.0])


@pytest.mark.parametrize(
    "setting, streams, step",
    [
        # Two micro-steps of two buckets, a second each. Rank 0 is 3 s late in the first, rank 1 is 2 s late in the
        # second. Where each micro-step ends together that is 3 + 2 + 2 + 2.
        (BLOCKING, False, 9.0),
        (replace(FLAT, carry_over=False), False, 9.0),
        # Rank 1 dispatches at 1, 4 (after bucket 0 of rank 0), 7, 8; rank 0 at 4, 5, 6, 7.
        (FLAT, False, 8.0),
        # On streams it starts its second micro-step at 2: dispatches at 1, 4, 5, 6.
        (FLAT, True, 7.0),
        # Two buckets ahead: rank 1 at 1, 2, 5 (after bucket 0), 6.
        (replace(FLAT, max_in_flight=2), False, 7.0),
        # Only the slower rank counts: 3 + 2 + 2.
        (Setting("all_to_all", reduce_every="boundary"), False, 7.0),
        # n that does not divide the window: the only pass is that of the step.
        (Setting("all_to_all", reduce_every=3), False, 7.0),
        (Setting("all_to_all", reduce_every=2), False, 7.0),
        (Setting("all_reduce", blocking=True, reduce_every="boundary"), False, 7.0),
        # A scalar in every micro-step undoes that.
        (Setting("all_reduce", blocking=True, reduce_every="boundary", loss=True), False, 9.0),
        (Setting("all_reduce", blocking=True, reduce_every="boundary", normaliser=True), False, 9.0),
    ],
)
def test_two_ranks_late_at_different_moments(setting, streams, step):
    assert step_of(setting, [[3.0, 0.0], [0.0, 2.0]], streams=streams) == (step, [step - 7.0, step - 6.0])


def test_a_bucket_late_is_what_max_in_flight_buys():
    # Rank 1 is late by 10 in the second micro-step, rank 0 in the third. With one in flight rank 0 stands in its
    # second micro-step until 13, when rank 1 dispatches, and is late only then; with two it is late meanwhile.
    delays = [[0.0, 0.0, 10.0], [0.0, 10.0, 0.0]]
    assert [step_of(replace(FLAT, max_in_flight=m), delays)[0] for m in (1, 2)] == [25.0, 16.0]


@pytest.mark.parametrize(
    "max_in_flight, streams, step",
    [
        # Rank 0 dispatches one bucket a micro-step, at 11, 22, 23, 24, 25. Rank 1 has all it needs at 1, 2 and then
        # drains the bucket before the last: at 11, 22, 23; its own 20 s begin then.
        (1, False, 23 + 20 + 1),
        (1, True, 23 + 20 + 1),  # it waits for the memory of the bucket before the last
        (2, False, 22 + 20 + 1),  # it drains the last bucket but two, in the fourth micro-step that of rank 0's 22
        (2, True, 12 + 20 + 1),  # it has three send buffers; the fourth micro-step waits for 11, the fifth for 22
    ],
)
def test_backward_waits_for_the_memory_of_a_bucket_that_is_not_drained(max_in_flight, streams, step):
    delays = [[10.0, 10.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0, 20.0]]
    setting = replace(FLAT, max_in_flight=max_in_flight)
    assert step_of(setting, delays, buckets=1, backward=1.0, streams=streams)[0] == step


def test_exchanges_take_their_time_one_after_another():
    costs = replace(FREE, hops_s=(0.5,))
    assert step_of(BLOCKING, [[1.0], [0.0]], costs=costs)[0] == 1 + 1 + 0.5 + 1 + 0.5
    # Chained, the first bucket's exchange is hidden behind the second bucket's backward.
    assert step_of(FLAT, [[1.0], [0.0]], costs=costs)[0] == 1 + 1 + 1 + 0.5
    # An exchange longer than a bucket's backward: the second waits for the channel, however many may be in flight.
    costs = replace(FREE, hops_s=(4.0,), meet_s=0.25, gather_s=0.125)
    many = replace(FLAT, max_in_flight=9)
    assert step_of(many, [[1.0], [0.0]], costs=costs, streams=True)[0] == 1 + 1 + 4 + 4 + 0.25 + 0.125


@pytest.mark.parametrize("streams, start", [(False, 5.0), (True, 4.5)])
def test_second_hop_starts_when_the_slowest_node_drains(streams, start):
    # Nodes (0, 1) and (2, 3); one micro-step of two buckets. The slowest rank dispatches bucket 0 at 4, the first hop
    # is over at 4.5. It drains it when it has the second bucket, at 5; on a stream of their own drains do not wait.
    costs = replace(FREE, hops_s=(0.5, 4.0))
    delays = [[0.0], [1.0], [2.0], [3.0]]
    got, idle = step_of(Setting("hierarchical", carry_over=False), delays, costs=costs, node_size=2, streams=streams)
    assert got == start + 4 + 0.5 + 4
    assert idle == [got - 2 - d for d in (0, 1, 2, 3)]


def test_nodes_wait_for_one_another_in_the_second_hop():
    delays = [[0.0, 10.0], [0.0, 10.0], [10.0, 0.0], [10.0, 0.0]]
    setting, costs = Setting("hierarchical", carry_over=False), replace(FREE, hops_s=(0.0, 0.0))
    assert step_of(setting, delays, buckets=1, backward=1.0, costs=costs, node_size=2)[0] == 10 + 1 + 10 + 1


def test_with_streams_backward_waits_for_the_second_hop_of_the_bucket_before_the_last():
    # Second hops of 4 s follow one another from 1 on. The third micro-step's bucket is filled after 5 (the end of the
    # first one's), so the 20 s of the fourth begin at 6, and its bucket is exchanged from 27 on.
    delays = [[0.0, 0.0, 0.0, 20.0]] * 4
    setting, costs = Setting("hierarchical"), replace(FREE, hops_s=(0.0, 4.0))
    step, _ = step_of(setting, delays, buckets=1, backward=1.0, costs=costs, node_size=2, streams=True)
    assert step == 5 + 1 + 20 + 1 + 4


# ---- properties

times = st.integers(0, 40).map(float)  # whole seconds: sums are exact


@st.composite
def cases(data):
    """Delays and the sizes of a workload; seconds of an exchange."""
    ranks, micro_steps = data(st.integers(1, 5)), data(st.integers(1, 4))
    row = st.lists(times, min_size=micro_steps, max_size=micro_steps)
    delays = data(st.lists(row, min_size=ranks, max_size=ranks))
    sizes = {"buckets": data(st.sampled_from([1, 2, 4])), "forward": 1.0, "backward": 4.0}
    return delays, sizes, replace(FREE, hops_s=(data(times),), meet_s=data(times))


@settings(max_examples=60, deadline=None)
@given(cases(), st.integers(1, 4), st.booleans(), st.booleans())
def test_more_slack_is_never_slower(case, max_in_flight, carry_over, streams):
    delays, sizes, costs = case
    setting = replace(FLAT, max_in_flight=max_in_flight, carry_over=carry_over)

    def step(setting, costs=costs):
        return step_of(setting, delays, costs=costs, streams=streams, **sizes)[0]

    assert step(replace(setting, max_in_flight=max_in_flight + 1)) <= step(setting)
    assert step(replace(setting, carry_over=True)) <= step(replace(setting, carry_over=False))
    for reduce_every in (2, "boundary"):
        assert step(replace(setting, reduce_every=reduce_every), FREE) <= step(setting, FREE)
    assert step(setting) <= step(replace(setting, blocking=True)) <= step(replace(setting, blocking=True, loss=True))


@settings(max_examples=60, deadline=None)
@given(cases(), st.sampled_from([*NAMES]), st.booleans())
def test_a_step_is_work_and_idle_time_of_every_rank(case, name, streams):
    delays, sizes, costs = case
    cluster = Cluster(len(delays), len(delays), Link(0, 1), Link(0, 1))
    setting, _ = resolve(name, cluster, Workload(len(delays[0]), sizes["buckets"], 1, 0, 0))
    step, idle = step_of(setting, delays, costs=costs, streams=streams, **sizes)
    work = [sum(row) + len(row) * 5.0 for row in delays]
    assert [step - i for i in idle] == pytest.approx(work)
    assert min(idle) >= costs.meet_s  # so the step is no shorter than the slowest rank's own work
    reductions = sum(op.kind == "dispatch" for op in program(setting, len(delays[0]), sizes["buckets"]))
    assert step <= sum(map(max, zip(*delays, strict=True))) + len(delays[0]) * (5 + costs.meet_s) + costs.meet_s + (
        reductions * costs.hops_s[0]
    )  # as if everything waited for everything


# ---- beside the real chain


class FakeDist:
    """``deepspeed.comm`` for exchanges that never happen; ``log`` is told what is started and waited for."""

    def __init__(self, log):
        self.log = log

    def all_to_all_single(self, received, sent, group=None, async_op=False):
        if not async_op:  # the second hop
            return None
        self.log.append("dispatch")
        return self

    def wait(self):
        self.log.append("drain")


def run_chain(setting, micro_steps, buckets, numel, dist, monkeypatch):
    """One window, as the optimizer drives it, of buckets of one parameter; returns the peak of the pool."""
    for module in (collectives, two_hops):
        monkeypatch.setattr(module, "dist", dist)
    if setting.collective == "hierarchical":  # 2 nodes of 4
        exchange = object.__new__(two_hops.TwoHops)
        exchange.node_size, exchange.nodes, exchange.inside, exchange.across = 4, 2, None, None
        exchange.accumulate = lambda *_: None
        exchange.across_in_wire_dtype = setting.across_bytes == 2
    else:
        exchange = object.__new__(collectives.AllToAll)
        exchange._group, exchange._ranks, exchange._remote_ranks = None, 8, 4
    dtype = {2: torch.bfloat16, 4: torch.float32}[setting.wire_bytes]
    made = [Bucket(b, numel, dtype, exchange, slots=[Slot(None, 0, numel, "p")]) for b in range(buckets)]
    for bucket in made:
        bucket.slots[0].bucket = bucket
    pool = BufferPool(torch.device("cpu"))
    kind = BucketChain if setting.reduce_every == 1 else AccumulatingChain
    order = range(buckets)
    chain = kind(made, order, lambda *_: None, pool, setting.max_in_flight, setting.carry_over)
    schedule = make_schedule(setting.reduce_every)
    for micro_step in range(micro_steps):
        if schedule.reduces_now(micro_step == micro_steps - 1):
            chain.open()
        for bucket in made:
            chain.put(bucket.slots[0], torch.zeros(numel, dtype=torch.bfloat16))
        chain.close()
    late = chain.has_accumulated()
    if any(late):
        chain.reduce_accumulated(late)
    chain.drain()
    assert pool.live_bytes == 0
    return pool.peak_bytes, chain


@settings(max_examples=80, deadline=None)
@given(
    collective=st.sampled_from(["all_to_all", "hierarchical"]),
    max_in_flight=st.integers(1, 5),
    carry_over=st.booleans(),
    reduce_every=st.sampled_from([1, 2, 3, "boundary"]),
    wire_bytes=st.sampled_from([2, 4]),
    across_in_wire_dtype=st.booleans(),
    micro_steps=st.integers(1, 4),
    buckets=st.integers(1, 5),
)
def test_order_buffers_and_bytes_are_those_of_the_chain(micro_steps, buckets, across_in_wire_dtype, **keys):
    setting = Setting(**keys, across_bytes=keys["wire_bytes"] if across_in_wire_dtype else 4)
    if setting.reduce_every != "boundary":  # what is left over of a window travels in fp32: not simulated
        assume(setting.wire_bytes == 4 or micro_steps % setting.reduce_every == 0)
    ops, numel, log = program(setting, micro_steps, buckets), 32768, []
    with pytest.MonkeyPatch.context() as patch:
        peak, chain = run_chain(setting, micro_steps, buckets, numel, FakeDist(log), patch)
    assert [op.kind for op in ops if op.kind in ("dispatch", "drain")] == log
    cluster = Cluster(8, 4, Link(0, 1), Link(0, 1))
    hops = traffic(cluster, setting, numel)
    assert peak == peak_buffer_bytes(ops, cluster, setting, numel)
    sends = chain.counters.gradient_collectives
    assert chain.counters.bytes_sent == sends * sum(hop.bytes_inside + hop.bytes_across for hop in hops)
    assert chain.counters.bytes_sent_across_nodes == sends * sum(hop.bytes_across for hop in hops)


# ---- costs and delays


def test_seconds_of_exchanges_on_links():
    # 2 nodes of 4; 1 s a message inside and 10 s across; a byte takes 1 s inside and 2 s across. 64 elements.
    cluster = Cluster(8, 4, Link(1.0, 1.0), Link(10.0, 0.5))
    workload = Workload(1, 1, 64, 0, 0)
    flat = costs_of(cluster, workload, Setting("all_to_all"))
    assert flat.hops_s == (max(3 + 3 * 16, 4 * 10 + 4 * 16 * 2),)  # to each rank an eighth of 128 bytes
    assert flat.meet_s == 2 * 2 * 1 + 2 * 1 * 10  # up and down a tree of both
    assert flat.gather_s == max(2 + 96, 10 + 16 * 2)
    two_hops = costs_of(cluster, workload, Setting("hierarchical"))
    assert two_hops.hops_s == (3 + 96, 10 + 64 // 4 * 4 // 2 * 2)
    ring = costs_of(cluster, workload, Setting("all_reduce"))
    assert ring.hops_s == (max(4 + 2 * 96, 2 * 10 + 2 * 128 // 4 // 2 * 2),)


def test_bytes_across_nodes_against_the_flat_exchange_and_the_ring():
    cluster = Cluster(64, 8, Link(0, 1), Link(0, 1))

    def across(*keys, **more):
        return sum(hop.bytes_across for hop in traffic(cluster, Setting(*keys, **more), 2**20))

    assert across("all_to_all") / across("hierarchical") == 8 / 2
    assert across("all_to_all") / across("hierarchical", across_bytes=2) == 8
    assert across("all_reduce") == across("hierarchical") == 2 * across("hierarchical", across_bytes=2)


def test_delays_have_the_shape_and_mean_of_their_kind():
    size = {"windows": 50, "ranks": 16, "micro_steps": 8, "mean_s": 0.02, "node_size": 4}
    drawn = {kind: draw(kind, **size, seed=3) for kind in KINDS}
    assert not drawn["none"].any()
    assert drawn["slow-node"].shape == (1, 16, 8) and drawn["slow-node"].sum() == pytest.approx(4 * 8 * 0.02)
    assert (drawn["slow-node"][:, 4:] == 0).all()
    for kind in ("exponential", "imbalance"):
        assert drawn[kind].shape == (50, 16, 8) and drawn[kind].dtype == torch.float64
        assert drawn[kind].mean().item() == pytest.approx(0.02, rel=0.15)
        assert torch.equal(drawn[kind], draw(kind, **size, seed=3))
        assert not torch.equal(drawn[kind], draw(kind, **size, seed=4))
    assert (drawn["imbalance"] == drawn["imbalance"][:, :, :1]).all()
    assert len(set(drawn["exponential"].flatten().tolist())) == 50 * 16 * 8


# ---- the command


def table(tmp_path, *argv):
    """{setting: row} of the only table that the command writes."""
    path = tmp_path / "out.json"
    assert simulate.main([*argv, "--json", str(path)]) == 0
    (only,) = json.loads(path.read_text())["tables"]
    return {row["setting"]: row for row in only["rows"]}


def test_prints_a_table_for_each_number_of_ranks_and_buckets(capsys, tmp_path):
    path = tmp_path / "out.json"
    argv = "--ranks 4 16 --buckets 2 3 --windows 2 --elements 1000 --settings zero2 lazy --delays none imbalance"
    assert simulate.main([*argv.split(), "--section", '{"max_in_flight": 2}', "--json", str(path)]) == 0
    output = capsys.readouterr().out
    for ranks in (4, 16):
        for buckets in (2, 3):
            assert f"\n{ranks} ranks, {buckets} buckets\n" in output
    written = json.loads(path.read_text())
    assert written["options"]["elements"] == 1000 and len(written["tables"]) == 4
    for found in written["tables"]:
        assert [row["setting"] for row in found["rows"]] == ["zero2", "lazy", "section"]
        for row in found["rows"]:
            assert row["delays"].keys() == {"none", "imbalance"}
            assert output.count(f"\n  {row['setting']} ") == 4


def test_losses_deferred_help_where_ranks_are_late_at_different_moments(tmp_path):
    argv = "--ranks 512 --windows 3 --settings window-loss window --delays exponential imbalance"
    rows = table(tmp_path, *argv.split())
    late, same = (
        rows["window"]["delays"][kind]["step_s"] / rows["window-loss"]["delays"][kind]["step_s"]
        for kind in ("exponential", "imbalance")
    )
    assert late < 0.9 and same > 0.999  # a rank that is slow throughout is waited for anyway


def test_memory_is_flat_in_the_number_of_buckets_with_the_chain_and_linear_without(tmp_path):
    held = {"lazy": [], "unchained": []}
    for buckets in (4, 16, 64):
        argv = f"--ranks 8 --buckets {buckets} --settings lazy unchained --delays none --windows 1"
        for name, row in table(tmp_path, *argv.split()).items():
            held[name].append(row["peak_buffer_bytes"] / row["bucket_bytes"])
    assert held == {"lazy": [3, 3, 3], "unchained": [8, 32, 128]}


def test_a_section_is_simulated_as_the_extension_reads_it(tmp_path):
    argv = "--ranks 16 --elements 1600000 --buckets 4 --delays none --settings lazy-flat lazy".split()
    section = {"collective": "hierarchical", "across_dtype": "wire", "bucket_size": 100000, "node_size": 8}
    rows = table(tmp_path, *argv, "--section", json.dumps(section))
    assert rows["section"]["bytes_sent_across_nodes"] * 2 == rows["lazy"]["bytes_sent_across_nodes"]
    assert rows["lazy"]["bytes_sent_across_nodes"] * 4 == rows["lazy-flat"]["bytes_sent_across_nodes"]
    assert rows["section"]["bucket_bytes"] == 2 * 100000 and rows["lazy"]["bucket_bytes"] == 2 * 400000


@pytest.mark.parametrize(
    "argv, says",
    [
        (["--ranks", "0"], "argument --ranks: invalid whole number >= 1 value: '0'"),
        (["--ranks", "12"], "argument --ranks: 12 ranks do not fill nodes of 8"),
        (["--delay-ms", "nan"], "argument --delay-ms: invalid number >= 0 value: 'nan'"),
        (["--inside", "0", "3"], "argument --inside: expected a bandwidth above 0"),
        (["--settings", "fast"], "argument --settings: invalid choice: 'fast'"),
        (["--section", "[1]"], "argument --section: got [1]; expected an object"),
        (["--section", "{"], "argument --section: invalid JSON value: '{'"),
        (["--section", '{"max_in_flight": 0}'], "max_in_flight: got 0; expected a whole number >= 1"),
        (["--section", '{"node_size": 3}'], "node_size: got 3; expected the cluster's 8"),
        (["--section", '{"collective": "reduce_scatter"}'], "collective: got"),
        (["--section", '{"reduce_every": 3, "wire_dtype": "bf16"}'], "reduce_every: got 3; expected a divisor of 8"),
        (["--section", '{"enabled": false}'], "enabled: got false; expected true, or the setting zero2"),
        (["--section", '{"bucket_size": 1}'], "bucket_size: got 1; expected at least 800000 for 10000 buckets"),
        (["--json", "/no/such/file"], "argument --json: /no/such is not a directory"),
        (["--json", "/tmp"], "argument --json: /tmp is a directory"),
        (["--json", "f", "--validate", "g"], "argument --json: not with --validate"),
        (["--seed", "-1"], "argument --seed: invalid whole number >= 0 and < 2**32 value: '-1'"),
        (["--validate", "/no/such.json"], "/no/such.json: No such file or directory"),
    ],
)
def test_wrong_input_is_one_clear_line(argv, says, capsys):
    try:
        code = simulate.main([*argv, "--windows", "1"])
    except SystemExit as refused:
        code = refused.code
    assert code == 2
    *usage, line = capsys.readouterr().err.splitlines()
    assert says in line and line.startswith("ds_lazyreduce.simulate: error: ")
    assert len(usage) <= 1  # what argparse puts before it


# ---- beside measurements


def measured(path, delays_ms, steps_ms, elements=1024):
    """A file as the benchmark writes it, of one round and two micro-steps of two buckets."""
    contenders = {name: {"metrics": {"step": {"samples": [ms]}}, "ratios": {}} for name, ms in steps_ms.items()}
    details = {"ranks": len(delays_ms), "micro_steps": 2, "elements": elements, "buckets": 2}
    details |= {"delays": {"drawn_ms": [delays_ms]}, "settings": {"lazy": {}, "lazy-2": {"max_in_flight": 2}}}
    jitter = {"workload": "jitter", "contenders": contenders, "details": details}
    path.write_text(json.dumps({"machine": {}, "workloads": [{"workload": "comm"}, jitter]}))
    return path


@pytest.fixture
def runs(tmp_path):
    """Runs on one rank, on two without delays, and with those of the two ranks played by hand above."""
    calm = {"zero2": 4000.0, "lazy": 4000.0, "lazy-2": 4000.0, "fsdp2": 4000.0}
    alone = measured(tmp_path / "alone.json", [[0.0, 0.0]], calm)
    together = measured(tmp_path / "calm.json", [[0.0, 0.0]] * 2, {**calm, "lazy": 4005.0})
    late = {"zero2": 9000.0, "lazy": 8005.0, "lazy-2": 14000.0, "fsdp2": 9999.0, "limit": 3000.0}
    return alone, together, measured(tmp_path / "late.json", [[3000.0, 0.0], [0.0, 2000.0]], late)


def test_predictions_follow_from_runs_without_delays(runs):
    *calm, late = map(read, runs)
    predictions = {p.name: p for p in predict(late, calm)}
    assert predictions.keys() == {"zero2", "lazy", "lazy-2"}
    assert [p.predicted_s for p in predictions.values()] == pytest.approx([9.0, 8.003, 7.0])
    assert [p.delays_only_s for p in predictions.values()] == [5.0, 5.0, 3.0]
    assert [p.error for p in predictions.values()] == pytest.approx([0.0, 8.003 / 8.005 - 1, -0.5])
    assert [p.predicted_buffers for p in predictions.values()] == [None, 3 * 1024, 5 * 1024]


def test_validation_prints_the_largest_error(runs, capsys):
    assert simulate.main(["--validate", *map(str, runs)]) == 0
    output = capsys.readouterr().out
    assert "not modelled, or not measured without delays: fsdp2" in output
    assert output.endswith("largest error of a time: 50.0%\n")


def test_validation_says_what_is_missing(runs, tmp_path, capsys):
    alone, calm, late = map(str, runs)
    foreign = tmp_path / "foreign.json"
    foreign.write_text('{"workloads": [{"workload": "jitter", "contenders": {}}]}')
    other = str(measured(tmp_path / "other.json", [[0.0, 0.0]] * 2, {"lazy": 1.0}, elements=2))
    for files, says in (
        ([late, calm], "on 1 rank(s)"),
        ([late, alone], "on 2 rank(s)"),
        ([late, alone, other], "on 2 rank(s)"),
        ([alone, calm], "expected one with delays among them"),
        ([str(foreign)], f"{foreign}: expected what"),
    ):
        assert simulate.main(["--validate", *files]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert says in line
