// GAE on the CPU. Four rows advance together, right to left, a block of tokens at a time: loops
// over the block that vectorise, and between them the one thing that is sequential, the chain
// X_t = c_t X_{t+1} + b_t, whose latency the other rows hide. Blocks are counted from the start of
// the row, so padding on the right changes no bit of the outputs and of the sums.
#include "../gae.h"
#include "isa.h"
#include "load.h"

namespace ppo {
namespace PPO_ISA {
namespace {

constexpr int kBlock = 256, kRows = 4, kLanes = 8;

inline float fma(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}
inline double fma(double a, double b, double c) {
#if defined(__FMA__) || defined(__aarch64__)
  return __builtin_fma(a, b, c);
#else
  return a * b + c;
#endif
}

// exp(x) - 1 for |x| <= 20 as 2^n (exp(r) - 1) + (2^n - 1), |r| <= ln(2)/2; the Taylor remainder
// r^8/8! is below 1e-8. Adding and subtracting 1.5 * 2^23 rounds to an integer.
inline float expm1_(float x) {
  const float n = fma(x, 1.44269504f, 12582912.f) - 12582912.f;
  const float r = fma(n, 1.42860677e-6f, fma(n, -0.693148613f, x));
  float q = 1.f / 5040;
  q = fma(q, r, 1.f / 720);
  q = fma(q, r, 1.f / 120);
  q = fma(q, r, 1.f / 24);
  q = fma(q, r, 1.f / 6);
  q = fma(q, r, 1.f / 2);
  const float scale = bits<float>(uint32_t(int32_t(n) + 127) << 23);
  return fma(scale, fma(q, r * r, r), scale - 1.f);
}
inline double expm1_(double x) { return __builtin_expm1(x); }

template <class F>
struct Block {
  int32_t valid[kBlock], stop[kBlock];  // as wide as a float, so that a select needs no unpacking
  F r[kBlock], v[kBlock], c[kBlock], x[kBlock], x_returns[kBlock];
};

// out[i] = in[at + i] where use[i] is set, else 0, for i < n. Whatever hides behind a mask is gone.
template <class F>
void load(F* __restrict out, const Input& in, int64_t at, const int32_t* __restrict use, int n) {
  const auto select = [&](const auto* __restrict p, auto convert) {
    for (int i = 0; i < n; ++i) {
      const F x = convert(p[i]);
      out[i] = use[i] ? x : F(0);
    }
  };
  switch (in.dtype) {
    case kF32: return select(static_cast<const float*>(in.data) + at, [](float x) { return F(x); });
    case kBF16:
      return select(static_cast<const uint16_t*>(in.data) + at,
                    [](uint16_t x) { return F(from_bf16(x)); });
    case kF16:
      return select(static_cast<const uint16_t*>(in.data) + at,
                    [](uint16_t x) { return F(from_f16(x)); });
    default:
      return select(static_cast<const double*>(in.data) + at, [](double x) { return F(x); });
  }
}

// out[i] = whether in[i] is set; null stands for all set.
inline void copy_flags(int32_t* __restrict out, const uint8_t* __restrict in, int n) {
  for (int i = 0; i < n; ++i) out[i] = in ? in[i] != 0 : 1;
}

template <class F>
F load_one(const Input& in, int64_t at) {
  const int32_t use = 1;
  F x;
  load(&x, in, at, &use, 1);
  return x;
}

// d becomes the KL estimate of d = logprob - ref_logprob.
template <class F>
void kl_of(F* d, int kind, int n) {
  if (kind == kK2) {
    for (int i = 0; i < n; ++i) d[i] = F(0.5) * d[i] * d[i];
  } else if (kind == kAbs) {
    for (int i = 0; i < n; ++i) d[i] = d[i] < 0 ? -d[i] : d[i];
  } else if (kind == kK3) {
    for (int i = 0; i < n; ++i) {
      F x = d[i] < F(-20) ? F(-20) : d[i];
      x = x > F(20) ? F(20) : x;
      d[i] = expm1_(-x) + x;
    }
  }
}

typedef double Doubles __attribute__((vector_size(kLanes * sizeof(double))));

// Over a row: valid tokens, and their advantages and squares in lanes.
struct Sums {
  int64_t n = 0;
  Doubles a{}, aa{};
};

template <class F>
class Rows {
 public:
  explicit Rows(const GaeArgs& args) : a(args) {}

