// Log-softmax, gather and entropy over rows of logits, and their gradient. Torch-free;
// csrc/logprobs.cpp calls these functions through PPO_PICK.
#pragma once
#include <stdint.h>

#include "isa.h"

namespace ppo {

enum class Dtype { f32, bf16, f16, f64 };

// Rows are the leading dimensions [A, B] of logits [A, B, V]; row r is (r / B, r % B).
struct LogprobsArgs {
  Dtype dtype;
  const void* x;
  int64_t B, V, stride_a, stride_b;
  const void* labels;  // int64 or int32
  bool wide_labels;
  // "real" below is fp32, and fp64 for f64.
  const void* temperatures;  // reals, one per row, or null: `temperature`
  double temperature, logit_scale, softcap;  // softcap 0: none
  int64_t ignore_index;
  int64_t first, vocab_size;  // the columns are [first, first + V) of a vocabulary

  // Forward: reals, one per row; entropy and sum_p2 may be null.
  void *logp, *entropy, *row_max, *log_sum, *sum_p2;
  // Or, for one slice of the vocabulary: (max, sum, w, target logit[, q]) per row.
  void* partials;
  int partial_columns;

  // Backward: reals, either gradient may be null; dx may be x.
  const void *grad_logp, *grad_entropy;
  void* dx;
  int64_t dx_stride_a, dx_stride_b;
  bool bf16_dx;  // of fp32 logits; dx may be the first half of each row, done piece by piece

  // For a caller that goes forward and at once backward over a few rows, or null: the exponentials
  // that forward, with entropy and from no scratch, leaves for backward, so that each is made
  // once. Per row from `kept_from` on, V reals e^(z - m of the piece), then each piece's m.
  void* kept;
  int64_t kept_from;
};

// A row is always summed in pieces of so many columns, merged in order: neither the number of
// rows nor that of threads leaves a trace in the result.
constexpr int64_t LOGPROBS_PIECE = 16384;
constexpr int64_t LOGPROBS_PIECE_REALS = 4;

inline int64_t logprobs_kept_reals(int64_t V) {
  return V + (V + LOGPROBS_PIECE - 1) / LOGPROBS_PIECE;
}

// Sums of the pieces [begin, end), counted over all rows, into scratch (PIECE_REALS reals each).
PPO_DECLARE(void logprobs_pieces(const LogprobsArgs&, void* scratch, int64_t begin, int64_t end))
// The outputs of rows [begin, end), from scratch or, if it is null, from the logits.
PPO_DECLARE(void logprobs_rows(const LogprobsArgs&, const void* scratch, int64_t begin, int64_t end))
// The gradient of the pieces [begin, end), counted over all rows.
PPO_DECLARE(void logprobs_backward(const LogprobsArgs&, int64_t begin, int64_t end))

}  // namespace ppo
