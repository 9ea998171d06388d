import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_lazyreduce.bucket_layout import ParamSpec, initial_order, learned_order, split_into_buckets

specs = st.lists(
    st.builds(ParamSpec, st.integers(-1, 50), st.integers(1, 100), st.sampled_from(["bf16", "fp32"])), max_size=30
)


@given(specs, st.integers(1, 150))
def test_every_parameter_is_in_one_bucket_within_the_limit(params, limit):
    buckets = split_into_buckets(params, limit)
    assert sorted(i for bucket in buckets for i in bucket) == list(range(len(params)))
    for bucket in buckets:
        assert bucket
        assert len({params[i].kind for i in bucket}) == 1
        assert len(bucket) == 1 or sum(params[i].numel for i in bucket) <= limit


@given(specs, st.integers(1, 150))
def test_buckets_follow_reverse_registration_order(params, limit):
    for kind in ("bf16", "fp32"):
        positions = [params[i].position for b in split_into_buckets(params, limit) for i in b if params[i].kind == kind]
        assert positions == sorted(positions, reverse=True)


def test_a_parameter_larger_than_the_limit_is_a_bucket_by_itself():
    params = [ParamSpec(0, 5000), ParamSpec(1, 10), ParamSpec(2, 5000)]
    assert split_into_buckets(params, 1000) == [[2], [1], [0]]


def test_limit_below_one_is_refused():
    with pytest.raises(ValueError, match="at least 1 element"):
        split_into_buckets([ParamSpec(0, 1)], 0)


def test_initial_order_interleaves_user_groups():
    # group 0: weights of layers 0..3 in two buckets; group 1: their biases in one bucket each
    earliest = [4, 0, 7, 5, 3, 1]
    assert initial_order(earliest) == [2, 3, 0, 4, 5, 1]


@given(st.permutations(range(8)), st.integers(0, 8), st.permutations(range(8)))
def test_learned_order_is_a_permutation_that_starts_with_what_completed(completed, count, current):
    order = learned_order(completed[:count], current)
    assert order[:count] == completed[:count]
    assert sorted(order) == list(range(8))
    rest = order[count:]
    assert rest == sorted(rest, key=current.index)
