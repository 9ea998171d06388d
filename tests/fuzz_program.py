"""Random training programs: what they are, how they are drawn, how ranks run them.

Every loss is linear in the parameters, with small integers as coefficients, so that gradients are known exactly
whatever the parameters are. ``fuzz_reference.py`` says what the result must be.
"""

import math
import random
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch.utils.checkpoint import checkpoint

from .harness import base_config, make_engine

SHAPES = [(1,), (1,), (3,), (8,), (17,), (7, 5), (64,), (129,), (300,), (5000,)]
BIG = [(9000,), (16400,)]  # a slot of the first is copied together with others, one of the second by itself


@dataclass(frozen=True)
class Param:
    shape: tuple[int, ...]
    group: int
    frozen: bool
    tied: bool  # registered under a second name, too


@dataclass(frozen=True)
class Segment:
    """A part of a forward pass: ``x + sum of coefficient * parameter`` over ``uses``."""

    checkpoint: str | None  # None, "reentrant" or "non-reentrant"
    uses: tuple[int, ...]


@dataclass(frozen=True)
class Pass:
    """One or more backward calls.

    kind: engine: ``engine.backward(loss)``; unscaled: the same with ``scale_wrt_gas=False``; joint: the same for
        the sum of two forwards; retain: the same twice, with ``retain_graph`` and the loss doubled in the second;
        direct: ``engine.scale(loss).backward()``; two losses: two forwards, then two of these; retain direct: two
        of these for one forward; around: the wrapped module's own loss.
    segments: of each rank.
    failing: ranks whose backward raises before the segment ``fail_at``, an error or a KeyboardInterrupt.
    absent: ranks that leave this pass out.
    before: what happens first: "eval", "flush", "metric", "zero_grad", "grad" (a torch.autograd.grad on some ranks),
        "swap" (parameters get other memory); "read" comes after.
    """

    kind: str
    seed: int
    segments: tuple[tuple[Segment, ...], ...]
    tokens: tuple[int, ...]
    failing: frozenset[int]
    fail_at: int
    interrupt: bool
    absent: frozenset[int]
    before: tuple[str, ...]
    read: bool


@dataclass(frozen=True)
class Window:
    micro_steps: tuple[tuple[Pass, ...], ...]
    coalesce: bool
    boundary_before_last: bool  # of the last pass; for boundaries set by hand
    after: str | None  # "save", "load" or "flush"

    @property
    def passes(self):
        return [one for micro_step in self.micro_steps for one in micro_step]


@dataclass(frozen=True)
class Program:
    world: int
    precision: str
    gas: int
    boundary: str  # "managed", "manual" or "unmanaged"
    loss_reduction: str | None  # of token normalisation
    clip: float
    allreduce: str
    momentum: float
    groups: tuple[tuple[float, float], ...]  # (lr, weight decay)
    params: tuple[Param, ...]
    partition: tuple[tuple[str, object], ...]
    windows: tuple[Window, ...]

    @property
    def reduce_every(self):
        return dict(self.partition)["reduce_every"]


# ---- drawing


def draw(rng: random.Random, world: int) -> Program:
    reduce_every = rng.choice([1, 1, 2, 3, "boundary"])
    tokens = rng.choice([None, None, "sum", "mean"])
    groups = tuple((rng.choice([0.5, 0.25]), rng.choice([0.0, 0.125])) for _ in range(rng.randint(1, 3)))
    shapes = SHAPES + (BIG if rng.random() < 0.1 else [])
    params = [
        Param(rng.choice(shapes), rng.randrange(len(groups)), rng.random() < 0.15, rng.random() < 0.15)
        for _ in range(rng.randint(1, 8))
    ]
    params[0] = Param(params[0].shape, params[0].group, False, params[0].tied)
    boundary = rng.choice(["managed", "managed", "manual", "unmanaged"])
    gas = rng.choice([1, 2, 4])
    wires = ["auto", "fp32", "fp16"] + (["bf16"] if reduce_every == 1 else [])
    partition = {
        "bucket_size": rng.choice(["auto", 1, 8, 32, 100, 1000, 20000]),
        "max_in_flight": rng.choice([1, 1, 2, 4]),
        "carry_over": rng.random() < 0.6,
        "reduce_every": reduce_every,
        "wire_dtype": rng.choice(wires),
        "kernel": rng.choice(["auto", "torch"]),
        "collective": rng.choice(["auto", "auto", "reduce_scatter"] + ["hierarchical"] * 2 * (world == 4)),
        "verify_every": rng.choice([0, 0, 1, 2]),  # it must find nothing, and change nothing
    }
    if partition["collective"] == "reduce_scatter":
        partition["wire_dtype"] = "fp32"  # it sums in the wire dtype, where others would round
        partition["verify_every"] = 0
    if partition["collective"] == "hierarchical":  # two nodes of two ranks
        partition["node_size"] = 2
        if partition["wire_dtype"] == "fp32":  # a narrower one would round the sums
            partition["across_dtype"] = rng.choice(["fp32", "wire"])
    rules = _Rules(rng, world, len(params), reduce_every, tokens)
    windows = tuple(rules.window(boundary, gas) for _ in range(rng.randint(1, 4)))
    return Program(
        world=world,
        precision=rng.choice(["bf16", "fp32"]),
        gas=gas,
        boundary=boundary,
        loss_reduction=tokens,
        clip=rng.choice([0.0, 0.0, 0.5, 1e6]),
        allreduce="mean" if tokens else rng.choice(["mean", "mean", "sum"]),
        momentum=rng.choice([0.0, 0.0, 0.5]),
        groups=groups,
        params=tuple(params),
        partition=tuple(partition.items()),
        windows=windows,
    )


