// ppo_kernels::gae for torch's dispatcher: tensors to pointers, and who runs them.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>
#include <vector>

#include "build_config.h"
#include "cpu/isa.h"
#include "gae.h"
#include "gae_plan.h"

namespace ppo {
PPO_DECLARE(void gae_rows(const GaeArgs&, int64_t, int64_t))
#ifdef PPO_CUDA  // gae.cu
int multiprocessors();
int64_t gae_scratch_bytes(const GaeArgs& args, const GaePlan& plan);
const char* gae_cuda(const GaeArgs& args, const GaePlan& plan, void* scratch, double* stats,
                     void* stream);
#endif
}  // namespace ppo

namespace {

using ppo::GaeArgs;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Optional = std::optional<Tensor>;

// Work below this many tokens is not worth a second thread.
constexpr int64_t kGrainTokens = 16384;

struct Call {
  bool one_precision;  // cast so that all inputs are fp64 or none is: what the CUDA kernels take
  GaeArgs args{};
  Tensor advantages, returns;
  std::vector<Tensor> kept;  // contiguous copies live as long as the pointers into them

  const void* pointer(const Tensor& x) {
    kept.push_back(torch::stable::contiguous(x));
    return kept.back().const_data_ptr();
  }

  ppo::Input input(const Optional& x) {
    if (!x) return {nullptr, ppo::kF32};
    const bool f64 = args.values.dtype == ppo::kF64;
    if (one_precision && args.values.data && f64 != (x->scalar_type() == ScalarType::Double))
      return input(torch::stable::to(*x, f64 ? ScalarType::Double : ScalarType::Float));
    switch (x->scalar_type()) {
      case ScalarType::Float:
        return {pointer(*x), ppo::kF32};
      case ScalarType::BFloat16:
        return {pointer(*x), ppo::kBF16};
      case ScalarType::Half:
        return {pointer(*x), ppo::kF16};
      case ScalarType::Double:
        return {pointer(*x), ppo::kF64};
      default:
        STD_TORCH_CHECK(false, "gae: inputs must be float32, bfloat16, float16 or float64");
    }
  }

