"""The demo's closing table: what was communicated, beside what plain ZeRO-2 would have sent."""

from __future__ import annotations

from typing import Any


def plain_zero2_traffic(
    sizes: list[int], *, bucket_size: int, element_bytes: int, world_size: int, micro_steps: int
) -> tuple[int, int]:
    """``(collectives, bytes sent per rank)`` for the gradients of one optimizer step of stock ZeRO-2.

    Computed from its algorithm, not measured: gradients of ``sizes`` elements fill a bucket in reverse
    order until the next would not fit; every bucket of every micro-step is all-reduced, and a ring
    all-reduce sends 2 (N - 1) / N of its input.
    """
    buckets, filled = 0, 0
    for size in reversed(sizes):
        if buckets == 0 or filled + size > bucket_size:
            buckets, filled = buckets + 1, 0
        filled += size
    sent = 2 * (world_size - 1) * sum(sizes) * element_bytes * micro_steps // world_size
    return buckets * micro_steps, sent


def closing_table(
    report: dict[str, Any],
    *,
    bucket_size: int,
    element_bytes: int,
    sizes: list[int],
    world_size: int,
    steps: int,
    micro_steps: int,
    losses: tuple[float | None, float | None],
) -> str:
    """The table as text.

    Args:
        report: ``engine.lazy_reduce_report()`` after ``steps`` optimizer steps.
        bucket_size, element_bytes: of stock ZeRO-2's all-reduces, see :func:`plain_zero2_traffic`.
        sizes: elements of each trainable parameter, in registration order.
        world_size: ranks that share the data.
        steps: optimizer steps of the run.
        micro_steps: micro-steps per optimizer step.
        losses: global loss of the first and of the last logging window, None where there was no report.
    """
    collectives, sent = plain_zero2_traffic(
        sizes,
        bucket_size=bucket_size,
        element_bytes=element_bytes,
        world_size=world_size,
        micro_steps=micro_steps,
    )
    first, last = ("not reported" if loss is None else f"{loss:.3f}" for loss in losses)
    rows = [
        ("per optimizer step and rank", "ds_lazyreduce", "plain ZeRO-2 *"),
        ("  gradient collectives", f"{report['gradient_collectives'] / steps:.1f}", f"{collectives}"),
        ("  gradient bytes sent", f"{report['bytes_sent'] / steps:,.0f}", f"{sent:,}"),
        ("  scalar collectives", f"{report['scalar_collectives'] / steps:.1f}", ""),
        ("  logging collectives", f"{report['metric_collectives'] / steps:.2f}", ""),
        ("peak buffer bytes", f"{report['peak_buffer_bytes']:,}", ""),
        ("kernel", report["kernel"], ""),
        ("collective, wire dtype", f"{report['collective']}, {report['wire_dtype']}", ""),
    ]
    return "\n".join(
        [
            f"{world_size} ranks, {sum(sizes) / 1e6:.2f} M parameters, "
            f"{steps} optimizer steps of {micro_steps} micro-steps",
            f"global loss, first -> last window: {first} -> {last}",
            *(f"{name:<28} {ours:>18} {stock:>18}".rstrip() for name, ours, stock in rows),
            "* computed for this model and config, not measured: a ring all-reduce of every bucket",
        ]
    )
