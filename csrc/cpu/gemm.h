// bf16 GEMM with fp32 sums on the CPU: the arguments that csrc/gemm.cpp hands out. Torch-free.
#pragma once
#include <stdint.h>

#include "cpu/isa.h"

namespace c10 {
struct BFloat16;
}

// oneDNN's micro-kernel for a small C = A B (+ C), exported by libtorch_cpu on x86. B is packed in
// pairs of rows. torch's own bf16 GEMMs round their output; this keeps the sums. Weak: absent from
// a libtorch without it.
namespace at {
namespace native {
namespace cpublas {
__attribute__((weak, visibility("default"))) void brgemm(
    int64_t M, int64_t N, int64_t K, int64_t lda, int64_t ldb, int64_t ldc, bool add_c,
    const c10::BFloat16* A, const c10::BFloat16* B, float* C, bool packed_b);
__attribute__((weak, visibility("default"))) void brgemm_release(bool packed_b);
}  // namespace cpublas
}  // namespace native
}  // namespace at

namespace ppo {

// out = A B, or out += A B. Without `out` the result has 24 bits a number, those of a bf16 in `high`
// and the 8 below them in `low`; `last` leaves it in `high` alone, rounded to bf16.
struct GemmArgs {
  const uint16_t *a, *b;
  float* out;
  uint16_t* high;
  uint8_t* low;
  int64_t M, N, K;
  int64_t a_row, a_col, b_row, b_col, out_row, low_row;
  bool add, last;
};

// A task multiplies `group_rows` rows of A, `rows` at a time, with `columns` columns of B; it packs
// these once.
struct GemmPlan {
  int64_t rows, columns, group_rows, groups, tasks;
};

// The most rows and columns; how much of K is packed at a time, and how much of that multiplied:
// packed rows and a tile of columns stay in a core's L2 cache.
constexpr int64_t GEMM_M = 256, GEMM_N = 1024, GEMM_PANEL = 1024, GEMM_K = 512, GEMM_TILE = 64;

PPO_DECLARE(void gemm_tasks(const GemmArgs&, const GemmPlan&, int64_t begin, int64_t end))

}  // namespace ppo