@dataclass
class _Rules:
    """What may follow what. ``saved``: whether a checkpoint exists already."""

    rng: random.Random
    world: int
    params: int
    reduce_every: int | str
    tokens: str | None
    saved: bool = False

    def window(self, boundary, gas):
        rng = self.rng
        coalesce = (boundary == "manual" or (boundary == "managed" and gas == 1)) and rng.random() < 0.2
        if boundary == "managed":
            count = gas
        else:
            count = rng.randint(0 if rng.random() < 0.1 else 1, 4)
        sizes = [rng.choice([1, 1, 1, 1, 2, 0]) if boundary == "managed" else 1 for _ in range(count)]
        if coalesce:
            sizes = [rng.randint(0, 3)]
        micro_steps = tuple(
            tuple(
                self.one_pass(coalesce, alone=boundary == "managed" and not coalesce and size == 1) for _ in range(size)
            )
            for size in sizes
        )
        after = rng.choice([None] * 12 + ["flush", "flush", "save"] + ["load"] * 4 * self.saved)
        self.saved |= after == "save"
        return Window(micro_steps, coalesce, rng.random() < 0.5, after)

    def one_pass(self, coalesce, alone):
        """``alone``: the engine's step comes before and after it, so that a rank may leave it out."""
        rng = self.rng
        kinds = ["engine"] * 4 + ["joint", "retain"]
        if self.tokens is None:
            kinds += ["direct"] * 3 + ["two losses", "retain direct", "around", "unscaled"]
        kind = rng.choice(kinds)
        ranks = range(self.world)
        failing = frozenset()
        if kind in ("engine", "direct", "unscaled") and rng.random() < 0.08:
            failing = frozenset(rank for rank in ranks if rng.random() < 0.6)
        absent = frozenset()
        skippable = alone and kind in ("engine", "joint", "direct", "unscaled")
        if rng.random() < 0.2 and (self.reduce_every == "boundary" or coalesce or kind == "around" or skippable):
            absent = frozenset(rank for rank in ranks if rng.random() < 0.5)
        segments = self.segments()
        before = ["eval", "metric", "metric", "zero_grad", "grad", "swap"]
        if self.reduce_every != "boundary":  # there ranks may run unequal numbers of passes, and reduce in any of them
            before.append("flush")
        return Pass(
            kind=kind,
            seed=rng.randrange(1000),
            segments=tuple(self.varied(segments) for _ in ranks),
            tokens=tuple(rng.choice([0, 1, 3, 7, 100]) for _ in ranks),
            failing=failing,
            fail_at=rng.randint(0, len(segments)),
            interrupt=rng.random() < 0.3,
            absent=absent,
            before=tuple(name for name in before if rng.random() < 0.06),
            read=self.reduce_every == 1 and not coalesce and not (skippable and absent) and rng.random() < 0.1,
        )

    def segments(self):
        rng = self.rng
        order = list(range(self.params))
        if rng.random() < 0.5:
            rng.shuffle(order)
        order += [index for index in range(self.params) if rng.random() < 0.15]  # applied twice
        segments, mixed = [], rng.random() < 0.4
        while order:
            size = rng.randint(1, len(order))
            kind = rng.choice([None, "reentrant", "non-reentrant"]) if mixed else None
            segments.append(Segment(kind, tuple(order[:size])))
            order = order[size:]
        return tuple(segments)

    def varied(self, segments):
        """On some ranks parameters stay unused, or segments run in another order."""
        rng = self.rng
        if rng.random() < 0.3:
            segments = tuple(Segment(s.checkpoint, tuple(i for i in s.uses if rng.random() < 0.6)) for s in segments)
        if rng.random() < 0.15:
            segments = tuple(rng.sample(segments, len(segments)))
        return segments


