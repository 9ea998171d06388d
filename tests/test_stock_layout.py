"""The layout of plain ZeRO-2, computed, against plain ZeRO-2; and the plan that moves elements into it."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_lazyreduce.bucket_layout import ParamSpec, split_into_buckets
from ds_lazyreduce.stock_layout import Placement, plan_transfer, split_into_rounds, stock_layout

PADDING = -1


def bucket_placements(numels, limit, ranks):
    """Placements in buckets, as the optimizer lays them out, and the elements each rank holds."""
    placements, base = {}, 0
    for bucket in split_into_buckets([ParamSpec(i, n) for i, n in enumerate(numels)], limit):
        start = 0
        starts = {}
        for index in bucket:
            starts[index] = start
            start += numels[index]
        shard = (start + -start % (2 * ranks)) // ranks
        placements.update({index: Placement(s, shard, base) for index, s in starts.items()})
        base += shard
    return [placements[index] for index in range(len(numels))], base


def scattered(numels, placements, size, ranks):
    """One list a rank of (parameter, element), padding elsewhere."""
    held = [[PADDING] * size for _ in range(ranks)]
    for index, (numel, (start, shard, base)) in enumerate(zip(numels, placements, strict=True)):
        for element in range(numel):
            rank, offset = divmod(start + element, shard)
            assert held[rank][base + offset] == PADDING
            held[rank][base + offset] = (index, element)
    return held


def apply(segments, source, target):
    for source_rank, source_offset, target_rank, target_offset, length in segments:
        target[target_rank][target_offset : target_offset + length] = source[source_rank][
            source_offset : source_offset + length
        ]


sizes = st.lists(st.integers(1, 40), min_size=1, max_size=12)


@settings(deadline=None, max_examples=200)
@given(sizes, st.integers(1, 60), st.integers(1, 9), st.booleans(), st.sampled_from([1, 4, 8]), st.integers(1, 30))
def test_every_element_moves_once_and_back_again(numels, limit, ranks, round_robin, alignment, cap):
    ours, size = bucket_placements(numels, limit, ranks)
    layout = stock_layout(numels, ranks, round_robin=round_robin, alignment=alignment)
    segments = plan_transfer(numels, ours, layout.placements())
    staying, rounds = split_into_rounds(segments, cap)

    moved = Counter()
    for segment in segments:
        for element in range(segment.length):
            moved[segment.source_rank, segment.source_offset + element] += 1
    assert sum(moved.values()) == sum(numels) and set(moved.values()) == {1}
    for segments_of_round in rounds:
        for side in ("source_rank", "target_rank"):
            load = Counter()
            for segment in segments_of_round:
                load[getattr(segment, side)] += segment.length
            assert max(load.values()) <= cap
        assert all(segment.source_rank != segment.target_rank and segment.length for segment in segments_of_round)
    assert all(segment.source_rank == segment.target_rank for segment in staying)

    held = scattered(numels, ours, size, ranks)
    stock = scattered(numels, layout.placements(), layout.partition_size, ranks)
    flat = [element for rank in stock for element in rank]
    assert len(flat) == layout.numel and len(flat) % (2 * ranks) == 0
    received = [[PADDING] * layout.partition_size for _ in range(ranks)]
    returned = [[PADDING] * size for _ in range(ranks)]
    pieces = [*staying, *(segment for segments_of_round in rounds for segment in segments_of_round)]
    apply(pieces, held, received)
    assert received == stock
    apply([(s.target_rank, s.target_offset, s.source_rank, s.source_offset, s.length) for s in pieces], stock, returned)
    assert returned == held


@settings(deadline=None)
@given(sizes, st.integers(1, 9), st.booleans(), st.sampled_from([1, 4, 8]))
def test_fragments_and_end_padding_cover_every_partition(numels, ranks, round_robin, alignment):
    layout = stock_layout(numels, ranks, round_robin=round_robin, alignment=alignment)
    covered = sum(sum(numel for _, numel in layout.fragments(rank).values()) for rank in range(ranks))
    assert covered == sum(numels)
    padding = sum(layout.end_padding(rank) for rank in range(ranks))
    assert covered + sum(layout.paddings) + padding == layout.numel
    assert all(start % alignment == 0 for start in layout.offsets)
    for rank in range(ranks):
        held = [0] * layout.partition_size
        for start, stop in [*((a, a + n) for a, n in layout.fragments(rank).values()), *layout.gaps(rank)]:
            for element in range(start, stop):
                held[element] += 1
        assert set(held) <= {1}  # every element belongs to a fragment or to a gap


def test_the_number_of_rounds_is_near_the_least():
    numels = [1000, 3000, 10, 5000, 77]
    ours, _ = bucket_placements(numels, 2000, 4)
    segments = plan_transfer(numels, ours, stock_layout(numels, 4).placements())
    _, rounds = split_into_rounds(segments, 100)
    busiest = max(
        sum(s.length for s in segments if getattr(s, side) == rank and s.source_rank != s.target_rank)
        for side in ("source_rank", "target_rank")
        for rank in range(4)
    )
    assert busiest / 100 <= len(rounds) <= 2 * busiest / 100 + 1


def test_a_group_of_frozen_parameters_is_empty():
    layout = stock_layout([], 3)
    assert layout.numel == 0 and layout.fragments(1) == {} and layout.end_padding(1) == 0


def plain_layout(group_sizes, round_robin, aligned):
    """What a real plain ZeRO-2 optimizer computed for parameters of these sizes, on this rank."""
    import torch

    from .harness import base_config, make_engine

    class Sizes(torch.nn.Module):
        def __init__(self):
            super().__init__()
            flat = [n for group in group_sizes for n in group]
            self.params = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(n)) for n in flat)

    model, groups, first = Sizes(), [], 0
    for group in group_sizes:
        groups.append({"params": list(model.params[first : first + len(group)])})
        first += len(group)
    zero = {"stage": 2, "round_robin_gradients": round_robin, "parameter_alignment": aligned}
    engine = make_engine(model, torch.optim.SGD(groups, lr=1.0), base_config(zero_optimization=zero))
    optimizer = engine.optimizer
    index = {param: i for group in optimizer.bit16_groups for i, param in enumerate(group)}
    return [
        {
            "order": tuple(index[param] for param in optimizer.round_robin_bit16_groups[g]),
            "paddings": tuple(optimizer.round_robin_bit16_padding[g]),
            "offsets": tuple(optimizer.round_robin_bit16_offsets[g]),
            "numel": optimizer.bit16_groups_flat[g].numel(),
            "end_padding": optimizer.groups_padding[g],
            "fragments": [(address.start, address.numel) for address in optimizer._param_slice_mappings[g].values()],
        }
        for g in range(len(groups))
    ]


GROUPS = [[5, 64, 1, 30], [3], [1025, 7, 7]]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("round_robin,aligned", [(False, False), (True, False), (False, True), (True, True)])
def test_it_is_the_layout_plain_deepspeed_has(ranks, world, round_robin, aligned):
    for rank, groups in enumerate(ranks(world).run(plain_layout, GROUPS, round_robin, aligned)):
        for numels, theirs in zip(GROUPS, groups, strict=True):
            ours = stock_layout(numels, world, round_robin=round_robin, alignment=8 if aligned else 1)
            assert ours.order == theirs["order"]
            assert ours.paddings == theirs["paddings"]
            assert ours.offsets == theirs["offsets"]
            assert ours.numel == theirs["numel"]
            assert ours.end_padding(rank) == theirs["end_padding"]
            # Plain DeepSpeed addresses fragments as if nothing were reordered, unless there is padding.
            if not round_robin or any(theirs["paddings"]):
                assert list(ours.fragments(rank).values()) == theirs["fragments"]