  void run(int64_t first, int count) {
    int64_t lo[kRows], blocks = 0, length[kRows] = {};
    F x[kRows] = {}, x_returns[kRows] = {};
    bool scored[kRows] = {};
    for (int j = 0; j < kRows; ++j) {
      lo[j] = 0;
      if (j >= count) continue;
      lo[j] = start(first + j);
      length[j] = start(first + j + 1) - lo[j];
      if ((length[j] + kBlock - 1) / kBlock > blocks) blocks = (length[j] + kBlock - 1) / kBlock;
      if (a.bootstrap.data && !a.truncated)
        x[j] = x_returns[j] = F(a.gamma) * load_one<F>(a.bootstrap, first + j);
      sums[j] = Sums();
    }
    for (int64_t block = blocks - 1; block >= 0; --block) {
      int n[kRows], widest = 0;
      for (int j = 0; j < kRows; ++j) {
        const int64_t left = length[j] - block * kBlock;
        n[j] = left < 0 ? 0 : left > kBlock ? kBlock : int(left);
        if (n[j] > widest) widest = n[j];
      }
      widest = (widest + kLanes - 1) / kLanes * kLanes;
      for (int j = 0; j < count; ++j)
        prepare(b[j], first + j, lo[j] + block * kBlock, n[j], widest, scored[j]);
      scan(a.lam, &Block<F>::x, x, count, widest);
      if (a.lam_returns != a.lam)
        scan(a.lam_returns, &Block<F>::x_returns, x_returns, count, widest);
      for (int j = 0; j < count; ++j) finish(b[j], lo[j] + block * kBlock, n[j], sums[j]);
    }
    for (int j = 0; j < count; ++j) {
      double* out = a.sums + 3 * (first + j);
      out[0] = double(sums[j].n);
      out[1] = out[2] = 0;
      for (int l = 0; l < kLanes; ++l) out[1] += sums[j].a[l], out[2] += sums[j].aa[l];
    }
  }

 private:
  int64_t start(int64_t row) const {
    if (a.cu_seqlens_32) return a.cu_seqlens_32[row];
    return a.cu_seqlens_64 ? a.cu_seqlens_64[row] : row * a.length;
  }

  // Loads tokens [at, at + n) and selects: slots that are masked or beyond n become zeros.
  void prepare(Block<F>& k, int64_t row, int64_t at, int n, int width, bool& scored) const {
    for (int i = n; i < width; ++i) {
      k.valid[i] = 0;
      k.r[i] = k.v[i] = 0;
    }
    copy_flags(k.valid, a.mask ? a.mask + at : nullptr, n);
    load(k.v, a.values, at, k.valid, n);
    if (a.rewards.data) {
      load(k.r, a.rewards, at, k.valid, n);
    } else {
      for (int i = 0; i < n; ++i) k.r[i] = 0;
    }
    if (a.logprobs.data) {
      F ref[kBlock], d[kBlock];
      load(d, a.logprobs, at, k.valid, n);
      load(ref, a.ref_logprobs, at, k.valid, n);
      for (int i = 0; i < n; ++i) d[i] -= ref[i];
      kl_of(d, a.kl_kind, n);  // 0 where masked
      const F coef = F(-a.kl_coef);
      for (int i = 0; i < n; ++i) k.r[i] = fma(coef, d[i], k.r[i]);
    }
    if (a.scores.data && !scored) {
      int last = n - 1;
      while (last >= 0 && !k.valid[last]) --last;
      if (last >= 0) k.r[last] += load_one<F>(a.scores, row);
      scored = last >= 0;
    }
    if (a.terminated || a.truncated) stops(k, at, n, width);
  }

  // stop: the episode ends after this token, whose reward takes in what the token gets instead of
  // X from its right.
  void stops(Block<F>& k, int64_t at, int n, int width) const {
    int32_t ends[kBlock];
    for (int i = 0; i < width; ++i) k.stop[i] = 0;
    if (a.terminated) {
      copy_flags(ends, a.terminated + at, n);
      for (int i = 0; i < n; ++i) k.stop[i] = ends[i] & k.valid[i];
    }
    if (!a.truncated) return;
    F boot[kBlock];
    copy_flags(ends, a.truncated + at, n);
    for (int i = 0; i < n; ++i) ends[i] &= k.valid[i];
    load(boot, a.bootstrap, at, ends, n);
    for (int i = 0; i < n; ++i) {
      k.r[i] = fma(F(a.gamma), boot[i], k.r[i]);
      k.stop[i] |= ends[i];
    }
  }

