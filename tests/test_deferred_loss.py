"""The loss and metrics an engine reports: values, rows in the monitors, collectives and host reads."""

import csv
import logging
import math
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from ds_lazyreduce.metrics import DeferredMetrics

from .harness import CollectiveRecorder, OneVec, base_config, make_engine, masters

STEP = 2  # samples of a step with one micro-step on 2 ranks


def _rank():
    from deepspeed import comm as dist

    return dist.get_rank()


def _engine(*, lr=0.0, gradients=False, interval="auto", deferred=True, **over):
    """fp32 and lr 0, so that the loss of a micro-step is just the number that `_micro_step` adds."""
    model = OneVec(4)
    lazy = {
        "gradient_partition": {"enabled": gradients},
        "deferred_loss": {"enabled": deferred, "interval": interval},
    }
    config = base_config(precision="fp32", lazy=lazy, **over)
    return make_engine(model, torch.optim.SGD(model.parameters(), lr=lr), config)


def _micro_step(engine, loss, **kwargs):
    engine.backward(engine(torch.ones(4)) + loss, **kwargs)
    engine.step()


@contextmanager
def _logged(level):
    """Messages of this project's logger, as a list."""
    lines = []
    handler = logging.Handler(level)
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("ds_lazyreduce")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


# ---- rows in the monitors


def write_csv(directory):
    monitor = {"enabled": True, "output_path": f"{directory}/rank{_rank()}", "job_name": "job"}
    engine = _engine(interval=2, csv_monitor=monitor)
    for step in range(6):
        _micro_step(engine, step + 10.0 * _rank())
    return engine.last_metrics


def test_the_loss_is_logged_at_all(ranks, tmp_path):  # case 9: DeepSpeed#7665 and its docs
    assert ranks(2).run(write_csv, str(tmp_path)) == [{"train_loss": 9.5}] * 2
    with open(tmp_path / "rank0/job/Train_Samples_train_loss.csv") as file:
        header, *rows = csv.reader(file)
    assert header == ["step", "train_loss"]
    assert [(int(samples), float(value)) for samples, value in rows] == [(4, 5.5), (8, 7.5), (12, 9.5)]
    assert list(tmp_path.glob("rank1/**/*.csv")) == []  # the monitors' own guard and ours


def write_tensorboard(directory):
    engine = _engine(interval=1, tensorboard={"enabled": True, "output_path": directory, "job_name": "job"})
    for step in range(2):
        engine.record_metric("accuracy", step, 4)
        _micro_step(engine, float(step))


