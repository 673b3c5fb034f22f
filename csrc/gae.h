// The arguments of one gae call, shared by the CPU and the CUDA kernels. No torch, no STL.
//
// Carry form. X_t is what position t hands to its left neighbour:
//
//   R_t = r_t + X_{t+1}      A_t = R_t - V_t      X_t = gamma ((1 - lam) V_t + lam R_t)
//
// with r_t = rewards_t - kl_coef kl_t. A masked token is the identity, X_t = X_{t+1}, and writes 0.
// Right of a row X is score + gamma bootstrap; an episode that ends after t hands 0 to t, one cut
// off there gamma bootstrap_t. As an affine map, X_t = c X_{t+1} + b with c = gamma lam and
// b = gamma lam r_t + gamma (1 - lam) V_t.
#pragma once
#include <cstdint>

namespace ppo {

enum Dtype : int { kF32, kBF16, kF16, kF64 };
enum KlKind : int { kK1, kK2, kK3, kAbs };

// A floating tensor of any supported dtype; data is null where the argument was not given.
struct Input {
  const void* data;
  int dtype;
};

struct GaeArgs {
  Input rewards, values, logprobs, ref_logprobs;  // a number per token
  Input scores;                                   // a number per row
  Input bootstrap;                                // per row, or per token with truncated
  const uint8_t *mask, *terminated, *truncated;   // a byte per token
  // Row s is [cu_seqlens[s], cu_seqlens[s + 1]); both null for padded rows of `length` tokens.
  const int32_t* cu_seqlens_32;
  const int64_t* cu_seqlens_64;
  void *advantages, *returns;  // a number per token, float or double
  double* sums;                // (n, sum A, sum A^2) of each row (CPU) or of each block (CUDA)
  int64_t rows, length, tokens;
  double gamma, lam, lam_returns, kl_coef;
  int kl_kind;
};

}  // namespace ppo
