"""Which parameter travels in which bucket, and in what order buckets leave. Pure logic.

A *bucket* is a run of parameters of one user param group that is reduced by one collective. It
becomes a ZeRO param group of its own, so that every rank owns an equal, contiguous shard of it:

    user group 0   [ w0 w1 w2 w3 b0 ]      registration order  ->  backward visits it from the right
    buckets        [ b0 w3 ] [ w2 w1 ] [ w0 ]
    bucket 0       | shard of rank 0 | shard of rank 1 | ... |      N equal shards, padded with zeros

With stock ZeRO-2 the rank's slice is cut from the whole param group, so that one bucket belongs to
one or two ranks only; an all-to-all over such slices would be lopsided.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ParamSpec:
    """What the layout needs to know of a parameter.

    position: index in the module's registration order; gradients arrive roughly from the highest.
    numel: number of elements, > 0.
    kind: parameters of different kinds (dtype, wire dtype) never share a bucket.
    """

    position: int
    numel: int
    kind: Hashable = None


def split_into_buckets(specs: Sequence[ParamSpec], limit: int) -> list[list[int]]:
    """Cut one param group into buckets of at most ``limit`` elements.

    Parameters are taken in reverse registration order, the order in which backward tends to
    produce their gradients. A parameter larger than ``limit`` is a bucket by itself.

    Returns:
        For each bucket the indices into ``specs``; every index occurs exactly once.
    """
    if limit < 1:
        raise ValueError(f"bucket limit must be at least 1 element, got {limit}")
    buckets: list[list[int]] = []
    open_buckets: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    for index in sorted(range(len(specs)), key=lambda i: -specs[i].position):
        spec = specs[index]
        if spec.kind not in open_buckets or filled[spec.kind] + spec.numel > limit:
            open_buckets[spec.kind] = []
            filled[spec.kind] = 0
            buckets.append(open_buckets[spec.kind])
        open_buckets[spec.kind].append(index)
        filled[spec.kind] += spec.numel
    return buckets


def initial_order(last_arrivals: Sequence[int]) -> list[int]:
    """Order in which buckets leave before a backward pass has been seen.

    A bucket is complete when its earliest registered parameter has its gradient, so buckets of all
    user groups are sorted by that parameter, latest registered first. (Taken group by group
    instead, the first bucket of the second group would wait for nearly the whole backward pass.)

    Args:
        last_arrivals: for each bucket the smallest registration position of its parameters.
    """
    return sorted(range(len(last_arrivals)), key=lambda i: -last_arrivals[i])


def learned_order(completed: Sequence[int], current: Sequence[int]) -> list[int]:
    """Order of completion seen in a backward pass; buckets that did not complete follow at the end.

    Args:
        completed: bucket indices in the order in which they completed, without repetition.
        current: the order used so far, a permutation of all buckets.
    """
    seen = set(completed)
    return [*completed, *(index for index in current if index not in seen)]
