// The mathematics of the PPO loss, once: `loss_tile` serves ppo_loss and ppo_loss_from_logits.
//
// Weights multiply only what was selected by them, so that a masked slot may hold anything.
#pragma once
#include "cpu/loss.h"
#include "cpu/simd.h"

namespace ppo {
namespace PPO_ISA {
namespace {

constexpr int64_t TILE = 256;
// exp() arguments are clamped to this, as in reference.py.
constexpr int LOG_RATIO_CLAMP = 20;

template <class Real>
using Vec = typename Compute<Real>::Vec;

// Up to TILE tokens: where their inputs are and their gradients go. `size` is whole vectors; slots
// past the end of the data have weight 0. What was not given points anywhere: its term is left out.
template <class Real>
struct Tile {
  int64_t size;
  const Real *weight, *coef;
  const Real *logp, *entropy, *old, *adv, *values, *old_values, *returns, *ref, *rollout;
  Real *d_logp, *d_values, *d_entropy;
};

// Which terms and factors there are beside the policy term.
struct LossHas {
  bool values, entropy, ref, rollout;
};

// The vector at p, with the one that the next tile has in its place on the way to the cache: loops
// this short end before the hardware sees a pattern.
template <class Real>
PPO_INLINE Vec<Real> fetch(const Real* p) {
  __builtin_prefetch(p + TILE);
  return load(p);
}

// Calls body(j, weight, coef, valid) for every vector of a tile.
template <class Real, class Body>
PPO_INLINE void for_vectors(const Tile<Real>& t, const Body& body) {
  typedef Vec<Real> V;
  for (int64_t j = 0; j < t.size; j += LANES<V>) {
    const V weight = load(t.weight + j);
    body(j, weight, load(t.coef + j), weight != V{});
  }
}

template <class V>
PPO_INLINE V clamp(V x) {
  return min(max(x, V{} - LOG_RATIO_CLAMP), V{} + LOG_RATIO_CLAMP);
}

// Whether a bound moved x to y; not so for NaN.
template <class V>
PPO_INLINE auto moved(V x, V y) {
  return (x < y) | (x > y);
}

// e^x and e^x - 1 - x for clamped x. With x = n ln2 + r, e^r = 1 + r + r^2 p(r): for n = 0, where
// the difference would cancel, the second is r^2 p(r) itself. The coefficients are those of exp().
PPO_INLINE void exp_and_rest(F32 x, F32& exp_x, F32& rest) {
  const F32 shift = F32{} + (12582912.0f + 127.0f);
  const F32 t = fma(x, F32{} + 1.44269504f, shift), n = t - shift;
  F32 r = fma(n, F32{} - 0.693359375f, x);
  r = fma(n, F32{} + 2.12194440e-4f, r);
  F32 p = fma(r, F32{} + 1.38146131e-3f, F32{} + 8.36870983e-3f);
  p = fma(p, r, F32{} + 4.16683874e-2f);
  p = fma(p, r, F32{} + 1.66665207e-1f);
  p = fma(p, r, F32{} + 4.99999935e-1f);
  const F32 square = p * (r * r);
  exp_x = (square + r + 1.0f) * (F32)((I32)t << 23);
  rest = n == 0.0f ? square : (exp_x - 1.0f) - x;
}
PPO_INLINE void exp_and_rest(F64 x, F64& exp_x, F64& rest) {
  for (int i = 0; i < LANES<F64>; ++i) {
    exp_x[i] = ::exp(x[i]);
    rest[i] = ::expm1(x[i]) - x[i];
  }
}

// NaN wins.
template <class V>
PPO_INLINE V larger(V a, V b) {
  return ((b > a) | (b != b)) ? b : a;
}

// (A - mean) rstd in fp64: the mean may be much larger than the deviations.
PPO_INLINE F32 whitened(F32 a, const LossOptions& o) {
  for (int i = 0; i < LANES<F32>; ++i) a[i] = float((double(a[i]) - o.mean) * o.rstd);
  return a;
}
PPO_INLINE F64 whitened(F64 a, const LossOptions& o) { return (a - o.mean) * o.rstd; }

// The KL of the kind for d = logp - ref, and its derivative by logp.
template <class V>
PPO_INLINE void kl_and_gradient(Kl kind, V d, V& kl, V& grad) {
  const V one = V{} + 1, zero = {};
  kl = grad = d;
  switch (kind) {
    case Kl::k1: grad = one; break;
    case Kl::k1_plus: break;
    case Kl::k2: kl = d * d / 2; break;
    case Kl::abs:
      kl = d < zero ? -d : d;
      grad = d > zero ? one : (d < zero ? -one : d);
      break;
    case Kl::k3:
    case Kl::k3_plus:
      const V x = clamp(d);
      V unused;
      exp_and_rest(-x, unused, kl);
      if (kind == Kl::k3) grad = moved(d, x) ? zero : x - kl;
  }
}

// The policy term and the KL to the reference: what depends on logp.
template <Policy kind, class Real>
void policy_terms(const LossOptions& o, LossHas has, const Tile<Real>& t, LossSums& sums) {
  typedef Vec<Real> V;
  const V low = V{} + Real(o.low), high = V{} + Real(o.high), dual = V{} + Real(o.dual);
  const V kl_old_coef = V{} + Real(o.kl_old_coef), kl_coef = V{} + Real(o.kl_coef);
  const V cap = V{} + Real(o.is_cap), inf = V{} + Real(__builtin_inf()), zero = {};
  V policy = {}, kl_ref = {}, approx_kl = {}, policy_kl = {}, clip_high = {}, clip_low = {};
  V sum_ratio = {}, ratio_max = {};
  for_vectors(t, [&](int64_t j, V weight, V c, auto valid) __attribute__((always_inline)) {
    const V logp = valid ? fetch(t.logp + j) : zero, old = valid ? fetch(t.old + j) : zero;
    const V log_ratio = logp - old, x = clamp(log_ratio);
    V r, kl;
    exp_and_rest(x, r, kl);
    V a = fetch(t.adv + j), loss, grad;
    if (o.whiten) a = whitened(a, o);
    a = valid ? a : zero;
    if (kind == Policy::clip) {
      const auto up = a > zero, down = a < zero;
      const V kept = min(max(r, down ? low : -inf), up ? high : (down ? dual : inf));
      const auto clipped = moved(r, kept);
      loss = -a * kept;
      grad = clipped | moved(log_ratio, x) ? zero : -a * r;
      clip_high = clipped & up ? clip_high + weight : clip_high;
      clip_low = r < kept ? clip_low + weight : clip_low;
    } else if (kind == Policy::kl) {
      loss = kl_old_coef * kl - a * r;
      grad = moved(log_ratio, x) ? zero : kl_old_coef * (x + kl) - a * r;
    } else {
      loss = -a * logp;
      grad = -a;
    }
    V scale = c;
    if (has.rollout) {
      V w, unused;
      exp_and_rest(clamp(old - (valid ? fetch(t.rollout + j) : zero)), w, unused);
      scale *= min(w, cap);
    }
    policy = fma(scale, loss, policy);
    V d_logp = scale * grad;
    approx_kl = fma(weight, kl, approx_kl);
    policy_kl = fma(weight, log_ratio, policy_kl);
    sum_ratio = fma(weight, r, sum_ratio);
    ratio_max = max(ratio_max, valid ? r : zero);
    if (has.ref) {
      kl_and_gradient(o.kl, valid ? logp - fetch(t.ref + j) : zero, kl, grad);
      kl_ref = fma(c, kl, kl_ref);
      if (o.kl_coef != 0) d_logp = fma(c * kl_coef, grad, d_logp);
    }
    store(t.d_logp + j, d_logp);
  });
  sums.policy += sum_lanes(policy);
  sums.kl_ref += sum_lanes(kl_ref);
  sums.approx_kl += sum_lanes(approx_kl);
  sums.policy_kl -= sum_lanes(policy_kl);
  sums.clip_high += sum_lanes(clip_high);
  sums.clip_low += sum_lanes(clip_low);
  const Real ratio = sum_lanes(sum_ratio);
  sums.ratio += ratio;
  // A ratio is finite or NaN, and max() does not keep NaN.
  sums.ratio_max = larger<double>(sums.ratio_max, ratio == ratio ? max_lane(ratio_max) : ratio);
}

template <class Real>
void value_terms(const LossOptions& o, const Tile<Real>& t, LossSums& sums) {
  typedef Vec<Real> V;
  const V range = V{} + Real(o.value_range), coef = V{} + Real(o.vf_coef), zero = {};
  const bool none = o.vf_coef == 0;
  V sum = {}, clip = {};
  for_vectors(t, [&](int64_t j, V weight, V c, auto valid) __attribute__((always_inline)) {
    const V v = valid ? fetch(t.values + j) : zero, ret = valid ? fetch(t.returns + j) : zero;
    const V old = valid ? fetch(t.old_values + j) : zero, low = old - range, high = old + range;
    const V inside = min(max(v, low), high);
    const V error = v - ret, other = inside - ret;
    const auto stop = other * other > error * error;
    sum = fma(c, stop ? other * other : error * error, sum);
    clip = stop ? clip + weight : clip;
    store(t.d_values + j, none ? zero : (stop ? zero : coef * c * error));
  });
  sums.value += sum_lanes(sum) / 2;
  sums.clip_value += sum_lanes(clip);
}

template <class Real>
void entropy_terms(const LossOptions& o, const Tile<Real>& t, LossSums& sums) {
  typedef Vec<Real> V;
  const V coef = V{} - Real(o.ent_coef);
  V sum = {};
  for_vectors(t, [&](int64_t j, V, V c, auto valid) __attribute__((always_inline)) {
    sum = fma(c, valid ? fetch(t.entropy + j) : V{}, sum);
    store(t.d_entropy + j, c * coef);
  });
  sums.entropy += sum_lanes(sum);
}

// Writes the tile's gradients, coefficients included, and adds its sums to `sums`.
template <class Real>
void loss_tile(const LossOptions& o, LossHas has, const Tile<Real>& t, LossSums& sums) {
  switch (o.policy) {
    case Policy::clip: policy_terms<Policy::clip>(o, has, t, sums); break;
    case Policy::kl: policy_terms<Policy::kl>(o, has, t, sums); break;
    case Policy::a2c: policy_terms<Policy::a2c>(o, has, t, sums); break;
  }
  if (has.values) value_terms(o, t, sums);
  if (has.entropy) entropy_terms(o, t, sums);
}

}  // namespace
}  // namespace PPO_ISA
}  // namespace ppo
