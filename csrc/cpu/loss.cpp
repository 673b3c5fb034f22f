// ppo_loss on the CPU: tiles of tokens in, gradients and sums out.
#include "cpu/loss_math.h"

namespace ppo {
namespace PPO_ISA {
namespace {

// n, rounded up to whole vectors.
template <class Real>
constexpr int64_t padded(int64_t n) {
  return (n + LANES<Vec<Real>> - 1) / LANES<Vec<Real>> * LANES<Vec<Real>>;
}

// n numbers from p, followed by anything.
template <class T>
void convert(const T* p, int64_t n, float* out) {
  int64_t j = 0;
  for (; j + LANES<F32> <= n; j += LANES<F32>) store(out + j, load(p + j));
  if (j < n) store(out + j, load_some(p + j, int(n - j)));
}

// n numbers from p, followed by zeros.
template <class From, class To>
void cast(const From* p, int64_t n, To* out) {
  for (int64_t j = 0; j < n; ++j) out[j] = To(+p[j]);
  for (int64_t j = n; j < padded<To>(n); ++j) out[j] = 0;
}

// n numbers of a column from token `at`: where they are if that will do, or converted into buffer.
// Masks, which are bool, f32 or f64, are followed by zeros, and select what follows the others.
const float* read(const Column& column, int64_t at, int64_t n, float* buffer) {
  if (!column.data) return buffer;
  const auto f32 = static_cast<const float*>(column.data) + at;
  if (column.boolean) {
    cast(static_cast<const uint8_t*>(column.data) + at, n, buffer);
  } else if (column.dtype == Dtype::f64) {
    cast(static_cast<const double*>(column.data) + at, n, buffer);
  } else if (column.dtype == Dtype::bf16) {
    convert(static_cast<const BF16*>(column.data) + at, n, buffer);
  } else if (column.dtype == Dtype::f16) {
    convert(static_cast<const FP16*>(column.data) + at, n, buffer);
  } else if (n != padded<float>(n)) {
    cast(f32, n, buffer);
  } else {
    return f32;
  }
  return buffer;
}

const double* read(const Column& column, int64_t at, int64_t n, double* buffer) {
  if (!column.data) return buffer;
  if (column.dtype == Dtype::f64) {
    cast(static_cast<const double*>(column.data) + at, n, buffer);
  } else {
    float narrow[TILE];
    cast(read(column, at, n, narrow), n, buffer);
  }
  return buffer;
}

// Whether the mask has any of the n tokens from `at`; weight: the same, as read.
template <class Real>
bool any(const Column& mask, int64_t at, int64_t n, const Real* weight) {
  if (mask.boolean) {
    const auto bytes = static_cast<const uint8_t*>(mask.data) + at;
    uint8_t seen = 0;
    for (int64_t j = 0; j < n; ++j) seen |= bytes[j];
    return seen;
  }
  int seen = 0;
  for (int64_t j = 0; j < n; ++j) seen |= weight[j] != 0;
  return seen;
}

// The sequence that holds token `at`: the last one that starts at or before it.
int64_t sequence_of(const int32_t* cu, int64_t sequences, int64_t at) {
  int64_t low = 0, high = sequences;
  while (low + 1 < high) {
    const int64_t middle = (low + high) / 2;
    (cu[middle] <= at ? low : high) = middle;
  }
  return low;
}

// c of n tokens from `at`.
template <class Real>
void coefficients(const LossScale& s, int64_t at, int64_t n, const Real* weight, Real* out) {
  if (!s.sequence_scale) {
    for (int64_t j = 0; j < padded<Real>(n); ++j) out[j] = weight[j] * Real(s.scale);
    return;
  }
  int64_t sequence = s.cu ? sequence_of(s.cu, s.sequences, at) : at / s.row;
  for (int64_t j = 0; j < n; ++sequence) {
    const int64_t end = (s.cu ? s.cu[sequence + 1] : (sequence + 1) * s.row) - at;
    const Real scale = Real(s.scale * s.sequence_scale[sequence]);
    for (; j < n && j < end; ++j) out[j] = weight[j] * scale;
  }
  for (int64_t j = n; j < padded<Real>(n); ++j) out[j] = 0;
}

// Where a tile's gradient is written: straight to the output, or to `buffer` if there is none or
// the last vector would reach past it.
template <class Real>
Real* target(void* out, int64_t at, int64_t n, Real* buffer) {
  return out && n == padded<Real>(n) ? static_cast<Real*>(out) + at : buffer;
}

template <class Real>
void finish(void* out, int64_t at, int64_t n, const Real* buffer) {
  if (out && n != padded<Real>(n))
    memcpy(static_cast<Real*>(out) + at, buffer, n * sizeof(Real));
}

template <class Real>
void zeros(void* out, int64_t at, int64_t n) {
  if (out) memset(static_cast<Real*>(out) + at, 0, n * sizeof(Real));
}

template <class Real>
void block(const LossOptions& o, const LossInputs& in, const LossScale& scale,
           const LossGrads& grads, int64_t begin, int64_t end, LossSums& sums) {
  const LossHas has{in.values.data != nullptr, in.entropy.data != nullptr, in.ref.data != nullptr,
                    in.rollout.data != nullptr};
  // Pages of these that no conversion needs are never touched.
  alignas(64) Real weight[TILE], coef[TILE], buffers[9][TILE], d[3][TILE];
  for (int64_t at = begin; at < end; at += TILE) {
    const int64_t n = end - at < TILE ? end - at : TILE;
    Tile<Real> t;
    t.size = padded<Real>(n);
    if (in.mask.data) {
      t.weight = read(in.mask, at, n, weight);
    } else {
      for (int64_t j = 0; j < t.size; ++j) weight[j] = j < n;
      t.weight = weight;
    }
    if (!any(in.mask, at, n, t.weight)) {
      zeros<Real>(grads.logp, at, n);
      zeros<Real>(grads.values, at, n);
      zeros<Real>(grads.entropy, at, n);
      continue;
    }
    coefficients(scale, at, n, t.weight, coef);
    t.coef = coef;
    t.logp = read(in.logp, at, n, buffers[0]);
    t.entropy = read(in.entropy, at, n, buffers[1]);
    t.old = read(in.old, at, n, buffers[2]);
    t.adv = read(in.adv, at, n, buffers[3]);
    t.values = read(in.values, at, n, buffers[4]);
    t.old_values = read(in.old_values.data ? in.old_values : in.values, at, n, buffers[5]);
    t.returns = read(in.returns, at, n, buffers[6]);
    t.ref = read(in.ref, at, n, buffers[7]);
    t.rollout = read(in.rollout, at, n, buffers[8]);
    t.d_logp = target(grads.logp, at, n, d[0]);
    t.d_values = target(grads.values, at, n, d[1]);
    t.d_entropy = target(grads.entropy, at, n, d[2]);
    loss_tile(o, has, t, sums);
    finish(grads.logp, at, n, d[0]);
    finish(grads.values, at, n, d[1]);
    finish(grads.entropy, at, n, d[2]);
  }
}

template <class T>
double total(const T* x, int64_t n) {
  constexpr int lanes = 16;
  double sums[lanes] = {}, sum = 0;
  int64_t j = 0;
  for (; j + lanes <= n; j += lanes)
    for (int i = 0; i < lanes; ++i) sums[i] += double(x[j + i]);
  for (; j < n; ++j) sum += double(x[j]);
  for (double s : sums) sum += s;
  return sum;
}

}  // namespace

void loss_block(Dtype type, const LossOptions& o, const LossInputs& in, const LossScale& scale,
                const LossGrads& grads, int64_t begin, int64_t end, LossSums& sums) {
  if (type == Dtype::f64) {
    block<double>(o, in, scale, grads, begin, end, sums);
  } else {
    block<float>(o, in, scale, grads, begin, end, sums);
  }
}

double weight_sum(const Column& mask, int64_t begin, int64_t end) {
  const int64_t n = end - begin;
  if (!mask.data) return double(n);
  if (mask.boolean) {
    const auto bytes = static_cast<const uint8_t*>(mask.data) + begin;
    int64_t count = 0;
    for (int64_t j = 0; j < n; j += TILE) {
      const int64_t end = n - j < TILE ? n : j + TILE;
      int part = 0;
      for (int64_t k = j; k < end; ++k) part += bytes[k];
      count += part;
    }
    return double(count);
  }
  if (mask.dtype == Dtype::f64) return total(static_cast<const double*>(mask.data) + begin, n);
  return total(static_cast<const float*>(mask.data) + begin, n);
}

}  // namespace PPO_ISA
}  // namespace ppo
