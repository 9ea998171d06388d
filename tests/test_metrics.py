"""Deferred metrics: windows by hand, and groups of ranks played by threads that meet in fake collectives."""

import math
import threading
from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_lazyreduce.metrics import DeferredMetrics, OpenWindow, Readback, over_group


class FakeGroup:
    """Collectives between threads, and a count of them."""

    def __init__(self, ranks):
        self.ranks = ranks
        self.all_reduces = 0
        self._barrier = threading.Barrier(ranks, timeout=20)
        self._slots = [None] * ranks

    def _exchange(self, rank, value):
        self._slots[rank] = value
        self._barrier.wait()
        values = list(self._slots)
        self._barrier.wait()
        return values

    def all_reduce(self, rank, tensor):
        tensors = self._exchange(rank, tensor.clone())
        assert len({t.shape for t in tensors}) == 1, "ranks reduce packs of different shapes"
        tensor.copy_(torch.stack(tensors).sum(0))
        self.all_reduces += rank == 0

    def metrics(self, rank, interval=1, **kwargs):
        return DeferredMetrics(
            device="cpu",
            interval=interval,
            all_reduce=lambda tensor: self.all_reduce(rank, tensor),
            gather_names=lambda names: self._exchange(rank, names),
            **kwargs,
        )

    def run(self, body):
        """``body(rank)`` on every rank; returns their results in order, raises the first error."""
        results, errors = [None] * self.ranks, []

        def one(rank):
            try:
                results[rank] = body(rank)
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        real = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)]
        if errors:
            raise (real or errors)[0]
        return results


class LateReadback(Readback):
    """A readback that is not ready until someone waits for it, as on a busy accelerator."""

    def ready(self):
        return False


class FlippingReadback(Readback):
    """A readback whose readiness differs from rank to rank and from time to time."""

    asked = 0

    def ready(self):
        FlippingReadback.asked += 1
        return FlippingReadback.asked % 3 == 0


# ---- one rank's arithmetic


def test_two_windows_without_a_group():
    a, b = OpenWindow("cpu"), OpenWindow("cpu")
    a.add("loss", 2.0, 1)
    b.add("loss", torch.tensor(4.0, dtype=torch.bfloat16), torch.tensor(1))
    for window in (a, b):
        window.agree(["loss"])
    assert (a.pack() + b.pack()).tolist() == [[0.0, 0.0], [6.0, 2.0]]
    a.close()
    assert a.pack().tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_agreed_rows_are_in_one_order_and_new_names_stay_open():
    a, b = OpenWindow("cpu"), OpenWindow("cpu")
    for name in "zyx":
        a.add(name, ord(name), 1)
    b.add("a", 5, 1)
    for window in (a, b):
        window.agree(["z", "y", "a"])
    assert a.agreed == b.agreed == ["a", "y", "z"]
    assert a.pack().tolist() == [[1.0, 0.0], [0.0, 0.0], [ord("y"), 1.0], [ord("z"), 1.0]]
    a.close()
    a.agree(["x"])
    assert a.agreed == ["a", "y", "z", "x"]
    assert a.pack()[-1].tolist() == [ord("x"), 1.0]


def test_many_names_grow_the_window():
    window = OpenWindow("cpu")
    for _ in range(2):
        for i in range(100):
            window.add(str(i), i, 1)
    window.agree(window.names())
    sums = dict(zip(window.agreed, window.pack()[1:].tolist(), strict=True))
    assert sums == {str(i): [2.0 * i, 2.0] for i in range(100)}


def test_sums_are_double_precision_and_detached():
    window = OpenWindow("cpu")
    loss = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    for _ in range(1000):
        window.add("loss", loss, 1)  # bf16 would stop at 256
    window.agree(["loss"])
    pack = window.pack()
    assert pack.dtype == torch.float64 and not pack.requires_grad
    assert pack[1].tolist() == [1000.0, 1000.0]


@pytest.mark.parametrize(
    "name, total, count, error",
    [
        ("loss", torch.zeros(2), 1, ValueError),
        ("loss", 1.0, torch.zeros(0), ValueError),
        ("loss", torch.tensor(1j), 1, ValueError),
        (3, 1.0, 1, TypeError),
        *((name, 1.0, 1, ValueError) for name in ("", "a\0b", "a\nb", "\ud800", "é" * 101)),
        *(("loss", total, 1, ValueError) for total in ("abc", "1.5", None, [1.0], 1j, 10**400)),
        ("loss", 1.0, "1", ValueError),
    ],
)
def test_a_bad_value_is_refused_before_anything_is_added(name, total, count, error):
    window = OpenWindow("cpu")
    with pytest.raises(error, match="metric "):
        window.add(name, total, count)
    assert window.names() == []


def test_a_nonpositive_interval_is_refused():
    with pytest.raises(ValueError, match="interval"):
        FakeGroup(1).metrics(0, interval=0)


# ---- reports


