"""A save that fails: the tag before it, and `latest`, stay what they were."""

import glob
import os
import signal
import subprocess
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from .ranks import RankPool, RanksFailed
from .test_checkpoint_interchange import assert_same, build, moments, train, trainable_masters, weights

PG_TIMEOUT = 10


def _rank():
    return int(os.environ["RANK"])


def _state(engine):
    return weights(engine), trainable_masters(engine), moments(engine, "exp_avg"), moments(engine, "exp_avg_sq")


def _kill_at(function, call, before=lambda *args, **kwargs: None):
    """`function` that ends this process at its `call`-th call."""
    left = [call]

    def dying(*args, **kwargs):
        left[0] -= 1
        if left[0] == 0:
            before(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)

    return dying


def _half_a_file(state_dict, path):
    torch.save(state_dict, path)
    os.truncate(path, os.path.getsize(path) // 2)


def _arm(engine, where):
    from ds_lazyreduce import checkpoint, layout_exchange

    rank, moment = where
    if _rank() != rank:
        return
    if moment == "exchange":
        layout_exchange.dist.all_to_all_single = _kill_at(layout_exchange.dist.all_to_all_single, 2)
    elif moment == "file":
        engine.checkpoint_engine.save = _kill_at(engine.checkpoint_engine.save, 1, _half_a_file)
    else:  # `latest.tmp` is there, `latest` not yet replaced; the first call is the logging window's
        checkpoint.os.replace = _kill_at(os.replace, 2)


def dies_while_saving(folder, where):
    engine = build(150)
    train(engine, 0, 2)
    engine.save_checkpoint(folder)
    train(engine, 2, 3)
    _arm(engine, where)
    try:
        engine.save_checkpoint(folder)
    except Exception as error:
        Path(f"{folder}/survivor{_rank()}").write_text(f"{type(error).__name__}: {error}")
        raise


def continued(folder=None):
    engine = build(150)
    if folder is None:
        train(engine, 0, 2)
    else:
        path, _ = engine.load_checkpoint(folder)
        assert "global_step2" in path
    train(engine, 2, 5)
    return _state(engine)


@pytest.mark.parametrize("where", [(1, "exchange"), (1, "file"), (0, "file"), (0, "latest")])
def test_a_rank_killed_while_saving(warm_extensions, ranks, tmp_path, where):
    folder = str(tmp_path)
    with RankPool(2, pg_timeout=PG_TIMEOUT) as pool:
        with pytest.raises(RanksFailed) as failed:
            pool.run(dies_while_saving, folder, where, timeout=60)
    assert failed.value.dead == [where[0]]
    assert (tmp_path / "latest").read_text() == "global_step2"
    survivor = tmp_path / f"survivor{1 - where[0]}"
    if survivor.exists():  # else the pool was faster than the process group's timeout
        message = survivor.read_text()
        if where[1] == "exchange":
            assert message.startswith("CollectiveError") and "between the ranks of a checkpoint" in message
    assert_same(ranks(2).run(continued), ranks(2).run(continued, folder))


def raises_on_rank_zero(what):
    from ds_lazyreduce.checkpoint import on_rank_zero

    on_rank_zero(torch.distributed, {"key": lambda: {}["missing"], "lock": lambda: _raise_unpicklable()}[what])


def _raise_unpicklable():
    raise ValueError(threading.Lock())


@pytest.mark.parametrize("what, message", [("key", "KeyError: 'missing'"), ("lock", "ValueError: <unlocked")])
def test_whatever_fails_on_rank_zero_fails_on_every_rank(ranks, what, message):
    for error in ranks(2).run_expect_error(raises_on_rank_zero, what):
        assert error.type == "CheckpointError" and message in error.message


# ---- a full disk


def goes_on_after(folder, breaks):
    """A run whose second save fails: the errors, and the state of the run that went on."""
    engine = build(150)
    train(engine, 0, 2)
    engine.save_checkpoint(folder)
    train(engine, 2, 3)
    client_state = breaks(folder)
    torch.distributed.barrier()
    try:
        engine.save_checkpoint(folder, client_state=client_state)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    else:
        raise AssertionError("no error")
    train(engine, 3, 5)
    return message, _state(engine)


def _no_room_for(name):
    """Writing the file fails as on a full disk; it is opened first, and the directory is there."""

    def breaks(folder):
        if _rank() == 0:
            path = Path(folder, name)
            path.parent.mkdir(exist_ok=True)
            path.symlink_to("/dev/full")

    return breaks


ZERO = "global_step3/bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"
FILES = {
    "model": "global_step3/mp_rank_00_model_states.pt",
    "zero 0": ZERO.format(0),
    "zero 1": ZERO.format(1),
    "window": "global_step3/lazy_reduce_window.json.tmp",
    "latest": "latest.tmp",
}
WRITER = {"zero 1": 1}  # rank 0 writes the others


def no_room_for(folder, name):
    return goes_on_after(folder, _no_room_for(name))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("file", FILES)
def test_no_room_for_a_file(ranks, tmp_path, file):
    folder = str(tmp_path)
    outcomes = ranks(2).run(no_room_for, folder, FILES[file])
    expected = ranks(2).run(continued)
    for rank, (message, state) in enumerate(outcomes):
        if file in ("window", "latest"):
            assert "No space left" in message
        else:
            assert message.startswith("CheckpointError") and FILES[file] in message and "cannot be written" in message
            assert (f"rank {WRITER.get(file, 0)}: " in message) == (rank != WRITER.get(file, 0))
        assert_same(expected[rank], state)  # training went on as if nobody had tried to save
    assert (tmp_path / "latest").read_text() == "global_step2"
    assert_same(expected, ranks(2).run(continued, folder))


@contextmanager
def tiny_disk(path, kilobytes):
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "none", path], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted: {mounted.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def _too_much(folder):
    return {"ballast": torch.zeros(2**20)} if _rank() == 0 else {}


def _filler(folder):
    if _rank() == 0:
        with open(f"{folder}/filler", "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass


def overfull(folder, what):
    return goes_on_after(folder, {"ballast": _too_much, "filler": _filler}[what])


@pytest.mark.parametrize("what", ["ballast", "filler"])
def test_a_full_disk(ranks, tmp_path, what):
    with tiny_disk(str(tmp_path), 1024):
        outcomes = ranks(2).run(overfull, str(tmp_path), what)
        assert (tmp_path / "latest").read_text() == "global_step2"
        expected = ranks(2).run(continued)
        assert_same(expected, [state for _, state in outcomes])
        assert_same(expected, ranks(2).run(continued, str(tmp_path)))
    for message, _ in outcomes:  # beside the ballast nothing of rank 1 has room either
        assert "cannot be written" in message if what == "ballast" else "No space left" in message
    if what == "ballast":
        assert "model_states.pt" in outcomes[0][0]


def unpicklable(folder):
    return {"client": lambda: None} if _rank() == 0 else {}


def client_state_that_cannot_be_written(folder):
    return goes_on_after(folder, unpicklable)


def test_client_state_that_cannot_be_pickled_on_one_rank(ranks, tmp_path):
    for message, _ in ranks(2).run(client_state_that_cannot_be_written, str(tmp_path)):
        assert "model_states.pt: cannot be written" in message and "pickle" in message.lower()
    assert (tmp_path / "latest").read_text() == "global_step2"
    assert len(glob.glob(str(tmp_path / "global_step2" / "*optim_states.pt"))) == 2
