// ppo_loss on the CPU: tiles of tokens in, gradients and sums out.
#include "cpu/loss.h"

#include "cpu/loss_math.h"

namespace ppo {
namespace PPO_ISA {
namespace {

inline float from_bf16(uint16_t x) {
  uint32_t bits = uint32_t(x) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}

inline float from_f16(uint16_t x) {
  uint32_t sign = uint32_t(x & 0x8000) << 16, rest = x & 0x7fff;
  // As an fp32 pattern the number is 2^-112 of itself; inf and NaN need the larger exponent.
  uint32_t bits = rest << 13;
  float y;
  std::memcpy(&y, &bits, 4);
  y *= 0x1p112f;
  std::memcpy(&bits, &y, 4);
  bits = (rest >= 0x7c00 ? bits | 0x7f800000 : bits) | sign;
  std::memcpy(&y, &bits, 4);
  return y;
}

template <class T, class Load>
void fill(T* out, const T* weight, int64_t n, Load load) {
  for (int64_t j = 0; j < n; ++j) out[j] = weight[j] != 0 ? T(load(j)) : T(0);
  for (int64_t j = n; j < kTile; ++j) out[j] = T(0);
}

// n numbers of a column from token `at`, 0 where the weight is 0 and past the end.
template <class T>
void load(T* out, const Column& column, int64_t at, int64_t n, const T* weight) {
  if (!column.data) return fill(out, weight, 0, [](int64_t) { return T(0); });
  switch (column.dtype) {
    case Dtype::f32: {
      auto p = static_cast<const float*>(column.data) + at;
      return fill(out, weight, n, [=](int64_t j) { return p[j]; });
    }
    case Dtype::f64: {
      auto p = static_cast<const double*>(column.data) + at;
      return fill(out, weight, n, [=](int64_t j) { return p[j]; });
    }
    case Dtype::bf16: {
      auto p = static_cast<const uint16_t*>(column.data) + at;
      return fill(out, weight, n, [=](int64_t j) { return from_bf16(p[j]); });
    }
    case Dtype::f16: {
      auto p = static_cast<const uint16_t*>(column.data) + at;
      return fill(out, weight, n, [=](int64_t j) { return from_f16(p[j]); });
    }
    case Dtype::boolean: {
      auto p = static_cast<const uint8_t*>(column.data) + at;
      return fill(out, weight, n, [=](int64_t j) { return p[j] ? 1.0f : 0.0f; });
    }
  }
}

// Weights of n tokens; returns whether any is not 0.
template <class T>
bool load_weights(T* out, const Column& mask, int64_t at, int64_t n) {
  T ones[kTile];
  for (T& x : ones) x = T(1);
  if (mask.data) {
    load(out, mask, at, n, ones);
  } else {
    for (int64_t j = 0; j < kTile; ++j) out[j] = j < n ? T(1) : T(0);
  }
  int any = 0;
  for (int64_t j = 0; j < kTile; ++j) any |= out[j] != 0;
  return any;
}

template <class T>
void coefficients(T* out, const T* weight, const LossScale& s, int64_t at, int64_t n) {
  if (!s.sequence_scale) {
    for (int64_t j = 0; j < kTile; ++j) out[j] = T(weight[j] * s.scale);
    return;
  }
  int64_t sequence = s.cu ? std::upper_bound(s.cu, s.cu + s.sequences + 1, at) - s.cu - 1 : at / s.row;
  for (int64_t j = 0; j < n;) {
    int64_t end = s.cu ? s.cu[sequence + 1] : (sequence + 1) * s.row;
    int64_t stop = std::min(n, end - at);
    const double scale = s.sequence_scale[sequence++];
    for (; j < stop; ++j) out[j] = T(weight[j] * scale);
  }
  for (int64_t j = n; j < kTile; ++j) out[j] = T(0);
}

template <class T>
void store(void* out, const T* x, int64_t at, int64_t n) {
  if (out) std::memcpy(static_cast<T*>(out) + at, x, n * sizeof(T));
}
