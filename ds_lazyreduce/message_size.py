"""Whether messages between hosts are large enough for the link. Pure logic."""

from __future__ import annotations

from collections.abc import Sequence

from .bucket import Bucket

# Below this a message between hosts takes as long as its latency rather than as its bytes.
LATENCY_BOUND = 256 * 1024


def small_messages(buckets: Sequence[Bucket], reduce_every: int | str) -> str | None:
    """What to tell the user if even the largest messages to ranks on other nodes are below ``LATENCY_BOUND``.

    The same on every rank, since it depends on sizes alone.

    Args:
        reduce_every: as in the config, for the advice.

    Returns:
        A message that names the bucket size and what would be right; None if nothing is small, or nothing leaves
        the node.
    """
    sizes = [(_message_across_nodes(bucket), bucket.numel) for bucket in buckets]
    message, elements = max(sizes, default=(0, 0))
    if not 0 < message < LATENCY_BOUND:
        return None
    needed = -(-elements * LATENCY_BOUND // message)
    total = sum(bucket.numel for bucket in buckets)
    advice = f"expected at least {needed:,} elements"
    if total < needed:
        advice = f"larger ones would need {needed:,} elements and the model has {total:,}"
        if reduce_every != "boundary":
            advice += '; reduce_every "boundary" sends them once per optimizer step'
    return (
        f"lazy_reduce.gradient_partition.bucket_size: buckets of {elements:,} elements make messages of "
        f"{message / 1024:.3g} KB to each rank on other nodes, and below {LATENCY_BOUND // 1024} KB these are bound by "
        f"latency; {advice}"
    )


def _message_across_nodes(bucket: Bucket) -> int:
    traffic = bucket.reduce_scatter.traffic(bucket.numel, bucket.wire_dtype)
    return traffic.bytes_across_nodes // max(1, traffic.messages_across_nodes)