  // Leaves X_{t+1} in (block.*out)[t] and in x what the block hands to its left.
  void scan(double lam, F (Block<F>::*out)[kBlock], F* x, int count, int width) {
    const F cg = F(a.gamma * lam), cv = F(a.gamma * (1 - lam));
    for (int j = 0; j < count; ++j) {
      Block<F>& k = b[j];
      F* shift = k.*out;
      for (int i = 0; i < width; ++i) {
        k.c[i] = k.valid[i] ? cg : F(1);
        shift[i] = fma(cg, k.r[i], cv * k.v[i]);  // 0 where masked
      }
      if (!a.terminated && !a.truncated) continue;
      for (int i = 0; i < width; ++i) k.c[i] = k.stop[i] ? F(0) : k.c[i];
    }
    F x0 = x[0], x1 = x[1], x2 = x[2], x3 = x[3];
    F *s0 = b[0].*out, *s1 = b[1].*out, *s2 = b[2].*out, *s3 = b[3].*out;
    for (int i = width - 1; i >= 0; --i) {
      const F left0 = fma(b[0].c[i], x0, s0[i]), left1 = fma(b[1].c[i], x1, s1[i]);
      const F left2 = fma(b[2].c[i], x2, s2[i]), left3 = fma(b[3].c[i], x3, s3[i]);
      s0[i] = x0, s1[i] = x1, s2[i] = x2, s3[i] = x3;
      x0 = left0, x1 = left1, x2 = left2, x3 = left3;
    }
    x[0] = x0, x[1] = x1, x[2] = x2, x[3] = x3;
  }

  void finish(Block<F>& k, int64_t at, int n, Sums& sum) const {
    const int width = (n + kLanes - 1) / kLanes * kLanes;
    if (a.terminated || a.truncated) {
      for (int i = 0; i < width; ++i) k.x[i] = k.stop[i] ? F(0) : k.x[i];
      for (int i = 0; i < width; ++i) k.x_returns[i] = k.stop[i] ? F(0) : k.x_returns[i];
    }
    const F* x_returns = a.lam_returns != a.lam ? k.x_returns : k.x;
    F* advantages = static_cast<F*>(a.advantages) + at;
    F* returns = static_cast<F*>(a.returns) + at;
    if (n == width) {
      outputs(k, x_returns, advantages, returns, n);
    } else {  // not beyond the end of the row
      F wide[2][kBlock];
      outputs(k, x_returns, wide[0], wide[1], width);
      __builtin_memcpy(advantages, wide[0], n * sizeof(F));
      __builtin_memcpy(returns, wide[1], n * sizeof(F));
    }
    Sums more = sum;  // a copy, that it may stay in registers
    for (int i = 0; i < width; i += kLanes) {
      typedef F Part __attribute__((vector_size(kLanes * sizeof(F))));
      Part part;
      __builtin_memcpy(&part, k.v + i, sizeof part);
      const Doubles x = __builtin_convertvector(part, Doubles);
      more.a += x;
      more.aa += x * x;
    }
    for (int i = 0; i < width; ++i) more.n += k.valid[i];
    sum = more;
  }

  // The advantages also take the place of k.v, for the sums.
  void outputs(Block<F>& k, const F* __restrict x_returns, F* __restrict advantages,
               F* __restrict returns, int width) const {
    for (int i = 0; i < width; ++i) {
      const F r = k.r[i] + k.x[i], r_returns = k.r[i] + x_returns[i];
      k.v[i] = advantages[i] = k.valid[i] ? r - k.v[i] : F(0);
      returns[i] = k.valid[i] ? r_returns : F(0);
    }
  }

  const GaeArgs& a;
  Block<F> b[kRows] = {};  // where fewer rows are left, the others' numbers lead nowhere
  Sums sums[kRows];
};

template <class F>
void run(const GaeArgs& args, int64_t begin, int64_t end) {
  Rows<F> rows(args);
  for (int64_t row = begin; row < end; row += kRows)
    rows.run(row, end - row < kRows ? int(end - row) : kRows);
}

}  // namespace

void gae_rows(const GaeArgs& args, int64_t begin, int64_t end) {
  args.values.dtype == kF64 ? run<double>(args, begin, end) : run<float>(args, begin, end);
}

}  // namespace PPO_ISA
}  // namespace ppo
