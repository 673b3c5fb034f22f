// GAE on a GPU: a reverse scan of the affine maps of gae.h. Includes no torch header; the tests
// compile this file for the CPU, with fibers for threads (tests/emu/cuda_emu.h).
//
// Which numbers are combined in which order does not depend on the launch. It hangs on the start
// of the row alone: 4 tokens of a lane right to left, lanes as a Kogge-Stone scan, units of 128
// tokens one after another, segments of 2048 tokens one after another, each segment's map applied
// as a whole. So a sequence gets the same bits from a warp, from a block or split over many
// blocks, packed or padded on the right, in any batch and on any GPU.
#pragma once
#ifndef CUDA_EMU
#include <cuda_runtime.h>
#endif
#include "gae.h"
#include "gae_plan.h"

namespace ppo {

constexpr int kThreads = 32 * kWarps;
constexpr unsigned kAllLanes = 0xffffffffu;

// x -> c x + b
template <class F>
struct Affine {
  F c, b;
};

__device__ inline float fma_(float a, float b, float c) { return fmaf(a, b, c); }
__device__ inline double fma_(double a, double b, double c) { return fma(a, b, c); }

template <class F>
__device__ F apply(Affine<F> f, F x) {
  return fma_(f.c, x, f.b);
}

// `right` first, then `left`. Not commutative.
template <class F>
__device__ Affine<F> then(Affine<F> right, Affine<F> left) {
  return {left.c * right.c, fma_(left.c, right.b, left.b)};
}

// The arguments and what the host made of them. First lambda: advantages, second: returns.
template <class F>
struct GaeCall {
  GaeArgs a;
  F cg[2], cv[2], gamma, kl_coef;  // cg = gamma lam, cv = gamma (1 - lam)
  bool aligned;         // every pointer may be read and written four numbers at a time
  const int64_t* last;  // the last action of each row; null unless scores meet episode ends
  Affine<F>* maps;      // of each segment and lambda; gae_seeds_kernel turns b into the seed
};

struct Span {
  int64_t lo, hi;
};

__device__ inline int64_t row_start(const GaeArgs& a, int64_t row) {
  if (!a.cu_seqlens_32 && !a.cu_seqlens_64) return row * a.length;
  const int64_t at = a.cu_seqlens_32 ? a.cu_seqlens_32[row] : a.cu_seqlens_64[row];
  return at < 0 ? 0 : at > a.tokens ? a.tokens : at;  // nobody has checked these numbers
}

__device__ inline Span row_span(const GaeArgs& a, int64_t row) {
  const int64_t lo = row_start(a, row), hi = row_start(a, row + 1);
  return {lo, hi < lo ? lo : hi};
}

// ------------------------------------------------------------------------------------ loading

__device__ inline float from_bf16(unsigned x) { return __uint_as_float(x << 16); }
__device__ inline float from_f16(unsigned x) {
  // Shifted into place the exponent is 112 too small; the product also makes subnormals right.
  const unsigned magnitude = (x & 0x7fff) << 13, sign = (x & 0x8000) << 16;
  const float finite = __uint_as_float(magnitude) * __uint_as_float(0x77800000);
  const bool special = (x & 0x7c00) == 0x7c00;  // inf and nan keep an exponent of all ones
  const float y = special ? __uint_as_float(magnitude | 0x7f800000) : finite;
  return sign ? -y : y;
}

// x[i] = in[at + i] where bit i of `inside` is set; `whole`: all four, by one wide load. Beside
// fp64 values every input is fp64, beside others none is (the caller casts).
__device__ inline void load(const Input& in, int64_t at, unsigned inside, bool whole,
                            float (&x)[4]) {
  if (in.dtype == kF32) {
    const float* p = static_cast<const float*>(in.data) + at;
    if (whole) {
      const float4 y = *reinterpret_cast<const float4*>(p);
      x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = inside >> i & 1 ? p[i] : 0.f;
    }
    return;
  }
  const uint16_t* p = static_cast<const uint16_t*>(in.data) + at;
  unsigned h[4];
  if (whole) {
    const uint2 y = *reinterpret_cast<const uint2*>(p);
    h[0] = y.x & 0xffff, h[1] = y.x >> 16, h[2] = y.y & 0xffff, h[3] = y.y >> 16;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) h[i] = inside >> i & 1 ? p[i] : 0;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = in.dtype == kBF16 ? from_bf16(h[i]) : from_f16(h[i]);
}

__device__ inline void load(const Input& in, int64_t at, unsigned inside, bool whole,
                            double (&x)[4]) {
  const double* p = static_cast<const double*>(in.data) + at;
  if (whole) {
    const double2 y = reinterpret_cast<const double2*>(p)[0];
    const double2 z = reinterpret_cast<const double2*>(p)[1];
    x[0] = y.x, x[1] = y.y, x[2] = z.x, x[3] = z.y;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = inside >> i & 1 ? p[i] : 0.;
  }
}

template <class F>
__device__ F load_one(const Input& in, int64_t at) {
  F x[4];
  load(in, at, 1, false, x);
  return x[0];
}

// Bit i: byte at + i is set.
__device__ inline unsigned load_flags(const uint8_t* in, int64_t at, unsigned inside, bool whole) {
  if (!in) return inside;
  unsigned bits = 0;
  if (whole) {
    const uchar4 y = *reinterpret_cast<const uchar4*>(in + at);
    bits = (y.x != 0) | (y.y != 0) << 1 | (y.z != 0) << 2 | (y.w != 0) << 3;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (inside >> i & 1) bits |= unsigned(in[at + i] != 0) << i;
  }
  return bits;
}

template <class F>
__device__ void store(void* out, int64_t at, unsigned inside, bool whole, const F (&x)[4]) {
  F* p = static_cast<F*>(out) + at;
  if (!whole) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (inside >> i & 1) p[i] = x[i];
  } else if constexpr (sizeof(F) == 4) {
    *reinterpret_cast<float4*>(p) = float4{x[0], x[1], x[2], x[3]};
  } else {
    reinterpret_cast<double2*>(p)[0] = double2{x[0], x[1]};
    reinterpret_cast<double2*>(p)[1] = double2{x[2], x[3]};
  }
}