  const uint8_t* flags(const Optional& x) {
    if (!x) return nullptr;
    STD_TORCH_CHECK(x->scalar_type() == ScalarType::Bool, "gae: masks and flags must be bool");
    return static_cast<const uint8_t*>(pointer(*x));
  }
};

Call prepare(bool one_precision, const Optional& rewards, const Tensor& values, const Optional& mask,
             const Optional& scores, const Optional& bootstrap, const Optional& logprobs,
             const Optional& ref_logprobs, const Optional& terminated, const Optional& truncated,
             const Optional& cu_seqlens, double gamma, double lam, double lam_returns,
             double kl_coef, int64_t kl_kind) {
  Call call{one_precision};
  GaeArgs& a = call.args;
  for (const Optional* x : {&rewards, &mask, &logprobs, &ref_logprobs, &terminated, &truncated})
    STD_TORCH_CHECK(!*x || (*x)->numel() == values.numel(), "gae: sizes differ from values");
  const int64_t rows = cu_seqlens ? cu_seqlens->numel() - 1 : values.size(0);
  STD_TORCH_CHECK(!scores || scores->numel() == rows, "gae: scores must hold one number per row");
  STD_TORCH_CHECK(!bootstrap || bootstrap->numel() == (truncated ? values.numel() : rows),
                  "gae: bootstrap must hold one number per row, per token with truncated");
  a.values = call.input(values);
  a.rewards = call.input(rewards);
  a.logprobs = call.input(logprobs);
  a.ref_logprobs = call.input(ref_logprobs);
  a.scores = call.input(scores);
  a.bootstrap = call.input(bootstrap);
  a.mask = call.flags(mask);
  a.terminated = call.flags(terminated);
  a.truncated = call.flags(truncated);
  a.rows = rows;
  a.tokens = values.numel();
  if (!cu_seqlens) {
    a.length = values.size(1);
  } else if (cu_seqlens->scalar_type() == ScalarType::Int) {
    a.cu_seqlens_32 = static_cast<const int32_t*>(call.pointer(*cu_seqlens));
  } else {
    a.cu_seqlens_64 = static_cast<const int64_t*>(call.pointer(*cu_seqlens));
  }
  a.gamma = gamma;
  a.lam = lam;
  a.lam_returns = lam_returns;
  a.kl_coef = kl_coef;
  a.kl_kind = static_cast<int>(kl_kind);
  const auto dtype = a.values.dtype == ppo::kF64 ? ScalarType::Double : ScalarType::Float;
  call.advantages = torch::stable::new_empty(values, values.sizes(), dtype);
  call.returns = torch::stable::new_empty(values, values.sizes(), dtype);
  a.advantages = call.advantages.mutable_data_ptr();
  a.returns = call.returns.mutable_data_ptr();
  return call;
}

void check_cu_seqlens(const GaeArgs& a) {
  if (!a.cu_seqlens_32 && !a.cu_seqlens_64) return;
  const auto at = [&](int64_t i) {
    return a.cu_seqlens_32 ? int64_t(a.cu_seqlens_32[i]) : a.cu_seqlens_64[i];
  };
  bool sound = at(0) == 0 && at(a.rows) == a.tokens;
  for (int64_t i = 0; i < a.rows; ++i) sound &= at(i) <= at(i + 1);
  STD_TORCH_CHECK(sound, "gae: cu_seqlens must run from 0 to the number of tokens, ascending");
}

using Result = std::tuple<Tensor, Tensor, Tensor>;

Result gae_cpu(const Optional& rewards, const Tensor& values, const Optional& mask,
               const Optional& scores, const Optional& bootstrap, const Optional& logprobs,
               const Optional& ref_logprobs, const Optional& terminated, const Optional& truncated,
               const Optional& cu_seqlens, double gamma, double lam, double lam_returns,
               double kl_coef, int64_t kl_kind) {
  static const auto rows = PPO_PICK(gae_rows);
  Call call = prepare(false, rewards, values, mask, scores, bootstrap, logprobs, ref_logprobs, terminated,
                      truncated, cu_seqlens, gamma, lam, lam_returns, kl_coef, kl_kind);
  GaeArgs& a = call.args;
  check_cu_seqlens(a);
  std::vector<double> sums(3 * a.rows);
  a.sums = sums.data();
  const int64_t tokens_per_row = a.tokens / (a.rows ? a.rows : 1) + 1;
  torch::stable::parallel_for(0, a.rows, kGrainTokens / tokens_per_row + 1,
                              [&](int64_t begin, int64_t end) { rows(a, begin, end); });
  const Tensor stats = torch::stable::new_zeros(values, {3}, ScalarType::Double);
  double* total = static_cast<double*>(stats.mutable_data_ptr());
  // Row after row, so that the number of threads changes no bit.
  for (int64_t i = 0; i < 3 * a.rows; ++i) total[i % 3] += sums[i];
  return {call.advantages, call.returns, stats};
}

#ifdef PPO_CUDA
Result gae_cuda(const Optional& rewards, const Tensor& values, const Optional& mask,
                const Optional& scores, const Optional& bootstrap, const Optional& logprobs,
                const Optional& ref_logprobs, const Optional& terminated,
                const Optional& truncated, const Optional& cu_seqlens, double gamma, double lam,
                double lam_returns, double kl_coef, int64_t kl_kind) {
  const int device = values.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  const Call call = prepare(false, rewards, values, mask, scores, bootstrap, logprobs, ref_logprobs,
                            terminated, truncated, cu_seqlens, gamma, lam, lam_returns, kl_coef,
                            kl_kind);
  const GaeArgs& a = call.args;
  if (a.tokens == 0)
    return {call.advantages, call.returns,
            torch::stable::new_zeros(values, {3}, ScalarType::Double)};
  const Tensor stats = torch::stable::new_empty(values, {3}, ScalarType::Double);
  const ppo::GaePlan plan = ppo::gae_plan(a.rows, cu_seqlens ? a.tokens / a.rows : a.length,
                                          a.tokens, cu_seqlens.has_value(), ppo::multiprocessors());
  const Tensor scratch = torch::stable::new_empty(
      values, {ppo::gae_scratch_bytes(a, plan) / 8 + 2}, ScalarType::Double);
  const char* error = ppo::gae_cuda(a, plan, scratch.mutable_data_ptr(),
                                    static_cast<double*>(stats.mutable_data_ptr()), stream);
  STD_TORCH_CHECK(!error, "gae: ", error);
  return {call.advantages, call.returns, stats};
}
#endif

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(ppo_kernels, CPU, m) { m.impl("gae", TORCH_BOX(&gae_cpu)); }
#ifdef PPO_CUDA
STABLE_TORCH_LIBRARY_IMPL(ppo_kernels, CUDA, m) { m.impl("gae", TORCH_BOX(&gae_cuda)); }
#endif
