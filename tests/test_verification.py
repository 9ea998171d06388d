"""`verify_every`: a wrong sum is found on all ranks, a right one never is; off, nothing is different."""

import dataclasses

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from .harness import CollectiveRecorder, base_config, make_engine, masters


def _rank():
    from deepspeed import comm as dist

    return dist.get_rank()


class Net(torch.nn.Module):
    """Two param groups, sizes that need padding; `twice` uses the first block again, after its bucket has left."""

    twice = False

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(9, 9) for _ in range(4))
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) / 3

    def forward(self, x):
        if self.twice:
            x = x.clone().requires_grad_()
        for block in [*self.blocks, *(self.blocks[:1] if self.twice else [])]:
            x = checkpoint(block, x, use_reentrant=True) if self.twice else torch.tanh(block(x)) + x
        return x.float().square().sum()


BUCKETS = 3  # two of two weights each, one of all biases


def build(verify_every=0, precision="bf16", normalize=False, micro_steps=2, one_group=False, **partition):
    torch.manual_seed(0)
    model = Net()
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    if one_group:
        groups = list(model.parameters())
    lazy = {"gradient_partition": {"bucket_size": 170, "verify_every": verify_every, **partition}}
    if normalize:
        lazy["token_normalization"] = {"enabled": True}
    config = base_config(precision=precision, lazy=lazy, gradient_accumulation_steps=micro_steps)
    return make_engine(model, torch.optim.AdamW(groups, lr=1e-2), config)


def train_window(engine, window, *, tokens=None):
    for micro_step in range(engine.gradient_accumulation_steps()):
        generator = torch.Generator().manual_seed(1000 * window + 10 * micro_step + _rank())
        x = torch.randn(3, 9, generator=generator) * 10.0 ** torch.randint(-3, 3, (3, 1), generator=generator)
        x = x.to(engine.module.blocks[0].weight.dtype)
        if tokens is not None:
            engine.backward(engine(x), num_tokens=tokens[(_rank() + micro_step) % len(tokens)])
        else:
            engine.backward(engine(x))
        engine.step()


# ---- no false alarm


SETTINGS = {
    "defaults": {},
    "one bucket": {"one_group": True, "bucket_size": 1000},
    "torch kernel": {"kernel": "torch"},
    "drained at once": {"carry_over": False},
    "four in flight": {"max_in_flight": 4},
    "every second micro-step": {"reduce_every": 2},
    "boundary": {"reduce_every": "boundary"},
    "boundary, bf16": {"reduce_every": "boundary", "wire_dtype": "bf16"},
    "fp32": {"precision": "fp32"},
    "tokens, some muted": {"normalize": True},
}
TWO_HOPS = {
    "two hops": {"collective": "hierarchical", "node_size": 2},
    "two hops, rounded": {"collective": "hierarchical", "node_size": 2, "across_dtype": "wire", "kernel": "torch"},
}


def verified_run(settings, verify_every):
    engine = build(verify_every, micro_steps=3, **settings)
    for window in range(5):
        train_window(engine, window, tokens=[4, 0, torch.tensor(0), 7] if settings.get("normalize") else None)
    return masters(engine), getattr(engine.optimizer._verification, "verified", None)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", SETTINGS)
def test_right_sums_raise_no_alarm_and_stay_what_they_are(ranks, world, name):
    check_no_alarm(ranks(world), SETTINGS[name])


@pytest.mark.parametrize("name", TWO_HOPS)
def test_right_sums_of_two_hops(ranks, name):
    check_no_alarm(ranks(4), TWO_HOPS[name])


def check_no_alarm(pool, settings):
    for (verified, count), (plain, _) in zip(
        pool.run(verified_run, settings, 1), pool.run(verified_run, settings, 0), strict=True
    ):
        assert count >= 5  # a window whose end brings late gradients is compared twice
        assert verified.keys() == plain.keys()
        assert all(torch.equal(verified[key], plain[key]) for key in plain)


def late_and_set_gradients():
    from deepspeed.utils import safe_get_full_grad, safe_set_full_grad

    engine = build(1)
    engine.module.twice = True
    for window in range(3):
        train_window(engine, window)
    engine.module.twice = False
    late = engine.optimizer._verification.verified
    x = torch.ones(3, 9).bfloat16()
    engine.backward(engine(x))
    engine.step()
    engine.backward(engine(x))
    for parameter in engine.module.parameters():
        safe_set_full_grad(parameter, 2 * safe_get_full_grad(parameter))
    engine.step()
    set_by_user = engine.optimizer._verification.verified
    train_window(engine, 9)
    return late, set_by_user, engine.optimizer._verification.verified


def test_late_gradients_and_gradients_that_the_user_sets(ranks):
    for late, set_by_user, afterwards in ranks(2).run(late_and_set_gradients):
        assert late > 3  # a window with late gradients is compared twice
        assert set_by_user == late and afterwards == set_by_user + 1


def failed_backward():
    engine = build(1)
    for window in range(3):
        if window == 1:
            if _rank() == 0:
                try:
                    engine.backward(_Fails.apply(engine(torch.ones(3, 9).bfloat16())))
                except ValueError:
                    pass
            else:
                engine.backward(engine(torch.ones(3, 9).bfloat16()))
            engine.step()
            engine.backward(engine(torch.ones(3, 9).bfloat16()))
            engine.step()
        else:
            train_window(engine, window)
    return engine.skipped_steps


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError


def test_a_voided_window_raises_no_alarm(ranks):
    assert ranks(2).run(failed_backward) == [1, 1]


