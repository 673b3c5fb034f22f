// The CPU side of widening_product_ and split_product_ (schemas: ppo_kernels/ops/_chunked.py), for
// bf16 and where the CPU multiplies bf16. Elsewhere nothing is registered and the reference runs.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>

#include "cpu/gemm.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

int64_t parts(int64_t n, int64_t most) { return (n + most - 1) / most; }

// n in equal parts of at most `most`, but for the last, each a multiple of `unit`.
int64_t part(int64_t n, int64_t most, int64_t unit) {
  return parts(parts(n, parts(n, most)), unit) * unit;
}

// Work for every thread. Where there are many rows, threads share them; where there are few, they
// share the columns, for B is then costly to pack. How the sums are split over K is fixed, and with
// it the result.
ppo::GemmPlan plan_for(const ppo::GemmArgs& g, int64_t threads) {
  const int64_t blocks = parts(g.M, ppo::GEMM_M);
  const bool many = blocks >= 4 * threads;
  const int64_t most = many ? ppo::GEMM_N : std::clamp(g.N / threads, ppo::GEMM_TILE, ppo::GEMM_N);
  ppo::GemmPlan p;
  p.rows = part(g.M, ppo::GEMM_M, 16);
  p.columns = part(g.N, most, ppo::GEMM_TILE);
  const int64_t wide = parts(g.N, p.columns);
  const int64_t groups = many ? parts(4 * threads, wide) : wide < threads ? blocks : 1;
  p.group_rows = parts(blocks, groups) * p.rows;
  p.groups = parts(g.M, p.group_rows);
  p.tasks = wide * p.groups;
  return p;
}

// The factors; where their product goes is for the caller to say.
ppo::GemmArgs factors(const Tensor& a, const Tensor& b, const Tensor& out) {
  STD_TORCH_CHECK(a.scalar_type() == ScalarType::BFloat16 && b.scalar_type() == a.scalar_type(),
                  "a and b must be bf16");
  STD_TORCH_CHECK(a.dim() == 2 && b.dim() == 2 && out.dim() == 2 && a.size(1) == b.size(0) &&
                      out.size(0) == a.size(0) && out.size(1) == b.size(1),
                  "out must be [M, N], a [M, K], b [K, N]");
  STD_TORCH_CHECK(out.stride(1) == 1 || out.size(1) == 1, "the rows of out must be contiguous");
  ppo::GemmArgs g = {};
  g.a = static_cast<const uint16_t*>(a.const_data_ptr());
  g.b = static_cast<const uint16_t*>(b.const_data_ptr());
  g.M = a.size(0), g.N = b.size(1), g.K = a.size(1);
  g.a_row = a.stride(0), g.a_col = a.stride(1);
  g.b_row = b.stride(0), g.b_col = b.stride(1);
  g.out_row = out.stride(0);
  return g;
}

void multiply(const ppo::GemmArgs& g) {
  if (g.M == 0 || g.N == 0 || (g.K == 0 && g.add && !g.last)) return;
  const ppo::GemmPlan plan = plan_for(g, torch::stable::get_num_threads());
  static const auto tasks = PPO_PICK(gemm_tasks);
  torch::stable::parallel_for(0, plan.tasks, 1, [&](int64_t begin, int64_t end) {
    tasks(g, plan, begin, end);
  });
}

void widening_product_(const Tensor& out, const Tensor& a, const Tensor& b, bool add) {
  STD_TORCH_CHECK(out.scalar_type() == ScalarType::Float, "out must be fp32");
  ppo::GemmArgs g = factors(a, b, out);
  g.out = static_cast<float*>(out.mutable_data_ptr());
  g.add = add;
  multiply(g);
}

void split_product_(const Tensor& high, const Tensor& low, const Tensor& a, const Tensor& b,
                    bool add, bool last) {
  STD_TORCH_CHECK(high.scalar_type() == ScalarType::BFloat16 &&
                      low.scalar_type() == ScalarType::Byte,
                  "high must be bf16, low uint8");
  STD_TORCH_CHECK(low.dim() == 2 && high.dim() == 2 && low.size(0) == high.size(0) &&
                      low.size(1) == high.size(1) && (low.stride(1) == 1 || low.size(1) == 1),
                  "low must have the shape of high and contiguous rows");
  ppo::GemmArgs g = factors(a, b, high);
  g.high = static_cast<uint16_t*>(high.mutable_data_ptr());
  g.low = static_cast<uint8_t*>(low.mutable_data_ptr());
  g.low_row = low.stride(0);
  g.add = add, g.last = last;
  multiply(g);
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
  if (!has_bf16_products()) return;
  m.impl("widening_product_", TORCH_BOX(&widening_product_));
  m.impl("split_product_", TORCH_BOX(&split_product_));
}
