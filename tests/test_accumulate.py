"""The fused accumulation: native against torch to the bit, and both against float64."""

import subprocess

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_lazyreduce import op_builder
from ds_lazyreduce.accumulate import TORCH_TILE, KernelBuildError, fused_accumulate, load_kernel

WIRES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(scope="session")
def native(extensions_dir):
    try:
        return load_kernel("native", "cpu")
    except KernelBuildError as error:
        pytest.skip(f"no native kernel here: {error}")


TORCH = load_kernel("torch", "cpu")


def bits(tensor):
    """The bits of an fp32 tensor, with every NaN alike: which NaN comes out is nobody's promise."""
    return torch.where(tensor.isnan(), torch.nan, tensor).view(torch.int32)


def assert_same_bits(kernel, partition, received, scale):
    expected, result = partition.clone(), partition.clone()
    TORCH(expected, received, scale)
    kernel(result, received, scale)
    assert torch.equal(bits(result), bits(expected))


def received_of(seed, rows, size, wire):
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(seed)).to(wire)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("rows", range(1, 10))
def test_native_equals_torch(native, wire, rows):
    for size in (0, 1, 3, 31, 127, 128, 129, 255, 256, 257, 1000, 4097):
        received = received_of(rows, rows, size, wire)
        assert_same_bits(native, torch.randn(size), received, 1 / rows)


@pytest.mark.parametrize("wire", WIRES)
def test_native_equals_torch_over_several_tiles(native, wire):
    size = 2 * TORCH_TILE + 5
    assert_same_bits(native, torch.randn(size), received_of(1, 3, size, wire), 1 / 3)


@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16])
def test_every_16_bit_value(native, wire):
    """Subnormals, both zeros, infinities and NaNs included, alone and beside a neighbour."""
    every = torch.arange(1 << 16).to(torch.int16).view(wire)
    for received in (every[None], torch.stack([every, every.roll(1)])):
        for scale in (1.0, 0.25, -3.0, 0.0, 1e-45, float("inf"), float("nan")):
            assert_same_bits(native, torch.full((1 << 16,), -0.0), received, scale)
            assert_same_bits(native, torch.randn(1 << 16), received, scale)


def test_16_bit_values_arrive_even_where_subnormals_are_flushed(native):
    every = torch.arange(1 << 16).to(torch.int16).view(torch.float16)[None]
    expected, result = torch.zeros(1 << 16), torch.zeros(1 << 16)
    TORCH(expected, every, 1.0)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormals")
    try:
        native(result, every, 1.0)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(bits(result), bits(expected))


def test_fp32_extremes(native):
    inf, nan = float("inf"), float("nan")
    values = torch.tensor([0.0, -0.0, 1e-45, -1e-40, 3e38, -3e38, inf, -inf, nan, 1.0])
    pairs = torch.cartesian_prod(values, values).t().contiguous()
    for start in values:
        for scale in (1.0, 0.5, 1e-40):
            assert_same_bits(native, torch.full((pairs.shape[1],), start.item()), pairs, scale)


@pytest.mark.parametrize("wire", WIRES)
def test_unaligned_views_and_padded_rows(native, wire):
    partition, received = torch.randn(1100), received_of(2, 4, 1100, wire)
    for shift in (0, 1, 2, 3, 5, 8):
        for size in (1, 63, 1000, 1024):
            view = received[:, shift : shift + size]
            expected = partition.clone()
            TORCH(expected[shift : shift + size], view, 0.5)
            result = partition.clone()
            native(result[shift : shift + size], view, 0.5)
            assert torch.equal(result, expected)  # the elements around the view as well


