// The CPU side of the logprobs ops (schemas: ppo_kernels/ops/logprobs.py): allocates, checks and
// hands rows to threads.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <tuple>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "cpu/logprobs.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Maybe = std::optional<Tensor>;

ppo::Dtype dtype_of(const Tensor& logits) {
  switch (logits.scalar_type()) {
    case ScalarType::Float: return ppo::Dtype::f32;
    case ScalarType::BFloat16: return ppo::Dtype::bf16;
    case ScalarType::Half: return ppo::Dtype::f16;
    case ScalarType::Double: return ppo::Dtype::f64;
    default: STD_TORCH_CHECK(false, "logits must be fp32, bf16, fp16 or fp64");
  }
  return ppo::Dtype::f32;
}

ScalarType real_of(const Tensor& logits) {
  return logits.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// Pointer to one real per row, null for none.
void* reals(const Maybe& x, const Tensor& logits, const Tensor& labels, const char* name) {
  if (!x) return nullptr;
  STD_TORCH_CHECK(x->scalar_type() == real_of(logits) && x->numel() == labels.numel() &&
                      x->is_contiguous(),
                  name, " must be contiguous, one number per label, of the dtype of the outputs");
  return x->mutable_data_ptr();
}

int64_t leading_stride(const Tensor& x) { return x.dim() == 3 ? x.stride(0) : 0; }

ppo::LogprobsArgs args_of(const Tensor& logits, const Tensor& labels, const Maybe& temperatures,
                          double temperature, double logit_scale, double softcap,
                          int64_t ignore_index, const Maybe& shard) {
  const int64_t dim = logits.dim();
  STD_TORCH_CHECK((dim == 2 || dim == 3) && labels.dim() == dim - 1,
                  "logits must be [N, V] or [A, B, V], labels [N] or [A, B]");
  for (int64_t i = 0; i < dim - 1; ++i)
    STD_TORCH_CHECK(labels.size(i) == logits.size(i), "labels must have the shape of the rows");
  STD_TORCH_CHECK(logits.stride(dim - 1) == 1 || logits.size(dim - 1) == 1,
                  "the last dimension of logits must be contiguous");
  STD_TORCH_CHECK(labels.is_contiguous(), "labels must be contiguous");
  const bool wide = labels.scalar_type() == ScalarType::Long;
  STD_TORCH_CHECK(wide || labels.scalar_type() == ScalarType::Int, "labels must be int64 or int32");
  ppo::LogprobsArgs a{};
  a.dtype = dtype_of(logits);
  a.x = logits.const_data_ptr();
  a.B = logits.size(dim - 2);
  a.V = logits.size(dim - 1);
  a.stride_a = leading_stride(logits);
  a.stride_b = logits.stride(dim - 2);
  a.labels = labels.const_data_ptr();
  a.wide_labels = wide;
  a.temperatures = reals(temperatures, logits, labels, "temperatures");
  a.temperature = temperature;
  a.logit_scale = logit_scale;
  a.softcap = softcap;
  a.ignore_index = ignore_index;
  a.vocab_size = a.V;
  if (shard) {
    STD_TORCH_CHECK(shard->scalar_type() == ScalarType::Long && shard->numel() == 2,
                    "shard must be int64 [2]: the first column and the vocabulary size");
    const int64_t* range = static_cast<const int64_t*>(shard->const_data_ptr());
    a.first = range[0];
    a.vocab_size = range[1];
  }
  return a;
}

Tensor per_row(const Tensor& logits, const Tensor& labels, bool wanted = true) {
  if (!wanted) return torch::stable::new_empty(logits, {0}, real_of(logits));
  return torch::stable::new_empty(logits, labels.sizes(), real_of(logits));
}

void run_forward(const ppo::LogprobsArgs& a, const Tensor& logits, int64_t rows) {
  static const auto pieces = PPO_PICK(logprobs_pieces);
  static const auto finish = PPO_PICK(logprobs_rows);
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t per_row = (a.V + ppo::LOGPROBS_PIECE - 1) / ppo::LOGPROBS_PIECE;
  // Few rows: threads share them out by pieces, so that one long row keeps all of them busy.
  if (rows < 4 * threads && per_row > 1) {
    Tensor scratch = torch::stable::new_empty(
        logits, {rows * per_row * ppo::LOGPROBS_PIECE_REALS}, real_of(logits));
    void* sums = scratch.mutable_data_ptr();
    torch::stable::parallel_for(0, rows * per_row, 1, [&](int64_t begin, int64_t end) {
      pieces(a, sums, begin, end);
    });
    finish(a, sums, 0, rows);
    return;
  }
  const int64_t grain = 1 + ppo::LOGPROBS_PIECE / a.V;
  torch::stable::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    finish(a, nullptr, begin, end);
  });
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> logprobs_fwd(
    const Tensor& logits, const Tensor& labels, const Maybe& temperatures, double temperature,
    double logit_scale, double softcap, int64_t ignore_index, bool entropy, bool sum_p2) {
  ppo::LogprobsArgs a = args_of(logits, labels, temperatures, temperature, logit_scale, softcap,
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
  ppo::LogprobsArgs a = args_of(logits, labels, temperatures, temperature, logit_scale, softcap,
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
                  const Maybe& shard) {
  static const auto backward = PPO_PICK(logprobs_backward);
  ppo::LogprobsArgs a = args_of(logits, labels, temperatures, temperature, logit_scale, softcap,
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
  const int64_t per_row = (a.V + ppo::LOGPROBS_PIECE - 1) / ppo::LOGPROBS_PIECE;
  const int64_t grain = 1 + ppo::LOGPROBS_PIECE / a.V;
  torch::stable::parallel_for(0, labels.numel() * per_row, grain, [&](int64_t begin, int64_t end) {
    backward(a, begin, end);
  });
}

// A fresh gradient of hundreds of MB spends more time in page faults than in arithmetic. Asking for
// huge pages leaves one fault per 2 MB; where the system has none to give, nothing changes. Only
// for sizes that malloc maps and unmaps on their own, so that the advice ends with the tensor.
Tensor empty_like_with_huge_pages(const Tensor& logits) {
  Tensor out = torch::stable::new_empty(logits, logits.sizes());
#if defined(__linux__)
  constexpr uintptr_t PAGE = 2 << 20;
  uintptr_t begin = reinterpret_cast<uintptr_t>(out.mutable_data_ptr());
  uintptr_t end = (begin + out.numel() * out.element_size()) / PAGE * PAGE;
  begin = (begin + PAGE - 1) / PAGE * PAGE;
  if (end > begin + 32 * PAGE)
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
  return out;
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

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(ppo_kernels, CPU, m) {
  m.impl("logprobs_fwd", TORCH_BOX(&logprobs_fwd));
  m.impl("logprobs_partials", TORCH_BOX(&logprobs_partials));
  m.impl("logprobs_bwd", TORCH_BOX(&logprobs_bwd));
  m.impl("logprobs_bwd_", TORCH_BOX(&logprobs_bwd_));
}
