#include "logprobs.h"

#include "simd.h"

namespace ppo {
namespace PPO_ISA {
namespace {

PPO_INLINE float real_exp(float x) { return __builtin_expf(x); }
PPO_INLINE double real_exp(double x) { return __builtin_exp(x); }
PPO_INLINE float real_log(float x) { return __builtin_logf(x); }
PPO_INLINE double real_log(double x) { return __builtin_log(x); }

template <class Real>
constexpr Real LOWEST = sizeof(Real) == 4 ? Real(-__FLT_MAX__) : Real(-__DBL_MAX__);
template <class Real>
constexpr Real LOG2E = Real(1.4426950408889634);
template <class Real>
constexpr Real LN2 = Real(0.6931471805599453);
constexpr float INF = __builtin_inff(), NOT_A_NUMBER = __builtin_nanf("");

// What a forward pass sums besides s: nothing, w, or w and q.
enum Level { PLAIN, ENTROPY, STATS };

// e_v = exp(z_v - m): s = sum e, w = sum e (z - m), q = sum e^2. In lanes or merged into one.
template <class R>
struct Sums {
  R m, s, w, q;
};

// z = inner * x, or outer * tanh(inner * x); infinite logits stay what they are.
template <class Vec, bool CAPPED>
struct Transform {
  Vec inner, outer;

  // e^z = 2^(unit u), with u = x where z is a multiple of it.
  inline __attribute__((always_inline)) Vec u(Vec x) const { return CAPPED ? z(x) : x; }
  inline __attribute__((always_inline)) Vec unit() const {
    constexpr auto log2e = LOG2E<decltype(Vec{}[0] + 0)>;
    return CAPPED ? Vec{} + log2e : inner * log2e;
  }
  template <class Real>
  Real z_of(Real u) const {
    return CAPPED ? u : inner[0] * u;
  }