@pytest.mark.parametrize("wire", WIRES)
def test_any_number_of_threads(native, wire):
    size = 300_007
    partition, received = torch.randn(size), received_of(3, 4, size, wire)
    expected = partition.clone()
    TORCH(expected, received, 0.25)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            result = partition.clone()
            native(result, received, 0.25)
            assert torch.equal(result, expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kernel", ["native", "torch"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_against_float64(native, kernel, data):
    """Off by at most one rounding per add, relative to the sum of magnitudes."""
    rows = data.draw(st.integers(1, 9))
    size = data.draw(st.integers(0, 300))
    wire = data.draw(st.sampled_from(WIRES))
    scale = data.draw(st.floats(-2, 2, width=32))
    seed = data.draw(st.integers(0, 2**31))
    received = received_of(seed, rows, size, wire)
    partition = received_of(seed + 1, 1, size, torch.float32)[0]

    exact = partition.double() + scale * received.double().sum(0)
    magnitude = partition.double().abs() + abs(scale) * received.double().abs().sum(0)
    fused_accumulate(partition, received, scale, kernel=kernel)
    assert ((partition.double() - exact).abs() <= magnitude * (rows + 1) * 2.0**-24).all()


@pytest.mark.parametrize("kernel", ["native", "torch"])
@pytest.mark.parametrize("value", [1e4, 2.0**-23])
def test_fp16_range_over_8_ranks(native, kernel, value):
    """CASES 3: the mean of 8 equal contributions is that contribution."""
    received = torch.full((8, 33), value, dtype=torch.float16)
    partition = torch.zeros(33)
    fused_accumulate(partition, received, 1 / 8, kernel=kernel)
    assert torch.equal(partition, torch.full((33,), value))


def test_plain_fp16_fails_where_the_fused_sum_does_not():
    """The negative control of the test above: summed, or divided beforehand, in fp16."""
    large, small = torch.full((8,), 1e4, dtype=torch.float16), torch.full((8,), 2.0**-23, dtype=torch.float16)
    total = large[0].clone()
    for contribution in large[1:]:
        total += contribution
    assert total.isinf()
    assert (small / 8).sum() == 0


@pytest.mark.parametrize("kernel", ["native", "torch"])
def test_bf16_contributions_that_bf16_sums_lose(native, kernel):
    received = torch.ones(257, 5, dtype=torch.bfloat16)
    partition = torch.zeros(5)
    fused_accumulate(partition, received, 1.0, kernel=kernel)
    assert torch.equal(partition, torch.full((5,), 257.0))
    lossy = torch.zeros(5, dtype=torch.bfloat16)
    for contribution in received:
        lossy += contribution
    assert torch.equal(lossy, torch.full((5,), 256.0, dtype=torch.bfloat16))


@pytest.mark.parametrize("kernel", ["native", "torch"])
def test_empty_partition_is_left_alone(native, kernel):
    fused_accumulate(torch.zeros(0), torch.zeros(3, 0, dtype=torch.bfloat16), 1.0, kernel=kernel)


def test_parameters_that_require_grad(native):
    partition = torch.zeros(4, requires_grad=True)
    for kernel in ("native", "torch"):
        fused_accumulate(partition, torch.ones(2, 4, requires_grad=True), 1.0, kernel=kernel)
    assert torch.equal(partition.detach(), torch.full((4,), 4.0)) and partition.grad_fn is None


P, R = torch.zeros(4), torch.zeros(2, 4, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([0.0], R, 1.0), TypeError, "partition: expected a torch.Tensor, got list"),
        ((P, None, 1.0), TypeError, "received: expected a torch.Tensor, got NoneType"),
        ((P.bfloat16(), R, 1.0), TypeError, "partition: dtype is torch.bfloat16, must be torch.float32"),
        ((P, R.double(), 1.0), TypeError, "received: dtype is torch.float64, must be one of torch.bfloat16"),
        ((P, R, torch.ones(())), TypeError, "scale: expected a Python number, got Tensor"),
        ((P, R, 1e39), ValueError, "scale: 1e\\+39 is beyond the range of fp32"),
        ((P[None], R, 1.0), ValueError, "partition: shape is \\[1, 4\\], must be \\[S\\]"),
        ((P, R[0], 1.0), ValueError, "received: shape is \\[4\\], must be \\[N, 4\\]"),
        ((P, R[:0], 1.0), ValueError, "received: shape is \\[0, 4\\], must be \\[N, 4\\] with N >= 1"),
        ((P, R[:, :3], 1.0), ValueError, "received: shape is \\[2, 3\\], must be \\[N, 4\\]"),
        ((P, R.to("meta"), 1.0), ValueError, "received: is on meta, must be on cpu"),
        ((torch.zeros(8)[::2], R, 1.0), ValueError, "partition: stride is 2, must be contiguous"),
        ((P, R.t().contiguous().t(), 1.0), ValueError, "received: strides are \\(1, 2\\), each row"),
        ((P, R, 1.0, "cuda"), ValueError, "kernel: 'cuda' is not a kernel; use one of 'auto', "),
    ],
)
def test_wrong_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        fused_accumulate(*arguments)
    assert torch.equal(P, torch.zeros(4))


