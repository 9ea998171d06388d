"""The open logging window in checkpoints."""

import json
import math
import pickle
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_lazyreduce.checkpoint import WINDOW_FILE, CheckpointError, read_window, write_window

from .harness import OneVec, base_config, make_engine


def _rank():
    from deepspeed import comm as dist

    return dist.get_rank()


def _engine(*, lazy=True, gradients=False, interval=4, **over):
    model = OneVec(4)
    section = {"gradient_partition": {"enabled": gradients}, "deferred_loss": {"interval": interval}}
    over = {"zero_optimization": {"stage": 2 if gradients else 0}, **over}
    config = base_config(precision="fp32", lazy=section if lazy else None, **over)
    return make_engine(model, torch.optim.SGD(model.parameters(), lr=0.0), config)


def _steps(engine, losses):
    for loss in losses:
        engine.backward(engine(torch.ones(4)) + loss)
        engine.step()


def save(directory, losses, metrics, **over):
    engine = _engine(**over)
    _steps(engine, [loss + _rank() for loss in losses])
    for name, total, count in metrics:
        engine.record_metric(name, total, count)
    result = engine.save_checkpoint(directory, tag="now")
    return result, engine.flush_metrics()


def resume(directory, losses, **over):
    engine = _engine(**over)
    kinds = [type(part).__name__ for part in engine.load_checkpoint(directory)]
    _steps(engine, losses)
    return kinds, engine.last_metrics, engine.flush_metrics()


# ---- the file


def test_every_number_survives(tmp_path):
    path = str(tmp_path / "tag" / WINDOW_FILE)
    window = {
        "train_loss": (0.1 + 0.2, 3.0),
        "größe/µ": (-0.0, 1e300),
        "inf": (math.inf, 1.0),
        "minus inf": (-math.inf, 2**53 + 1.0),
        "nan": (math.nan, 1.0),
    }
    write_window(path, window)
    write_window(path, window)  # replaces
    assert repr(read_window(path)) == repr(window)
    json.loads((tmp_path / "tag" / WINDOW_FILE).read_text(), parse_constant=pytest.fail)  # strict JSON
    assert [file.name for file in (tmp_path / "tag").iterdir()] == [WINDOW_FILE]


def test_a_missing_file_is_an_empty_window(tmp_path):
    assert read_window(str(tmp_path / WINDOW_FILE)) == {}


BROKEN = [
    "",
    '{"version": 1, "metrics": {"train_loss": {"sum": "1.0", "cou',
    "[]",
    '{"version": 1}',
    '{"version": 2, "metrics": {}}',
    '{"version": 1, "metrics": {"train_loss": {"sum": "one", "count": "1.0"}}}',
    '{"version": 1, "metrics": {"train_loss": [1.0, 1.0]}}',
    "\x80",
    "[" * 100_000,
    '{"version": ' * 100_000,
    '{"version": 1, "metrics": {"train_loss": {"sum": 1%s, "count": "1.0"}}}' % ("0" * 400),
]


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_file_is_named(tmp_path, text):
    path = tmp_path / WINDOW_FILE
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError) as error:
        read_window(str(path))
    assert str(error.value).startswith(f"{path}: ")


class _Pickled:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("write", [pickle.dump, torch.save])
def test_a_file_that_would_run_code_is_only_broken(tmp_path, write):
    path, trace = tmp_path / WINDOW_FILE, tmp_path / "ran"
    with open(path, "wb") as file:
        write(_Pickled(trace), file)
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        read_window(str(path))
    assert not trace.exists()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["version", "metrics", "sum", "count", "loss"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(JSON | JSON.map(lambda metrics: {"version": 1, "metrics": {"loss": metrics}}))
def test_arbitrary_json_is_a_window_or_broken(content):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, WINDOW_FILE)
        path.write_text(json.dumps(content))
        try:
            window = read_window(str(path))
        except CheckpointError as error:
            assert str(error).startswith(f"{path}: ")
        else:
            assert all(isinstance(number, float) for pair in window.values() for number in pair)


# ---- engines


