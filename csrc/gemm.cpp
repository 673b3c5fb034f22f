// The CPU side of widening_product_ (schema: ppo_kernels/ops/hidden.py), for bf16 and where the CPU
// multiplies bf16. Elsewhere nothing is registered and the reference runs.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include "cpu/gemm.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

void widening_product_(const Tensor& out, const Tensor& a, const Tensor& b, bool add) {
  STD_TORCH_CHECK(a.scalar_type() == ScalarType::BFloat16 && b.scalar_type() == a.scalar_type() &&
                      out.scalar_type() == ScalarType::Float,
                  "a and b must be bf16, out fp32");
  STD_TORCH_CHECK(a.dim() == 2 && b.dim() == 2 && out.dim() == 2 && a.size(1) == b.size(0) &&
                      out.size(0) == a.size(0) && out.size(1) == b.size(1),
                  "out must be [M, N], a [M, K], b [K, N]");
  STD_TORCH_CHECK(out.stride(1) == 1 || out.size(1) == 1, "the rows of out must be contiguous");
  ppo::GemmArgs g;
  g.a = static_cast<const uint16_t*>(a.const_data_ptr());
  g.b = static_cast<const uint16_t*>(b.const_data_ptr());
  g.out = static_cast<float*>(out.mutable_data_ptr());
  g.M = a.size(0), g.N = b.size(1), g.K = a.size(1);
  g.a_row = a.stride(0), g.a_col = a.stride(1);
  g.b_row = b.stride(0), g.b_col = b.stride(1);
  g.out_row = out.stride(0);
  g.add = add;
  static const auto blocks = PPO_PICK(gemm_blocks);
  const int64_t tasks = ((g.M + ppo::GEMM_M - 1) / ppo::GEMM_M) *
                        ((g.N + ppo::GEMM_N - 1) / ppo::GEMM_N);
  torch::stable::parallel_for(0, tasks, 1, [&](int64_t begin, int64_t end) { blocks(g, begin, end); });
}

bool has_bf16_products() {
#if defined(__x86_64__)
  return &at::native::cpublas::brgemm && &at::native::cpublas::brgemm_release &&
         __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(ppo_kernels, CPU, m) {
  if (has_bf16_products()) m.impl("widening_product_", TORCH_BOX(&widening_product_));
}
