"""`PipelineEngine` with the loss deferred: 2 stages on 2 data-parallel ranks each, against the stock engine."""

import contextlib
import csv
import io
import math

import pytest
import torch
from deepspeed.runtime.pipe.module import LayerSpec, PipelineModule

from .harness import CollectiveRecorder, base_config, make_engine

MICRO_BATCHES = 3
WORLD = 4


def _rank():
    from deepspeed import comm as dist

    return dist.get_rank()


class Balanced(PipelineModule):
    """With additional losses, as mixture-of-experts models have: one tensor that is used again and again."""

    def __init__(self, additional, dtype, stages):
        self.given, self.handed_out = additional, torch.zeros((), dtype=dtype)
        torch.manual_seed(0)
        layers = [LayerSpec(torch.nn.Linear, 4, 4) for _ in range(2)]
        super().__init__(layers, num_stages=stages, loss_fn=lambda out, label: (out - label).square().mean())

    def get_additional_losses(self):
        if not self.given:
            return None
        self.handed_out += 0.1
        return {"balance": self.handed_out}


def _engine(*, deferred=True, additional=False, precision="fp32", stages=2, **over):
    lazy = {"gradient_partition": {"enabled": False}, "deferred_loss": {"enabled": True, "interval": 2}}
    if deferred == "off":
        lazy["deferred_loss"]["enabled"] = False
    over = {"gradient_accumulation_steps": MICRO_BATCHES, "zero_optimization": {"stage": 0}, **over}
    config = base_config(precision=precision, lazy=lazy if deferred else None, **over)
    model = Balanced(additional, torch.bfloat16 if precision == "bf16" else torch.float32, stages)
    return make_engine(model, torch.optim.SGD(model.parameters(), lr=0.05), config)


def _batches(engine, seed=0):
    """Endless micro-batches, different for each data-parallel rank and the same for its stages."""
    generator = torch.Generator().manual_seed(100 * seed + engine.grid.data_parallel_id)
    dtype = next(engine.module.parameters()).dtype
    while True:
        x, y = torch.rand(2, 1, 4, generator=generator)
        yield x.to(dtype), y.to(dtype)


def train(batches, **over):
    """Per batch: what train_batch returned, its collectives, and what the engine knew afterwards."""
    engine = _engine(**over)
    data = _batches(engine)
    rows = []
    for _ in range(batches):
        with CollectiveRecorder() as record:
            value = engine.train_batch(data)
        calls = [c for c in record.calls if c.name not in ("send", "recv")]
        local = getattr(engine, "local_loss", None)
        rows.append((value.item(), len(calls), None if local is None else local.item()))
    last = getattr(engine, "last_metrics", None)
    extra = engine.get_additional_losses()
    return rows, last, {name: loss.item() for name, loss in (extra or {}).items()}, engine.is_last_stage()


@pytest.mark.parametrize("stage", [0, 1])
def test_the_report_replaces_the_collectives_of_every_batch(ranks, stage):
    pool = ranks(WORLD)
    over = {"zero_optimization": {"stage": stage}}
    stock = pool.run(train, 6, deferred=False, **over)
    lazy = pool.run(train, 6, **over)
    losses = [row[0] for row in stock[0][0]]
    for rank in range(WORLD):
        rows, last, _, is_last_stage = lazy[rank]
        returned = [row[0] for row in rows]
        assert all(math.isnan(value) for value in returned[:1])
        for step in range(1, 6):  # batches 0 and 1 are in the report at the end of batch 1, and so on
            stop = step + 1 - (step + 1) % 2
            mean = (losses[stop - 2] + losses[stop - 1]) / 2
            assert returned[step] == pytest.approx(mean, rel=1e-6)
        assert last == {"train_loss": pytest.approx((losses[4] + losses[5]) / 2, rel=1e-6)}
        # stock: an all-reduce on the last stage, and a broadcast to the others, every batch
        saved = [before[1] - after[1] for before, after in zip(stock[rank][0], rows, strict=True)]
        every_batch = 2 if is_last_stage else 1
        assert saved[0] == saved[2] == saved[4] == every_batch
        assert saved[3] == saved[5] == every_batch - 1  # the one all-reduce of a report
        assert (rows[0][2] is not None) == is_last_stage
    # rank order is stage-major: the last stage's two data-parallel ranks are 2 and 3
    for step in range(6):
        local = [lazy[rank][0][step][2] for rank in (2, 3)]
        assert sum(local) / 2 == pytest.approx(losses[step], rel=1e-6)
    assert [lazy[rank][0][0][0] for rank in range(WORLD)] == pytest.approx([math.nan] * WORLD, nan_ok=True)
    assert len({tuple(row[0] for row in lazy[rank][0][1:]) for rank in range(WORLD)}) == 1


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_additional_losses_by_name(ranks, precision):
    pool = ranks(WORLD)
    lazy = pool.run(train, 2, additional=True, precision=precision)
    for _, last, reported, _ in lazy:
        assert set(last) == {"train_loss", "balance"}
        assert reported == {"balance": pytest.approx(last["balance"])}
    # the module counts in tenths and is asked once a forward pass; bf16 counts coarsely
    tolerance = 1e-6 if precision == "fp32" else 0.02
    assert last["balance"] == pytest.approx(sum(0.1 * k for k in range(1, 7)) / 6, rel=tolerance)


