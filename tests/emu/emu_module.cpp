// Python's side of the emulated GAE kernels: tensors come as (address, dtype), (0, 0) for None.
#include <pybind11/pybind11.h>

#include "gae.h"
#include "gae_plan.h"

namespace py = pybind11;

void emu_gae(const ppo::GaeArgs&, const ppo::GaePlan&, double*, bool);

namespace {

ppo::Input input(const py::dict& tensors, const char* name) {
  const auto x = tensors[name].cast<std::pair<uintptr_t, int>>();
  return {reinterpret_cast<const void*>(x.first), x.second};
}

template <class T>
T* pointer(const py::dict& tensors, const char* name) {
  return reinterpret_cast<T*>(tensors[name].cast<std::pair<uintptr_t, int>>().first);
}

// launch: 0 warp per row, 1 block per row, 2 rows split, -1 what gae_plan chooses for `sms`.
void gae(const py::dict& tensors, int64_t rows, int64_t length, int64_t tokens, double gamma,
         double lam, double lam_returns, double kl_coef, int kl_kind, int launch, int sms,
         bool last_warp_first) {
  ppo::GaeArgs a{};
  a.rewards = input(tensors, "rewards");
  a.values = input(tensors, "values");
  a.logprobs = input(tensors, "logprobs");
  a.ref_logprobs = input(tensors, "ref_logprobs");
  a.scores = input(tensors, "scores");
  a.bootstrap = input(tensors, "bootstrap");
  a.mask = pointer<const uint8_t>(tensors, "mask");
  a.terminated = pointer<const uint8_t>(tensors, "terminated");
  a.truncated = pointer<const uint8_t>(tensors, "truncated");
  a.cu_seqlens_32 = pointer<const int32_t>(tensors, "cu_seqlens_32");
  a.cu_seqlens_64 = pointer<const int64_t>(tensors, "cu_seqlens_64");
  a.advantages = pointer<void>(tensors, "advantages");
  a.returns = pointer<void>(tensors, "returns");
  a.rows = rows, a.length = length, a.tokens = tokens;
  a.gamma = gamma, a.lam = lam, a.lam_returns = lam_returns;
  a.kl_coef = kl_coef, a.kl_kind = kl_kind;
  const bool packed = a.cu_seqlens_32 || a.cu_seqlens_64;
  const int64_t mean = packed ? tokens / rows : length;
  ppo::GaePlan plan = ppo::gae_plan(rows, mean, tokens, packed, sms);
  if (launch == 0) plan = {ppo::kWarpPerRow, (rows + ppo::kWarps - 1) / ppo::kWarps};
  if (launch == 1) plan = {ppo::kBlockPerRow, rows};
  if (launch == 2) plan = {ppo::kSplitRows, ppo::gae_segments(rows, length, tokens, packed)};
  emu_gae(a, plan, pointer<double>(tensors, "stats"), last_warp_first);
}

}  // namespace

PYBIND11_MODULE(emu, m) { m.def("gae", &gae); }