def test_one_collective_per_logging_window():
    """2 ranks, 4 micro-steps, interval 5, 15 steps: three collectives, and each value is the global mean."""
    group = FakeGroup(2)

    def body(rank):
        rows = []
        metrics = group.metrics(rank, interval=5, publish=lambda *row: rows.append(row))
        for step in range(1, 16):
            for _ in range(4):
                metrics.add("train_loss", torch.tensor(float(step + rank)), 1)
            metrics.end_of_step(step, samples=8 * step)
        assert (metrics.collectives, metrics.exchanges) == (3, 1)
        return rows

    expected = [({"train_loss": mean + 0.5}, samples) for mean, samples in ((3, 40), (8, 80), (13, 120))]
    assert group.run(body) == [expected, expected]
    assert group.all_reduces == 3


def test_a_rank_with_nothing_takes_part_and_unequal_counts_are_weighted():
    group = FakeGroup(3)

    def body(rank):
        metrics = group.metrics(rank)
        if rank:
            metrics.add("loss", 10.0 * rank, rank)
        metrics.end_of_step(1, 0)
        return metrics.last

    assert group.run(body) == [{"loss": 10.0}] * 3


def test_zero_counts_are_dropped_and_empty_windows_keep_the_last_report():
    group, rows = FakeGroup(1), []
    metrics = group.metrics(0, publish=lambda *row: rows.append(row))
    metrics.add("loss", 3.0, 1)
    metrics.add("aux", 0.0, 0)
    metrics.end_of_step(1, 1)
    metrics.end_of_step(2, 2)
    assert metrics.last == {"loss": 3.0}
    assert rows == [({"loss": 3.0}, 1)]
    metrics.add("aux", 4.0, 2)
    metrics.end_of_step(3, 3)
    assert metrics.last == {"aux": 2.0}
    assert metrics.last_on_device("loss").item() == 3.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_totals_are_reported_and_leave_with_their_window(bad):
    metrics = FakeGroup(1).metrics(0)
    metrics.add("loss", bad, 1)
    metrics.add("other", 1.0, 1)
    metrics.end_of_step(1, 0)
    assert str(metrics.last["loss"]) == str(bad)
    assert metrics.last["other"] == 1.0
    metrics.add("loss", 1.0, 1)
    metrics.end_of_step(2, 0)
    assert metrics.last == {"loss": 1.0}


@pytest.mark.parametrize("readback", [Readback, LateReadback, FlippingReadback])
def test_a_name_new_on_one_rank_is_reported_one_window_later(readback):
    group = FakeGroup(2)

    def body(rank):
        rows = []
        metrics = group.metrics(rank, publish=lambda values, _: rows.append(values), readback=readback)
        for step in range(1, 6):
            metrics.add("loss", step, 1)
            if rank == 1 and step >= 2:
                metrics.add("aux", 10 * step, 1)
            metrics.end_of_step(step, step)
        assert metrics.last == rows[-1]
        return rows, metrics.exchanges, metrics.collectives

    rows = [{"loss": 1.0}, {"loss": 2.0}, {"loss": 3.0, "aux": 25.0}]
    rows += [{"loss": 4.0, "aux": 40.0}, {"loss": 5.0, "aux": 50.0}]
    assert group.run(body) == [(rows, 2, 5)] * 2


def test_flush_reports_new_names_at_once_and_ends_the_window():
    group = FakeGroup(2)

    def body(rank):
        metrics = group.metrics(rank, interval=None, readback=LateReadback)
        metrics.end_of_step(1, 1)
        assert metrics.collectives == 0
        metrics.add(f"only_on_{rank}", rank, 1)
        first = metrics.flush(1)
        assert metrics.flush(1) == {}
        assert metrics.last == first
        metrics.add("late", 1, 1)
        return first, metrics.flush(2)

    assert group.run(body) == [({"only_on_0": 0.0, "only_on_1": 1.0}, {"late": 1.0})] * 2


def test_the_host_reads_a_report_only_when_it_is_ready_or_asked_for():
    group, rows = FakeGroup(1), []
    metrics = group.metrics(0, interval=2, publish=lambda *row: rows.append(row), readback=LateReadback)
    for step in (1, 2, 3):
        metrics.add("loss", step, 1)
        metrics.end_of_step(step, step)
    assert rows == []
    metrics.end_of_step(4, 4)
    assert rows == [({"loss": 1.5}, 2)]
    assert metrics.last == {"loss": 3.0}
    assert rows[1:] == [({"loss": 3.0}, 4)]


def test_the_last_value_is_on_the_device_before_the_host_has_it():
    metrics = FakeGroup(1).metrics(0, readback=LateReadback)
    assert metrics.last_on_device("loss").isnan()
    metrics.add("loss", 3.0, 2)
    metrics.end_of_step(1, 0)
    first = metrics.last_on_device("loss")
    assert first.item() == 1.5 and first.shape == ()
    metrics.add("other", 1.0, 1)
    metrics.add("loss", 5.0, 1)
    metrics.end_of_step(2, 0)
    assert metrics.last_on_device("loss").item() == 5.0
    assert metrics.last_on_device("other").isnan()
    assert first.item() == 1.5