  inline __attribute__((always_inline)) Vec z(Vec x) const {
    Vec u = inner * x;
    if (!CAPPED) return u;
    return ((x == INF) | (x == -INF)) ? x : outer * tanh(u);
  }
  inline __attribute__((always_inline)) Vec dz_dx(Vec x) const {
    if (!CAPPED) return inner;
    Vec t = tanh(inner * x);
    return ((x == INF) | (x == -INF)) ? outer * inner : outer * inner * (1 - t * t);
  }
};

template <class T, bool CAPPED>
auto transform(const LogprobsArgs& a, int64_t row) {
  typedef typename Compute<T>::Real Real;
  typedef typename Compute<T>::Vec Vec;
  Real scale = Real(a.logit_scale), t = Real(a.temperature), cap = Real(a.softcap);
  if (a.temperatures) t = ((const Real*)a.temperatures)[row];
  if (!(t > 0)) t = NOT_A_NUMBER;  // poisons the row
  if (CAPPED) return Transform<Vec, CAPPED>{Vec{} + scale / cap, Vec{} + cap / t};
  return Transform<Vec, CAPPED>{Vec{} + scale / t, Vec{}};
}

int64_t label_of(const LogprobsArgs& a, int64_t row) {
  return a.wide_labels ? ((const int64_t*)a.labels)[row] : ((const int32_t*)a.labels)[row];
}

template <class T>
T* row_of(const void* x, const LogprobsArgs& a, int64_t row, int64_t stride_a, int64_t stride_b) {
  return (T*)x + row / a.B * stride_a + row % a.B * stride_b;
}

int64_t pieces_per_row(const LogprobsArgs& a) { return (a.V + LOGPROBS_PIECE - 1) / LOGPROBS_PIECE; }

// --------------------------------------------------------------------------------- forward

// Logits go into the sums as t = unit * (u - m) powers of two, where u is x, or z if there is a
// softcap, and m the largest u so far, the same in all lanes. It seldom moves, about log(n) times
// in n groups of vectors, so that the common path is one max, one compare and the powers.

// Shift the sums from m to `to`. What vanishes is 0, not 0 * -inf.
template <class Vec>
PPO_INLINE void shift(Sums<Vec>& sums, Vec unit, Vec to) {
  Vec by = unit * (sums.m - to), factor = exp2(by);
  sums.w = factor == 0 ? Vec{} : (sums.w + sums.s * by) * factor;
  sums.q *= factor * factor;
  sums.s *= factor;
  sums.m = to;
}

template <Level LEVEL, int n, class Vec>
PPO_INLINE void add(Sums<Vec>& sums, Vec unit, const Vec (&u)[n]) {
  Vec s{}, w{}, q{};
  for (int i = 0; i < n; ++i) {
    Vec t = unit * (u[i] - sums.m), e = exp2(t);
    s += e;
    if (LEVEL >= ENTROPY) w = fma(e, e == 0 ? Vec{} : t, w);
    if (LEVEL >= STATS) q = fma(e, e, q);
  }
  sums.s += s;
  sums.w += w;
  sums.q += q;
}

template <class T, Level LEVEL, bool CAPPED>
auto sum_piece(const LogprobsArgs& a, int64_t row, int64_t piece) {
  typedef typename Compute<T>::Real Real;
  typedef typename Compute<T>::Vec Vec;
  constexpr int L = LANES<Vec>, GROUP = sizeof(Vec) == 64 ? 8 : 4;  // as registers allow
  const auto f = transform<T, CAPPED>(a, row);
  const T* x = row_of<const T>(a.x, a, row, a.stride_a, a.stride_b) + piece * LOGPROBS_PIECE;
  const int64_t left = a.V - piece * LOGPROBS_PIECE;
  const int n = left < LOGPROBS_PIECE ? left : LOGPROBS_PIECE;
  const Vec unit = f.unit();
  Sums<Vec> lanes{Vec{} + LOWEST<Real>, {}, {}, {}};
  auto take = [&](const auto& u) __attribute__((always_inline)) {
    Vec top = lanes.m;
    for (const Vec& each : u) top = max(top, each);
    if (__builtin_expect(any(top > lanes.m), 0)) shift(lanes, unit, Vec{} + max_lane(top));
    add<LEVEL>(lanes, unit, u);
  };
  int i = 0;
  for (; i + GROUP * L <= n; i += GROUP * L) {
    Vec u[GROUP];
    for (int k = 0; k < GROUP; k += 2) load_two(x + i + k * L, u[k], u[k + 1]);
    for (Vec& each : u) each = f.u(each);
    take(u);
  }
  for (; i < n; i += L) {
    const Vec u[1] = {f.u(i + L <= n ? load(x + i) : load_some(x + i, n - i))};
    take(u);
  }
  const Real w = sum_lanes(lanes.w) * LN2<Real>;
  return Sums<Real>{f.z_of(lanes.m[0]), sum_lanes(lanes.s), w, sum_lanes(lanes.q)};
}

template <class Real>
Real* kept_of(const LogprobsArgs& a, int64_t row) {
  return (Real*)a.kept + (row - a.kept_from) * (a.V + pieces_per_row(a));
}

// The same, where the exponentials are kept. They need one shift for the whole piece, which is
// found first; while they are made, the next piece is on its way to the cache.
template <class T, bool CAPPED>
auto keep_piece(const LogprobsArgs& a, int64_t row, int64_t piece) {
  typedef typename Compute<T>::Real Real;
  typedef typename Compute<T>::Vec Vec;
  constexpr int L = LANES<Vec>, GROUP = 4;
  const auto f = transform<T, CAPPED>(a, row);
  const int64_t start = piece * LOGPROBS_PIECE, left = a.V - start;
  const int n = left < LOGPROBS_PIECE ? left : LOGPROBS_PIECE;
  const T* x = row_of<const T>(a.x, a, row, a.stride_a, a.stride_b) + start;
  Real* kept = kept_of<Real>(a, row);
  const Vec unit = f.unit();
  Vec top[GROUP];
  for (Vec& t : top) t = Vec{} + LOWEST<Real>;
  int i = 0;
  for (; i + GROUP * L <= n; i += GROUP * L)
    for (int k = 0; k < GROUP; ++k) top[k] = max(top[k], f.u(load(x + i + k * L)));
  for (; i < n; i += L)
    top[0] = max(top[0], f.u(i + L <= n ? load(x + i) : load_some(x + i, n - i)));
  const Real m = max_lane(max(max(top[0], top[1]), max(top[2], top[3])));
  Vec s[GROUP] = {}, w[GROUP] = {};
  auto take = [&](Vec x, int k) __attribute__((always_inline)) {
    const Vec t = unit * (f.u(x) - m), e = exp2(t);
    s[k] += e;
    w[k] = fma(e, e == 0 ? Vec{} : t, w[k]);
    return e;
  };
  for (i = 0; i + GROUP * L <= n; i += GROUP * L)
    for (int k = 0; k < GROUP; ++k) {
      const T* at = x + i + k * L;
      __builtin_prefetch(at + LOGPROBS_PIECE, 0, 2);
      store(kept + start + i + k * L, take(load(at), k));
    }
  for (; i < n; i += L) {
    const int some = n - i < L ? n - i : L;
    store_some(kept + start + i, some, take(load_some(x + i, some), 0));
  }
  kept[a.V + piece] = f.z_of(m);
  const Real sum_w = sum_lanes((w[0] + w[1]) + (w[2] + w[3])) * LN2<Real>;
  return Sums<Real>{f.z_of(m), sum_lanes((s[0] + s[1]) + (s[2] + s[3])), sum_w, 0};
}

template <class Real>
void merge(Sums<Real>& a, const Sums<Real>& b) {
  const Real m = a.m < b.m ? b.m : a.m, da = a.m - m, db = b.m - m;
  const Real fa = real_exp(da), fb = real_exp(db);
  a.w = (fa == 0 ? 0 : (a.w + a.s * da) * fa) + (fb == 0 ? 0 : (b.w + b.s * db) * fb);
  a.q = a.q * fa * fa + b.q * fb * fb;
  a.s = a.s * fa + b.s * fb;
  a.m = m;
}

template <class T, bool CAPPED, class Real>
void finish(const LogprobsArgs& a, int64_t row, int64_t label, const Sums<Real>& sums) {
  const bool here = label >= 0 && label < a.V;
  Real z = a.partials ? -INF : NOT_A_NUMBER;  // a label outside the vocabulary poisons its row
  if (here) {
    const T* x = row_of<const T>(a.x, a, row, a.stride_a, a.stride_b);
    z = transform<T, CAPPED>(a, row).z(load_some(x + label, 1))[0];
  }
  if (a.partials) {
    Real* out = (Real*)a.partials + row * a.partial_columns;
    const Real values[] = {sums.m, sums.s, sums.w, z, sums.q};
    for (int k = 0; k < a.partial_columns; ++k) out[k] = values[k];
    return;
  }
  const Real log_s = real_log(sums.s);
  ((Real*)a.logp)[row] = (z - sums.m) - log_s;
  ((Real*)a.row_max)[row] = sums.m;
  ((Real*)a.log_sum)[row] = log_s;
  if (a.entropy) ((Real*)a.entropy)[row] = here ? log_s - sums.w / sums.s : Real(NOT_A_NUMBER);
  if (a.sum_p2) ((Real*)a.sum_p2)[row] = sums.q / (sums.s * sums.s);
}

// An ignored row counts for nothing and was not read.
template <class Real>
void finish_ignored(const LogprobsArgs& a, int64_t row) {
  if (a.partials) {
    Real* out = (Real*)a.partials + row * a.partial_columns;
    for (int k = 0; k < a.partial_columns; ++k) out[k] = 0;
    return;
  }
  void* const outputs[] = {a.logp, a.row_max, a.log_sum, a.entropy, a.sum_p2};
  for (void* out : outputs)
    if (out) ((Real*)out)[row] = 0;
}

template <class T, Level LEVEL, bool CAPPED>
struct Forward {
  typedef typename Compute<T>::Real Real;

