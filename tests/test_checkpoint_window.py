"""Saving within a window leaves the window alone; and the optimizer's own `state_dict` and `load_state_dict`."""

import io

import pytest
import torch

from .harness import base_config, make_engine
from .test_checkpoint_interchange import (
    Net,
    assert_same,
    build,
    moments,
    train,
    trainable_masters,
    weights,
)

MICRO_STEPS = 4


def _rank():
    from deepspeed import comm as dist

    return dist.get_rank()


def _engine(partition, **over):
    model = Net()
    lazy = {"gradient_partition": {"bucket_size": 150, **partition}} if partition is not None else None
    normalized = "token_normalization" in over
    if normalized:
        lazy["token_normalization"] = over.pop("token_normalization")
    config = base_config(lazy=lazy, gradient_accumulation_steps=MICRO_STEPS, gradient_clipping=0.5, **over)
    trainable = [p for p in model.parameters() if p.requires_grad]
    return make_engine(model, torch.optim.AdamW(trainable, lr=1e-2), config)


def _micro_steps(engine, first, last, **tokens):
    for index in range(first, last):
        generator = torch.Generator().manual_seed(100 * index + _rank())
        engine.backward(engine(torch.randn(3, 7, generator=generator).bfloat16()), **tokens)
        engine.step()


def _state(engine):
    return weights(engine), trainable_masters(engine), moments(engine, "exp_avg"), moments(engine, "exp_avg_sq")


def window_with_a_save(folder, partition, save_after, over):
    """The second of two windows, with a save after `save_after` of its micro-steps."""
    engine = _engine(partition, **over)
    tokens = {"num_tokens": 3} if over else {}
    _micro_steps(engine, 0, MICRO_STEPS, **tokens)
    if save_after == MICRO_STEPS - 1:
        engine.save_checkpoint(f"{folder}/boundary", tag="now")
    if save_after is None:
        _micro_steps(engine, MICRO_STEPS, 2 * MICRO_STEPS, **tokens)
    else:
        _micro_steps(engine, MICRO_STEPS, MICRO_STEPS + save_after, **tokens)
        before = engine.lazy_reduce_report() if partition is not None else None
        engine.save_checkpoint(f"{folder}/within", tag="now")
        if partition is not None:
            engine.optimizer.state_dict()
            after = engine.lazy_reduce_report()
            for counter in ("gradient_collectives", "bytes_sent", "scalar_collectives"):
                assert after[counter] == before[counter]  # nothing was reduced, or sent, for the sake of the save
        _micro_steps(engine, MICRO_STEPS + save_after, 2 * MICRO_STEPS, **tokens)
    return _state(engine)


