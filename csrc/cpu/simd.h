// Vectors of the width of the instruction set, with the conversions and functions that the
// full-vocabulary loops need. GCC and clang vector extensions: no intrinsics but fused
// multiply-add, which has no portable spelling.
//
// Everything is in an anonymous namespace of ppo::PPO_ISA (isa.h): each file that includes this
// has its own copy, compiled for its own instruction set.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define PPO_INLINE static inline __attribute__((always_inline))
#pragma GCC diagnostic ignored "-Wpsabi"  // every vector stays inside this translation unit

#if defined(__AVX512F__)
#define PPO_BYTES 64
#elif defined(__AVX2__)
#define PPO_BYTES 32
#else
#define PPO_BYTES 16
#endif

namespace ppo {
namespace PPO_ISA {
namespace {

typedef float F32 __attribute__((vector_size(PPO_BYTES)));
typedef double F64 __attribute__((vector_size(PPO_BYTES)));
typedef int32_t I32 __attribute__((vector_size(PPO_BYTES)));
typedef uint32_t U32 __attribute__((vector_size(PPO_BYTES)));
typedef uint16_t U16 __attribute__((vector_size(PPO_BYTES / 2)));

// What a logit is stored as.
struct BF16 {
  uint16_t bits;
};
struct FP16 {
  uint16_t bits;
};

// Element -> (what it is computed in, a vector of that).
template <class T>
struct Compute {
  typedef float Real;
  typedef F32 Vec;
};
template <>
struct Compute<double> {
  typedef double Real;
  typedef F64 Vec;
};
template <class Vec>
constexpr int LANES = sizeof(Vec) / sizeof(Vec{}[0]);

// --------------------------------------------------------------------------- arithmetic

PPO_INLINE F32 fma(F32 a, F32 b, F32 c) {
#if defined(__AVX512F__)
  return (F32)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (F32)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (F32)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}
PPO_INLINE F64 fma(F64 a, F64 b, F64 c) { return a * b + c; }

// The larger and the smaller; a if either is NaN, as x86 has it with the operands exchanged. Masks
// of ones cost nothing; without them GCC 12 warns of its own header.
PPO_INLINE F32 max(F32 a, F32 b) {
#if defined(__AVX512F__)
  return (F32)_mm512_maskz_max_ps(0xffff, (__m512)b, (__m512)a);
#else
  return b > a ? b : a;
#endif
}
PPO_INLINE F64 max(F64 a, F64 b) { return b > a ? b : a; }
PPO_INLINE F32 min(F32 a, F32 b) {
#if defined(__AVX512F__)
  return (F32)_mm512_maskz_min_ps(0xffff, (__m512)b, (__m512)a);
#else
  return b < a ? b : a;
#endif
}
PPO_INLINE F64 min(F64 a, F64 b) { return b < a ? b : a; }

template <class Vec>
PPO_INLINE auto max_lane(Vec v) {
  auto m = v[0];
  for (int i = 1; i < LANES<Vec>; ++i) m = v[i] > m ? v[i] : m;
  return m;
}

// op over all lanes, halves first: lane i with lane i + half.
template <class Vec, class Op>
PPO_INLINE auto fold_lanes(Vec v, const Op& op) {
  if constexpr (LANES<Vec> == 1) {
    return v[0];
  } else {
    typedef __typeof__(Vec{}[0] + 0) Half __attribute__((vector_size(sizeof(Vec) / 2)));
    Half halves[2];
    memcpy(halves, &v, sizeof v);
    return fold_lanes(op(halves[0], halves[1]), op);
  }
}

template <class Vec>
PPO_INLINE auto sum_lanes(Vec v) {
  return fold_lanes(v, [](auto a, auto b) { return a + b; });
}

// Whether any lane of a comparison is true.
template <class Mask>
PPO_INLINE bool any(Mask mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_epi8((__m256i)mask) != 0;
#else
  auto seen = mask[0];
  for (int i = 1; i < LANES<Mask>; ++i) seen |= mask[i];
  return seen != 0;
#endif
}

// Of |x| < 2^22 the nearest integer; and p * 2^n for an integer n from -126 on. Both exact. For
// numbers below a bound `low`, however small, the power is 0; NaN stays NaN.
PPO_INLINE F32 nearest(F32 x) {
#if defined(__AVX512F__)
  return (F32)_mm512_maskz_roundscale_ps(0xffff, (__m512)x, _MM_FROUND_TO_NEAREST_INT);
#else
  const F32 shift = F32{} + 12582912.0f;  // 1.5 * 2^23
  return (x + shift) - shift;
#endif
}
PPO_INLINE F32 times_power(F32 p, F32 n, F32 x, float low) {
#if defined(__AVX512F__)
  const __mmask16 keep = _mm512_cmp_ps_mask((__m512)x, (__m512)(F32{} + low), _CMP_NLT_UQ);
  return (F32)_mm512_maskz_scalef_ps(keep, (__m512)p, (__m512)n);
#else
  // The 127 leaves the exponent of 2^n in the low bits of the sum.
  F32 scale = (F32)((I32)(n + (12582912.0f + 127.0f)) << 23);
  return x < low ? F32{} : p * scale;
#endif
}

// e^x for x <= 88, below 1.1 ulp; 0 where it would be subnormal (x < -87); NaN stays NaN.
// x = n ln2 + r with |r| <= ln2/2; e^r is a minimax polynomial.
PPO_INLINE F32 exp(F32 x) {
  F32 n = nearest(x * 1.44269504f);
  F32 r = fma(n, F32{} - 0.693359375f, x);  // 9 bits: n times it is exact
  r = fma(n, F32{} + 2.12194440e-4f, r);
  F32 p = fma(r, F32{} + 1.38146131e-3f, F32{} + 8.36870983e-3f);
  p = fma(p, r, F32{} + 4.16683874e-2f);
  p = fma(p, r, F32{} + 1.66665207e-1f);
  p = fma(p, r, F32{} + 4.99999935e-1f);
  p = fma(p, r * r, r) + 1.0f;
  return times_power(p, n, x, -87.0f);
}

PPO_INLINE F64 exp(F64 x) {
  for (int i = 0; i < LANES<F64>; ++i) x[i] = ::exp(x[i]);
  return x;
}

// 2^x for x < 127, below 1.2 ulp; 0 for x < -126; NaN stays NaN. Cheaper than exp().
PPO_INLINE F32 exp2(F32 x) {
  F32 n = nearest(x), f = x - n;
  F32 p = fma(f, F32{} + 1.53458124e-4f, F32{} + 1.33999309e-3f);
  p = fma(p, f, F32{} + 9.61848907e-3f);
  p = fma(p, f, F32{} + 5.55032864e-2f);
  p = fma(p, f, F32{} + 2.40226462e-1f);
  p = fma(p, f, F32{} + 6.93147182e-1f);
  p = fma(p, f, F32{} + 1.0f);
  return times_power(p, n, x, -126.0f);
}

PPO_INLINE F64 exp2(F64 x) {
  for (int i = 0; i < LANES<F64>; ++i) x[i] = ::exp2(x[i]);
  return x;
}

// tanh, an odd minimax polynomial near 0 and 1 - 2 / (e^2|x| + 1) elsewhere.
PPO_INLINE F32 tanh(F32 x) {
  F32 t = x * x, a = x < 0.0f ? -x : x;
  F32 p = fma(t, F32{} - 5.70498699e-3f, F32{} + 2.06390861e-2f);
  p = fma(p, t, F32{} - 5.37397154e-2f);
  p = fma(p, t, F32{} + 1.33314416e-1f);
  p = fma(p, t, F32{} - 3.33332807e-1f);
  F32 big = 1.0f - 2.0f / (exp(a > 40.0f ? F32{} + 80.0f : 2.0f * a) + 1.0f);
  return a < 0.625f ? fma(p, t * x, x) : (x < 0.0f ? -big : big);
}

PPO_INLINE F64 tanh(F64 x) {
  for (int i = 0; i < LANES<F64>; ++i) x[i] = ::tanh(x[i]);
  return x;
}

// ------------------------------------------------------------------------ load and store

template <class V, class T>
PPO_INLINE V bits_at(const T* p) {
  V v;
  memcpy(&v, p, sizeof v);
  return v;
}

PPO_INLINE F32 load(const float* p) { return bits_at<F32>(p); }
PPO_INLINE F64 load(const double* p) { return bits_at<F64>(p); }
PPO_INLINE F32 load(const BF16* p) {
  return (F32)(__builtin_convertvector(bits_at<U16>(p), U32) << 16);
}
PPO_INLINE F32 load(const FP16* p) {
  U32 h = __builtin_convertvector(bits_at<U16>(p), U32), sign = (h & 0x8000u) << 16;
  // Shifted into place the exponent is 112 too small, for subnormals too; inf and NaN are apart.
  U32 magnitude = (h & 0x7fffu) << 13;
  F32 f = (F32)magnitude * 0x1p112f;
  U32 bits = magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : (U32)f;
  return (F32)(bits | sign);
}

// Two vectors' worth of numbers, in whatever order comes cheapest: for sums.
template <class T, class Vec>
PPO_INLINE void load_two(const T* p, Vec& a, Vec& b) {
  a = load(p);
  b = load(p + LANES<Vec>);
}
PPO_INLINE void load_two(const BF16* p, F32& a, F32& b) {
  U32 pairs = bits_at<U32>(p);
  a = (F32)(pairs << 16);
  b = (F32)(pairs & 0xffff0000u);
}

PPO_INLINE void store(float* p, F32 v) { memcpy(p, &v, sizeof v); }
PPO_INLINE void store(double* p, F64 v) { memcpy(p, &v, sizeof v); }
// Both round to nearest, ties to even.
PPO_INLINE void store(BF16* p, F32 v) {
  U32 u = (U32)v, rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  U16 out = __builtin_convertvector(v != v ? U32{} + 0x7fc0u : rounded, U16);
  memcpy(p, &out, sizeof out);
}
PPO_INLINE void store(FP16* p, F32 v) {
  U32 u = (U32)v, sign = (u >> 16) & 0x8000u, a = u & 0x7fffffffu;
  U32 normal = (a - 0x38000000u + 0xfffu + ((a >> 13) & 1u)) >> 13;
  // Adding 1/2 puts the subnormal's last bit where fp32 rounds.
  U32 small = (U32)((F32)a + 0.5f) - 0x3f000000u;
  U32 h = a < 0x38800000u ? small : normal;
  h = a >= 0x47800000u ? U32{} + 0x7c00u : h;
  h = a > 0x7f800000u ? U32{} + 0x7e00u : h;
  U16 out = __builtin_convertvector(h | sign, U16);
  memcpy(p, &out, sizeof out);
}

// The first n < LANES elements, the others -inf; and their store.
PPO_INLINE void set_minus_inf(float& x) { x = -__builtin_inff(); }
PPO_INLINE void set_minus_inf(double& x) { x = -__builtin_inf(); }
PPO_INLINE void set_minus_inf(BF16& x) { x.bits = 0xff80; }
PPO_INLINE void set_minus_inf(FP16& x) { x.bits = 0xfc00; }
template <class T>
PPO_INLINE auto load_some(const T* p, int n) {
  T padded[LANES<typename Compute<T>::Vec>];
  for (T& x : padded) set_minus_inf(x);
  memcpy(padded, p, n * sizeof(T));
  return load(padded);
}
template <class T, class Vec>
PPO_INLINE void store_some(T* p, int n, Vec v) {
  T padded[LANES<Vec>];
  store(padded, v);
  memcpy(p, padded, n * sizeof(T));
}

}  // namespace
}  // namespace PPO_ISA
}  // namespace ppo