  static void pieces(const LogprobsArgs& a, void* scratch, int64_t begin, int64_t end) {
    const int64_t per_row = pieces_per_row(a);
    for (int64_t i = begin; i < end; ++i)
      if (label_of(a, i / per_row) != a.ignore_index)
        ((Sums<Real>*)scratch)[i] = sum_piece<T, LEVEL, CAPPED>(a, i / per_row, i % per_row);
  }

  static void rows(const LogprobsArgs& a, const void* scratch, int64_t begin, int64_t end) {
    const int64_t per_row = pieces_per_row(a);
    for (int64_t row = begin; row < end; ++row) {
      const int64_t label = label_of(a, row);
      if (label == a.ignore_index) {
        finish_ignored<Real>(a, row);
        continue;
      }
      Sums<Real> sums{LOWEST<Real>, 0, 0, 0};
      for (int64_t k = 0; k < per_row; ++k)
        merge(sums, scratch  ? ((const Sums<Real>*)scratch)[row * per_row + k]
                    : a.kept ? keep_piece<T, CAPPED>(a, row, k)
                             : sum_piece<T, LEVEL, CAPPED>(a, row, k));
      finish<T, CAPPED>(a, row, label - a.first, sums);
    }
  }
};

// -------------------------------------------------------------------------------- backward

// dz_v = g (1_y - p_v) - h p_v (ln p_v + H); dx = dz * dz/dx.
template <class T, class Out, bool HAS_H, bool CAPPED>
struct Backward {
  typedef typename Compute<T>::Real Real;
  typedef typename Compute<T>::Vec Vec;
  static constexpr int L = LANES<Vec>;

