// The CPU side of the logprobs ops (schemas: ppo_kernels/ops/logprobs.py): allocates, checks and
// hands rows to threads.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "logits_args.h"

namespace ppo {
namespace {

Tensor per_row(const Tensor& logits, const Tensor& labels, bool wanted = true) {
  return wanted ? empty(labels.sizes(), real_of(logits)) : empty({0}, real_of(logits));
}

void run_forward(const LogprobsArgs& a, const Tensor& logits, int64_t rows) {
  static const auto pieces = PPO_PICK(logprobs_pieces);
  static const auto finish = PPO_PICK(logprobs_rows);
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t per_row = (a.V + LOGPROBS_PIECE - 1) / LOGPROBS_PIECE;
  // Few rows: threads share them out by pieces, so that one long row keeps all of them busy.
  if (rows < 4 * threads && per_row > 1) {
    Tensor scratch = torch::stable::new_empty(
        logits, {rows * per_row * LOGPROBS_PIECE_REALS}, real_of(logits));
    void* sums = scratch.mutable_data_ptr();
    torch::stable::parallel_for(0, rows * per_row, 1, [&](int64_t begin, int64_t end) {
      pieces(a, sums, begin, end);
    });
    finish(a, sums, 0, rows);
    return;
  }
  const int64_t grain = 1 + LOGPROBS_PIECE / a.V;
  torch::stable::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    finish(a, nullptr, begin, end);
  });
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> logprobs_fwd(
    const Tensor& logits, const Tensor& labels, const Maybe& temperatures, double temperature,
    double logit_scale, double softcap, int64_t ignore_index, bool entropy, bool sum_p2) {
  LogprobsArgs a = args_of(logits, labels, temperatures, temperature, logit_scale, softcap,
                                ignore_index, std::nullopt);
  Tensor logp = per_row(logits, labels), ent = per_row(logits, labels, entropy);
  Tensor row_max = per_row(logits, labels), log_sum = per_row(logits, labels);
  Tensor p2 = per_row(logits, labels, sum_p2);
  a.logp = logp.mutable_data_ptr();
  a.row_max = row_max.mutable_data_ptr();
  a.log_sum = log_sum.mutable_data_ptr();
  if (entropy) a.entropy = ent.mutable_data_ptr();
  if (sum_p2) a.sum_p2 = p2.mutable_data_ptr();
  run_forward(a, logits, labels.numel());
  return {logp, ent, row_max, log_sum, p2};
}

Tensor logprobs_partials(const Tensor& logits, const Tensor& labels, const Maybe& temperatures,
                         double temperature, double logit_scale, double softcap,
                         int64_t ignore_index, const Maybe& shard, bool sum_p2) {
  LogprobsArgs a = args_of(logits, labels, temperatures, temperature, logit_scale, softcap,
                                ignore_index, shard);
  a.partial_columns = sum_p2 ? 5 : 4;
  Tensor out =
      torch::stable::new_empty(logits, {labels.numel(), a.partial_columns}, real_of(logits));
  a.partials = out.mutable_data_ptr();
  run_forward(a, logits, labels.numel());
  return out;
}

void run_backward(const Tensor& logits, const Tensor& dx, const Maybe& grad_logp,
                  const Maybe& grad_entropy, const Tensor& labels, const Maybe& temperatures,
                  double temperature, double logit_scale, double softcap, int64_t ignore_index,
                  const Tensor& row_max, const Tensor& log_sum, const Maybe& entropy,
                  const Maybe& shard, bool bf16_in_place = false) {
  static const auto backward = PPO_PICK(logprobs_backward);
  LogprobsArgs a = args_of(logits, labels, temperatures, temperature, logit_scale, softcap,
                                ignore_index, shard);
  STD_TORCH_CHECK(!grad_entropy || entropy, "grad_entropy needs the entropy");
  a.grad_logp = reals(grad_logp, logits, labels, "grad_logprobs");
  a.grad_entropy = reals(grad_entropy, logits, labels, "grad_entropy");
  a.row_max = reals(row_max, logits, labels, "row_max");
  a.log_sum = reals(log_sum, logits, labels, "log_sum");
  a.entropy = grad_entropy ? reals(entropy, logits, labels, "entropy") : nullptr;
  a.dx = dx.mutable_data_ptr();
  a.dx_stride_a = leading_stride(dx);
  a.dx_stride_b = dx.stride(dx.dim() - 2);
  const int64_t per_row = (a.V + LOGPROBS_PIECE - 1) / LOGPROBS_PIECE;
  const int64_t grain = 1 + LOGPROBS_PIECE / a.V;
  if (bf16_in_place) {
    STD_TORCH_CHECK(a.dtype == Dtype::f32, "logits must be fp32");
    a.bf16_dx = true;
    a.dx_stride_a *= 2;
    a.dx_stride_b *= 2;
    // A row at a time and front to back: what is written has been read.
    torch::stable::parallel_for(0, labels.numel(), grain, [&](int64_t begin, int64_t end) {
      backward(a, begin * per_row, end * per_row);
    });
    return;
  }
  torch::stable::parallel_for(0, labels.numel() * per_row, grain, [&](int64_t begin, int64_t end) {
    backward(a, begin, end);
  });
}

Tensor logprobs_bwd(const Tensor& logits, const Maybe& grad_logp, const Maybe& grad_entropy,
                    const Tensor& labels, const Maybe& temperatures, double temperature,
                    double logit_scale, double softcap, int64_t ignore_index,
                    const Tensor& row_max, const Tensor& log_sum, const Maybe& entropy,
                    const Maybe& shard) {
  Tensor dx = empty_like_with_huge_pages(logits);
  run_backward(logits, dx, grad_logp, grad_entropy, labels, temperatures, temperature, logit_scale,
               softcap, ignore_index, row_max, log_sum, entropy, shard);
  return dx;
}

void logprobs_bwd_(const Tensor& logits, const Maybe& grad_logp, const Maybe& grad_entropy,
                   const Tensor& labels, const Maybe& temperatures, double temperature,
                   double logit_scale, double softcap, int64_t ignore_index, const Tensor& row_max,
                   const Tensor& log_sum, const Maybe& entropy, const Maybe& shard) {
  run_backward(logits, logits, grad_logp, grad_entropy, labels, temperatures, temperature,
               logit_scale, softcap, ignore_index, row_max, log_sum, entropy, shard);
}

void logprobs_bwd_bf16_(const Tensor& logits, const Maybe& grad_logp, const Maybe& grad_entropy,
                        const Tensor& labels, const Maybe& temperatures, double temperature,
                        double logit_scale, double softcap, int64_t ignore_index,
                        const Tensor& row_max, const Tensor& log_sum, const Maybe& entropy,
                        const Maybe& shard) {
  run_backward(logits, logits, grad_logp, grad_entropy, labels, temperatures, temperature,
               logit_scale, softcap, ignore_index, row_max, log_sum, entropy, shard, true);
}

}  // namespace
}  // namespace ppo

STABLE_TORCH_LIBRARY_IMPL(ppo_kernels, CPU, m) {
  m.impl("logprobs_fwd", TORCH_BOX(&ppo::logprobs_fwd));
  m.impl("logprobs_partials", TORCH_BOX(&ppo::logprobs_partials));
  m.impl("logprobs_bwd", TORCH_BOX(&ppo::logprobs_bwd));
  m.impl("logprobs_bwd_", TORCH_BOX(&ppo::logprobs_bwd_));
  m.impl("logprobs_bwd_bf16_", TORCH_BOX(&ppo::logprobs_bwd_bf16_));
}