# ---- a wrong sum


def _flip_a_bit(tensor, element):
    """The lowest one of bf16; of fp32 one that no sum with a number of the same size rounds away."""
    if tensor.element_size() == 4:
        tensor.view(torch.int32)[element] ^= 1 << 12
    else:
        tensor.view(torch.int16)[element] ^= 1


def _break_kernel(engine, bucket, element):
    """The kernel of this rank flips a bit of what it adds for one bucket."""
    optimizer, kernel = engine.optimizer, engine.optimizer._settings.accumulate
    start, stop = optimizer._shard_range[bucket]

    def faulty(partition, rows, scale):
        kernel(partition, rows, scale)
        gradient = optimizer._group_of_bucket[bucket].gradient
        if gradient is not None and partition.data_ptr() == gradient[start:stop].data_ptr():
            _flip_a_bit(partition, element)

    optimizer._settings = dataclasses.replace(optimizer._settings, accumulate=faulty)


def _break_collective(engine, bucket, element):
    """This rank receives a wrong bit for one bucket."""
    chain = engine.optimizer.chain
    (collective,) = engine.optimizer._reduce_scatters.values()
    start, dispatch, current = collective.start, chain._dispatch, [None]

    def faulty(send, pool):
        handle = start(send, pool)
        if current[0] is chain.buckets[bucket]:
            wait = handle.wait
            handle = _Handle(lambda: _with_flipped_bit(wait(), element), handle.release)
        return handle

    def noting(dispatched, send):
        current[0] = dispatched
        dispatch(dispatched, send)

    chain._dispatch, collective.start = noting, faulty


class _Handle:
    def __init__(self, wait, release):
        self.wait, self.release = wait, release


def _with_flipped_bit(rows, element):
    _flip_a_bit(rows[0], element)
    return rows


def _overwrite_partition(engine, bucket, element):
    """Something writes into the partition after its sum was complete."""
    optimizer, complete = engine.optimizer, engine.optimizer._agree_scalars

    def stray(late):
        shard = optimizer._gradient_shard(bucket)
        _flip_a_bit(shard, element)
        return complete(late)

    optimizer._agree_scalars = stray


BREAKS = {"kernel": _break_kernel, "collective": _break_collective, "partition": _overwrite_partition}


def train_broken(how, verify_every, bucket, settings):
    """(windows that were completed, the error, whether masters are those of the last one)"""
    engine = build(verify_every, micro_steps=1, **settings)
    assert len(engine.optimizer.chain.buckets) == BUCKETS
    if _rank() == 1:
        BREAKS[how](engine, bucket, 5)
    for window in range(2 * verify_every * BUCKETS):
        before = [master.clone() for master in engine.optimizer.single_partition_of_fp32_groups]
        try:
            train_window(engine, window)
        except RuntimeError as error:
            after = engine.optimizer.single_partition_of_fp32_groups
            unchanged = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
            return window, f"{type(error).__name__}: {error}", unchanged
    return None


@pytest.mark.parametrize("how", BREAKS)
@pytest.mark.parametrize("verify_every, bucket", [(1, 2), (2, 1)])
def test_a_wrong_bit_stops_all_ranks_in_the_window_in_which_it_is_looked_for(ranks, how, verify_every, bucket):
    for window, error, unchanged in ranks(3).run(train_broken, how, verify_every, bucket, {}):
        assert window == verify_every * (bucket + 1) - 1  # counted from 0; buckets take turns
        assert error.startswith("VerificationError: lazy_reduce.gradient_partition.verify_every")
        assert f"bucket {bucket} (" in error and f"window {window + 1} " in error
        assert "on rank 1, element 5 of its shard, element " in error and " of blocks." in error
        assert "kernel native, collective all_to_all, wire dtype bfloat16" in error
        assert "; 1 of " in error and "No update was applied" in error
        assert unchanged


def test_a_wrong_bit_of_two_hops(ranks):
    settings = {"collective": "hierarchical", "node_size": 2}
    for window, error, unchanged in ranks(4).run(train_broken, "collective", 1, 0, settings):
        assert window == 0 and "on rank 1" in error and "collective hierarchical" in error and unchanged


# ---- off


def what_off_does():
    engine = build(0)
    train_window(engine, 0)
    with CollectiveRecorder() as off:
        train_window(engine, 1)
    kinds = {type(bucket.reduce_scatter).__name__ for bucket in engine.optimizer.chain.buckets}
    engine.destroy()
    engine = build(2)
    train_window(engine, 0)
    train_window(engine, 1)
    with CollectiveRecorder() as between:
        train_window(engine, 2)
    with CollectiveRecorder() as verifying:
        train_window(engine, 3)
    return off.names(), kinds, between.names(), verifying.names()


def test_off_and_between_two_verifications_nothing_is_added(ranks):
    for off, kinds, between, verifying in ranks(2).run(what_off_does):
        assert kinds == {"AllToAll"}
        assert between == off
        assert len(verifying) == len(off) + 2  # one gathering a micro-step


def test_the_reference_is_gathered_in_pieces(ranks):
    ranks(2).run(gathered_in_pieces)


def gathered_in_pieces():
    from ds_lazyreduce import verification

    whole = verification._PIECE_BYTES
    verification._PIECE_BYTES = 2 * 2 * 2 * 7  # seven columns of bf16 at two ranks
    try:
        engine = build(1)
        for window in range(BUCKETS):
            train_window(engine, window)
    finally:
        verification._PIECE_BYTES = whole