def test_over_group_asks_the_given_group():
    class Comm:
        def get_world_size(self, group):
            assert group == "dp"
            return 2

        def all_gather_object(self, gathered, names, group):
            assert group == "dp"
            gathered[:] = [names, ["theirs"]]

        def all_reduce(self, tensor, group):
            assert group == "dp"
            tensor.mul_(2)

    all_reduce, gather_names = over_group(Comm(), Comm(), "dp")
    assert gather_names(["ours"]) == [["ours"], ["theirs"]]
    metrics = DeferredMetrics(device="cpu", interval=1, all_reduce=all_reduce, gather_names=gather_names)
    metrics.add("ours", 3.0, 1)
    assert metrics.flush(0) == {"ours": 3.0}


# ---- checkpoints


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_an_open_window_survives_a_checkpoint_on_another_number_of_ranks(ranks):
    group = FakeGroup(2)

    def save(rank):
        metrics = group.metrics(rank, interval=10)
        metrics.add("loss", 1.0 + rank, 1)
        if rank:
            metrics.add("aux", 7.0, 2)
        saved = metrics.export_open_window()
        metrics.add("loss", 3.0, 1)  # exporting leaves the window open
        return saved, metrics.flush(0)

    (saved, flushed), (other, _) = group.run(save)
    assert saved == other == {"aux": (7.0, 2.0), "loss": (3.0, 2.0)}
    assert flushed == {"aux": 3.5, "loss": 2.25}

    group = FakeGroup(ranks)

    def load(rank):
        metrics = group.metrics(rank, interval=2)
        metrics.add("loss", 1e9, 1)  # a window that was open before loading is replaced
        metrics.import_open_window(saved, is_first_rank=rank == 0)
        metrics.add("loss", 3.0, 1)
        metrics.end_of_step(2, 0)
        return metrics.last

    expected = {"aux": 3.5, "loss": (3.0 + 3.0 * ranks) / (2 + ranks)}
    assert group.run(load) == [expected] * ranks


def test_importing_in_mid_run_agrees_the_restored_names_at_the_next_report():
    group = FakeGroup(2)

    def body(rank):
        metrics = group.metrics(rank)
        metrics.add("loss", 1.0, 1)
        metrics.end_of_step(1, 0)
        metrics.import_open_window({"aux": (8.0, 4.0)}, is_first_rank=rank == 0)
        metrics.end_of_step(2, 0)
        return metrics.last

    assert group.run(body) == [{"aux": 2.0}] * 2


# ---- never lose, never count twice

_NAMES = st.sampled_from(["a", "b", "c", "d"])
_ADD = st.tuples(st.just("add"), st.integers(0, 2), _NAMES, st.integers(-99, 99), st.integers(0, 3))
_TOGETHER = st.sampled_from([("step",), ("step",), ("flush",), ("checkpoint",)])


@settings(max_examples=60, deadline=None)
@given(
    events=st.lists(_ADD | _ADD | _TOGETHER, max_size=30),
    ranks=st.integers(1, 3),
    interval=st.integers(1, 3),
    readback=st.sampled_from([Readback, LateReadback, FlippingReadback]),
)
def test_every_sum_is_reported_exactly_once(events, ranks, interval, readback):
    group = FakeGroup(ranks)

    def body(rank):
        packs, shown = defaultdict(lambda: [0.0, 0.0]), []

        class Recording(readback):
            def wait(self):
                rows = super().wait()
                shown.append(rows)
                return rows

        published = []
        metrics = group.metrics(rank, interval, readback=Recording, publish=lambda values, _: published.append(values))
        steps = 0
        for event in [*events, ("flush",)]:
            if event[0] == "add":
                if event[1] % ranks == rank:
                    metrics.add(*event[2:])
            elif event[0] == "step":
                steps += 1
                metrics.end_of_step(steps, steps)
            elif event[0] == "flush":
                metrics.flush(steps)
            else:
                metrics.import_open_window(metrics.export_open_window(), is_first_rank=rank == 0)
        names = metrics._window.agreed  # only ever appended to, so it names the rows of every earlier pack
        means = []
        for rows in shown:
            for name, (total, count) in zip(names, rows[1:], strict=False):
                packs[name][0] += total
                packs[name][1] += count
            mean = {n: t / c for n, (t, c) in zip(names, rows[1:], strict=False) if c}
            means += [mean] if mean else []
        assert published == means
        return {name: pair for name, pair in packs.items() if pair != [0.0, 0.0]}, published

    expected = defaultdict(lambda: [0.0, 0.0])
    for event in events:
        if event[0] == "add":
            expected[event[2]][0] += event[3]
            expected[event[2]][1] += event[4]
    expected = {name: pair for name, pair in expected.items() if pair != [0.0, 0.0]}
    results = group.run(body)
    assert results == [(expected, results[0][1])] * ranks
