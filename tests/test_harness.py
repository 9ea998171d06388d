"""The multi-rank harness itself."""

import os
import signal
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch
import torch.distributed as dist

from tests.harness import CollectiveRecorder, OneVec, base_config, make_engine, masters
from tests.ranks import ROOT, PoolCache, RanksFailed


def rank_and_sum(value, *, factor=1):
    total = torch.tensor([value])
    dist.all_reduce(total)
    return dist.get_rank(), int(total) * factor


def raise_on(ranks):
    if dist.get_rank() in ranks:
        raise KeyError(f"rank {dist.get_rank()} is unhappy")
    dist.barrier()


def raise_on_without_barrier(rank):
    if dist.get_rank() == rank:
        raise KeyError("alone")


def raise_after_uneven_collectives():
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1), async_op=True)
    raise KeyError("uneven")


def hang_on(rank):
    if dist.get_rank() == rank:
        threading.Event().wait()


def kill_self_on(rank):
    if dist.get_rank() == rank:
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def leave_traces():
    import deepspeed

    model = OneVec(4)
    engine = make_engine(model, torch.optim.SGD(model.parameters(), lr=1.0), base_config(precision="fp32"))
    engine.backward(engine(torch.ones(4)))
    engine.step()
    leave_traces.engine = weakref.ref(engine)
    dist.new_group([0, 1])
    deepspeed.comm.configure(enabled=True, prof_all=True)
    deepspeed.utils.logger.warning_once("left behind")
    os.environ["LEFT_BEHIND"] = "1"


def look_for_traces():
    import deepspeed

    return (
        leave_traces.engine() is None,
        len(dist.distributed_c10d._world.pg_map),
        deepspeed.comm.comms_logger.enabled,
        deepspeed.utils.logger.warning_once.cache_info().currsize,
        "LEFT_BEHIND" in os.environ,
    )


def stock_step(precision, dtype):
    rank = dist.get_rank()
    model = OneVec(1000, dtype)
    config = base_config(precision=precision)
    engine = make_engine(model, torch.optim.SGD(model.parameters(), lr=1.0), config)
    x = (torch.arange(1000) % 16 + rank).to(dtype)
    with CollectiveRecorder() as record:
        engine.backward(engine(x))
    engine.step()
    return masters(engine)["w"], record.calls