def as_stock_when_off():
    rows, last, _, _ = train(2, deferred="off")
    return [row[:2] for row in rows], last


def test_without_deferred_loss_the_engine_is_stock(ranks):
    stock = ranks(WORLD).run(train, 2, deferred=False)
    for rank, (rows, last) in enumerate(ranks(WORLD).run(as_stock_when_off)):
        assert rows == [row[:2] for row in stock[rank][0]]
        assert last == {}


def evaluate(deferred, bcast_loss, monitor=None):
    engine = _engine(deferred=deferred, **({"csv_monitor": monitor} if monitor else {}))
    engine.train_batch(_batches(engine))
    values = []
    for kwargs in ({}, {"num_micro_batches": 2}):
        value = engine.eval_batch(_batches(engine, seed=1), bcast_loss=bcast_loss, **kwargs)
        values.append(None if value is None else value.item())
    flushed = engine.flush_metrics() if deferred else None
    return values, flushed


@pytest.mark.parametrize("bcast_loss", [True, False])
def test_eval_batch_keeps_its_meaning(ranks, bcast_loss):
    stock = ranks(WORLD).run(evaluate, False, bcast_loss)
    lazy = ranks(WORLD).run(evaluate, True, bcast_loss)
    assert [values for values, _ in lazy] == [values for values, _ in stock]
    first = ranks(WORLD).run(train, 1, deferred=False)[0][0][0][0]
    for _, flushed in lazy:  # evaluation adds nothing to the training loss
        assert flushed == {"train_loss": pytest.approx(first, rel=1e-6)}


def write_rows(directory, **over):
    output = io.StringIO()
    monitor = {"enabled": True, "output_path": directory, "job_name": "job"}
    with contextlib.redirect_stdout(output):
        rows, *_ = train(4, csv_monitor=monitor, steps_per_print=2, **over)
    return [row[0] for row in rows], output.getvalue()


def test_prints_and_rows_of_the_loss_are_ours(ranks, tmp_path):
    results = ranks(WORLD).run(write_rows, str(tmp_path))
    with open(tmp_path / "job/Train_Samples_train_loss.csv") as file:
        _, *rows = csv.reader(file)
    returned = results[0][0]
    samples = MICRO_BATCHES * 2
    assert [int(row[0]) for row in rows] == [2 * samples, 4 * samples]
    assert [float(row[1]) for row in rows] == pytest.approx([returned[1], returned[3]], rel=1e-6)
    assert (tmp_path / "job/Train_Samples_lr.csv").exists()  # stock's other rows stay
    printed = [line for line in results[0][1].splitlines() if line.startswith("steps:")]
    assert [line.split()[:2] for line in printed] == [["steps:", "2"], ["steps:", "4"]]
    assert all("samples/sec" in line and "loss" not in line for line in printed)


def test_timers_are_logged(ranks, tmp_path):
    # (With more stages than one, stock's own timers fail: it starts those of the backward pass twice.)
    results = ranks(2).run(write_rows, str(tmp_path), wall_clock_breakdown=True, stages=1)
    assert results[0][1].count("samples/sec") >= 2


def failing_batch():
    """The second batch fails after a forward pass, on every rank."""
    engine = _engine()
    data = _batches(engine)
    engine.train_batch(data)
    local = engine.local_loss

    def fail(schedule):
        if engine.is_last_stage():
            engine._add_to_batch("train_loss", torch.tensor(1e6))
        raise ArithmeticError("broken forward")

    engine._exec_schedule = fail
    with pytest.raises(ArithmeticError):
        engine.train_batch(data)
    assert engine.local_loss is local
    return engine.flush_metrics(), engine.flush_metrics()


def test_a_batch_that_fails_is_not_counted(ranks):
    first = ranks(WORLD).run(train, 1, deferred=False)[0][0][0][0]
    for flushed, again in ranks(WORLD).run(failing_batch):
        assert flushed == {"train_loss": pytest.approx(first, rel=1e-6)}
        assert again == {}


def only_train_batch():
    from deepspeed.runtime.pipe.module import PipelineError

    engine = _engine()
    for call in (lambda: engine.backward(torch.ones(())), engine.step, lambda: engine.forward(1)):
        with pytest.raises(PipelineError):
            call()
    with torch.no_grad(), pytest.raises(RuntimeError, match="eval_batch"):
        engine.train_batch(_batches(engine))
    return engine.flush_metrics()


def test_only_train_batch_is_accessible(ranks):
    assert ranks(WORLD).run(only_train_batch) == [{}] * WORLD


def with_gradient_partition():
    model = Balanced(False, torch.float32, 2)
    make_engine(model, torch.optim.SGD(model.parameters(), lr=1.0), base_config(precision="fp32", lazy=True))


def test_gradient_partition_is_refused(ranks):
    for error in ranks(WORLD).run_expect_error(with_gradient_partition):
        assert error.type == "ConfigError"
        assert "gradient_partition.enabled: got true; expected false with a PipelineEngine" in error.message