# ---- the model


def coefficients(program, one, rank, forward=0):
    """For each segment the integer tensors that its parameters are multiplied with; multiples of ``gas``."""
    generator = torch.Generator().manual_seed(one.seed * 100 + rank * 10 + forward)
    return [
        [
            program.gas * torch.randint(-4, 5, program.params[index].shape, generator=generator).float()
            for index in segment.uses
        ]
        for segment in one.segments[rank]
    ]


def initial(program):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(-8, 9, param.shape, generator=generator).float() for param in program.params]


class Model(torch.nn.Module):
    def __init__(self, program):
        super().__init__()
        self.p = torch.nn.ParameterList(
            torch.nn.Parameter(value, requires_grad=not param.frozen)
            for value, param in zip(initial(program), program.params, strict=True)
        )
        for index, param in enumerate(program.params):
            if param.tied:
                self.register_parameter(f"tied{index}", self.p[index])

    def forward(self, x, segments, factors, fail_at=None, interrupt=False):
        x = x.clone()
        for position, (segment, values) in enumerate(zip(segments, factors, strict=True)):
            if position == fail_at:
                x = _Failing.apply(x, interrupt)
            if segment.checkpoint is None:
                x = self._part(x, segment.uses, values)
            else:
                reentrant = segment.checkpoint == "reentrant"
                x = checkpoint(self._part, x, segment.uses, values, use_reentrant=reentrant)
        return _Failing.apply(x, interrupt) if fail_at == len(segments) else x

    def _part(self, x, uses, values):
        for index, value in zip(uses, values, strict=True):
            x = x + (self.p[index].float() * value).sum()
        return x


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, interrupt):
        ctx.interrupt = interrupt
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise KeyboardInterrupt if ctx.interrupt else ArithmeticError


# ---- running


def run(program, directory):
    """Runs it on this rank; returns what was observed, in order."""
    return _Run(program, directory).run()


