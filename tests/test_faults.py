"""A rank that dies: the others end within the process group's timeout, with a message that says where."""

import os
import time

import pytest
import torch

from .harness import base_config, make_engine
from .ranks import RankPool
from .test_autograd import Chain

PG_TIMEOUT = 8


class _DiesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if os.environ["RANK"] == "1":
            os._exit(1)
        return grad


def a_rank_dies(path, carry_over):
    partition = {"bucket_size": 8, "carry_over": carry_over}
    model = Chain(blocks=4)
    engine = make_engine(
        model, torch.optim.SGD(model.parameters(), lr=1.0), base_config(lazy={"gradient_partition": partition})
    )
    x = torch.ones(8, dtype=torch.bfloat16)
    engine.backward(engine(x))
    engine.step()
    before = [shard.clone() for shard in engine.optimizer.single_partition_of_fp32_groups]
    started = time.monotonic()
    h = x.clone().requires_grad_()
    for index, block in enumerate(model.blocks):
        h = _DiesInBackward.apply(block(h)) if index == 1 else block(h)
    messages = []
    for call in (lambda: engine.backward(h.sum()), engine.step):
        try:
            call()
        except RuntimeError as error:
            messages.append(str(error))
    after = engine.optimizer.single_partition_of_fp32_groups
    unchanged = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    with open(f"{path}/rank{os.environ['RANK']}", "w") as file:
        file.write(f"{time.monotonic() - started}\n{unchanged}\n" + "\n".join(messages))


@pytest.mark.parametrize("carry_over", [False, True])
def test_survivors_of_a_dead_rank_name_the_bucket_and_apply_nothing(warm_extensions, tmp_path, carry_over):
    with RankPool(3, pg_timeout=PG_TIMEOUT) as pool:
        with pytest.raises(AssertionError, match="rank 1 died"):
            pool.run(a_rank_dies, str(tmp_path), carry_over, timeout=60)
        deadline = time.monotonic() + PG_TIMEOUT + 5  # the pool gives survivors less than a timeout takes
        while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
    for rank in (0, 2):
        seconds, unchanged, *messages = (tmp_path / f"rank{rank}").read_text().splitlines()
        assert float(seconds) < PG_TIMEOUT + 5
        assert unchanged == "True"
        assert len(messages) == 2
        for message in messages:
            assert "the gradient reduction of bucket" in message and "blocks." in message


def test_destroying_an_engine_twice_is_harmless(ranks):
    ranks(2).run(destroy_twice)


def destroy_twice():
    model = Chain(blocks=2)
    engine = make_engine(model, torch.optim.SGD(model.parameters(), lr=1.0), base_config(lazy=True))
    engine.backward(engine(torch.ones(8, dtype=torch.bfloat16)))
    engine.destroy()
    engine.destroy()
