"""An optional guard: now and then a bucket is summed a second, slow way, and the two sums compared bit by bit.

``gradient_partition.verify_every: n``. For every n-th window one bucket, chosen in turn, gets a reduce-scatter that
also gathers what all ranks send, by another collective, and adds it up with plain torch operations in the order
that the collective promises. Before the update that sum must equal the bucket's gradient partition in every bit,
which checks collective, kernel, accumulation over micro-steps and whoever else may have written there. What ranks
send is taken as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as torch_dist
from deepspeed import comm as dist

from .bucket import Bucket
from .buffer_pool import Buffer, BufferPool
from .collectives import Handle, ReduceScatter, Traffic
from .failures import during

# Bytes that are gathered at once.
_PIECE_BYTES = 32 * 2**20


class VerificationError(RuntimeError):
    """Gradients were summed wrongly on some rank: by a kernel, a network or a memory that is faulty, or by a bug."""


@dataclass(frozen=True)
class Difference:
    """One rank's shard of a bucket is not what it should be; ``element`` is the first one of ``differing``.

    place: where it belongs in the model. found, expected: its values.
    """

    element: int
    differing: int
    of: int
    place: str
    found: float
    expected: float

    def describe(self) -> str:
        values = (f"{value!r} ({_bits(value)})" for value in (self.found, self.expected))
        return (
            f"element {self.element} of its shard, {self.place}, is {next(values)} where the slow sum gives "
            f"{next(values)}; {self.differing} of {self.of} elements differ"
        )


class Verification(Protocol):
    """What the optimizer asks. Everything is the same on every rank but for what ``difference`` returns."""

    def begin_window(self) -> None:
        """A new window begins; nothing is in flight."""

    def forget_window(self) -> None:
        """Somebody has set gradients, which are no sums any more."""

    def difference(self) -> Difference | None:
        """What is wrong on this rank in the open window, once everything is drained."""

    def stop(self, difference: Difference | None, group: Any) -> None:
        """Raises VerificationError on every rank, after some rank had a difference. Collective."""


class NoVerification:
    """``verify_every: 0``."""

    def begin_window(self) -> None:
        pass

    def forget_window(self) -> None:
        pass

    def difference(self) -> None:
        return None


class BucketVerification:
    """See the module's docstring.

    Args:
        every: windows, at least 1.
        buckets: all buckets; the reduce-scatter of the chosen one is replaced for the window.
        shard_of: this rank's shard of a bucket's gradient partition ``[S]`` fp32, None where nothing was summed.
        scale: what sums are multiplied with.
        kernel: its name, for the error.

    Attributes:
        verified: comparisons made so far.
    """

    def __init__(
        self,
        every: int,
        buckets: Sequence[Bucket],
        shard_of: Callable[[int], torch.Tensor | None],
        scale: float,
        kernel: str,
    ):
        self._every, self._buckets, self._shard_of, self._scale, self._kernel = every, buckets, shard_of, scale, kernel
        self._window = 0
        self._bucket: Bucket | None = None
        self.verified = 0
        self.begin_window()

    def begin_window(self) -> None:
        self.forget_window()
        self._window += 1
        if self._window % self._every == 0 and self._buckets:
            self._bucket = bucket = self._buckets[(self._window // self._every - 1) % len(self._buckets)]
            bucket.reduce_scatter = SummingReduceScatter(bucket.reduce_scatter, bucket.group, self._scale)

    def forget_window(self) -> None:
        if self._bucket is not None:
            self._bucket.reduce_scatter = self._bucket.reduce_scatter.verified
            self._bucket = None

    def difference(self) -> Difference | None:
        if self._bucket is None:
            return None
        shard, expected = self._shard_of(self._bucket.index), self._bucket.reduce_scatter.sum
        if shard is None or expected is None:
            return None
        self.verified += 1
        expected = expected.to(shard.device)
        # NaN equals NaN: which one comes out of a sum depends on the processor's instruction.
        differs = (shard.view(torch.int32) != expected.view(torch.int32)) & ~(shard.isnan() & expected.isnan())
        if not differs.any():
            return None
        element = int(differs.nonzero()[0])
        rank = dist.get_rank(group=self._bucket.group)
        return Difference(
            element=element,
            differing=int(differs.sum()),
            of=shard.numel(),
            place=_place(self._bucket, rank * shard.numel() + element),
            found=shard[element].item(),
            expected=expected[element].item(),
        )

    def stop(self, difference: Difference | None, group: Any) -> None:
        bucket = self._bucket
        found: list[Difference | None] = [None] * dist.get_world_size(group=group)
        with during("the exchange of what verify_every found", "No update was applied.", group):
            # Not through deepspeed.comm: its comms logger does not know the call and ends the process.
            torch_dist.all_gather_object(found, difference, group=group)
        wrong = {rank: difference for rank, difference in enumerate(found) if difference is not None}
        where = "; ".join(f"on rank {rank}, {one.describe()}" for rank, one in list(wrong.items())[:3])
        if len(wrong) > 3:
            where += f"; and on ranks {', '.join(map(str, list(wrong)[3:]))}"
        raise VerificationError(
            f"lazy_reduce.gradient_partition.verify_every: gradients of {bucket.describe()} were summed wrongly in "
            f"window {self._window} of this engine: {where or 'on ranks of another data-parallel group'}. "
            f"Ranks are those of the data-parallel group; kernel {self._kernel}, collective "
            f"{bucket.reduce_scatter.name}, wire dtype {str(bucket.wire_dtype).removeprefix('torch.')}. No update was "
            "applied. Earlier windows, of which only a part was verified, may have been wrong, too."
        )


class SummingReduceScatter:
    """A reduce-scatter that also sums, slowly, what it is given.

    Attributes:
        sum: fp32 ``[S]``, what this rank's shard of the gradient partition should be; None before the first start.
        verified: the reduce-scatter that is checked, and does the work.
    """

    def __init__(self, verified: ReduceScatter, group: Any, scale: float):
        self.verified = verified
        self.name = verified.name
        self.sum: torch.Tensor | None = None
        self._group, self._scale = group, scale

    def start(self, send: Buffer, pool: BufferPool) -> Handle:
        self._add(send.data)  # before it is sent and taken back
        return self.verified.start(send, pool)

    def _add(self, send: torch.Tensor) -> None:
        ranks, rank = dist.get_world_size(group=self._group), dist.get_rank(group=self._group)
        shards = send.view(ranks, -1)
        size = shards.shape[1]
        if self.sum is None:
            self.sum = torch.zeros(size, dtype=torch.float32, device=send.device)
        width = max(_PIECE_BYTES // (ranks * ranks * send.element_size()), 1)
        for begin in range(0, size, width):
            piece = shards[:, begin : begin + width].contiguous()
            everyone = piece.new_empty(ranks, *piece.shape)
            dist.all_gather_into_tensor(everyone.view(-1), piece.view(-1), group=self._group)
            rows = self.verified.reference_rows(everyone[:, rank])
            self.sum[begin : begin + width].add_(sum_in_order(rows), alpha=self._scale)

    def reference_rows(self, contributions: torch.Tensor) -> torch.Tensor:
        return self.verified.reference_rows(contributions)

    def traffic(self, numel: int, dtype: torch.dtype) -> Traffic:
        return self.verified.traffic(numel, dtype)

    def close(self) -> None:
        self.verified.close()


def sum_in_order(rows: torch.Tensor) -> torch.Tensor:
    """``rows[0] + rows[1] + ...`` in fp32, one after the other; ``[N, S] -> [S]``."""
    total = rows[0].float()
    for row in rows[1:]:
        total = total + row.float()
    return total


def make_verification(every: int, *args) -> Verification:
    """``every``: windows, 0 for none; the rest as for :class:`BucketVerification`."""
    return BucketVerification(every, *args) if every else NoVerification()


def _place(bucket: Bucket, flat: int) -> str:
    for slot in bucket.slots:
        if slot.offset <= flat < slot.offset + slot.numel:
            return f"element {flat - slot.offset} of {slot.name}"
    return "in the padding"


def _bits(value: float) -> str:
    return f"0x{torch.tensor(value, dtype=torch.float32).view(torch.int32).item() & 0xFFFFFFFF:08x}"
