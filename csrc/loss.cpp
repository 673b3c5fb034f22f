// ppo_loss for torch's CPU key (stable ABI): the ops' arguments to raw pointers, blocks of tokens
// to threads, their sums to the loss and its statistics.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cmath>
#include <limits>
#include <list>
#include <optional>
#include <string>
#include <vector>

#include "cpu/isa.h"
#include "cpu/loss.h"

namespace ppo {

PPO_DECLARE(void loss_block(Dtype, const LossOptions&, const LossInputs&, const LossScale&,
                            const LossGrads&, int64_t, int64_t, LossSums&))
PPO_DECLARE(double weight_sum(const Column&, int64_t, int64_t))

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

double inverse(double x) { return x > 0 ? 1 / x : 0; }

Policy policy_of(const std::string& name) {
  if (name == "clip") return Policy::clip;
  if (name == "kl") return Policy::kl;
  STD_TORCH_CHECK(name == "a2c", "policy_loss must be clip, kl or a2c, got ", name);
  return Policy::a2c;
}

Kl kl_of(const std::string& name) {
  const char* names[] = {"k1", "k2", "k3", "abs", "k1+", "k3+"};
  for (int i = 0; i < 6; ++i)
    if (name == names[i]) return Kl(i);
  STD_TORCH_CHECK(false, "kl_kind must be k1, k2, k3, abs, k1+ or k3+, got ", name);
}

Dtype dtype_of(ScalarType type) {
  if (type == ScalarType::Double) return Dtype::f64;
  if (type == ScalarType::BFloat16) return Dtype::bf16;
  if (type == ScalarType::Half) return Dtype::f16;
  STD_TORCH_CHECK(type == ScalarType::Float, "ppo_loss takes bf16, f16, f32 and f64 numbers");
  return Dtype::f32;
}

// An op's arguments, taken in the order of its schema; its results, in theirs.
class Stack {
 public:
  explicit Stack(StableIValue* stack) : values_(stack) {}

  template <class T>
  T take() {
    return torch::stable::detail::to<T>(values_[at_++]);
  }

  void give(std::initializer_list<Tensor> results) {
    for (const Tensor& x : results) *values_++ = torch::stable::detail::from(x);
  }

  // A contiguous column of numbers, alive as long as this.
  Column column() {
    const auto x = take<MaybeTensor>();
    return x ? column(*x) : Column{};
  }
  Column column(const Tensor& x) {
    const Tensor& kept = kept_.emplace_back(x.is_contiguous() ? x : torch::stable::contiguous(x));
    const bool boolean = kept.scalar_type() == ScalarType::Bool;
    return {kept.const_data_ptr(), boolean ? Dtype::f32 : dtype_of(kept.scalar_type()), boolean};
  }

 private:
  StableIValue* values_;
  int at_ = 0;
  std::list<Tensor> kept_;
};

// TERMS of ops/loss.py, ready for the kernels.
struct Terms {
  LossOptions options;
  LossInputs in;
  LossScale scale;
  double total_weight = 0;

  explicit Terms(Stack& stack) {
    const auto old = stack.take<Tensor>();
    in.old = stack.column(old);
    in.adv = stack.column(stack.take<Tensor>());
    in.mask = stack.column();
    in.values = stack.column();
    in.old_values = stack.column();
    in.returns = stack.column();
    in.ref = stack.column();
    in.rollout = stack.column();
    whiten(static_cast<const double*>(stack.column().data));
    const auto normalizer = static_cast<const double*>(stack.column().data);
    auto denominator = stack.take<std::optional<double>>();
    if (normalizer) denominator = *normalizer;
    const auto cu = stack.take<MaybeTensor>();
    const double inf = std::numeric_limits<double>::infinity();
    options.policy = policy_of(stack.take<std::string>());
    options.low = 1 - stack.take<double>();
    options.high = 1 + stack.take<double>();
    options.dual = stack.take<std::optional<double>>().value_or(inf);
    options.value_range = stack.take<std::optional<double>>().value_or(inf);
    options.vf_coef = stack.take<double>();
    options.ent_coef = stack.take<double>();
    options.kl_coef = stack.take<double>();
    options.kl = kl_of(stack.take<std::string>());
    options.kl_old_coef = stack.take<double>();
    options.is_cap = stack.take<double>();
    count(stack.take<std::string>(), denominator, old, cu);
  }

 private:
  // (A - mean) * rstd from (n, sum, sum of squares), as reference.mean_rstd.
  void whiten(const double* stats) {
    options.whiten = stats != nullptr;
    if (!stats) return;
    const double n = stats[0];
    options.mean = stats[1] / std::fmax(n, 1);
    const double var = (stats[2] - stats[1] * options.mean) / std::fmax(n - 1, 1);
    options.rstd = n > 1 ? 1 / std::sqrt(std::fmax(var, 0) + 1e-8) : 0;
  }

