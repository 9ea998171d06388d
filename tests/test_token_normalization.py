"""Token normalisation: gradients are the sum of all losses over the sum of all tokens, whatever the split."""

import logging
import math
import random
from contextlib import contextmanager, nullcontext

import pytest
import torch

from ds_lazyreduce.accumulate import fused_accumulate
from ds_lazyreduce.token_window import TokenWindow

from .harness import CollectiveRecorder, OneVec, base_config, make_engine, masters
from .test_process_groups import Sharded, TensorParallel

N = 8


def _rank():
    from deepspeed import comm as dist

    return dist.get_rank()


def _engine(*, reduction="sum", precision="fp32", normalize=True, bucket=64, reduce_every=1, **over):
    """lr 1 on zeros: after the first step the master is minus the gradient."""
    lazy = {
        "gradient_partition": {"bucket_size": bucket, "reduce_every": reduce_every},
        "token_normalization": {"enabled": normalize, "loss_reduction": reduction},
    }
    model = OneVec(N)
    return make_engine(
        model, torch.optim.SGD(model.parameters(), lr=1.0), base_config(precision=precision, lazy=lazy, **over)
    )


def _x(value, engine):
    return torch.full((N,), float(value), dtype=engine.module.w.dtype)


def _gradient(engine, before=0.0):
    (weight,) = set(masters(engine)["w"].tolist())
    return before - weight


# ---- the gradient

CASE_12 = [[(10, 10), (2, 1)], [(3, 1), (0, 0)]]  # (loss sum, tokens) of each micro-step of each rank


@contextmanager
def _counts_as(kind):
    """What makes a num_tokens argument: an int, a CPU tensor, or a tensor that stays off the host.

    The last is a CPU tensor, too, which takes the way of a device tensor.
    """
    import ds_lazyreduce.engine as module

    checked = module._checked_tokens
    if kind == "device tensor":
        module._checked_tokens = lambda tokens: tokens
    try:
        yield int if kind == "int" else torch.tensor
    finally:
        module._checked_tokens = checked


def run_windows(windows, *, kind="int", **over):
    with _counts_as(kind) as count:
        return _run_windows(windows, count, **over)


def _run_windows(windows, count, reduction="sum", empty_is_nan=False, **over):
    """`windows[rank]` is a list of (loss sum, tokens); returns the gradient and the reported loss."""
    engine = _engine(reduction=reduction, gradient_accumulation_steps=len(windows[_rank()]), **over)
    for total, tokens in windows[_rank()]:
        loss = engine(_x(total, engine)) + total
        if reduction == "mean":
            loss = loss / tokens  # NaN without tokens, and so is its gradient
        elif tokens == 0 and empty_is_nan:
            loss = loss * math.nan
        engine.backward(loss, num_tokens=count(tokens))
        engine.step()
    return _gradient(engine), engine.flush_metrics()["train_loss"], engine.lazy_reduce_report()