WAYS = {
    "every micro-step": {},
    "carried over": {"max_in_flight": 4},
    "drained": {"carry_over": False},
    "every second": {"reduce_every": 2},
    "boundary": {"reduce_every": "boundary"},
    "plain": None,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_save_within_a_window_does_not_disturb_it(ranks, tmp_path, way):
    expected = ranks(2).run(window_with_a_save, str(tmp_path), WAYS[way], None, {})
    for save_after in (1, MICRO_STEPS - 1):
        assert_same(expected, ranks(2).run(window_with_a_save, str(tmp_path), WAYS[way], save_after, {}))
    # Pending gradients are not saved: the optimizer's files are those of the last boundary.
    assert_same_zero_files(tmp_path / "boundary", tmp_path / "within")


def assert_same_zero_files(one, other):
    from .test_checkpoint_interchange import zero_files

    assert_same(zero_files(one), zero_files(other))


@pytest.mark.parametrize("way", ["carried over", "boundary"])
def test_nor_the_tokens_of_the_window(ranks, tmp_path, way):
    over = {"token_normalization": {"enabled": True}}
    expected = ranks(2).run(window_with_a_save, str(tmp_path), WAYS[way], None, over)
    assert_same(expected, ranks(2).run(window_with_a_save, str(tmp_path), WAYS[way], 2, over))


def from_within(folder, partition):
    """What follows a load of a save within the second window: that window from its start."""
    engine = _engine(partition)
    engine.load_checkpoint(f"{folder}/within", tag="now")
    _micro_steps(engine, MICRO_STEPS, 2 * MICRO_STEPS)
    return _state(engine)


def test_a_load_begins_the_window_anew(ranks, tmp_path):
    for way in ("carried over", "boundary"):
        expected = ranks(2).run(window_with_a_save, str(tmp_path), WAYS[way], 2, {})
        assert_same(expected, ranks(2).run(from_within, str(tmp_path), WAYS[way]))


# ---- the optimizer's own methods


def _own(engine, state):
    """What `load_state_dict` takes: a list with an entry for every rank."""
    from deepspeed import comm as dist

    return [state if rank == _rank() else None for rank in range(dist.get_world_size())]


def _warm_up(engine, first, last):
    for step in range(first, last):
        for group in engine.optimizer.param_groups:
            group["lr"].add_(1e-2)  # in place, as torch's schedulers change a tensor
        train(engine, step, step + 1)


def there_and_back_in_memory(**keys):
    engine = build(150, **keys)
    for group in engine.optimizer.param_groups:
        group["lr"] = torch.tensor(0.0)
    _warm_up(engine, 0, 2)
    kept, module = engine.optimizer.state_dict(), {k: v.clone() for k, v in engine.module.state_dict().items()}
    _warm_up(engine, 2, 4)
    expected = _state(engine)
    for _ in range(2):  # the state dict is a copy, and stays one when it has been loaded
        engine.module.load_state_dict(module)
        engine.optimizer.load_state_dict(_own(engine, kept), load_from_fp32_weights=True)
        _warm_up(engine, 2, 4)
        assert_same(expected, _state(engine))


def test_a_state_dict_in_memory_is_a_copy(ranks):
    ranks(2).run(there_and_back_in_memory)
    ranks(3).run(there_and_back_in_memory, tiny_group=True)


def _pickled(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def between_layouts():
    """State dicts of plain DeepSpeed and of ours, handed over in memory."""
    states = {}
    for bucket in (None, 150):
        engine = build(bucket)
        train(engine, 0, 2)
        states[bucket] = _pickled(engine.optimizer.state_dict()), _state(engine)
        engine.destroy()
    for bucket, other in ((None, 150), (150, None), (400, 150)):
        engine = build(bucket)
        state, (bit16, masters, first, second) = states[other]
        engine.optimizer.load_state_dict(_own(engine, state), load_from_fp32_weights=True)
        assert_same((masters, first, second), _state(engine)[1:])
        engine.module.load_state_dict({**engine.module.state_dict(), **bit16})
        engine.optimizer.load_state_dict(_own(engine, state))  # stock's default: masters from the bit16 weights
        assert_same({name: bit16[name].float() for name in masters}, trainable_masters(engine))
        engine.optimizer.load_state_dict(_own(engine, state), load_optimizer_states=False, load_from_fp32_weights=True)
        assert_same((masters, first, second), _state(engine)[1:])
        engine.destroy()


def test_state_dicts_change_hands_with_plain_deepspeed(ranks):
    ranks(2).run(between_layouts)


def refused(spoil):
    engine = build(150)
    train(engine, 0, 1)
    states, before = _own(engine, engine.optimizer.state_dict()), _state(engine)
    if spoil == "bare":
        states = states[_rank()]
    elif spoil == "one":
        states = [states[_rank()]]
    elif _rank() == 1:
        if spoil == "none":
            states = [None, None]
        elif spoil == "groups":
            states[1]["single_partition_of_fp32_groups"].pop()
        elif spoil == "state":
            del states[1]["base_optimizer_state"]["state"][0]["exp_avg"]
    try:
        engine.optimizer.load_state_dict(states)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    else:
        raise AssertionError("no error")
    assert_same(before, _state(engine))
    train(engine, 1, 2)  # nobody is left waiting
    return message


@pytest.mark.parametrize(
    "spoil,expected",
    [
        ("bare", "expected a list of 2 state dicts, one a data-parallel rank, got dict"),
        ("one", "expected a list of 2 state dicts, one a data-parallel rank, got 1 of them"),
        ("none", "state_dict_list[1]: not a state dict: NoneType"),
        ("groups", "state_dict_list[1]: has 1 param groups, the optimizer 2"),
        ("state", "exp_avg"),
    ],
)
def test_state_that_does_not_fit_is_refused_on_every_rank(ranks, spoil, expected):
    for message in ranks(2).run(refused, spoil):
        assert message.startswith("CheckpointError") and expected in message