class _Run:
    def __init__(self, program, directory):
        from deepspeed import comm as dist

        self.program, self.directory, self.rank = program, directory, dist.get_rank()
        self.engine = _engine(program)
        self.trainable = {
            index: self.engine.module.p[index] for index, param in enumerate(program.params) if not param.frozen
        }
        self.seen = []
        self.losses = []  # (loss times weight, weight) of the open logging window
        self.additive = 0  # losses of this window that were divided by the caller

    def run(self):
        for number, window in enumerate(self.program.windows):
            self.window(window)
            self.observe_step()
            if window.after == "save":
                self.engine.save_checkpoint(self.directory, tag="fuzz")
                self.saved_losses = list(self.losses)
            elif window.after == "load":
                self.engine.load_checkpoint(self.directory, tag="fuzz")
                self.losses = list(self.saved_losses)
            if window.after == "flush" or number == len(self.program.windows) - 1:
                self.flush()
        return self.seen

    def window(self, window):
        engine, passes = self.engine, window.passes
        if self.program.boundary == "manual":
            engine.set_gradient_accumulation_boundary(False)
        if self.program.boundary == "managed" and not window.coalesce:
            for micro_step in window.micro_steps:
                for one in micro_step:
                    self.one_pass(one)
                engine.step()
            return
        with engine.coalesce_grad_reduction() if window.coalesce else nullcontext():
            for number, one in enumerate(passes):
                last = number == len(passes) - 1
                if self.program.boundary == "manual" and last and window.boundary_before_last:
                    engine.set_gradient_accumulation_boundary(True)
                self.one_pass(one)
        if self.program.boundary == "manual":
            engine.set_gradient_accumulation_boundary(True)
        engine.step()

    def one_pass(self, one):
        for name in one.before:
            self.before(name, one)
        if self.rank not in one.absent:
            try:
                self.backward(one)
            except (ArithmeticError, KeyboardInterrupt):
                assert self.rank in one.failing
            else:
                assert self.rank not in one.failing
        if one.read:
            self.read()

    def before(self, name, one):
        if name == "eval":
            self.engine.eval()
            with torch.no_grad():
                self.forward(one)
            self.engine.train()
        elif name == "flush":
            self.flush()
        elif name == "metric":
            self.engine.record_metric(f"metric{self.rank % 2}", self.rank, 2)
        elif name == "zero_grad":
            self.engine.zero_grad()
        elif name == "grad" and self.rank % 2 == 0:
            x = torch.zeros((), requires_grad=True)
            # torch.autograd.grad is not for reentrant checkpoints.
            segments = [replace(segment, checkpoint=None) for segment in one.segments[self.rank]]
            output = self.engine(x, segments, coefficients(self.program, one, self.rank))
            assert torch.autograd.grad(output, x)[0] > 0
        elif name == "swap":
            for p in self.engine.module.p:
                p.data = p.data.clone()

    def forward(self, one, forward=0, module=None):
        x = torch.zeros((), requires_grad=True)
        factors = coefficients(self.program, one, self.rank, forward)
        fail_at = one.fail_at if self.rank in one.failing else None
        return (module or self.engine)(x, one.segments[self.rank], factors, fail_at, one.interrupt)

    def backward(self, one):
        engine, kind = self.engine, one.kind
        if kind == "around":
            self.forward(one, module=engine.module).backward()
            return
        loss = self.forward(one)
        if kind in ("two losses", "joint"):
            second = self.forward(one, forward=1)
        if kind == "direct":
            engine.scale(loss).backward()
        elif kind == "two losses":
            engine.scale(loss).backward()
            engine.scale(second).backward()
        elif kind == "retain direct":
            engine.scale(loss).backward(retain_graph=True)
            engine.scale(loss).backward()
        elif kind == "retain":
            self.engine_backward(loss, one, retain_graph=True)
            self.engine_backward(2 * loss, one)
        elif kind == "joint":
            self.engine_backward(loss + second, one)
        else:
            self.engine_backward(loss, one, scale_wrt_gas=kind != "unscaled")

    def engine_backward(self, loss, one, **kwargs):
        value, tokens = loss.item(), one.tokens[self.rank]
        if self.program.loss_reduction is None:
            self.engine.backward(loss, **kwargs)
            additive = not kwargs.get("scale_wrt_gas", True)
            self.additive += additive
            entry = (value, 1 / self.program.gas if additive else 1)
        else:
            if self.program.loss_reduction == "mean":
                loss = loss / tokens if tokens else loss * math.nan
            elif not tokens:
                loss = loss * math.nan
            self.engine.backward(loss, num_tokens=tokens, **kwargs)
            entry = (value if tokens else 0.0, tokens)
        self.losses.append(entry)  # a backward that raised is not reported

    # -- observing

    def observe_step(self):
        from deepspeed.utils import safe_get_full_fp32_param

        engine = self.engine
        masters = {index: safe_get_full_fp32_param(p) for index, p in self.trainable.items()}
        for index, p in enumerate(engine.module.p):
            expected = initial(self.program)[index] if index not in masters else masters[index]
            assert torch.equal(p.detach(), expected.to(p.dtype)), f"the weights of parameter {index} are stale"
            assert p.grad is None or not p.requires_grad
        report = engine.lazy_reduce_report()
        assert engine.optimizer._pool.live_bytes == 0
        assert report["max_in_flight_seen"] <= dict(self.program.partition)["max_in_flight"]
        if self.additive:
            self.losses.append((0.0, 1 - self.additive / self.program.gas))
        self.additive = 0
        self.seen.append(("step", masters, report, engine.skipped_steps))

    def read(self):
        from deepspeed.utils import safe_get_full_grad

        try:
            self.seen.append(("read", {index: safe_get_full_grad(p) for index, p in self.trainable.items()}))
        except (RuntimeError, ValueError) as error:
            self.seen.append(("read", str(error)))

    def flush(self):
        self.seen.append(("flush", self.engine.flush_metrics(), self.losses))
        self.losses = []


def _engine(program):
    model = Model(program)
    groups = [
        {"params": [model.p[i] for i, p in enumerate(program.params) if p.group == g], "lr": lr, "weight_decay": decay}
        for g, (lr, decay) in enumerate(program.groups)
    ]
    groups = [group for group in groups if group["params"]]
    config = base_config(
        precision=program.precision,
        lazy={
            "gradient_partition": dict(program.partition),
            "deferred_loss": {"interval": 10**6},
            "token_normalization": {
                "enabled": program.loss_reduction is not None,
                "loss_reduction": program.loss_reduction or "sum",
            },
        },
        gradient_accumulation_steps=program.gas,
        gradient_clipping=program.clip,
        gradient_allreduce_op=program.allreduce,
        managed_gradient_accumulation=program.boundary != "unmanaged",
    )
    return make_engine(model, torch.optim.SGD(groups, lr=1.0, momentum=program.momentum), config)