@pytest.mark.parametrize("gradients", [False, True])
def test_the_window_goes_on_after_a_restart(ranks, tmp_path, gradients):
    over = {"gradients": gradients}
    saved = ranks(2).run(save, str(tmp_path), [1.0, 2.0], [("accuracy", 3, 10)], **over)
    assert saved == [(True, {"accuracy": 0.3, "train_loss": 2.0})] * 2  # saving leaves the window open
    # in the report at step 4: 1, 2 on rank 0, 2, 3 on rank 1, and 6, 7 on both
    whole = {"accuracy": 0.3, "train_loss": (1 + 2 + 2 + 3 + 2 * (6 + 7)) / 8}
    for kinds, last, flushed in ranks(2).run(resume, str(tmp_path), [6.0, 7.0], **over):
        assert kinds == ["str", "dict"]
        assert last == whole
        assert flushed == {}


def test_the_sums_are_right_on_another_number_of_ranks(ranks, tmp_path):
    ranks(2).run(save, str(tmp_path), [1.0, 2.0], [("accuracy", 3, 10)])
    for _, last, _ in ranks(4).run(resume, str(tmp_path), [6.0, 7.0]):
        assert last == {"accuracy": 0.3, "train_loss": (8 + 4 * 13) / (4 + 8)}


def test_nan_and_infinity_survive(ranks, tmp_path):
    ranks(2).run(save, str(tmp_path), [math.nan], [("high", math.inf, 1)])
    for _, _, flushed in ranks(2).run(resume, str(tmp_path), []):
        assert math.isnan(flushed["train_loss"]) and flushed["high"] == math.inf


def roll_back(directory, module_only):
    """Loads in mid-run, when the window holds something."""
    engine = _engine(interval=100)
    _steps(engine, [50.0])
    engine.load_checkpoint(directory, load_module_only=module_only)
    return engine.flush_metrics()


def test_loading_replaces_the_window_unless_only_weights_are_loaded(ranks, tmp_path):
    ranks(2).run(save, str(tmp_path), [1.0], [])
    assert ranks(2).run(roll_back, str(tmp_path), False) == [{"train_loss": 1.5}] * 2
    assert ranks(2).run(roll_back, str(tmp_path), True) == [{"train_loss": 50.0}] * 2


def nothing_to_load(directory):
    engine = _engine(interval=100)
    _steps(engine, [50.0])
    return engine.load_checkpoint(directory), engine.flush_metrics()


def test_where_nothing_is_loaded_the_window_stays(ranks, tmp_path):
    assert ranks(2).run(nothing_to_load, str(tmp_path)) == [((None, None), {"train_loss": 50.0})] * 2


def stock_round_trip(directory, lazy_saves):
    saver = _engine(lazy=lazy_saves)
    _steps(saver, [3.0])
    saver.save_checkpoint(directory, tag="mixed")
    loader = _engine(lazy=not lazy_saves)
    path, _ = loader.load_checkpoint(directory)
    return path is not None, loader.global_steps, None if lazy_saves else loader.flush_metrics()


def test_plain_deepspeed_reads_and_writes_the_same_checkpoints(ranks, tmp_path):
    assert ranks(2).run(stock_round_trip, str(tmp_path / "a"), True) == [(True, 1, None)] * 2
    assert ranks(2).run(stock_round_trip, str(tmp_path / "b"), False) == [(True, 1, {})] * 2


def load_broken(directory):
    engine = _engine()
    with torch.no_grad():
        engine.module.w.fill_(9.0)
    with pytest.raises(CheckpointError) as error:
        engine.load_checkpoint(directory)
    return str(error.value), engine.module.w.tolist(), engine.global_steps


def test_a_broken_file_is_named_on_every_rank_before_anything_changes(ranks, tmp_path):
    ranks(2).run(save, str(tmp_path), [1.0], [])
    path = tmp_path / "now" / WINDOW_FILE
    path.write_text(path.read_text()[:20])
    for message, weights, steps in ranks(2).run(load_broken, str(tmp_path)):
        assert str(path) in message
        assert (weights, steps) == ([9.0] * 4, 0)


def unwritable(directory):
    engine = _engine()
    engine.save_checkpoint(directory, tag="file/tag")


def test_a_window_that_cannot_be_written_fails_on_every_rank(ranks, tmp_path):
    (tmp_path / "file").write_text("in the way of a directory")
    for error in ranks(2).run_expect_error(unwritable, str(tmp_path)):
        assert error.type in ("NotADirectoryError", "FileExistsError")
