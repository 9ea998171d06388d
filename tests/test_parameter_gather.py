from hypothesis import given
from hypothesis import strategies as st

from ds_lazyreduce.parameter_gather import plan_chunks


@given(st.lists(st.tuples(st.integers(1, 100), st.sampled_from("ab"))), st.integers(1, 200))
def test_every_bucket_is_gathered_once_within_the_limit(buckets, limit):
    numels, kinds = [n for n, _ in buckets], [k for _, k in buckets]
    chunks = plan_chunks(numels, kinds, limit)
    assert sorted(i for chunk in chunks for i in chunk) == list(range(len(buckets)))
    for chunk in chunks:
        assert len({kinds[i] for i in chunk}) == 1
        assert len(chunk) == 1 or sum(numels[i] for i in chunk) <= limit


def test_small_buckets_share_a_chunk_and_large_ones_do_not():
    assert plan_chunks([4, 4, 100, 4], ["a"] * 4, 10) == [[0, 1], [2], [3]]
    assert plan_chunks([4, 4, 4], ["a", "b", "a"], 10) == [[0, 2], [1]]
