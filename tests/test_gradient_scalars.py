import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ds_lazyreduce.gradient_scalars import agree, local_norm_squared
from ds_lazyreduce.metrics import OpenWindow

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


class HostCopies(TorchDispatchMode):
    """Counts copies of numbers of the host, as of ``pack[2] = 1.0``: on a GPU the host waits in each of them."""

    def __init__(self, *on_device):
        super().__init__()
        self.made, self.count = list(on_device), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            self.count += not any(args[1] is tensor for tensor in self.made)
        elif func is not torch.ops.aten.lift_fresh.default:  # of torch.tensor
            self.made.append(result)
        return result


@pytest.mark.parametrize("late", [[False, False], [False, True]])
@pytest.mark.parametrize("tokens", [3, torch.tensor(3.0, dtype=torch.float64)])
def test_nothing_is_copied_from_the_host(late, tokens):
    norm_squared = torch.tensor(4.0, dtype=torch.float64)
    with HostCopies(norm_squared, tokens) as copies:
        agree(norm_squared, True, tokens, late, False, lambda pack: None)
    assert copies.count == 0
    window = OpenWindow("cpu")
    window.add("loss", 1.0, 1)
    with HostCopies() as copies:
        assert window.pack().tolist() == [[1.0, 0.0]]
    assert copies.count == 0