def record_both_ways():
    import deepspeed.comm as ds_dist

    n, tensor = dist.get_world_size(), torch.arange(8, dtype=torch.bfloat16)
    with CollectiveRecorder() as record:
        ds_dist.all_reduce(tensor)
        dist.all_reduce(tensor)
        ds_dist.all_to_all_single(torch.empty_like(tensor), tensor)
        dist.all_to_all_single(
            torch.empty(4 * n if dist.get_rank() else 2 * n),
            torch.zeros(6),
            [4] * n if dist.get_rank() else [2] * n,
            [2, 4],
        )
        ds_dist.allgather_fn(torch.empty(8 * n, dtype=tensor.dtype), tensor)
        ds_dist.reduce_scatter_fn(torch.empty(8 // n, dtype=tensor.dtype), tensor)
        ds_dist.broadcast(tensor, 0)
        ds_dist.barrier()
    dist.all_reduce(tensor)
    return [(c.name, c.numel, c.bytes, c.bytes_to_peers, c.via_deepspeed) for c in record.calls]


class TestPool:
    def test_results_come_in_rank_order(self, ranks):
        assert ranks(2).run(rank_and_sum, 3, factor=2) == [(0, 12), (1, 12)]

    def test_an_exception_is_reported_with_its_rank(self, ranks):
        with pytest.raises(RanksFailed, match="raise_on on 2 ranks: rank 1 raised KeyError") as info:
            ranks(2).run(raise_on, [1])
        assert list(info.value.errors) == [1] and info.value.hung == [0]
        assert "in raise_on" in str(info.value) and "dist.barrier()" not in info.value.errors[1].traceback
        assert "rank 0: end of its output" in str(info.value) and "distributed_c10d.py" in str(info.value)
        assert ranks(2).run(rank_and_sum, 1) == [(0, 2), (1, 2)]

    def test_the_same_error_on_all_ranks_keeps_the_pool(self, ranks):
        ranks(2).run(rank_and_sum, 1)
        pids = ranks(2).pids
        errors = ranks(2).run_expect_error(raise_on, [0, 1])
        assert [error.type for error in errors] == ["KeyError", "KeyError"]
        assert [error.message for error in errors] == ["'rank 0 is unhappy'", "'rank 1 is unhappy'"]
        assert ranks(2).pids == pids

    def test_an_error_with_a_collective_pending_costs_the_pool(self, ranks):
        assert len(ranks(2).run_expect_error(raise_after_uneven_collectives)) == 2
        assert not ranks(2).alive
        assert ranks(2).run(rank_and_sum, 1) == [(0, 2), (1, 2)]

    def test_an_expected_error_must_come(self, ranks):
        with pytest.raises(AssertionError, match="rank_and_sum on 2 ranks: no rank raised"):
            ranks(2).run_expect_error(rank_and_sum, 1)
        with pytest.raises(AssertionError, match=r"these returned: \[0\]"):
            ranks(2).run_expect_error(raise_on_without_barrier, 1)

    def test_a_hang_is_cut_and_shows_where(self, ranks):
        pool = ranks(2)
        pool.run(rank_and_sum, 1)
        start = time.monotonic()
        with pytest.raises(RanksFailed, match="hang_on on 2 ranks, after 2 s: rank 1 did not answer") as info:
            pool.run(hang_on, 1, timeout=2)
        assert time.monotonic() - start < 10
        assert info.value.hung == [1] and "in hang_on" in str(info.value)
        assert pool.run(rank_and_sum, 1) == [(0, 2), (1, 2)]

    def test_a_killed_rank_is_reported(self, ranks):
        with pytest.raises(RanksFailed, match="kill_self_on on 2 ranks: .*rank 0 died") as info:
            ranks(2).run(kill_self_on, 0)
        assert info.value.dead == [0] and "last words" in str(info.value)
        assert ranks(2).run(rank_and_sum, 1) == [(0, 2), (1, 2)]

    def test_calls_leave_no_traces(self, ranks):
        pids = ranks(2).pids
        ranks(2).run(leave_traces)
        # groups: of all ranks, and DeepSpeed's copy of it
        assert ranks(2).run(look_for_traces) == [(True, 2, False, 0, False)] * 2
        assert not pids or ranks(2).pids == pids

    def test_a_local_function_is_refused(self, ranks):
        with pytest.raises(ValueError, match="not importable"):
            ranks(2).run(lambda: None)

    def test_workers_end_with_the_test_process(self, warm_extensions):
        code = (
            "import os, tests.ranks as r, tests.test_harness as t; pool = r.RankPool(2); "
            "pool.run(t.rank_and_sum, 1); print(*pool.pids, flush=True); os._exit(0)"
        )
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
        pids = [int(pid) for pid in done.stdout.split()]
        assert len(pids) == 2, done.stderr
        deadline = time.monotonic() + 5
        while any(map(_running, pids)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(map(_running, pids))

    def test_the_cache_keeps_the_most_recent_pools(self, warm_extensions):
        cache = PoolCache(limit=1)
        try:
            assert cache.get(1).run(rank_and_sum, 5) == [(0, 5)]
            first = cache.get(1).pids
            assert cache.get(1).pids == first
            cache.get(2)
            assert not cache._pools[1].alive
            assert cache.get(1).run(rank_and_sum, 5) == [(0, 5)] and cache.get(1).pids != first
        finally:
            cache.close()


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_stock_zero_2_steps_by_the_mean_gradient(ranks, precision, dtype):
    mean = torch.arange(1000.0) % 16 + 0.5
    for master, calls in ranks(2).run(stock_step, precision, dtype):
        assert torch.equal(master, -mean)
        assert "all_reduce" in [call.name for call in calls] and all(call.via_deepspeed for call in calls)


def test_the_recorder_counts_each_collective_once(ranks):
    assert ranks(2).run(record_both_ways)[0] == [
        ("all_reduce", 8, 16, 16, True),
        ("all_reduce", 8, 16, 16, False),
        ("all_to_all_single", 8, 16, 8, True),
        ("all_to_all_single", 6, 24, 16, False),
        ("all_gather_into_tensor", 8, 16, 16, True),
        ("reduce_scatter_tensor", 8, 16, 8, True),
        ("broadcast", 8, 16, 16, True),
        ("barrier", 0, 0, 0, True),
    ]


def test_config_sections():
    assert "lazy_reduce" not in base_config() and "bf16" not in base_config(precision="fp32")
    assert base_config(lazy=True)["lazy_reduce"] == {"enabled": True}
    config = base_config(lazy={"enabled": False}, zero_optimization={"reduce_bucket_size": 64})
    assert config["lazy_reduce"] == {"enabled": False}
    assert config["zero_optimization"] == {"stage": 2, "reduce_bucket_size": 64}


def test_a_group_of_one_rank(one_rank_group):
    assert dist.get_world_size(one_rank_group) == 1


def _running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