  Transform<Vec, CAPPED> f;
  Vec m, log_s, g, h, H;

  // one_hot: g at the label, 0 elsewhere.
  inline __attribute__((always_inline)) Vec at(Vec x, Vec one_hot) const {
    return at(x, one_hot, exp((f.z(x) - m) - log_s));
  }
  inline __attribute__((always_inline)) Vec at(Vec x, Vec one_hot, Vec p) const {
    Vec log_p = (f.z(x) - m) - log_s;
    Vec weight = HAS_H ? fma(h, (p == 0 ? Vec{} : log_p) + H, g) : g;
    return (one_hot - p * weight) * f.dz_dx(x);
  }

  // The gradient of n columns from e = e^(z - shift).
  void from_kept(const Real* e, Real shift, const T* x, Out* dx, int n) const {
    const Vec to_p = Vec{} + real_exp((shift - m[0]) - log_s[0]);
    int i = 0;
    for (; i + L <= n; i += L) store(dx + i, at(load(x + i), Vec{}, load(e + i) * to_p));
    if (i < n) {
      const Vec p = load_some(e + i, n - i) * to_p;
      store_some(dx + i, n - i, at(load_some(x + i, n - i), Vec{}, p));
    }
  }

  static void pieces(const LogprobsArgs& a, int64_t begin, int64_t end) {
    const int64_t per_row = pieces_per_row(a);
    for (int64_t i = begin; i < end; ++i) piece(a, i / per_row, i % per_row);
  }

