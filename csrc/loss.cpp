// ppo_loss for torch's CPU key (stable ABI): the ops' arguments to raw pointers, blocks of tokens
// to threads, their sums to the loss and its statistics.
#include <torch/csrc/stable/library.h>

#include <cmath>
#include <limits>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "cpu/loss.h"
#include "logits_args.h"

namespace ppo {
namespace {

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
    const auto x = take<Maybe>();
    return x ? column(*x) : Column{};
  }
  Column column(const Tensor& x) {
    const Tensor& kept = kept_.emplace_back(x.is_contiguous() ? x : torch::stable::contiguous(x));
    const bool boolean = kept.scalar_type() == ScalarType::Bool;
    return {kept.const_data_ptr(), boolean ? Dtype::f32 : dtype_of(kept), boolean};
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
  Tensor old;  // of the shape of all that is one number per token

  explicit Terms(Stack& stack) : old(stack.take<Tensor>()) {
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
    cu_ = stack.take<Maybe>();
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
    count(stack.take<std::string>(), denominator);
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
  void count(const std::string& reduction, std::optional<double> denominator) {
    static const auto weight_sum = PPO_PICK(weight_sum);
    scale = {};
    if (reduction == "token-mean" || reduction == "sum") {
      total_weight = weight_sum(in.mask, 0, old.numel());
      scale.scale = inverse(denominator.value_or(total_weight));
      return;
    }
    const bool packed = cu_.has_value();
    if (packed) boundaries();
    scale.row = packed ? 0 : old.size(1);
    scale.sequences = packed ? cu_->numel() - 1 : old.size(0);
    int64_t live = 0;
    for (int64_t s = 0; s < scale.sequences; ++s) {
      const int64_t begin = packed ? scale.cu[s] : s * scale.row;
      const int64_t end = packed ? scale.cu[s + 1] : begin + scale.row;
      const double weight = weight_sum(in.mask, begin, end);
      total_weight += weight;
      live += weight > 0;
      sequence_scale_.push_back(inverse(weight));
    }
    scale.scale = inverse(denominator.value_or(live));
    if (reduction == "seq-mean-token-mean") scale.sequence_scale = sequence_scale_.data();
  }

  // scale.cu, which a compiled graph hands over as it came: nothing beyond the tokens is read.
  void boundaries() {
    if (!cu_->is_contiguous()) cu_ = torch::stable::contiguous(*cu_);
    const int32_t* cu = scale.cu = cu_->const_data_ptr<int32_t>();
    const int64_t last = cu_->numel() - 1, n = old.numel();
    bool sound = last >= 0 && cu[0] == 0 && cu[last] == n;
    for (int64_t s = 0; s < last; ++s) sound = sound && cu[s] <= cu[s + 1];
    STD_TORCH_CHECK(sound, "cu_seqlens must run from 0 to ", n, " and not decrease");
  }

  Maybe cu_;
  std::vector<double> sequence_scale_;
};

Tensor tensor_of(const std::vector<double>& x, torch::headeronly::IntHeaderOnlyArrayRef shape,
                 ScalarType type) {
  Tensor out = empty(shape, type);
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
Result finish(const Terms& terms, const std::vector<LossSums>& blocks, ScalarType type) {
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
  // A coefficient of 0 leaves its term out, which may be infinite where it is only watched.
  double loss = t.policy;
  if (o.vf_coef != 0) loss += o.vf_coef * t.value;
  if (o.ent_coef != 0) loss -= o.ent_coef * t.entropy;
  if (o.kl_coef != 0) loss += o.kl_coef * t.kl_ref;
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
  return {tensor_of({loss}, {}, type), tensor_of(stats, {int64_t(stats.size())}, type)};
}

// Calls body(begin, end, sums, scratch) for blocks of `size` of the n tokens, in parallel, each
// thread with bytes of its own.
template <class Body>
std::vector<LossSums> for_blocks(int64_t n, int64_t size, int64_t bytes, const Body& body) {
  const int64_t count = (n + size - 1) / size;
  std::vector<LossSums> sums(count, LossSums{});
  torch::stable::parallel_for(0, count, 1, [&](int64_t first, int64_t last) {
    const std::unique_ptr<char[]> scratch(new char[bytes]);
    for (int64_t b = first; b < last; ++b)
      body(b * size, std::min(n, (b + 1) * size), sums[b], scratch.get());
  });
  return sums;
}

// A gradient, or [0] where none is needed; and where it lies, or null.
Tensor gradient(const Tensor& like, bool needed, ScalarType type) {
  return needed ? empty(like.sizes(), type) : empty({0}, type);
}
void* data(const Tensor& x) { return x.numel() ? x.mutable_data_ptr() : nullptr; }

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
  const ScalarType type = real_of(logprobs);
  const Dtype real = type == ScalarType::Double ? Dtype::f64 : Dtype::f32;
  const Tensor d_logp = gradient(logprobs, stack.take<bool>(), type);
  const Tensor d_values = gradient(logprobs, stack.take<bool>(), type);
  const Tensor d_entropy = gradient(logprobs, stack.take<bool>(), type);
  const LossGrads grads{data(d_logp), data(d_values), data(d_entropy)};
  const auto sums = for_blocks(
      logprobs.numel(), LOSS_BLOCK, 0, [&](int64_t begin, int64_t end, LossSums& block, void*) {
        loss_block(real, terms.options, terms.in, terms.scale, grads, begin, end, block);
      });
  const Result result = finish(terms, sums, type);
  stack.give({result.loss, result.stats, d_logp, d_values, d_entropy});
}

// Tokens whose logits are read, turned into a loss and overwritten by or followed by their gradient
// while they are still in the cache.
int64_t rows_at_a_time(int64_t V) { return std::max<int64_t>(1, 32768 / V); }

// ppo_loss_from_logits(logits, labels, TRANSFORM, TERMS, need_logits, need_values)
//   -> (loss, stats, d_logits, d_values)
// ppo_loss_from_logits_(logits, labels, TRANSFORM, TERMS, need_values) -> (loss, stats, d_values),
// where d_logits takes the place of the logits.
template <bool in_place>
void ppo_loss_from_logits(StableIValue* values, uint64_t, uint64_t) {
  static const auto forward = PPO_PICK(logprobs_rows);
  static const auto backward = PPO_PICK(logprobs_backward);
  static const auto loss_block = PPO_PICK(loss_block);
  Stack stack(values);
  const auto logits = stack.take<Tensor>(), labels = stack.take<Tensor>();
  const auto temperatures = stack.take<Maybe>();
  const auto temperature = stack.take<double>(), logit_scale = stack.take<double>();
  const auto softcap = stack.take<double>();
  const auto ignore_index = stack.take<int64_t>();
  LogprobsArgs a = args_of(logits, labels, temperatures, temperature, logit_scale, softcap,
                           ignore_index, std::nullopt);
  Terms terms(stack);
  const bool need_logits = in_place || stack.take<bool>();
  const ScalarType type = real_of(logits);
  const Dtype real = type == ScalarType::Double ? Dtype::f64 : Dtype::f32;
  const Tensor d_values = gradient(terms.old, stack.take<bool>(), type);
  Tensor d_logits = in_place ? logits : torch::stable::new_empty(logits, {0});
  if (need_logits && !in_place) d_logits = empty_like_with_huge_pages(logits);

  // What links the three passes over a block of rows: reals per row.
  const int64_t n = labels.numel(), pieces = (a.V + LOGPROBS_PIECE - 1) / LOGPROBS_PIECE;
  const Tensor rows = torch::stable::new_empty(logits, {6, n}, type);
  auto row = [&](int i) {
    return static_cast<char*>(rows.mutable_data_ptr()) + i * n * rows.element_size();
  };
  a.logp = row(0);
  a.entropy = row(1);
  a.row_max = row(2);
  a.log_sum = row(3);
  terms.in.logp = {a.logp, real};
  terms.in.entropy = {a.entropy, real};
  const LossGrads grads{row(4), data(d_values), row(5)};
  LogprobsArgs b = a;
  b.grad_logp = grads.logp;
  if (terms.options.ent_coef != 0) b.grad_entropy = grads.entropy;
  b.dx = d_logits.mutable_data_ptr();
  b.dx_stride_a = leading_stride(d_logits);
  b.dx_stride_b = need_logits ? d_logits.stride(d_logits.dim() - 2) : 0;
  const int64_t at_a_time = rows_at_a_time(a.V);
  const int64_t kept = need_logits ? at_a_time * logprobs_kept_reals(a.V) * rows.element_size() : 0;
  const auto sums = for_blocks(
      n, at_a_time, kept, [&](int64_t begin, int64_t end, LossSums& block, void* scratch) {
        LogprobsArgs first = a, second = b;
        first.kept = second.kept = need_logits ? scratch : nullptr;
        first.kept_from = second.kept_from = begin;
        forward(first, nullptr, begin, end);
        loss_block(real, terms.options, terms.in, terms.scale, grads, begin, end, block);
        if (need_logits) backward(second, begin * pieces, end * pieces);
      });
  const Result result = finish(terms, sums, type);
  if (in_place) return stack.give({result.loss, result.stats, d_values});
  stack.give({result.loss, result.stats, d_logits, d_values});
}

}  // namespace
}  // namespace ppo

STABLE_TORCH_LIBRARY_IMPL(ppo_kernels, CPU, m) {
  m.impl("ppo_loss", &ppo::ppo_loss);
  m.impl("ppo_loss_from_logits", &ppo::ppo_loss_from_logits<false>);
  m.impl("ppo_loss_from_logits_", &ppo::ppo_loss_from_logits<true>);
}
