// The CPU loop: independent lanes that the compiler vectorises, built for several instruction sets and
// split over OpenMP threads. Elements are independent, so the result depends on neither.
#include "fused_accumulate.h"

#include <type_traits>

#if defined(_OPENMP)
#include <omp.h>
#endif

// Chosen at run time rather than by -march=native: caches of built modules are shared between unlike
// hosts. Not target_clones: its "avx2" has no fma, and it wants ifunc support from the C library.
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define DSLR_X86_VARIANTS 1
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace dslr {
namespace {

// Elements of one row read before the next row's, 512 bytes of them: enough for the hardware to prefetch
// each row, few enough for rows that lie a power of two apart not to evict one another and the sums.
template <typename T>
constexpr int64_t kLanes = 512 / int64_t(sizeof(T));
// Below this many elements a thread costs more to wake than it saves.
constexpr int64_t kMinPerThread = 32768;

template <typename T>
DSLR_HD void accumulate_range(const Args<T>& args, int64_t begin, int64_t end) {
  const Args<T> a = args;  // a local copy: stores to `out` cannot alias it
  constexpr int64_t lanes = kLanes<T>;
  int64_t i = begin;
  for (; i + lanes <= end; i += lanes) {
    const T* __restrict row = a.recv + i;
    float* __restrict out = a.out + i;
    float sum[lanes];
    for (int64_t l = 0; l < lanes; ++l) sum[l] = to_float(row[l]);
    for (int64_t r = 1; r < a.rows; ++r) {
      row += a.row_stride;
      for (int64_t l = 0; l < lanes; ++l) sum[l] += to_float(row[l]);
    }
    for (int64_t l = 0; l < lanes; ++l) out[l] = fmaf(a.scale, sum[l], out[l]);
  }
  for (; i < end; ++i) accumulate_one(a, i);
}

template <typename T>
using RangeFunction = void (*)(const Args<T>&, int64_t begin, int64_t end);

template <typename T>
void range_baseline(const Args<T>& a, int64_t begin, int64_t end) {
  accumulate_range(a, begin, end);
}

#if defined(DSLR_X86_VARIANTS)
template <typename T>
__attribute__((target("avx2,fma"))) void range_avx2(const Args<T>& a, int64_t begin, int64_t end) {
  accumulate_range(a, begin, end);
}

template <typename T>
__attribute__((target("avx512f,avx512bw,fma"))) void range_avx512(const Args<T>& a, int64_t begin,
                                                                  int64_t end) {
  accumulate_range(a, begin, end);
}

// fp16 through the hardware's conversion, as exact as to_float(FP16) and blind to flush modes; the
// portable one costs more than the memory traffic does.
__attribute__((target("avx2,fma,f16c"))) void range_f16c(const Args<FP16>& args, int64_t begin, int64_t end) {
  const Args<FP16> a = args;
  const __m256 scale = _mm256_set1_ps(a.scale);
  constexpr int64_t lanes = kLanes<FP16>;
  constexpr int64_t vectors = lanes / 8;
  int64_t i = begin;
  for (; i + lanes <= end; i += lanes) {
    const __m128i* row = reinterpret_cast<const __m128i*>(a.recv + i);
    __m256 sum[vectors];
    for (int64_t v = 0; v < vectors; ++v) sum[v] = _mm256_cvtph_ps(_mm_loadu_si128(row + v));
    for (int64_t r = 1; r < a.rows; ++r) {
      row = reinterpret_cast<const __m128i*>(a.recv + r * a.row_stride + i);
      for (int64_t v = 0; v < vectors; ++v) {
        sum[v] = _mm256_add_ps(sum[v], _mm256_cvtph_ps(_mm_loadu_si128(row + v)));
      }
    }
    for (int64_t v = 0; v < vectors; ++v) {
      float* out = a.out + i + 8 * v;
      _mm256_storeu_ps(out, _mm256_fmadd_ps(scale, sum[v], _mm256_loadu_ps(out)));
    }
  }
  for (; i < end; ++i) accumulate_one(a, i);
}

bool has_f16c() {  // not every compiler's __builtin_cpu_supports knows it
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
#endif

template <typename T>
RangeFunction<T> pick_range() {
#if defined(DSLR_X86_VARIANTS)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("fma")) {
    if constexpr (std::is_same<T, FP16>::value) {
      if (__builtin_cpu_supports("avx2") && has_f16c()) return range_f16c;
    }
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")) return range_avx512<T>;
    if (__builtin_cpu_supports("avx2")) return range_avx2<T>;
  }
#endif
  return range_baseline<T>;
}

template <typename T>
void accumulate(const Args<T>& a, int threads) {
  static const RangeFunction<T> range = pick_range<T>();
#if defined(_OPENMP)
  const int64_t useful = a.size / kMinPerThread;
  if (threads > useful) threads = int(useful);
  if (threads > 1) {
#pragma omp parallel num_threads(threads)
    {
      // The runtime may grant fewer threads than asked for: divide by what it gave.
      const int64_t team = omp_get_num_threads();
      const int64_t blocks = (a.size + kLanes<T> - 1) / kLanes<T>;
      const int64_t share = (blocks + team - 1) / team * kLanes<T>;
      const int64_t begin = omp_get_thread_num() * share;
      const int64_t end = begin + share < a.size ? begin + share : a.size;
      if (begin < end) range(a, begin, end);
    }
    return;
  }
#endif
  (void)threads;
  range(a, 0, a.size);
}

}  // namespace

void accumulate_cpu(float* out, const void* recv, int64_t row_stride, int64_t rows, int64_t size,
                    Wire wire, float scale, int threads) {
  switch (wire) {
    case Wire::bf16:
      return accumulate<BF16>({out, static_cast<const BF16*>(recv), row_stride, rows, size, scale}, threads);
    case Wire::fp16:
      return accumulate<FP16>({out, static_cast<const FP16*>(recv), row_stride, rows, size, scale}, threads);
    case Wire::fp32:
      return accumulate<float>({out, static_cast<const float*>(recv), row_stride, rows, size, scale}, threads);
  }
}

}  // namespace dslr
