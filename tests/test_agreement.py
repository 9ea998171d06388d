"""Ranks that were started differently find out at construction, all of them."""

import pytest
import torch

from ds_lazyreduce.agreement import DisagreementError, check_agreement

from .harness import base_config, make_engine


def _rank():
    from deepspeed import comm as dist

    return dist.get_rank()


def test_equal_facts_take_one_exchange():
    exchanged = []
    check_agreement({"a": "1"}, lambda: ["w [3]"], lambda mine: exchanged.append(mine) or [mine] * 3)
    assert len(exchanged) == 1


def test_the_first_different_line_is_named():
    def gather(mine):
        other = {**mine, "model": "other"} if isinstance(mine, dict) else ["w [3]", "b [4]"]
        return [mine, mine, other]

    with pytest.raises(DisagreementError, match=r"model is b \[3\] on rank 0 and b \[4\] on rank 2"):
        check_agreement({}, lambda: ["w [3]", "b [3]"], gather)


def different(what):
    odd = _rank() == 1
    model = torch.nn.Sequential(torch.nn.Linear(4, 5 if odd and what == "shape" else 4), torch.nn.Linear(4, 4))
    if odd and what == "frozen":
        model[0].weight.requires_grad_(False)
    partition = {"max_in_flight": 2 if odd and what == "section" else 1}
    over = {"zero_optimization": {"reduce_bucket_size": 7 if odd and what == "bucket" else 8}}
    if odd and what == "shape":  # DeepSpeed itself broadcasts weights at construction: give it equal bytes
        model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Linear(4, 4))
        model[0].bias = torch.nn.Parameter(torch.zeros(4))
    make_engine(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        base_config(lazy={"gradient_partition": partition}, **over),
    )


@pytest.mark.parametrize(
    "what,named",
    [
        ("section", '"max_in_flight":1'),
        ("bucket", "reduce_bucket_size is 8 on rank 0 and 7 on rank 1"),
        ("frozen", "0.weight [4, 4] bfloat16 trained, group 0 on rank 0 and 0.weight [4, 4] bfloat16 frozen"),
        ("shape", "0.weight [4, 4] bfloat16 trained, group 0 on rank 0 and 0.weight [8, 2]"),
    ],
)
def test_every_rank_says_what_differs(ranks, what, named):
    for error in ranks(3).run_expect_error(different, what, timeout=60):
        assert error.type == "DisagreementError"
        assert named in error.message, error.message
