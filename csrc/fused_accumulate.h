// The work of one lane and of one GPU thread, as plain functions for host and device.
//
//   out[i] = fma(scale, recv[0, i] + recv[1, i] + ... + recv[rows-1, i], out[i])
//
// all in fp32, rows in order, starting from row 0 itself (not from 0.0f, which would lose -0.0).
// The only rounding steps are the fp32 adds and the one fma, so every path (CPU, GPU, torch) agrees
// to the bit. Compile with -ffp-contract=off / -fmad=false and never with fast math.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__) || defined(__HIPCC__)
#define DSLR_HD __host__ __device__ __forceinline__
#else
// Always inlined: a callee left outside would not be compiled for the caller's instruction set.
#define DSLR_HD inline __attribute__((always_inline))
#endif

namespace dslr {

enum class Wire : int { bf16 = 0, fp16 = 1, fp32 = 2 };

// Raw wire words: no half-precision headers, so the file compiles anywhere.
struct BF16 {
  uint16_t bits;
};
struct FP16 {
  uint16_t bits;
};

DSLR_HD float as_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

DSLR_HD uint32_t as_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

DSLR_HD float to_float(float x) { return x; }

DSLR_HD float to_float(BF16 x) { return as_float(uint32_t(x.bits) << 16); }

// Exact for all 65536 inputs and free of branches, so that it vectorises. Subnormals go through an
// integer conversion: a trick with fp32 subnormals would break where the host flushes them.
DSLR_HD float to_float(FP16 x) {
  const uint32_t sign = uint32_t(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = x.bits & 0x7fffu;
  const float small = float(int32_t(magnitude)) * 0x1p-24f;
  const uint32_t special = 0u - uint32_t(magnitude >= 0x7c00u);
  const uint32_t subnormal = 0u - uint32_t(magnitude < 0x0400u);
  const uint32_t normal = (magnitude << 13) + (112u << 23) + (special & (112u << 23));
  return as_float(sign | (subnormal & as_bits(small)) | (~subnormal & normal));
}

// What one call works on. `row_stride` counts elements; rows must not overlap `out`.
template <typename T>
struct Args {
  float* out;
  const T* recv;
  int64_t row_stride;
  int64_t rows;
  int64_t size;
  float scale;
};

template <typename T>
DSLR_HD void accumulate_one(const Args<T>& a, int64_t i) {
  float sum = to_float(a.recv[i]);
  for (int64_t row = 1; row < a.rows; ++row) sum += to_float(a.recv[row * a.row_stride + i]);
  a.out[i] = fmaf(a.scale, sum, a.out[i]);
}

// 16 bytes of a row; loaded and stored as one word where the compiler knows how.
template <typename T>
struct alignas(16) Pack {
  static constexpr int lanes = 16 / int(sizeof(T));
  T lane[lanes];
};

template <typename T>
DSLR_HD bool can_use_packs(const Args<T>& a) {
  const uint64_t row_bytes = uint64_t(a.row_stride) * sizeof(T);
  return ((uint64_t(uintptr_t(a.out)) | uint64_t(uintptr_t(a.recv)) | row_bytes) & 15u) == 0;
}

template <typename T>
DSLR_HD void accumulate_pack(const Args<T>& a, int64_t pack) {
  constexpr int lanes = Pack<T>::lanes;
  constexpr int out_packs = lanes / Pack<float>::lanes;
  const int64_t first = pack * lanes;

  float sum[lanes];
  Pack<T> word = *reinterpret_cast<const Pack<T>*>(a.recv + first);
  for (int l = 0; l < lanes; ++l) sum[l] = to_float(word.lane[l]);
  for (int64_t row = 1; row < a.rows; ++row) {
    word = *reinterpret_cast<const Pack<T>*>(a.recv + row * a.row_stride + first);
    for (int l = 0; l < lanes; ++l) sum[l] += to_float(word.lane[l]);
  }

  Pack<float>* out = reinterpret_cast<Pack<float>*>(a.out + first);
  for (int p = 0; p < out_packs; ++p) {
    Pack<float> value = out[p];
    for (int l = 0; l < Pack<float>::lanes; ++l) {
      value.lane[l] = fmaf(a.scale, sum[p * Pack<float>::lanes + l], value.lane[l]);
    }
    out[p] = value;
  }
}

// Everything GPU thread `thread` of `threads` does: a grid-stride loop over packs, then over the tail
// that fills no pack. Tested on the CPU by looping `thread` over the whole grid.
template <typename T, bool packed>
DSLR_HD void accumulate_thread(const Args<T>& a, int64_t thread, int64_t threads) {
  int64_t done = 0;
  if (packed) {
    const int64_t packs = a.size / Pack<T>::lanes;
    for (int64_t pack = thread; pack < packs; pack += threads) accumulate_pack(a, pack);
    done = packs * Pack<T>::lanes;
  }
  for (int64_t i = done + thread; i < a.size; i += threads) accumulate_one(a, i);
}

// The two entry points behind the binding. `recv` holds `rows` >= 1 rows of `size` elements of `wire`.
void accumulate_cpu(float* out, const void* recv, int64_t row_stride, int64_t rows, int64_t size,
                    Wire wire, float scale, int threads);

// Asynchronous on `stream` of `device`. Returns nullptr, or the runtime's description of the error.
const char* accumulate_gpu(float* out, const void* recv, int64_t row_stride, int64_t rows, int64_t size,
                           Wire wire, float scale, int device, void* stream);

}  // namespace dslr
