"""What a program of ``fuzz_program.py`` must do: all ranks in one process, in float64."""

import math

import torch

from .fuzz_program import coefficients, initial


def check(program, seen_by_rank):
    """Raises AssertionError where an observation of a rank is not what the program means."""
    _Reference(program, seen_by_rank).check()


class _Reference:
    def __init__(self, program, seen_by_rank):
        self.program = program
        self.events = [iter(seen) for seen in seen_by_rank]
        self.masters = [value.double() for value in initial(program)]
        self.momenta = [None] * len(self.masters)
        self.skipped = 0
        self.collectives = 0  # of the report so far
        self.scalar_collectives = 0
        self.saved = None
        self.metrics = {}

    def check(self):
        for number, window in enumerate(self.program.windows):
            self.where = f"window {number}"
            self.window(window)
            if window.after == "save":
                self.saved = (list(self.masters), list(self.momenta), self.skipped, _copied(self.metrics))
            elif window.after == "load":
                masters, momenta, self.skipped, metrics = self.saved
                self.masters, self.momenta, self.metrics = list(masters), list(momenta), _copied(metrics)
            if window.after == "flush" or number == len(self.program.windows) - 1:
                self.flush()
        assert all(next(events, None) is None for events in self.events)

    # -- a window

    def window(self, window):
        ranks = range(self.program.world)
        total = [torch.zeros_like(master) for master in self.masters]
        tokens, void, late, reduced = 0, False, self.program.reduce_every != 1, 0
        for one in window.passes:
            for name in one.before:
                if name == "flush":
                    self.flush()
                elif name == "metric":
                    self.metric()
            void |= bool(one.failing - one.absent)
            forwards = 2 if one.kind == "joint" else 1
            late |= one.kind in ("around", "retain direct")
            late |= any(_meets_twice(segments * forwards) for segments in one.segments)
            reduced += {"around": 0, "two losses": 2, "retain": 2}.get(one.kind, 1)
            for rank in ranks:
                if rank not in one.absent:
                    self.add(total, one, rank)
                    tokens += one.tokens[rank] * (2 if one.kind == "retain" else 1)
            if one.read:
                self.read(total, uncertain=void or self.program.loss_reduction is not None)
        if self.program.loss_reduction is not None:
            gradients = [gradient / max(tokens, 1) for gradient in total]
            void |= tokens == 0
        else:
            gradients = [gradient * self.scale for gradient in total]
        if void:
            self.skipped += 1
        else:
            self.update(gradients)
        reduced += self.steps_without_pass(window)
        late = late and not window.coalesce
        self.step(window, late, reduced, late * (1 + sum(one.read for one in window.passes)))

    def steps_without_pass(self, window):
        """Calls of ``engine.step`` which no backward of the engine precedes: in each ranks reduce zeros."""
        if self.program.boundary == "unmanaged" or window.coalesce:
            return 0
        stretches = window.micro_steps if self.program.boundary == "managed" else [window.passes]
        return sum(all(one.kind == "around" for one in stretch) for stretch in stretches)

    @property
    def scale(self):
        return 1 / self.program.world if self.program.allreduce == "mean" else 1

    def add(self, total, one, rank):
        divided = one.kind not in ("unscaled", "around") and self.program.loss_reduction is None
        factor = {"retain": 3, "retain direct": 2}.get(one.kind, 1) / (self.program.gas if divided else 1)
        if self.program.loss_reduction is not None and not one.tokens[rank]:
            return
        for forward in range(2 if one.kind in ("two losses", "joint") else 1):
            for segment, values in zip(one.segments[rank], coefficients(self.program, one, rank, forward), strict=True):
                for index, value in zip(segment.uses, values, strict=True):
                    total[index] += factor * value.double()

    def update(self, gradients):
        program = self.program
        trained = [index for index, param in enumerate(program.params) if not param.frozen]
        if program.clip:
            norm = math.sqrt(sum(gradients[index].square().sum().item() for index in trained))
            gradients = [gradient / max((norm + 1e-6) / program.clip, 1) for gradient in gradients]
        for index in trained:
            lr, decay = program.groups[program.params[index].group]
            gradient = gradients[index] + decay * self.masters[index]
            if program.momentum:
                before = self.momenta[index]
                gradient = gradient if before is None else program.momentum * before + gradient
                self.momenta[index] = gradient
            self.masters[index] = self.masters[index] - lr * gradient

    # -- observations

    def next(self, kind):
        found = [next(events) for events in self.events]
        assert {event[0] for event in found} == {kind}, (self.where, kind, found)
        return found

    def same(self, what, got, expected):
        assert got.shape == expected.shape
        close = torch.isclose(got.double(), expected, rtol=1e-5, atol=1e-4)
        assert close.all(), f"{self.where}: {what} is {got[~close][:4]}, not {expected[~close][:4]}"

    def step(self, window, late, reduced, late_passes):
        for rank, (_, masters, report, skipped) in enumerate(self.next("step")):
            for index, master in masters.items():
                self.same(f"parameter {index} on rank {rank}", master, self.masters[index])
            assert skipped == self.skipped, f"{self.where}: {skipped} skipped, not {self.skipped}"
            if rank == 0:
                scalars = report["scalar_collectives"] - self.scalar_collectives
                gradients = report["gradient_collectives"] - self.collectives
                buckets = report["buckets"]
            self_reported = (report["scalar_collectives"], report["gradient_collectives"])
            assert self_reported == (self.scalar_collectives + scalars, self.collectives + gradients)
        self.scalar_collectives += scalars
        self.collectives += gradients
        if self.program.reduce_every == "boundary" or window.coalesce:
            reducing = 1
        else:
            reducing = reduced // self.program.reduce_every
        assert 1 <= scalars <= 1 + late, f"{self.where}: {scalars} scalar collectives"
        least, late_ones = buckets * reducing, buckets * late_passes
        assert least <= gradients <= least + late_ones, f"{self.where}: {gradients} reductions, least {least}"

    def read(self, total, uncertain):
        for rank, (_, gradients) in enumerate(self.next("read")):
            if not uncertain and not isinstance(gradients, str):
                for index, gradient in gradients.items():
                    self.same(f"gradient {index} on rank {rank}", gradient, total[index] * self.scale)

    def metric(self):
        for rank in range(self.program.world):
            total = self.metrics.setdefault(f"metric{rank % 2}", [0, 0])
            total[0] += rank
            total[1] += 2

    def flush(self):
        found = self.next("flush")
        losses = [entry for _, _, losses in found for entry in losses]
        weight = sum(weight for _, weight in losses)
        expected = {name: total / count for name, (total, count) in self.metrics.items()}
        if weight > 0:
            expected["train_loss"] = sum(loss for loss, _ in losses) / weight
        for _, values, _ in found:
            assert values.keys() == expected.keys(), f"{self.where}: {values} for {expected}"
            for name, value in values.items():
                rounding = 1e-6 * (1 + sum(abs(loss) for loss, _ in losses))  # losses are fp32
                assert math.isclose(value, expected[name], abs_tol=rounding), (self.where, name, value)
        self.metrics = {}


def _meets_twice(segments):
    """Whether a parameter's gradient arrives more than once: from reentrant segments it comes by itself."""
    used = [index for segment in segments for index in set(segment.uses)]
    reentrant = {index for segment in segments if segment.checkpoint == "reentrant" for index in segment.uses}
    return any(used.count(index) > 1 for index in reentrant)


def _copied(metrics):
    return {name: list(total) for name, total in metrics.items()}