# The GPU kernel's index logic: its per-thread functions, looped over a whole grid on the CPU.
GRID = r"""
#include <cstdio>
#include <cstdlib>
#include <vector>
#include "fused_accumulate.h"
using namespace dslr;

static void read(void* to, size_t bytes) { if (bytes && fread(to, bytes, 1, stdin) != 1) exit(2); }

template <typename T, bool packed>
static void grid(const Args<T>& a, int64_t threads) {
  for (int64_t t = threads - 1; t >= 0; --t) accumulate_thread<T, packed>(a, t, threads);
}

template <typename T>
static void one(const int64_t* h, float scale) {
  const int64_t rows = h[1], size = h[2], stride = h[3], out_at = h[4], recv_at = h[5], threads = h[6];
  // Exactly as long as the data, so that one element too many is seen.
  const size_t out_bytes = (out_at + size) * 4, recv_elements = recv_at + (rows - 1) * stride + size;
  float* out = static_cast<float*>(malloc(out_bytes));
  T* recv = static_cast<T*>(malloc(recv_elements * sizeof(T)));
  read(out, out_bytes);
  read(recv, recv_elements * sizeof(T));
  Args<T> a{out + out_at, recv + recv_at, stride, rows, size, scale};
  const bool packed = can_use_packs(a);
  if (packed) grid<T, true>(a, threads); else grid<T, false>(a, threads);
  fputc(packed, stdout);
  fwrite(out, 1, out_bytes, stdout);
  free(out);
  free(recv);
}

int main() {
  int64_t h[7];
  float scale;
  while (fread(h, sizeof h, 1, stdin) == 1) {
    read(&scale, sizeof scale);
    if (h[0] == 0) one<BF16>(h, scale); else if (h[0] == 1) one<FP16>(h, scale); else one<float>(h, scale);
  }
}
"""


def compile_grid(folder):
    try:
        cxx = op_builder.find_cxx()
    except KernelBuildError as error:
        pytest.skip(str(error))
    source, program = folder / "grid.cpp", folder / "grid"
    source.write_text(GRID)
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    include = f"-I{op_builder.source_directory()}"
    command = [*cxx, "-O1", "-g", "-std=c++17", "-ffp-contract=off", include, str(source), "-o", str(program)]
    if subprocess.run(
        [*cxx, *sanitizers, "-x", "c++", "-", "-o", str(folder / "probe")], input=b"int main() {}", capture_output=True
    ).returncode:
        pytest.skip(f"{cxx[0]} has no address sanitizer")
    subprocess.run([*command, *sanitizers], check=True)
    return program


def test_gpu_threads_on_the_cpu_under_sanitizers(tmp_path):
    program = compile_grid(tmp_path)
    draw = numpy.random.default_rng(0)
    stdin, expected = b"", b""
    packed_cases = 0
    for case in range(300):
        code = case % 3
        wire = WIRES[code]
        lanes = 16 // wire.itemsize
        rows, size = int(draw.integers(1, 10)), int(draw.integers(0, 200))
        stride = size + int(draw.integers(0, 9))
        if case % 2:  # half of the cases can use 16-byte loads
            stride = -(-stride // lanes) * lanes
        out_at, recv_at = int(draw.choice([0, 0, 0, 1, 4])), int(draw.choice([0, 0, 0, 1, 4, lanes]))
        threads = int(draw.choice([1, 2, 7, 32, 256]))
        scale = float(draw.choice([1.0, 0.25, 1 / 3]))

        out = torch.randn(out_at + size)
        flat = torch.randn(recv_at + (rows - 1) * stride + size).to(wire)
        stdin += numpy.array([code, rows, size, stride, out_at, recv_at, threads], numpy.int64).tobytes()
        stdin += numpy.float32(scale).tobytes() + out.numpy().tobytes()
        stdin += flat.view(torch.uint8).numpy().tobytes()

        received = flat.as_strided((rows, size), (stride, 1), recv_at)
        TORCH(out[out_at:], received, scale)
        spans = (out_at * 4, recv_at * wire.itemsize, stride * wire.itemsize)
        packed = all(span % 16 == 0 for span in spans)
        packed_cases += packed
        expected += bytes([packed]) + out.numpy().tobytes()

    done = subprocess.run([str(program)], input=stdin, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    assert done.stdout == expected
    assert 50 < packed_cases < 250


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("wire", WIRES)
def test_gpu_equals_cpu(native, wire):
    gpu = load_kernel("native", "cuda")
    for size, shift in ((1, 0), (1000, 0), (1024, 8), (1001, 1), (3_000_017, 0)):
        partition, received = torch.randn(size), received_of(4, 5, size, wire)
        expected, result = partition[shift:].clone(), partition.cuda()
        TORCH(expected, received[:, shift:], 0.2)
        gpu(result[shift:], received.cuda()[:, shift:], 0.2)
        assert torch.equal(result[shift:].cpu(), expected)