__device__ inline float expm1_(float x) { return expm1f(x); }
__device__ inline double expm1_(double x) { return expm1(x); }

template <class F>
__device__ F kl(int kind, F d) {
  if (kind == kK1) return d;
  if (kind == kK2) return F(0.5) * d * d;
  if (kind == kAbs) return d < F(0) ? -d : d;
  d = d < F(-20) ? F(-20) : d > F(20) ? F(20) : d;
  return expm1_(-d) + d;
}

// What a kernel is compiled for. kGeneral: episode ends inside a row, another lambda for returns.
template <class F_, bool kGeneral_>
struct Traits {
  using F = F_;
  static constexpr bool kGeneral = kGeneral_;
  static constexpr int kLams = kGeneral ? 2 : 1;
};

// Where the four tokens of a lane are and which of them count.
struct Slots {
  int64_t at;
  unsigned inside, valid;  // bit per token
  bool whole;              // all four, read and written at once
};

template <class F>
__device__ Slots find_slots(const GaeCall<F>& call, int64_t at, int64_t hi) {
  const unsigned inside = at + 4 <= hi ? 15 : at < hi ? (1u << (hi - at)) - 1 : 0;
  const bool whole = call.aligned && inside == 15 && at % 4 == 0;
  return {at, inside, load_flags(call.a.mask, at, inside, whole), whole};
}

// The four tokens of a lane. Slots that are masked or outside the span are not valid, and nothing
// looks at their numbers; where no slot is valid they are not even read.
template <class T>
struct Items : Slots {
  using F = typename T::F;
  unsigned stop = 0;       // bit per token: the episode ends after it
  F r[4] = {}, v[4] = {};  // r of a stopped token includes what it gets from its right

  __device__ Items(const GaeCall<F>& call, const Slots& slots, int64_t row) : Slots(slots) {
    if (!valid) return;
    const GaeArgs& a = call.a;
    load(a.values, at, inside, whole, v);
    if (a.rewards.data) load(a.rewards, at, inside, whole, r);
    if (a.logprobs.data) {
      F logp[4], ref[4];
      load(a.logprobs, at, inside, whole, logp);
      load(a.ref_logprobs, at, inside, whole, ref);
#pragma unroll
      for (int i = 0; i < 4; ++i) r[i] = fma_(-call.kl_coef, kl(a.kl_kind, logp[i] - ref[i]), r[i]);
    }
    if (T::kGeneral) ends(call, row);
  }