  static void piece(const LogprobsArgs& a, int64_t row, int64_t piece) {
    const int64_t start = piece * LOGPROBS_PIECE, left = a.V - start;
    const int n = left < LOGPROBS_PIECE ? left : LOGPROBS_PIECE;
    const T* x = row_of<const T>(a.x, a, row, a.stride_a, a.stride_b) + start;
    Out* dx = row_of<Out>(a.dx, a, row, a.dx_stride_a, a.dx_stride_b) + start;
    int64_t label = label_of(a, row);
    Real g = a.grad_logp ? ((const Real*)a.grad_logp)[row] : 0;
    const Real h = HAS_H ? ((const Real*)a.grad_entropy)[row] : 0;
    // A row whose outputs carry no gradient is not read.
    if (label == a.ignore_index || (g == 0 && h == 0)) {
      memset(dx, 0, n * sizeof(Out));
      return;
    }
    if (label < 0 || label >= a.vocab_size) g = NOT_A_NUMBER;
    label -= a.first + start;
    const Vec o{};
    const Backward b{transform<T, CAPPED>(a, row),
                     o + ((const Real*)a.row_max)[row],
                     o + ((const Real*)a.log_sum)[row],
                     o + g,
                     o + h,
                     o + (HAS_H ? ((const Real*)a.entropy)[row] : 0)};
    // The label's own gradient first: dx may be x.
    const bool here = label >= 0 && label < n;
    const Vec at_label = here ? b.at(load_some(x + label, 1), b.g) : o;
    if (a.kept) {
      b.from_kept(kept_of<Real>(a, row) + start, kept_of<Real>(a, row)[a.V + piece], x, dx, n);
    } else {
      int i = 0;
      for (; i + L <= n; i += L) store(dx + i, b.at(load(x + i), o));
      if (i < n) store_some(dx + i, n - i, b.at(load_some(x + i, n - i), o));
    }
    if (here) store_some(dx + label, 1, at_label);
  }
};

// -------------------------------------------------------------------------------- dispatch

template <class T>
struct Type {
  typedef T type;
};

template <class F>
void for_dtype(Dtype dtype, const F& f) {
  switch (dtype) {
    case Dtype::f32: return f(Type<float>());
    case Dtype::bf16: return f(Type<BF16>());
    case Dtype::f16: return f(Type<FP16>());
    case Dtype::f64: return f(Type<double>());
  }
}

template <class F>
void for_forward(const LogprobsArgs& a, const F& f) {
  for_dtype(a.dtype, [&](auto type) {
    typedef typename decltype(type)::type T;
    const bool stats = a.sum_p2 || (a.partials && a.partial_columns > 4);
    const Level level = stats ? STATS : a.entropy || a.partials ? ENTROPY : PLAIN;
    if (a.softcap > 0) {
      if (level == PLAIN) return f(Forward<T, PLAIN, true>());
      if (level == ENTROPY) return f(Forward<T, ENTROPY, true>());
      return f(Forward<T, STATS, true>());
    }
    if (level == PLAIN) return f(Forward<T, PLAIN, false>());
    if (level == ENTROPY) return f(Forward<T, ENTROPY, false>());
    return f(Forward<T, STATS, false>());
  });
}

}  // namespace

void logprobs_pieces(const LogprobsArgs& a, void* scratch, int64_t begin, int64_t end) {
  for_forward(a, [&](auto forward) { forward.pieces(a, scratch, begin, end); });
}

void logprobs_rows(const LogprobsArgs& a, const void* scratch, int64_t begin, int64_t end) {
  for_forward(a, [&](auto forward) { forward.rows(a, scratch, begin, end); });
}

template <class T, class Out>
void backward_as(const LogprobsArgs& a, int64_t begin, int64_t end) {
  if (a.softcap > 0) {
    if (a.grad_entropy) return Backward<T, Out, true, true>::pieces(a, begin, end);
    return Backward<T, Out, false, true>::pieces(a, begin, end);
  }
  if (a.grad_entropy) return Backward<T, Out, true, false>::pieces(a, begin, end);
  return Backward<T, Out, false, false>::pieces(a, begin, end);
}

void logprobs_backward(const LogprobsArgs& a, int64_t begin, int64_t end) {
  if (a.bf16_dx) return backward_as<float, BF16>(a, begin, end);
  for_dtype(a.dtype, [&](auto type) {
    typedef typename decltype(type)::type T;
    backward_as<T, T>(a, begin, end);
  });
}

}  // namespace PPO_ISA
}  // namespace ppo
