"""One rank of the comparison in two_hosts.py: all contenders in turn, with the bytes that left the host."""

import argparse
import json
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch

from .emulated_hosts import bytes_sent
from .harness import base_config, make_engine

WARM_UP = 2  # rounds: in the second one buckets leave in the order that was learned in the first


class Model(torch.nn.Module):
    """Parameters of equal size whose gradient is a small integer: sums of 8 ranks are exact in bf16, in any order."""

    def __init__(self, layers, numel, rank):
        super().__init__()
        self.layers = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(numel)) for _ in range(layers))
        self.gradient = (torch.arange(numel) % 7 + 1).bfloat16() * (rank + 1)

    def forward(self):
        return sum((p * self.gradient).sum() for p in self.layers)

    def expected(self, steps, ranks):
        """Every parameter after so many steps of SGD with a rate of 1."""
        factor = sum(range(1, ranks + 1)) / ranks
        return (-steps * factor * (torch.arange(self.gradient.numel()) % 7 + 1)).bfloat16()


class Contender:
    """An engine of plain ZeRO-2 (`partition` None), or with these keys of `gradient_partition`."""

    def __init__(self, partition, layers, numel, rank):
        self.model = Model(layers, numel, rank)
        lazy = None if partition is None else {"gradient_partition": {"bucket_size": numel, **partition}}
        zero = {"stage": 2, "reduce_bucket_size": numel}
        config = base_config(lazy=lazy, zero_optimization=zero)
        self.engine = make_engine(self.model, torch.optim.SGD(self.model.parameters(), lr=1.0), config)
        self.is_lazy = lazy is not None
        self.samples = []

    def one_round(self):
        """A step, from one state in which no rank communicates to the next; the gradients' part of it measured."""
        before = _quiet_bytes()
        start = time.perf_counter()
        self.engine.backward(self.engine())
        if self.is_lazy:
            self.engine.optimizer.chain.drain()
        reduced = time.perf_counter()
        after = _quiet_bytes()
        resumed = time.perf_counter()
        self.engine.step()
        stepped = time.perf_counter() - resumed + reduced - start
        return {"bytes": after - before, "reduced": reduced - start, "stepped": stepped}


def _quiet_bytes():
    """`bytes_sent()` while no rank sends."""
    torch.distributed.barrier()
    sent = bytes_sent()
    torch.distributed.barrier()
    return sent


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank")  # the launcher's
    parser.add_argument("--contenders", type=json.loads, help="name -> keys of gradient_partition, null for stock")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--numel", type=int, help="elements of a layer, and of a bucket")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()

    import deepspeed
    from tqdm import tqdm

    deepspeed.init_distributed("gloo", timeout=timedelta(seconds=60), verbose=False)
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    built = {name: Contender(p, options.layers, options.numel, rank) for name, p in options.contenders.items()}
    steps = WARM_UP + options.rounds
    for _ in tqdm(range(steps), desc="rounds", disable=rank != 0, file=sys.stderr):
        for contender in built.values():
            contender.samples.append(contender.one_round())
    mine = {}
    for name, contender in built.items():
        expected = contender.model.expected(steps, ranks)
        mine[name] = {
            "samples": contender.samples[WARM_UP:],
            "exact": all(torch.equal(p.detach(), expected) for p in contender.model.layers),
            "report": contender.engine.lazy_reduce_report() if contender.is_lazy else None,
        }
    everyone = [None] * ranks
    torch.distributed.all_gather_object(everyone, mine)
    if rank == 0:
        options.output.write_text(json.dumps(everyone))
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