  __device__ void ends(const GaeCall<F>& call, int64_t row) {
    const GaeArgs& a = call.a;
    if (a.terminated) stop = load_flags(a.terminated, at, inside, whole) & valid;
    if (a.truncated) {
      const unsigned truncated = load_flags(a.truncated, at, inside, whole) & valid;
      F boot[4];
      load(a.bootstrap, at, inside, whole, boot);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (truncated >> i & 1) r[i] = fma_(call.gamma, boot[i], r[i]);
      stop |= truncated;
    }
    if (!call.last) return;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (at + i == call.last[row]) r[i] += load_one<F>(a.scores, row);
  }

  __device__ bool is_valid(int i) const { return valid >> i & 1; }
  __device__ bool stops(int i) const { return T::kGeneral && stop >> i & 1; }

  // The map of all four, cg = gamma lam, cv = gamma (1 - lam).
  __device__ Affine<F> map(F cg, F cv) const {
    Affine<F> all{F(1), F(0)};
#pragma unroll
    for (int i = 3; i >= 0; --i) {
      if (!is_valid(i)) continue;
      all = then(all, {stops(i) ? F(0) : cg, fma_(cg, r[i], cv * v[i])});
    }
    return all;
  }

  // The returns of the four, given X from their right.
  __device__ void returns(F cg, F cv, F x, F (&out)[4]) const {
#pragma unroll
    for (int i = 3; i >= 0; --i) {
      out[i] = F(0);
      if (!is_valid(i)) continue;
      out[i] = stops(i) ? r[i] : r[i] + x;
      x = fma_(cg, out[i], cv * v[i]);
    }
  }
};

// ----------------------------------------------------------------------------------- scanning

template <class F>
__device__ Affine<F> from_lane(Affine<F> f, int lane) {
  return {__shfl_sync(kAllLanes, f.c, lane), __shfl_sync(kAllLanes, f.b, lane)};
}

// Composes the lanes from the right; returns the map of the lanes right of this one, and in
// `unit` that of all 32.
template <class F>
__device__ Affine<F> scan_lanes(Affine<F> mine, Affine<F>& unit) {
  const int lane = threadIdx.x % 32;
  Affine<F> all = mine;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const Affine<F> right{__shfl_down_sync(kAllLanes, all.c, d),
                          __shfl_down_sync(kAllLanes, all.b, d)};
    if (lane + d < 32) all = then(right, all);
  }
  unit = from_lane(all, 0);
  const Affine<F> right{__shfl_down_sync(kAllLanes, all.c, 1),
                        __shfl_down_sync(kAllLanes, all.b, 1)};
  return lane < 31 ? right : Affine<F>{F(1), F(0)};
}

struct Sums {
  unsigned n = 0;
  double a = 0, aa = 0;
};

// What a group of kGroup warps knows while it walks a row from right to left. The first lambda is
// for advantages, the last for returns.
template <class T, int kGroup>
struct Walk {
  using F = typename T::F;
  F x[T::kLams];
  Affine<F> map[T::kLams];      // of the tokens of this segment seen so far
  Affine<F> (*shared)[kWarps];  // [2 * kLams][kWarps], two turns
  int turn = 0;

  __device__ explicit Walk(Affine<F> (*shared)[kWarps]) : shared(shared) {}

  // X entering this lane from the right under lambda k; moves x[k] and map[k] past the tile.
  __device__ F enter(int k, Affine<F> mine) {
    Affine<F> unit;
    const Affine<F> right = scan_lanes(mine, unit);
    F entering = x[k];
    if constexpr (kGroup == 1) {
      x[k] = apply(unit, x[k]);
      map[k] = then(map[k], unit);
    } else {
      Affine<F>* units = shared[2 * k + turn];
      const int warp = threadIdx.x / 32;
      if (threadIdx.x % 32 == 0) units[warp] = unit;
      __syncthreads();
      // The other turn's units may still be read by slower warps, these by nobody before the
      // next barrier but one.
#pragma unroll 4
      for (int w = kGroup - 1; w >= 0; --w) {
        if (w == warp) entering = x[k];
        x[k] = apply(units[w], x[k]);
        map[k] = then(map[k], units[w]);
      }
    }
    return apply(right, entering);
  }

