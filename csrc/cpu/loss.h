// The PPO loss on the CPU: the arguments that csrc/loss.cpp hands to the kernels. Torch-free.
#pragma once
#include <stdint.h>

#include "cpu/logprobs.h"

namespace ppo {

enum class Policy { clip, kl, a2c };
enum class Kl { k1, k2, k3, abs, k1_plus, k3_plus };

// One number per token; absent if data is null. `boolean` columns hold bytes.
struct Column {
  const void* data = nullptr;
  Dtype dtype = Dtype::f32;
  bool boolean = false;
};

struct LossOptions {
  Policy policy;
  Kl kl;
  // Ratios below `low` (A < 0), above `high` (A > 0) and above `dual` (A < 0) stop there.
  double low, high, dual, kl_old_coef, is_cap;
  double value_range, vf_coef, ent_coef, kl_coef;
  // Advantages enter as (A - mean) * rstd.
  bool whiten;
  double mean, rstd;
};

struct LossInputs {
  Column logp, entropy, old, adv, mask, values, old_values, returns, ref, rollout;
};

// The c of `agg(x) = sum c x` is weight * scale, and times sequence_scale of the token's sequence
// if that is given. Sequences have `row` tokens each, or lie between cu[s] and cu[s + 1].
struct LossScale {
  double scale;
  const double* sequence_scale;
  int64_t row;
  const int32_t* cu;
  int64_t sequences;
};

// Sums over tokens: the first four with c, the others with the weight alone.
struct LossSums {
  double policy, value, entropy, kl_ref;
  double approx_kl, policy_kl, clip_high, clip_low, clip_value, ratio;
  double ratio_max;
};

// Where d(loss)/d(input) of each token goes; null where nobody needs it.
struct LossGrads {
  void *logp, *values, *entropy;
};

// Tokens per LossSums, whatever the number of threads.
constexpr int64_t LOSS_BLOCK = 4096;

// Loss and gradients of the tokens [begin, end); `real` is f32 or f64, of everything written.
PPO_DECLARE(void loss_block(Dtype real, const LossOptions&, const LossInputs&, const LossScale&,
                            const LossGrads&, int64_t begin, int64_t end, LossSums&))
// The sum of a mask (bool, f32 or f64; absent: all ones) over [begin, end).
PPO_DECLARE(double weight_sum(const Column& mask, int64_t begin, int64_t end))

}  // namespace ppo
