import math

import pytest
import torch

from ds_lazyreduce.gradient_scalars import agree, local_norm_squared

CPU = torch.device("cpu")


@pytest.mark.parametrize("numel", [0, 1, 5, 128 * 1024, 300_001])
def test_norm_squared_is_summed_in_float64(numel):
    gradient = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    expected = gradient.double().square().sum()
    torch.testing.assert_close(local_norm_squared([gradient], CPU), expected, rtol=1e-13, atol=0)


def test_norm_squared_does_not_depend_on_how_elements_are_distributed():
    gradient = torch.randn(400_000, generator=torch.Generator().manual_seed(0)) * 1e3
    norms = {
        math.sqrt(local_norm_squared(gradient[torch.randperm(400_000)].split(size), CPU))
        for size in (1_000, 7_919, 100_000, 400_000)
    }
    assert len({torch.tensor(norm, dtype=torch.float32).item() for norm in norms}) == 1


def test_large_gradients_do_not_overflow_the_norm():
    assert local_norm_squared([torch.full((4,), 3e38)], CPU).item() == pytest.approx(4 * 9e76)


def _two_ranks(other):
    return lambda pack: pack.add_(torch.tensor(other, dtype=pack.dtype))


def test_agreed_values_are_sums_and_flags_over_ranks():
    scalars = agree(
        torch.tensor(9.0, dtype=torch.float64), False, 3, [True, False], False, _two_ranks([16.0, 0, 1, 5, 1, 0, 0, 0])
    )
    assert scalars.norm == 5.0 and scalars.is_finite
    assert scalars.void and scalars.tokens == 8 and scalars.any_late and scalars.late == [True, False]
    assert scalars.wrong


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_gradient_anywhere_is_seen_everywhere(bad):
    here = agree(torch.tensor(bad, dtype=torch.float64), False, 0, [], False, _two_ranks([4.0, 0, 0, 0, 0, 0]))
    there = agree(torch.tensor(4.0, dtype=torch.float64), False, 0, [], False, _two_ranks([0.0, 1, 0, 0, 0, 0]))
    for scalars in (here, there):
        assert not scalars.is_finite and scalars.norm == math.inf