  // Walks the tokens of `part`, at most a segment. kWrite: with x set on entry, writes the
  // outputs; otherwise only map is of use.
  template <bool kWrite>
  __device__ void segment(const GaeCall<F>& call, Span part, int64_t row, Sums& sums) {
    constexpr int kTile = kGroup * kUnit;
    const int first = 4 * (threadIdx.x % (32 * kGroup));
#pragma unroll
    for (int k = 0; k < T::kLams; ++k) map[k] = {F(1), F(0)};
    int tile = int(part.hi - part.lo - 1) / kTile;
    Slots next = find_slots(call, part.lo + tile * kTile + first, part.hi);
#pragma unroll 1
    for (; tile >= 0; --tile) {
      const Items<T> items(call, next, row);
      // The mask is read a tile ahead, so that no load waits for it.
      if (tile > 0) next = find_slots(call, part.lo + (tile - 1) * kTile + first, part.hi);
#pragma unroll
      for (int k = 0; k < T::kLams; ++k) {
        const F cg = call.cg[k], cv = call.cv[k];
        const F entering = enter(k, items.map(cg, cv));
        if (!kWrite) continue;
        F out[4];
        items.returns(cg, cv, entering, out);
        if (k == T::kLams - 1) store(call.a.returns, items.at, items.inside, items.whole, out);
        if (k == 0) advantages(call.a, items, out, sums);
      }
      turn ^= 1;
    }
  }

  __device__ void advantages(const GaeArgs& a, const Items<T>& items, F (&x)[4], Sums& sums) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!items.is_valid(i)) continue;
      x[i] -= items.v[i];
      sums.n += 1;
      sums.a += double(x[i]);
      sums.aa = fma(double(x[i]), double(x[i]), sums.aa);
    }
    store(a.advantages, items.at, items.inside, items.whole, x);
  }
};

// X right of a row. With episode ends the score belongs to the last action (Items adds it there).
template <class F>
__device__ F x_end(const GaeCall<F>& call, int64_t row) {
  const GaeArgs& a = call.a;
  F x = F(0);
  if (a.bootstrap.data && !a.truncated) x = call.gamma * load_one<F>(a.bootstrap, row);
  if (a.scores.data && !call.last) x += load_one<F>(a.scores, row);
  return x;
}

// Adds up the block's sums in a fixed order.
__device__ inline void write_sums(Sums sums, double* out) {
  __shared__ double of_warp[kWarps][3];
  double s[3] = {double(sums.n), sums.a, sums.aa};
#pragma unroll
  for (int k = 0; k < 3; ++k) {
#pragma unroll
    for (int d = 16; d > 0; d /= 2) s[k] += __shfl_xor_sync(kAllLanes, s[k], d);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32][k] = s[k];
  }
  __syncthreads();
  if (threadIdx.x >= 3) return;
  double total = 0;
  for (int w = 0; w < kWarps; ++w) total += of_warp[w][threadIdx.x];
  out[threadIdx.x] = total;
}

// ------------------------------------------------------------------------------------ kernels

// Four blocks an SM: at most 64 registers; fp64 gets 128.
#define PPO_GAE_KERNEL __global__ void __launch_bounds__(kThreads, sizeof(typename T::F) == 4 ? 4 : 2)

// A group of kGroup warps per row, kWarps / kGroup rows per block.
template <class T, int kGroup>
PPO_GAE_KERNEL gae_rows_kernel(const __grid_constant__ GaeCall<typename T::F> call) {
  using F = typename T::F;
  __shared__ Affine<F> shared[2 * T::kLams][kWarps];
  Walk<T, kGroup> walk(shared);
  Sums sums;
  const int64_t row = int64_t(blockIdx.x) * (kWarps / kGroup) + threadIdx.x / (32 * kGroup);
  if (row < call.a.rows) {
    const Span span = row_span(call.a, row);
    F seed[T::kLams];
#pragma unroll
    for (int k = 0; k < T::kLams; ++k) seed[k] = x_end<F>(call, row);
    Span part{span.hi - 1 - (span.hi - span.lo - 1) % kSegment, span.hi};
#pragma unroll 1
    for (; part.hi > span.lo; part = {part.lo - kSegment, part.lo}) {
#pragma unroll
      for (int k = 0; k < T::kLams; ++k) walk.x[k] = seed[k];
      walk.template segment<true>(call, part, row, sums);
#pragma unroll
      for (int k = 0; k < T::kLams; ++k) seed[k] = apply(walk.map[k], seed[k]);
    }
  }
  write_sums(sums, call.a.sums + 3 * int64_t(blockIdx.x));
}