  // The first pass, over the mask alone: no token's c is known before all of it is read.
  void count(const std::string& reduction, std::optional<double> denominator, const Tensor& tokens,
             const MaybeTensor& cu) {
    static const auto weight_sum = PPO_PICK(weight_sum);
    scale = {};
    if (reduction == "token-mean" || reduction == "sum") {
      total_weight = weight_sum(in.mask, 0, tokens.numel());
      scale.scale = inverse(denominator.value_or(total_weight));
      return;
    }
    scale.cu = cu ? cu->const_data_ptr<int32_t>() : nullptr;
    scale.row = cu ? 0 : tokens.size(1);
    scale.sequences = cu ? cu->numel() - 1 : tokens.size(0);
    int64_t live = 0;
    for (int64_t s = 0; s < scale.sequences; ++s) {
      const int64_t begin = cu ? scale.cu[s] : s * scale.row;
      const double weight = weight_sum(in.mask, begin, cu ? scale.cu[s + 1] : begin + scale.row);
      total_weight += weight;
      live += weight > 0;
      sequence_scale_.push_back(inverse(weight));
    }
    scale.scale = inverse(denominator.value_or(live));
    if (reduction == "seq-mean-token-mean") scale.sequence_scale = sequence_scale_.data();
  }

  std::vector<double> sequence_scale_;
};

Tensor tensor_of(const std::vector<double>& x, torch::headeronly::IntHeaderOnlyArrayRef shape,
                 const Tensor& like, ScalarType type) {
  Tensor out = torch::stable::new_empty(like, shape, type);
  for (size_t i = 0; i < x.size(); ++i) {
    if (type == ScalarType::Double) {
      static_cast<double*>(out.mutable_data_ptr())[i] = x[i];
    } else {
      static_cast<float*>(out.mutable_data_ptr())[i] = float(x[i]);
    }
  }
  return out;
}

struct Result {
  Tensor loss, stats;
};

// The blocks' sums, added in order.
Result finish(const Terms& terms, const std::vector<LossSums>& blocks, const Tensor& like,
              ScalarType type) {
  LossSums t{};
  for (const LossSums& b : blocks) {
    t.policy += b.policy;
    t.value += b.value;
    t.entropy += b.entropy;
    t.kl_ref += b.kl_ref;
    t.approx_kl += b.approx_kl;
    t.policy_kl += b.policy_kl;
    t.clip_high += b.clip_high;
    t.clip_low += b.clip_low;
    t.clip_value += b.clip_value;
    t.ratio += b.ratio;
    if (b.ratio_max > t.ratio_max || std::isnan(b.ratio_max)) t.ratio_max = b.ratio_max;
  }
  const LossOptions& o = terms.options;
  const double loss =
      t.policy + o.vf_coef * t.value - o.ent_coef * t.entropy + o.kl_coef * t.kl_ref;
  const double share = inverse(terms.total_weight);
  const std::vector<double> stats = {t.policy,
                                     t.value,
                                     t.entropy,
                                     t.kl_ref,
                                     t.approx_kl * share,
                                     t.policy_kl * share,
                                     (t.clip_high + t.clip_low) * share,
                                     t.clip_high * share,
                                     t.clip_low * share,
                                     t.clip_value * share,
                                     t.ratio * share,
                                     t.ratio_max,
                                     terms.total_weight};
  return {tensor_of({loss}, {}, like, type),
          tensor_of(stats, {int64_t(stats.size())}, like, type)};
}

// ppo_loss(logprobs, entropy, TERMS, need_logprobs, need_values, need_entropy)
//   -> (loss, stats, d_logprobs, d_values, d_entropy)
void ppo_loss(StableIValue* values, uint64_t, uint64_t) {
  static const auto loss_block = PPO_PICK(loss_block);
  Stack stack(values);
  const auto logprobs = stack.take<Tensor>();
  const Column logp = stack.column(logprobs), entropy = stack.column();
  Terms terms(stack);
  terms.in.logp = logp;
  terms.in.entropy = entropy;
  const bool wide = logp.dtype == Dtype::f64;
  const ScalarType type = wide ? ScalarType::Double : ScalarType::Float;

  std::vector<Tensor> grads;
  for (int i = 0; i < 3; ++i) {
    const bool needed = stack.take<bool>();
    grads.push_back(needed ? torch::stable::new_empty(logprobs, logprobs.sizes(), type)
                           : torch::stable::new_empty(logprobs, {0}, type));
  }
  auto data = [&](int i) { return grads[i].numel() ? grads[i].mutable_data_ptr() : nullptr; };
  const LossGrads out{data(0), data(1), data(2)};

  const int64_t n = logprobs.numel(), count = (n + LOSS_BLOCK - 1) / LOSS_BLOCK;
  std::vector<LossSums> blocks(count, LossSums{});
  torch::stable::parallel_for(0, count, 1, [&](int64_t first, int64_t last) {
    for (int64_t b = first; b < last; ++b) {
      const int64_t begin = b * LOSS_BLOCK, end = std::min(n, begin + LOSS_BLOCK);
      loss_block(wide ? Dtype::f64 : Dtype::f32, terms.options, terms.in, terms.scale, out, begin,
                 end, blocks[b]);
    }
  });
  const Result result = finish(terms, blocks, logprobs, type);
  stack.give({result.loss, result.stats, grads[0], grads[1], grads[2]});
}

}  // namespace
}  // namespace ppo

STABLE_TORCH_LIBRARY_IMPL(ppo_kernels, CPU, m) { m.impl("ppo_loss", &ppo::ppo_loss); }
