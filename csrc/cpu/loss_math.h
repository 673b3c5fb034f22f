// The mathematics of the PPO loss: one function, `loss_tile`, for ppo_loss and for
// ppo_loss_from_logits. Included by the files in csrc/cpu only, once per instruction set.
//
// Loops have a constant trip count and no branch: the compiler vectorises them. A tile of tokens is
// cleaned first (masked slots become 0, whatever they held), so what follows may multiply by
// weights.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "cpu/loss.h"

namespace ppo {
namespace PPO_ISA {
namespace {

// e^x for |x| <= 20 or NaN: 2^n p(r), r = x - n ln 2.
inline float exp20(float x) {
  const float magic = 12582912.0f;  // adding it rounds to an integer, kept in the low bits
  float t = x * 1.44269504f + magic;
  float n = t - magic;
  float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = (p * r) * r + r + 1.0f;
  int32_t bits;
  std::memcpy(&bits, &t, 4);
  bits = (bits + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, 4);
  return p * scale;
}
inline double exp20(double x) { return std::exp(x); }

// e^x - 1 - x given e = e^x, without cancellation near 0.
inline float expm1_minus_x(float x, float e) {
  float p = 1.0f / 362880;
  p = p * x + 1.0f / 40320;
  p = p * x + 1.0f / 5040;
  p = p * x + 1.0f / 720;
  p = p * x + 1.0f / 120;
  p = p * x + 1.0f / 24;
  p = p * x + 1.0f / 6;
  p = p * x + 0.5f;
  bool near = (x < 0.5f) & (x > -0.5f);
  return near ? x * x * p : (e - 1.0f) - x;
}
inline double expm1_minus_x(double x, double) { return std::expm1(x) - x; }

template <class T>
inline T clamp20(T x) {
  T low = x < T(-20) ? T(-20) : x;
  return low > T(20) ? T(20) : low;
}

template <class T>
struct Tile {
  T weight[kTile], coef[kTile];
  T logp[kTile], old[kTile], adv[kTile], values[kTile], old_values[kTile], returns[kTile];
  T entropy[kTile], ref[kTile], is_weight[kTile];
  // Out: gradients, c included.
  T d_logp[kTile], d_values[kTile], d_entropy[kTile];
};

// sum a b in a fixed order.
template <class T>
double dot(const T* a, const T* b) {
  T lanes[kLanes] = {};
  for (int64_t j = 0; j < kTile; j += kLanes)
    for (int l = 0; l < kLanes; ++l) lanes[l] += a[j + l] * b[j + l];
  double sum = 0;
  for (int l = 0; l < kLanes; ++l) sum += lanes[l];
  return sum;
}

// Per token: loss and d(loss)/d(logp) of the policy term, and what the statistics need.
template <class T>
struct PolicyTile {
  T loss[kTile], ratio[kTile], approx_kl[kTile], policy_kl[kTile], above[kTile], below[kTile];
};

template <Policy kind, class T>
void policy_tile(const LossOptions& o, Tile<T>& t, PolicyTile<T>& p) {
  const T low = T(o.low), high = T(o.high), dual = T(o.dual), coef = T(o.kl_old_coef);
  for (int64_t j = 0; j < kTile; ++j) {
    T a = t.adv[j], w = t.is_weight[j];
    T log_ratio = t.logp[j] - t.old[j];
    bool outside = (log_ratio > T(20)) | (log_ratio < T(-20));
    T d = clamp20(log_ratio);
    T r = exp20(d);
    T kl = expm1_minus_x(d, r);
    p.ratio[j] = r;
    p.approx_kl[j] = kl;
    p.policy_kl[j] = -log_ratio;
    if constexpr (kind == Policy::clip) {
      bool above = (a > 0) & (r > high), below = (a < 0) & (r < low), past = (a < 0) & (r > dual);
      T bounded = above ? high : below ? low : past ? dual : r;
      p.loss[j] = -a * bounded * w;
      t.d_logp[j] = (above | below | past | outside) ? T(0) : -a * r * w;
      p.above[j] = above ? T(1) : T(0);
      p.below[j] = below ? T(1) : T(0);
    } else if constexpr (kind == Policy::kl) {
      p.loss[j] = (-a * r + coef * kl) * w;
      t.d_logp[j] = outside ? T(0) : (-a * r + coef * (d + kl)) * w;
    } else {
      p.loss[j] = -a * t.logp[j] * w;
      t.d_logp[j] = -a * w;
    }
    if constexpr (kind != Policy::clip) p.above[j] = p.below[j] = T(0);
  }
}

// The KL to the reference: its value in `loss`, its gradient times kl_coef added to d_logp.
template <Kl kind, class T>
void kl_tile(const LossOptions& o, Tile<T>& t, T* loss) {
  const T coef = T(o.kl_coef);
  for (int64_t j = 0; j < kTile; ++j) {
    T d = t.logp[j] - t.ref[j], grad = d;
    if constexpr (kind == Kl::k1 || kind == Kl::k1_plus) loss[j] = d;
    if constexpr (kind == Kl::k2) loss[j] = T(0.5) * d * d;
    if constexpr (kind == Kl::abs) loss[j] = d < 0 ? -d : d;
    if constexpr (kind == Kl::k3 || kind == Kl::k3_plus) {
      T x = -clamp20(d);
      T value = expm1_minus_x(x, exp20(x));
      loss[j] = value;
      if constexpr (kind == Kl::k3) grad = ((d > T(20)) | (d < T(-20))) ? T(0) : -(x + value);
    }
    if constexpr (kind == Kl::k1) grad = T(1);
    if constexpr (kind == Kl::abs) grad = d > 0 ? T(1) : d < 0 ? T(-1) : d;
    t.d_logp[j] += coef * grad;
  }
}

template <class T>
void value_tile(const LossOptions& o, Tile<T>& t, T* loss, T* clipped) {
  const T range = T(o.value_range), coef = T(o.vf_coef);
  for (int64_t j = 0; j < kTile; ++j) {
    T v = t.values[j], ret = t.returns[j];
    T low = t.old_values[j] - range, high = t.old_values[j] + range;
    T inside = v < low ? low : v > high ? high : v;
    T plain = (v - ret) * (v - ret), other = (inside - ret) * (inside - ret);
    bool stop = other > plain;
    loss[j] = T(0.5) * (stop ? other : plain);
    clipped[j] = stop ? T(1) : T(0);
    t.d_values[j] = stop ? T(0) : coef * t.coef[j] * (v - ret);
  }
}

// Adds the tile's sums to `sums` and leaves its gradients in the tile. Absent inputs are marked by
// `has`; slots past the end of the data have weight 0.
struct HasTerms {
  bool values, entropy, ref;
};

template <class T>
void loss_tile(const LossOptions& o, HasTerms has, Tile<T>& t, LossSums& sums) {
  PolicyTile<T> p;
  switch (o.policy) {
    case Policy::clip: policy_tile<Policy::clip>(o, t, p); break;
    case Policy::kl: policy_tile<Policy::kl>(o, t, p); break;
    case Policy::a2c: policy_tile<Policy::a2c>(o, t, p); break;
  }
  sums.policy += dot(t.coef, p.loss);
  sums.approx_kl += dot(t.weight, p.approx_kl);
  sums.policy_kl += dot(t.weight, p.policy_kl);
  sums.clip_high += dot(t.weight, p.above);
  sums.clip_low += dot(t.weight, p.below);
  sums.ratio += dot(t.weight, p.ratio);
  for (int64_t j = 0; j < kTile; ++j) {
    double r = t.weight[j] != 0 ? p.ratio[j] : T(0);
    sums.ratio_max = (r > sums.ratio_max) | (r != r) ? r : sums.ratio_max;
  }
  T loss[kTile], clipped[kTile];
  if (has.ref) {
    switch (o.kl) {
      case Kl::k1: kl_tile<Kl::k1>(o, t, loss); break;
      case Kl::k2: kl_tile<Kl::k2>(o, t, loss); break;
      case Kl::k3: kl_tile<Kl::k3>(o, t, loss); break;
      case Kl::abs: kl_tile<Kl::abs>(o, t, loss); break;
      case Kl::k1_plus: kl_tile<Kl::k1_plus>(o, t, loss); break;
      case Kl::k3_plus: kl_tile<Kl::k3_plus>(o, t, loss); break;
    }
    sums.kl_ref += dot(t.coef, loss);
  }
  for (int64_t j = 0; j < kTile; ++j) t.d_logp[j] *= t.coef[j];
  if (has.values) {
    value_tile(o, t, loss, clipped);
    sums.value += dot(t.coef, loss);
    sums.clip_value += dot(t.weight, clipped);
  }
  if (has.entropy) {
    const T coef = T(-o.ent_coef);
    sums.entropy += dot(t.coef, t.entropy);
    for (int64_t j = 0; j < kTile; ++j) t.d_entropy[j] = coef * t.coef[j];
  }
}

}  // namespace
}  // namespace PPO_ISA
}  // namespace ppo
