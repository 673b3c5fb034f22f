#include "cpu/gemm.h"

#include "cpu/simd.h"

namespace ppo {
namespace PPO_ISA {
namespace {

// Blocks are copied to fixed shapes and strides, padded with zeros: oneDNN compiles a kernel for
// each that it meets and keeps it, and the numbers of rows never stop changing.
struct Scratch {
  alignas(64) uint16_t a[GEMM_PANEL / GEMM_K][GEMM_M * GEMM_K];
  alignas(64) uint32_t b[GEMM_N / GEMM_TILE][GEMM_PANEL / 2 * GEMM_TILE];
  alignas(64) float sums[GEMM_M * GEMM_TILE];
};

int64_t least(int64_t x, int64_t y) { return x < y ? x : y; }
int64_t padded(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Asks for n numbers that are needed soon.
template <class T>
void prefetch(const T* p, int64_t n) {
  for (int64_t j = 0; j < n; j += 64 / int64_t(sizeof(T))) __builtin_prefetch(p + j, 1, 2);
}

#if defined(__AVX512BW__)
// The first n of `most` numbers, then zeros.
inline __mmask32 first(int64_t n, int64_t most) {
  return n >= most ? uint32_t((1ull << most) - 1) : n > 0 ? (1u << n) - 1 : 0;
}

// Rows and columns of 16 x 16 words change places: first in blocks of 8 x 8, then of 4 x 4, ..
template <int D>
inline void exchange(__m512i (&x)[16]) {
  alignas(64) int32_t low[16], high[16];
  for (int k = 0; k < 16; ++k) {
    low[k] = k & D ? 16 + k - D : k;
    high[k] = k & D ? 16 + k : k + D;
  }
  const __m512i from_low = _mm512_load_si512(low), from_high = _mm512_load_si512(high);
  for (int i = 0; i < 16; ++i) {
    if (i & D) continue;
    const __m512i a = x[i], b = x[i + D];
    x[i] = _mm512_permutex2var_epi32(a, from_low, b);
    x[i + D] = _mm512_permutex2var_epi32(a, from_high, b);
  }
}

inline void transpose(__m512i (&x)[16]) {
  exchange<8>(x);
  exchange<4>(x);
  exchange<2>(x);
  exchange<1>(x);
}

// m x k of A = X^T, 16 rows and 32 columns at a time: pairs of rows of X make words.
void pack_transposed_a(const uint16_t* x, int64_t x_row, int64_t m, int64_t k, uint16_t* out) {
  for (int64_t i = 0; i < m; i += 16) {
    const __mmask16 rows = first(m - i, 16);
    for (int64_t j = 0; j < k; j += 32) {
      __m512i words[16];
      for (int64_t s = 0; s < 16; ++s) {
        const uint16_t* even = x + i + (j + 2 * s) * x_row;
        const __mmask16 has_even = j + 2 * s < k ? rows : 0, has_odd = j + 2 * s + 1 < k ? rows : 0;
        words[s] = _mm512_or_si512(
            _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(has_even, even)),
            _mm512_slli_epi32(
                _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(has_odd, even + x_row)), 16));
      }
      transpose(words);
      for (int64_t s = 0; s < 16; ++s)
        _mm512_storeu_si512(out + (i + s) * GEMM_K + j, words[s]);
    }
  }
}

// k x n of B = X^T: a row of X has the pairs side by side.
void pack_transposed_b(const uint16_t* x, int64_t x_row, int64_t k, int64_t n, uint32_t* out) {
  for (int64_t j = 0; j < GEMM_TILE; j += 16)
    for (int64_t i = 0; i < k; i += 32) {
      __m512i words[16];
      for (int64_t s = 0; s < 16; ++s) {
        const __mmask32 here = j + s < n ? first(k - i, 32) : 0;
        words[s] = _mm512_maskz_loadu_epi16(here, x + i + (j + s) * x_row);
      }
      transpose(words);
      for (int64_t s = 0; s < 16; ++s)
        _mm512_storeu_si512(out + (i / 2 + s) * GEMM_TILE + j, words[s]);
    }
}
#endif

// m x k of A, row by row.
void pack_a(const GemmArgs& g, int64_t i0, int64_t m, int64_t k0, int64_t k, uint16_t* out) {
  const uint16_t* a = g.a + i0 * g.a_row + k0 * g.a_col;
#if defined(__AVX512BW__)
  if (g.a_row == 1) return pack_transposed_a(a, g.a_col, m, k, out);
#endif
  const int64_t m_end = padded(m, 16), k_end = padded(k, 32);
  for (int64_t i = 0; i < m_end; ++i)
    for (int64_t j = i < m ? k : 0; j < k_end; ++j) out[i * GEMM_K + j] = 0;
  for (int64_t i = 0; i < m; ++i) {
    const uint16_t* row = a + i * g.a_row;
    if (g.a_col == 1) {
      __builtin_memcpy(out + i * GEMM_K, row, k * sizeof(uint16_t));
    } else {
      for (int64_t j = 0; j < k; ++j) out[i * GEMM_K + j] = row[j * g.a_col];
    }
  }
}

// k x n of B: rows 2i and 2i + 1 side by side, as the dot product of pairs wants them.
void pack_b(const GemmArgs& g, int64_t k0, int64_t k, int64_t j0, int64_t n, uint32_t* out) {
  const uint16_t* b = g.b + k0 * g.b_row + j0 * g.b_col;
#if defined(__AVX512BW__)
  if (g.b_row == 1) return pack_transposed_b(b, g.b_col, k, n, out);
#endif
  const int64_t k_end = padded(k, 32);
  if (k < k_end || n < GEMM_TILE) __builtin_memset(out, 0, k_end / 2 * GEMM_TILE * sizeof *out);
  for (int64_t i = 0; i < k; i += 2) {
    const uint16_t *even = b + i * g.b_row, *odd = even + g.b_row;
    uint32_t* pairs = out + i / 2 * GEMM_TILE;
    if (i + 1 == k) {
      for (int64_t j = 0; j < n; ++j) pairs[j] = even[j * g.b_col];
    } else if (g.b_col == 1) {
      for (int64_t j = 0; j < n; ++j) pairs[j] = even[j] | uint32_t(odd[j]) << 16;
    } else {
      for (int64_t j = 0; j < n; ++j)
        pairs[j] = even[j * g.b_col] | uint32_t(odd[j * g.b_col]) << 16;
    }
  }
}

void add_row(float* out, int64_t n, bool add, const float* sums) {
  if (add) {
    for (int64_t j = 0; j < n; ++j) out[j] += sums[j];
  } else {
    for (int64_t j = 0; j < n; ++j) out[j] = sums[j];
  }
}

typedef uint8_t U8 __attribute__((vector_size(PPO_BYTES / 4)));

// A byte for each lane. GCC 12 would convert them one by one.
PPO_INLINE U32 load_bytes(const uint8_t* p) {
#if defined(__AVX512F__)
  return (U32)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  U32 v;
  for (int i = 0; i < LANES<F32>; ++i) v[i] = p[i];
  return v;
#endif
}

// A vector of sums of 24 bits, rounded to nearest, ties to even; `last`: of 16 bits. NaN stays NaN:
// from bf16 factors and 24 bits it is quiet, and has zeros where the rounding could carry from.
PPO_INLINE void add_split(uint16_t* high, uint8_t* low, bool add, bool last, F32 sum) {
  if (add) {
    const U32 h = __builtin_convertvector(bits_at<U16>(high), U32);
    sum += (F32)(h << 16 | load_bytes(low) << 8);
  }
  if (last) return store(reinterpret_cast<BF16*>(high), sum);
  const U32 bits = (U32)sum, rounded = bits + 0x7fu + ((bits >> 8) & 1u);
  const U16 h = __builtin_convertvector(rounded >> 16, U16);
  const U8 l = __builtin_convertvector((rounded >> 8) & 0xffu, U8);
  memcpy(high, &h, sizeof h);
  memcpy(low, &l, sizeof l);
}

void add_split_row(uint16_t* high, uint8_t* low, int64_t n, bool add, bool last,
                   const float* sums) {
  constexpr int64_t lanes = LANES<F32>;
  int64_t j = 0;
  for (; j + lanes <= n; j += lanes) add_split(high + j, low + j, add, last, load(sums + j));
  if (j == n) return;
  uint16_t some_high[lanes] = {};
  uint8_t some_low[lanes] = {};
  if (add) memcpy(some_high, high + j, (n - j) * sizeof *high);
  if (add) memcpy(some_low, low + j, n - j);
  add_split(some_high, some_low, add, last, load(sums + j));
  memcpy(high + j, some_high, (n - j) * sizeof *high);
  if (!last) memcpy(low + j, some_low, n - j);
}

// Rows [i0, i0 + m) and columns [j0, j0 + n) of what rows [p0, p0 + panel) of B, packed, give.
void block(const GemmArgs& g, int64_t i0, int64_t m, int64_t j0, int64_t n, int64_t p0,
           int64_t panel, Scratch& s) {
  for (int64_t k0 = 0; k0 < panel; k0 += GEMM_K)
    pack_a(g, i0, m, p0 + k0, least(GEMM_K, panel - k0), s.a[k0 / GEMM_K]);
  const bool add = g.add || p0 > 0, last = g.last && p0 + panel == g.K;
  if (panel == 0) memset(s.sums, 0, sizeof s.sums);
  for (int64_t t = 0; t < n; t += GEMM_TILE) {
    const int64_t at = i0 * g.out_row + j0 + t, low_at = i0 * g.low_row + j0 + t;
    const int64_t width = least(GEMM_TILE, n - t);
    for (int64_t i = 0; i < m; ++i) {
      if (g.out) {
        prefetch(g.out + at + i * g.out_row, width);
      } else {
        prefetch(g.high + at + i * g.out_row, width);
        prefetch(g.low + low_at + i * g.low_row, width);
      }
    }
    for (int64_t k0 = 0; k0 < panel; k0 += GEMM_K) {
      const uint32_t* b = s.b[t / GEMM_TILE] + k0 / 2 * GEMM_TILE;
      at::native::cpublas::brgemm(
          padded(m, 8), GEMM_TILE, padded(least(GEMM_K, panel - k0), 16), GEMM_K, GEMM_TILE,
          GEMM_TILE, k0 > 0, reinterpret_cast<const c10::BFloat16*>(s.a[k0 / GEMM_K]),
          reinterpret_cast<const c10::BFloat16*>(b), s.sums, true);
    }
    for (int64_t i = 0; i < m; ++i) {
      const float* sums = s.sums + i * GEMM_TILE;
      if (g.out) {
        add_row(g.out + at + i * g.out_row, width, add, sums);
      } else {
        add_split_row(g.high + at + i * g.out_row, g.low + low_at + i * g.low_row, width, add,
                      last, sums);
      }
    }
  }
}

}  // namespace

void gemm_tasks(const GemmArgs& g, const GemmPlan& plan, int64_t begin, int64_t end) {
  static thread_local Scratch s;
  for (int64_t task = begin; task < end; ++task) {
    const int64_t j0 = task / plan.groups * plan.columns, n = least(plan.columns, g.N - j0);
    const int64_t first = task % plan.groups * plan.group_rows;
    const int64_t last = least(first + plan.group_rows, g.M);
    for (int64_t p0 = 0; p0 == 0 || p0 < g.K; p0 += GEMM_PANEL) {
      const int64_t panel = least(GEMM_PANEL, g.K - p0);
      for (int64_t t = 0; t < n; t += GEMM_TILE)
        pack_b(g, p0, panel, j0 + t, least(GEMM_TILE, n - t), s.b[t / GEMM_TILE]);
      for (int64_t i0 = first; i0 < last; i0 += plan.rows)
        block(g, i0, least(plan.rows, last - i0), j0, n, p0, panel, s);
    }
  }
  at::native::cpublas::brgemm_release(true);
}

}  // namespace PPO_ISA
}  // namespace ppo
