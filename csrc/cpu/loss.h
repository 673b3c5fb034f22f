// The PPO loss on the CPU: what the kernels in loss.cpp read and write.
#pragma once
#include <cstdint>

namespace ppo {

enum class Dtype { f32, f64, bf16, f16, boolean };
enum class Policy { clip, kl, a2c };
enum class Kl { k1, k2, k3, abs, k1_plus, k3_plus };

// One number per token; absent if data is null.
struct Column {
  const void* data = nullptr;
  Dtype dtype = Dtype::f32;
};

struct LossOptions {
  Policy policy;
  Kl kl;
  // Ratios below `low` (for A < 0), above `high` (for A > 0) and above `dual` (for A < 0) stop.
  double low, high, dual, kl_old_coef, is_cap;
  double value_range, vf_coef, ent_coef, kl_coef;
  // Advantages enter as (A - mean) * rstd.
  bool whiten;
  double mean, rstd;
};

struct LossInputs {
  Column mask, logp, old, adv, values, old_values, returns, entropy, ref, rollout;
};

// c of `agg(x) = sum c x` is weight * scale, times sequence_scale of the token's sequence if there
// are any: `row` tokens each, or bounded by cu[0..sequences].
struct LossScale {
  double scale;
  const double* sequence_scale;
  int64_t row;
  const int32_t* cu;
  int64_t sequences;
};

// Sums over tokens: the first four with c, the others with the weight.
struct LossSums {
  double policy, value, entropy, kl_ref;
  double approx_kl, policy_kl, clip_high, clip_low, clip_value, ratio;
  double ratio_max;
};

// Gradients of the loss per token; null where nobody needs it.
struct LossGrads {
  void *logp, *values, *entropy;
};

// A block's sums never depend on the number of threads.
constexpr int64_t kLossBlock = 4096;

}  // namespace ppo