def test_tensorboard_gets_the_same_rows(ranks, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    ranks(2).run(write_tensorboard, str(tmp_path))
    events = EventAccumulator(str(tmp_path / "job")).Reload()
    losses = [(event.step, event.value) for event in events.Scalars("Train/Samples/train_loss")]
    assert losses == [(2, 0.0), (4, 1.0)]
    assert [event.value for event in events.Scalars("Train/Samples/accuracy")] == [0.0, 0.25]


def log_lines():
    import ds_lazyreduce.engine as module

    lines, stock = [], module.log_dist
    module.log_dist = lambda message, ranks: lines.append(message)
    try:
        engine = _engine(interval=2)
        for step in range(4):
            _micro_step(engine, float(step))
    finally:
        module.log_dist = stock
    return lines


def test_rank_0_logs_one_line_a_report(ranks):
    lines = ["samples=4, train_loss=0.5", "samples=8, train_loss=2.5"]
    assert ranks(2).run(log_lines) == [lines, []]


# ---- collectives and host reads

_READS = ("item", "tolist", "numpy", "cpu", "__float__", "__int__", "__bool__", "__array__", "__format__")


@contextmanager
def _host_reads(everywhere):
    """Reads of tensors by the host: all of them, or only those that the metrics' own code makes."""
    reads = []

    def counting(name, original):
        def read(*args, **kwargs):
            frame = sys._getframe(1)
            while frame is not None and not everywhere:
                if frame.f_globals.get("__name__") == "ds_lazyreduce.metrics":
                    break
                frame = frame.f_back
            if frame is not None:
                reads.append(name)
            return original(*args, **kwargs)

        return read

    originals = {name: getattr(torch.Tensor, name) for name in _READS}
    for name, original in originals.items():
        setattr(torch.Tensor, name, counting(name, original))
    try:
        yield reads
    finally:
        for name, original in originals.items():
            setattr(torch.Tensor, name, original)


def one_collective_a_window(gradients):
    engine = _engine(interval=5, gradients=gradients, gradient_accumulation_steps=4)
    in_backward, in_steps, pairs = [], [], []
    for step in range(15):
        with CollectiveRecorder() as record, _host_reads(everywhere=False) as reads:
            for _ in range(4):
                loss = engine(torch.ones(4)) + float(step)
                with _host_reads(everywhere=True) as all_reads:
                    engine.backward(loss)
                in_backward += all_reads
                engine.step()
        in_steps.append(bool(reads))
        pairs.append(sum(call.dtype == torch.float64 and call.numel == 4 for call in record.named("all_reduce")))
    return engine.lazy_reduce_report()["metric_collectives"], in_backward, in_steps, pairs


@pytest.mark.parametrize("gradients", [False, True])
def test_one_collective_per_logging_window(ranks, gradients):  # case 10: ms-swift#9966, OLMo#279, trl#6943
    for collectives, in_backward, in_steps, pairs in ranks(2).run(one_collective_a_window, gradients):
        assert collectives == 3
        assert in_backward == []
        reports = [step % 5 == 4 for step in range(15)]
        assert in_steps == reports
        if not gradients:  # (a step's scalar pack may have the same size)
            assert [count > 0 for count in pairs] == reports


def nothing_between_reports(stage):
    """The collectives of ten steps, with the deferred loss and without."""
    counts = []
    for deferred in (True, False):
        engine = _engine(interval=5, deferred=deferred, zero_optimization={"stage": stage})
        with CollectiveRecorder() as record:
            for step in range(10):
                _micro_step(engine, float(step))
        counts.append(len(record.calls))
        last = engine.last_metrics
        engine.destroy()
    return counts[0] - counts[1], last


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_zero_stage(ranks, stage):
    values = ranks(2).run(report_at_stage, stage)
    # ranks 0 and 1 pass 1, 2, 3, 4 and 101, ... in windows of two
    assert values == [[{}, {"train_loss": 51.5}, {"train_loss": 51.5}, {"train_loss": 53.5}]] * 2
    for extra, last in ranks(2).run(nothing_between_reports, stage):
        assert extra == 2 + 2  # two reports, and one exchange of names in two gathers
        assert last == {}


def report_at_stage(stage):
    engine = _engine(interval=2, zero_optimization={"stage": stage})
    values = []
    for step in range(4):
        _micro_step(engine, step + 1.0 + 100 * _rank())
        values.append(engine.last_metrics)
    return values


# ---- the interval


def interval_cases(cases):
    results = []
    for over, interval in cases:
        with _logged(logging.WARNING) as lines:
            engine = _engine(interval=interval, **over)
            reports = []
            for step in range(4):
                _micro_step(engine, float(step))
                reports.append(engine.last_metrics.get("train_loss"))
        results.append((reports, sum("deferred_loss" in line for line in lines), engine.flush_metrics()))
        engine.destroy()
    return results


def test_the_interval(ranks):  # case 11: DeepSpeed#6602, #2629; accelerate's config handling
    every, second = [0.0, 1.0, 2.0, 3.0], [None, 0.5, 0.5, 2.5]
    cases = {
        "absent": (({}, "auto"), [None] * 4, 1, {"train_loss": 1.5}),
        "null": (({"steps_per_print": None}, "auto"), [None] * 4, 1, {"train_loss": 1.5}),
        "infinite": (({"steps_per_print": math.inf}, "auto"), [None] * 4, 1, {"train_loss": 1.5}),
        "one": (({"steps_per_print": 1}, "auto"), every, 0, {}),
        "own key": (({"steps_per_print": math.inf}, 2), second, 0, {}),
        "own key again": (({"steps_per_print": 1}, 2), second, 0, {}),
    }
    results = ranks(2).run(interval_cases, [case[0] for case in cases.values()])
    for rank, per_case in enumerate(results):
        for (name, case), result in zip(cases.items(), per_case, strict=True):
            reports, warnings, flushed = case[1:]
            assert result == (reports, warnings if rank == 0 else 0, flushed), name


def test_an_interval_of_0_is_refused(ranks):
    for error in ranks(2).run_expect_error(_engine, interval=0):
        assert error.type == "ConfigError" and "lazy_reduce.deferred_loss.interval: got 0" in error.message


# ---- a backward that fails


def failed_backward(gradients, scale_wrt_gas):
    engine = _engine(gradients=gradients, gradient_accumulation_steps=2)
    for loss in (1.0, 3.0):
        with pytest.raises(AssertionError):
            engine.backward(torch.tensor(1000.0), scale_wrt_gas=scale_wrt_gas)  # no graph
        _micro_step(engine, loss, scale_wrt_gas=scale_wrt_gas)
    return engine.flush_metrics()


@pytest.mark.parametrize("scale_wrt_gas, reported", [(True, 2.0), (False, 4.0)])
@pytest.mark.parametrize("gradients", [False, True])
def test_a_backward_that_fails_is_not_counted(ranks, gradients, scale_wrt_gas, reported):
    assert ranks(2).run(failed_backward, gradients, scale_wrt_gas) == [{"train_loss": reported}] * 2


# ---- names


def late_names():
    engine = _engine(interval=2)
    reports = []
    for step in range(8):
        if _rank() == 1 and step >= 3:
            engine.record_metric("late", step, 1)
        engine.record_metric(f"only_{_rank()}", 1.0, 2)
        _micro_step(engine, 1.0)
        if step % 2:
            reports.append(engine.last_metrics)
    return reports, engine.flush_metrics()


def test_names_that_differ_between_ranks_and_appear_late(ranks):
    usual = {"only_0": 0.5, "only_1": 0.5, "train_loss": 1.0}
    for reports, flushed in ranks(2).run(late_names):
        # new at step 3, agreed at the next report: nothing of it is lost until then
        assert reports == [usual, usual, {**usual, "late": 4.0}, {**usual, "late": 6.5}]
        assert flushed == {}


def evaluation_loop():
    engine = _engine(interval=100)
    _micro_step(engine, 7.0)
    engine.flush_metrics()
    engine.eval()
    with torch.no_grad(), _host_reads(everywhere=True) as reads:
        for batch in range(_rank() + 1):  # ranks may have different numbers of batches
            engine.record_metric("eval_loss", engine(torch.ones(4)) + batch + _rank(), 1)
    return reads, engine.flush_metrics(), engine.last_metrics


def test_an_evaluation_loop(ranks):
    for reads, flushed, last in ranks(2).run(evaluation_loop):
        assert reads == []
        assert flushed == last == {"eval_loss": (0 + 1 + 2) / 3}


# ---- what counts how often


def weighted(num_tokens, tensor):
    engine = _engine(interval=100)
    for tokens in num_tokens[_rank()]:
        loss = float(tokens) if tokens else math.nan  # a mean over no tokens
        weight = torch.tensor(tokens) if tensor else tokens
        _micro_step(engine, loss, num_tokens=weight)
    return engine.flush_metrics()


@pytest.mark.parametrize("tensor", [False, True])
def test_num_tokens_weights_the_log(ranks, tensor):
    for flushed in ranks(2).run(weighted, [[1, 3], [6, 0]], tensor):
        assert flushed == {"train_loss": (1 * 1 + 3 * 3 + 6 * 6) / 10}


def unweighted_gradients(pass_tokens):
    engine = _engine(lr=0.3, interval=100, gradients=True, gradient_accumulation_steps=2)
    x = torch.tensor([0.1, 0.2, 0.3, 0.7]) * (_rank() + 1)
    for step in range(4):
        kwargs = {"num_tokens": 3 + step + _rank()} if pass_tokens else {}
        engine.backward(engine(x) / 3, **kwargs)
        engine.step()
    return masters(engine)["w"].tolist()


def test_num_tokens_leaves_gradients_alone_without_token_normalization(ranks):
    assert ranks(2).run(unweighted_gradients, True) == ranks(2).run(unweighted_gradients, False)


def losses_divided_by_the_caller():
    engine = _engine(interval=1, gradient_accumulation_steps=4)
    reports = []
    for step in range(2):
        for micro_step in range(4):
            _micro_step(engine, (step + micro_step) / 4, scale_wrt_gas=False)
        reports.append(engine.last_metrics["train_loss"])
    return reports


def test_losses_of_a_window_add_up_with_scale_wrt_gas_false(ranks):
    assert ranks(2).run(losses_divided_by_the_caller) == [[1.5, 2.5]] * 2


def precise(gradients):
    """The mean of many losses, recorded before GAS, loss scale or clipping."""
    engine = _engine(interval=7, gradients=gradients, gradient_accumulation_steps=3, gradient_clipping=0.1)
    losses = torch.rand(2, 21, generator=torch.Generator().manual_seed(5)) * 10
    for loss in losses[_rank()]:
        _micro_step(engine, loss.item())
    return engine.last_metrics["train_loss"], losses.double().mean().item()


@pytest.mark.parametrize("gradients", [False, True])
def test_the_report_is_the_mean_of_the_losses(ranks, gradients):
    for value, mean in ranks(2).run(precise, gradients):
        assert value == pytest.approx(mean, rel=1e-6)


def direct_backward():
    engine = _engine(interval=1)
    loss = engine(torch.ones(4)) + 5.0
    loss.backward()
    engine.record_metric("mine", loss, 1)
    engine.step()
    return engine.last_metrics


def test_a_direct_backward_records_nothing(ranks):
    assert ranks(2).run(direct_backward) == [{"mine": 5.0}] * 2


def switched_off():
    engine = _engine(deferred=False, steps_per_print=1)
    _micro_step(engine, 5.0)
    engine.record_metric("mine", 1, 2)
    return engine.last_metrics, engine.flush_metrics()


def test_without_deferred_loss_only_flush_reports(ranks):
    assert ranks(2).run(switched_off) == [({}, {"mine": 0.5})] * 2


# ---- the end


def unfinished_report(end, directory):
    """A report whose values are on their way to the host when the engine ends."""
    from ds_lazyreduce import metrics

    monitor = {"enabled": True, "output_path": directory, "job_name": "job"}
    engine = _engine(interval=2, csv_monitor=monitor)
    engine._metrics._readback = LateReadback
    for step in range(3):
        _micro_step(engine, float(step))
    engine._metrics.add("unreported", 1.0, 1)
    with CollectiveRecorder() as record:
        engine.destroy() if end == "destroy" else metrics._finish_if_alive(lambda: engine._metrics)
    return record.names()


class LateReadback:
    """Ready at the third question, as on an accelerator that still works on it."""

    def __init__(self, tensor):
        self.asked, self.values = 0, tensor.tolist()

    def ready(self):
        self.asked += 1
        return self.asked > 2

    def wait(self):
        return self.values


@pytest.mark.parametrize("end", ["destroy", "exit"])
def test_what_is_complete_is_published_at_the_end(ranks, tmp_path, end):
    assert ranks(2).run(unfinished_report, end, str(tmp_path)) == [[], []]
    rows = Path(tmp_path / "job/Train_Samples_train_loss.csv").read_text().split()
    assert rows == ["step,train_loss", "4,0.5"]


def test_the_end_does_not_wait_for_values_that_never_come():
    class Never(LateReadback):
        def ready(self):
            return False

    published = []
    metrics = DeferredMetrics(
        device="cpu",
        interval=1,
        all_reduce=lambda pack: None,
        gather_names=lambda names: [names],
        publish=lambda values, samples: published.append(values),
        readback=Never,
    )
    metrics.add("loss", 1.0, 1)
    metrics.end_of_step(1, 1)
    metrics.finish(patience=0.0)
    assert published == []
    assert metrics.last == {}


AT_EXIT = """
from ds_lazyreduce.metrics import DeferredMetrics
from tests.test_deferred_loss import LateReadback

def publish(values, samples):
    print(values, samples)

metrics = DeferredMetrics(
    device="cpu", interval=1, all_reduce=lambda pack: None, gather_names=lambda names: [names],
    publish=publish, readback=LateReadback,
)
metrics.finish_at_exit()
metrics.add("loss", 1.0, 2)
metrics.end_of_step(1, 8)
print("done")
"""


def test_the_interpreters_exit_publishes():
    done = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=240)
    assert done.stdout.split("\n")[:2] == ["done", "{'loss': 0.5} 8"], done.stderr