// Which row the segment with this number belongs to, and its tokens (none for a spare number).
__device__ inline Span find_segment(const GaeArgs& a, int64_t number, int64_t& row) {
  int64_t first;
  if (!a.cu_seqlens_32 && !a.cu_seqlens_64) {
    const int64_t per_row = (a.length + kSegment - 1) / kSegment;
    row = number / per_row;
    first = row * per_row;
  } else {
    row = -1;
    for (int64_t s = 0; s < a.rows; s += kThreads) {
      const int64_t mine = s + threadIdx.x;
      row += __syncthreads_count(mine < a.rows && row_start(a, mine) / kSegment + mine <= number);
    }
    if (row < 0) return {0, 0};  // cu_seqlens does not begin with 0
    first = row_start(a, row) / kSegment + row;
  }
  const Span span = row_span(a, row);
  const int64_t lo = span.lo + (number - first) * kSegment;
  return {lo, lo + kSegment < span.hi ? lo + kSegment : span.hi};
}

// A block per segment. kWrite = false leaves the segment's map; after gae_seeds_kernel,
// kWrite = true walks the segment again with the X that enters it.
template <class T, bool kWrite>
PPO_GAE_KERNEL gae_segments_kernel(const __grid_constant__ GaeCall<typename T::F> call) {
  using F = typename T::F;
  __shared__ Affine<F> shared[2 * T::kLams][kWarps];
  Affine<F>* maps = call.maps + int64_t(blockIdx.x) * T::kLams;
  int64_t row;
  const Span part = find_segment(call.a, blockIdx.x, row);
  Walk<T, kWarps> walk(shared);
  Sums sums;
  if (part.lo < part.hi) {
#pragma unroll
    for (int k = 0; k < T::kLams; ++k) walk.x[k] = kWrite ? maps[k].b : F(0);
    walk.template segment<kWrite>(call, part, row, sums);
    if (!kWrite && threadIdx.x == 0) {
#pragma unroll
      for (int k = 0; k < T::kLams; ++k) maps[k] = walk.map[k];
    }
  }
  if (kWrite) write_sums(sums, call.a.sums + 3 * int64_t(blockIdx.x));
}

// A block per row: X entering each of its segments, one after another from the right.
template <class T>
PPO_GAE_KERNEL gae_seeds_kernel(const __grid_constant__ GaeCall<typename T::F> call) {
  using F = typename T::F;
  constexpr int kLams = T::kLams;
  __shared__ Affine<F> maps[kThreads];
  const GaeArgs& a = call.a;
  const int64_t row = blockIdx.x;
  const Span span = row_span(a, row);
  const bool packed = a.cu_seqlens_32 || a.cu_seqlens_64;
  const int64_t segments = (span.hi - span.lo + kSegment - 1) / kSegment;
  const int64_t first = packed ? span.lo / kSegment + row : row * segments;
  Affine<F>* all = call.maps + first * kLams;
  F x = x_end<F>(call, row);  // thread k follows lambda k
  constexpr int kBatch = kThreads / kLams;
  for (int64_t hi = segments; hi > 0; hi -= kBatch) {
    const int64_t lo = hi > kBatch ? hi - kBatch : 0;
    const int n = int(hi - lo) * kLams;
    if (int(threadIdx.x) < n) maps[threadIdx.x] = all[lo * kLams + threadIdx.x];
    __syncthreads();
    if (threadIdx.x < kLams) {
      for (int i = n - kLams + int(threadIdx.x); i >= 0; i -= kLams) {
        const F left = apply(maps[i], x);
        maps[i].b = x;
        x = left;
      }
    }
    __syncthreads();
    if (int(threadIdx.x) < n) all[lo * kLams + threadIdx.x] = maps[threadIdx.x];
  }
}

// A warp per row: the index of its last action, or -1.
__global__ void __launch_bounds__(kThreads) gae_last_kernel(const __grid_constant__ GaeArgs a,
                                                            int64_t* last) {
  const int64_t row = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= a.rows) return;
  const Span span = row_span(a, row);
  int64_t found = -1;
  for (int64_t hi = span.hi; found < 0 && hi > span.lo; hi -= 32) {
    const int64_t at = hi - 32 + threadIdx.x % 32;
    const unsigned votes = __ballot_sync(kAllLanes, at >= span.lo && (!a.mask || a.mask[at]));
    if (votes) found = hi - 1 - __clz(int(votes));
  }
  if (threadIdx.x % 32 == 0) last[row] = found;
}

