// The GPU kernel and its launcher, for CUDA and HIP from one source; knows nothing of torch.
// No shuffles and no assumption about the wave size.
#if defined(__HIPCC__)
#include <hip/hip_runtime.h>
#define cudaError_t hipError_t
#define cudaGetDevice hipGetDevice
#define cudaGetErrorString hipGetErrorString
#define cudaGetLastError hipGetLastError
#define cudaSetDevice hipSetDevice
#define cudaStream_t hipStream_t
#define cudaSuccess hipSuccess
#else
#include <cuda_runtime.h>
#endif

#include "fused_accumulate.h"

namespace dslr {
namespace {

constexpr int kBlock = 256;
// Enough blocks to fill any current device; the grid-stride loop covers the rest.
constexpr int64_t kMaxBlocks = 4096;

template <typename T, bool packed>
__global__ void __launch_bounds__(kBlock) accumulate_kernel(Args<T> a) {
  accumulate_thread<T, packed>(a, int64_t(blockIdx.x) * blockDim.x + threadIdx.x,
                               int64_t(gridDim.x) * blockDim.x);
}

template <typename T>
void launch(const Args<T>& a, cudaStream_t stream) {
  const bool packed = can_use_packs(a);
  const int64_t per_thread = packed ? Pack<T>::lanes : 1;
  const int64_t needed = (a.size + kBlock * per_thread - 1) / (kBlock * per_thread);
  const unsigned blocks = unsigned(needed < kMaxBlocks ? needed : kMaxBlocks);
  if (packed) {
    accumulate_kernel<T, true><<<blocks, kBlock, 0, stream>>>(a);
  } else {
    accumulate_kernel<T, false><<<blocks, kBlock, 0, stream>>>(a);
  }
}

}  // namespace

const char* accumulate_gpu(float* out, const void* recv, int64_t row_stride, int64_t rows, int64_t size,
                           Wire wire, float scale, int device, void* stream_handle) {
  if (size == 0) return nullptr;  // an empty grid is an error
  cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);

  // The default stream has no device of its own, so the tensors' device must be the current one.
  int previous = device;
  cudaError_t error = cudaGetDevice(&previous);
  if (error == cudaSuccess && previous != device) error = cudaSetDevice(device);
  if (error != cudaSuccess) return cudaGetErrorString(error);

  switch (wire) {
    case Wire::bf16:
      launch<BF16>({out, static_cast<const BF16*>(recv), row_stride, rows, size, scale}, stream);
      break;
    case Wire::fp16:
      launch<FP16>({out, static_cast<const FP16*>(recv), row_stride, rows, size, scale}, stream);
      break;
    case Wire::fp32:
      launch<float>({out, static_cast<const float*>(recv), row_stride, rows, size, scale}, stream);
      break;
  }
  error = cudaGetLastError();
  if (previous != device) (void)cudaSetDevice(previous);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace dslr