@pytest.mark.parametrize("kind", ["int", "tensor", "device tensor"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("reduction, empty_is_nan", [("sum", False), ("sum", True), ("mean", True)])
def test_accumulation_equals_the_full_batch(ranks, reduction, empty_is_nan, precision, kind):
    # case 12: transformers#34242, torchtitan#2206
    over = {"kind": kind, "reduction": reduction, "empty_is_nan": empty_is_nan, "precision": precision}
    results = ranks(2).run(run_windows, CASE_12, **over)
    for gradient, loss, report in results:
        assert gradient == 1.25
        assert loss == 1.25
        assert report["scalar_collectives"] == 1


@pytest.mark.parametrize("kind", ["int", "device tensor"])
@pytest.mark.parametrize("reduce_every", [2, "boundary"])
def test_local_accumulation_masks_empty_micro_steps(ranks, reduce_every, kind):
    over = {"kind": kind, "reduce_every": reduce_every, "empty_is_nan": True}
    for gradient, loss, _ in ranks(2).run(run_windows, CASE_12, **over):
        assert gradient == loss == 1.25


def bf16_losses():
    """Means in bf16 over odd numbers of tokens, of which bf16 keeps three digits."""
    engine = _engine(reduction="mean", precision="bf16", gradient_accumulation_steps=2)
    losses = []
    for tokens in (1001, 2003):
        loss = engine(_x(1, engine)) + 3.14 * (1 + _rank())
        losses.append((loss.item(), tokens))
        engine.backward(loss, num_tokens=tokens)
        engine.step()
    return losses, engine.flush_metrics()["train_loss"]


def test_the_report_weighs_bf16_losses_exactly(ranks):
    results = ranks(2).run(bf16_losses)
    pairs = [pair for losses, _ in results for pair in losses]
    mean = sum(loss * tokens for loss, tokens in pairs) / sum(tokens for _, tokens in pairs)
    assert [value for _, value in results] == pytest.approx([mean] * 2, rel=1e-12)


def test_a_rank_without_any_tokens(ranks):
    windows = [[(0, 0), (0, 0)], [(5, 2), (1, 1)]]
    for gradient, loss, _ in ranks(2).run(run_windows, windows, empty_is_nan=True):
        assert gradient == loss == 2.0


def split_of_tokens(seed, reduction, reduce_every):
    """The same tokens, split over ranks and micro-steps at random, empty parts included."""
    from deepspeed import comm as dist

    generator = torch.Generator().manual_seed(7)
    tokens = torch.rand(50, N, generator=generator, dtype=torch.float64)
    steps = random.Random(seed).randint(1, 4)
    parts = [[] for _ in range(steps * dist.get_world_size())]
    chosen = random.Random(seed + 1)
    usable = chosen.sample(range(len(parts)), max(1, len(parts) - chosen.randint(0, 3)))
    for token in tokens:
        parts[chosen.choice(usable)].append(token)
    engine = _engine(reduction=reduction, gradient_accumulation_steps=steps, bucket=3, reduce_every=reduce_every)
    for part in parts[_rank() * steps : (_rank() + 1) * steps]:
        x = torch.stack(part).float() if part else torch.zeros(0, N)
        loss = engine(x)
        engine.backward(loss / len(part) if reduction == "mean" else loss, num_tokens=len(part))
        engine.step()
    reference = tokens.mean(0)
    return ((masters(engine)["w"] + reference) / reference).abs().max().item()


@pytest.mark.parametrize("reduce_every", [1, 2, "boundary"])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("seed", range(4))
def test_any_split_gives_the_same_gradient(ranks, seed, reduction, reduce_every):
    for error in ranks(2).run(split_of_tokens, seed, reduction, reduce_every):
        assert error < 1e-6


def several_windows(counts):
    """Windows of very different size: the prescale that one leaves for the next must not show."""
    engine = _engine()
    gradients = []
    for tokens in counts:
        before = masters(engine)["w"][0].item()
        engine.backward(engine(_x(tokens * (_rank() + 1), engine)), num_tokens=tokens)
        engine.step()
        gradients.append(_gradient(engine, before))
    return gradients, engine.lazy_reduce_report()["scalar_collectives"]


def test_windows_of_different_size(ranks):
    for gradients, collectives in ranks(2).run(several_windows, [1, 100_000, 3, 7]):
        assert gradients == pytest.approx([1.5] * 4, rel=1e-6)
        assert collectives == 4


# ---- what sees the normalised gradient


def clipped(clip):
    engine = _engine(gradient_clipping=clip, gradient_accumulation_steps=2)
    for total, tokens in CASE_12[_rank()]:
        engine.backward(engine(_x(total, engine)), num_tokens=tokens)
        engine.step()
    return _gradient(engine), float(engine.get_global_grad_norm())


@pytest.mark.parametrize("clip", [0.5, 100.0])
def test_clipping_and_the_norm_see_the_normalized_gradient(ranks, clip):
    norm = 1.25 * math.sqrt(N)
    for gradient, reported in ranks(2).run(clipped, clip):
        assert reported == pytest.approx(norm, rel=1e-6)
        assert gradient == pytest.approx(1.25 * min(1.0, clip / norm), rel=1e-5)


# ---- windows without tokens


def empty_windows(kind):
    lines = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("ds_lazyreduce").addHandler(handler)
    try:
        engine = _engine(gradient_accumulation_steps=2)
        skipped, gradients = [], []
        for tokens in (4, 0, 0, 4):
            before = masters(engine)["w"][0].item()
            for _ in range(2):
                loss = engine(_x(tokens, engine)) * (1.0 if tokens else math.nan)
                with _counts_as(kind) as count:
                    engine.backward(loss, num_tokens=count(tokens))
                engine.step()
            skipped.append(engine.skipped_steps)
            gradients.append(_gradient(engine, before))
    finally:
        logging.getLogger("ds_lazyreduce").removeHandler(handler)
    return skipped, gradients, sum("no rank had tokens" in line for line in lines)


@pytest.mark.parametrize("kind", ["int", "device tensor"])
def test_a_window_without_tokens_is_skipped(ranks, kind):
    results = ranks(2).run(empty_windows, kind)
    for rank, (skipped, gradients, warnings) in enumerate(results):
        assert skipped == [0, 1, 2, 2]
        assert gradients == [1.0, 0.0, 0.0, 1.0]
        assert warnings == (1 if rank == 0 else 0)


# ---- errors


def refused(kind):
    """The error, the collectives before it, and the gradient of the good window that follows."""
    engine = _engine()
    loss = engine(_x(5, engine))
    with CollectiveRecorder() as record, pytest.raises(ValueError) as error:
        if kind == "direct":
            loss.backward()
        elif kind == "missing":
            engine.backward(loss)
        else:
            engine.backward(loss, num_tokens=kind)
    engine.backward(engine(_x(6, engine)), num_tokens=2)
    engine.step()
    return str(error.value), record.names(), _gradient(engine), engine.flush_metrics(), engine.skipped_steps


@pytest.mark.parametrize(
    "kind, message",
    [
        ("missing", "num_tokens is needed"),
        ("direct", "a direct loss.backward() cannot say how many tokens"),
        (-1, "num_tokens is -1"),
        (1.5, "num_tokens is 1.5"),
        (math.nan, "num_tokens is nan, expected a whole number"),
        (math.inf, "num_tokens is inf, expected a whole number"),
        ("5", "num_tokens is '5', expected a whole number"),
        ([1], "num_tokens is [1], expected a whole number"),
        (torch.ones(2), "num_tokens has shape (2,)"),
    ],
)
def test_a_missing_or_wrong_count_is_refused_before_any_collective(ranks, kind, message):
    for error, collectives, gradient, loss, skipped in ranks(2).run(refused, kind):
        assert message in error
        assert collectives == []
        assert (gradient, loss, skipped) == (3.0, {"train_loss": 0.0}, 0)


def returned(reduction):
    engine = _engine(reduction=reduction)
    loss = engine(_x(5, engine)) + 3.0
    return engine.backward(loss, num_tokens=4) is loss


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_backward_returns_the_loss_it_was_given(ranks, reduction):
    assert ranks(2).run(returned, reduction) == [True, True]


# ---- windows that are not gradient_accumulation_steps long


def _backwards(engine, count):
    """`count` micro-steps of gradient (micro-step + 1) * 4 on rank 0 and of nothing on rank 1; 1 token each."""
    for micro_step in range(count):
        x = _x(4 * (micro_step + 1) * (1 - _rank()), engine)
        engine.backward(engine(x), num_tokens=1)


def caller_owned(kind):
    managed = {"managed_gradient_accumulation": False} if kind == "unmanaged" else {}
    engine = _engine(gradient_accumulation_steps=4, **managed)
    gradients = []
    for count in (1, 3, 2):
        before = masters(engine)["w"][0].item()
        if kind == "boundary":
            engine.set_gradient_accumulation_boundary(False)
        with engine.coalesce_grad_reduction() if kind == "coalesced" else nullcontext():
            _backwards(engine, count)
        if kind != "unmanaged":
            engine.set_gradient_accumulation_boundary(True)
        engine.step()
        gradients.append(_gradient(engine, before))
    return gradients, engine.lazy_reduce_report()


@pytest.mark.parametrize("kind", ["unmanaged", "boundary", "coalesced"])
def test_windows_of_any_length(ranks, kind):  # case 7's token counts
    for gradients, report in ranks(2).run(caller_owned, kind):
        # sum of 4, 8, 12 so far over twice as many tokens as micro-steps, since rank 1 counts too
        assert gradients == [2.0, 4.0, 3.0]
        assert report["scalar_collectives"] == 3
        if kind == "coalesced":
            assert report["gradient_collectives"] == 3


def coalesced_with_empty_micro_steps():
    engine = _engine()
    with engine.coalesce_grad_reduction():
        for total, tokens in [*CASE_12[_rank()], (math.nan, 0)]:
            engine.backward(engine(_x(total, engine)), num_tokens=tokens)
    engine.step()
    return _gradient(engine)


def test_coalescing_masks_micro_steps_without_tokens(ranks):
    assert ranks(2).run(coalesced_with_empty_micro_steps) == [1.25, 1.25]


def grad_of_an_input():
    engine = _engine()
    x = torch.ones(1).requires_grad_()
    out = engine(x)
    (grad,) = torch.autograd.grad(out, x, retain_graph=True)
    engine.backward(out, num_tokens=2)
    engine.step()
    return engine.skipped_steps


def test_autograd_grad_needs_no_token_count(ranks):
    assert ranks(2).run(grad_of_an_input) == [0, 0]


# ---- collectives


def collectives_of_a_step(normalize):
    """Of the third step, when everything that happens once has happened."""
    engine = _engine(normalize=normalize, gradient_accumulation_steps=2, gradient_clipping=1.0)
    for _ in range(3):
        with CollectiveRecorder() as record:
            for total, tokens in CASE_12[_rank()]:
                engine.backward(engine(_x(total, engine)), num_tokens=torch.tensor(tokens))
                engine.step()
    return record.names(), engine.lazy_reduce_report()["scalar_collectives"]


def test_tokens_cost_no_collective(ranks):
    with_tokens = ranks(2).run(collectives_of_a_step, True)
    assert with_tokens == ranks(2).run(collectives_of_a_step, False)
    for names, scalar_collectives in with_tokens:
        assert scalar_collectives == 3
        assert names.count("all_reduce") == 1


# ---- sequence parallelism


def sequence_parallel(size, mode):
    from deepspeed import comm as dist

    over = {}
    if size > 1:
        over = {"sequence_parallel_size": size, "data_parallel_size": dist.get_world_size() // size}
    if mode == "stock":
        model = OneVec(N)
        config = base_config(precision="bf16", **over)
        engine = make_engine(model, torch.optim.SGD(model.parameters(), lr=1.0), config)
    else:
        engine = _engine(normalize=mode == "tokens", precision="bf16", **over)
    kwargs = {"num_tokens": 1} if mode == "tokens" else {}
    engine.backward(engine(_x(1, engine)), **kwargs)
    engine.step()
    return _gradient(engine)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_sequence_parallel(ranks, size):  # case 13: DeepSpeed#5248, #5555
    assert ranks(4).run(sequence_parallel, size, "stock") == [float(size)] * 4
    assert ranks(4).run(sequence_parallel, size, "default") == [float(size)] * 4
    assert ranks(4).run(sequence_parallel, size, "tokens") == [1.0] * 4


# ---- the prescale


def test_the_prescale_keeps_sums_within_fp16():
    tokens, ranks = 2**17, 8  # each token's gradient is 1, so a rank's sum is beyond fp16's 65504
    window = TokenWindow()
    window.restart(float(tokens * ranks))  # the window before was as long
    assert math.frexp(window.prescale)[0] == 0.5  # a power of two: it does not round

    def gradient(prescale):
        received = torch.full((ranks, N), tokens * prescale).half()
        partition = torch.zeros(N)
        fused_accumulate(partition, received, 1.0, kernel="torch")
        return set((partition / (ranks * tokens * prescale)).tolist())

    assert gradient(1.0) == {math.inf}
    assert gradient(window.prescale) == {1.0}


@pytest.mark.parametrize("total", [1.0, 2.0, 3.0, 1023.0, 1024.0, 1025.0, 1e9])
def test_the_prescale_is_the_inverse_of_the_last_window_rounded_up(total):
    window = TokenWindow()
    assert window.prescale == 1.0
    window.restart(total)
    assert 0.5 * window.prescale < 1 / total <= window.prescale
    window.restart(0.0)  # a window without tokens says nothing
    assert 0.5 * window.prescale < 1 / total <= window.prescale


def test_counts_of_ints_and_tensors_add_up_exactly():
    window = TokenWindow()
    first = torch.tensor(2**24, dtype=torch.int64)
    for tokens in (first, 1, torch.tensor(1, dtype=torch.int32), torch.tensor(2.0, dtype=torch.bfloat16)):
        window.add(tokens)
    assert window.total() == 2**24 + 4 and first == 2**24
    window.restart(8.0)
    assert window.total() == 0


# ---- tensor parallelism


def tensor_parallel():
    mpu = TensorParallel()
    model = Sharded(mpu.model_rank)
    config = base_config(precision="fp32", lazy={"token_normalization": {"enabled": True}})
    engine = make_engine(model, torch.optim.SGD(model.parameters(), lr=1.0), config, mpu=mpu)
    engine.backward(engine(1.0 + mpu.data_rank), num_tokens=3)
    engine.step()
    weights = {name: set(weight.tolist()) for name, weight in masters(engine).items()}
    return weights, mpu.model_rank, float(engine.get_global_grad_norm())


def test_tensor_parallel_ranks_see_the_same_tokens(ranks):
    for weights, model_rank, norm in ranks(4).run(tensor_parallel):
        assert weights == {"sharded": {1 - (1 + model_rank) * 3 / 6}, "replicated": {1 - 3 / 6}}
        assert norm == pytest.approx(math.sqrt(24 * (0.5**2 + 1.0**2) + 9 * 0.5**2), rel=1e-6)