// One block: the sum over all blocks' sums, in an order that depends on their number alone.
__global__ void __launch_bounds__(kThreads) gae_stats_kernel(const double* sums, int64_t blocks,
                                                             double* stats) {
  Sums mine;
  for (int64_t i = threadIdx.x; i < blocks; i += kThreads) {
    mine.n += sums[3 * i];
    mine.a += sums[3 * i + 1];
    mine.aa += sums[3 * i + 2];
  }
  write_sums(mine, stats);
}

// ------------------------------------------------------------------------------------- launch

// Bytes of scratch memory for a call: block sums, then last actions, then maps.
struct GaeScratch {
  int64_t last, maps, bytes;
};

inline GaeScratch gae_scratch(const GaeArgs& a, const GaePlan& plan) {
  const bool needs_last = a.scores.data && (a.terminated || a.truncated);
  GaeScratch s;
  s.last = 3 * int64_t(sizeof(double)) * plan.blocks;
  s.maps = s.last + (needs_last ? int64_t(sizeof(int64_t)) * a.rows : 0);
  s.bytes = s.maps + (plan.launch == kSplitRows ? 4 * int64_t(sizeof(double)) * plan.blocks : 0);
  return s;
}

inline bool gae_aligned(const GaeArgs& a) {
  const auto floats = [](const Input& x) {
    const int bytes = x.dtype == kF32 || x.dtype == kF64 ? 16 : 8;
    return reinterpret_cast<uintptr_t>(x.data) % bytes == 0;
  };
  const auto bytes = [](const void* p, int n) { return reinterpret_cast<uintptr_t>(p) % n == 0; };
  return floats(a.rewards) && floats(a.values) && floats(a.logprobs) && floats(a.ref_logprobs) &&
         (!a.truncated || floats(a.bootstrap)) && bytes(a.mask, 4) && bytes(a.terminated, 4) &&
         bytes(a.truncated, 4) && bytes(a.advantages, 16) && bytes(a.returns, 16);
}

// launch(kernel, blocks, arguments...) starts a kernel with kThreads threads a block.
template <class T, class Launch>
void gae_launch_as(const GaeArgs& a, const GaePlan& plan, const int64_t* last, void* maps,
                   Launch launch) {
  using F = typename T::F;
  const GaeCall<F> call{a,
                        {F(a.gamma * a.lam), F(a.gamma * a.lam_returns)},
                        {F(a.gamma * (1 - a.lam)), F(a.gamma * (1 - a.lam_returns))},
                        F(a.gamma),
                        F(a.kl_coef),
                        gae_aligned(a),
                        last,
                        static_cast<Affine<F>*>(maps)};
  if (plan.launch == kWarpPerRow) {
    launch(gae_rows_kernel<T, 1>, plan.blocks, call);
  } else if (plan.launch == kBlockPerRow) {
    launch(gae_rows_kernel<T, kWarps>, plan.blocks, call);
  } else {
    launch(gae_segments_kernel<T, false>, plan.blocks, call);
    launch(gae_seeds_kernel<T>, a.rows, call);
    launch(gae_segments_kernel<T, true>, plan.blocks, call);
  }
}

// scratch: gae_scratch(args, plan).bytes, 16-byte aligned. stats: 3 doubles. tokens > 0.
template <class Launch>
void gae_launch(GaeArgs args, const GaePlan& plan, void* scratch, double* stats, Launch launch) {
  const GaeScratch at = gae_scratch(args, plan);
  char* base = static_cast<char*>(scratch);
  args.sums = reinterpret_cast<double*>(base);
  int64_t* last = nullptr;
  if (at.maps > at.last) {
    last = reinterpret_cast<int64_t*>(base + at.last);
    launch(gae_last_kernel, (args.rows + kWarps - 1) / kWarps, args, last);
  }
  if (args.values.dtype == kF64) {
    gae_launch_as<Traits<double, true>>(args, plan, last, base + at.maps, launch);
  } else if (args.terminated || args.truncated || args.lam_returns != args.lam) {
    gae_launch_as<Traits<float, true>>(args, plan, last, base + at.maps, launch);
  } else {
    gae_launch_as<Traits<float, false>>(args, plan, last, base + at.maps, launch);
  }
  launch(gae_stats_kernel, int64_t(1), static_cast<const double*>(args.sums), plan.blocks, stats);
}

}  // namespace ppo
