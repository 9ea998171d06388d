"""A module that holds the GPU kernel, on a machine that may have no GPU."""

import pytest
import torch

from ds_lazyreduce.accumulate import NativeCpuKernel, load_kernel
from ds_lazyreduce.op_builder import import_binary


def check_module(binary, refusal):
    """Its CPU path has the bits of the torch path; without a GPU its GPU path raises, for the reason ``refusal``."""
    module = import_binary(binary)
    partition, received = torch.ones(1000), torch.randn(4, 1000).bfloat16()
    expected = partition.clone()
    load_kernel("torch", "cpu")(expected, received, 0.25)
    NativeCpuKernel(module)(partition, received, 0.25)
    assert torch.equal(partition, expected)

    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match=f"fused_accumulate: launch on device 0 failed: {refusal}"):
            module.accumulate_gpu(partition.data_ptr(), received.data_ptr(), 1000, 4, 1000, 0, 1.0, 0, 0)
