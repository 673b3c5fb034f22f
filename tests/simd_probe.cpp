// What tests/test_simd.py calls: the functions of csrc/cpu/simd.h over arrays, and the log-prob
// kernels without torch, compiled for one instruction set.
#include "cpu/logprobs.cpp"

namespace {

using namespace ppo;
using namespace ppo::PPO_ISA;

template <class T, class F>
void map(const T* in, T* out, int64_t n, F f) {
  typedef typename Compute<T>::Vec Vec;
  for (int64_t i = 0; i < n; i += LANES<Vec>) {
    const int left = n - i < LANES<Vec> ? n - i : LANES<Vec>;
    store_some(out + i, left, f(load_some(in + i, left)));
  }
}

template <class T>
void widen(const T* in, float* out, int64_t n) {
  for (int64_t i = 0; i < n; i += LANES<F32>) store(out + i, load(in + i));
}

template <class T>
void narrow(const float* in, T* out, int64_t n) {
  for (int64_t i = 0; i < n; i += LANES<F32>) store(out + i, load(in + i));
}

}  // namespace

extern "C" {

int lanes() { return LANES<F32>; }
void exp_f32(const float* in, float* out, int64_t n) {
  map(in, out, n, [](F32 x) { return exp(x); });
}
void exp2_f32(const float* in, float* out, int64_t n) {
  map(in, out, n, [](F32 x) { return exp2(x); });
}
void tanh_f32(const float* in, float* out, int64_t n) {
  map(in, out, n, [](F32 x) { return ppo::PPO_ISA::tanh(x); });
}
// n must be a multiple of 16.
void from_bf16(const BF16* in, float* out, int64_t n) { widen(in, out, n); }
void from_fp16(const FP16* in, float* out, int64_t n) { widen(in, out, n); }
void to_bf16(const float* in, BF16* out, int64_t n) { narrow(in, out, n); }
void to_fp16(const float* in, FP16* out, int64_t n) { narrow(in, out, n); }

// One forward and one backward of contiguous fp32 (bf16 if `half`) logits [N, V]; temperature 0.7.
// out: logp, entropy, row_max, log_sum, sum_p2, N each.
void logprobs(const void* x, const int64_t* labels, int64_t N, int64_t V, bool half, double softcap,
              float* out, const float* g, const float* h, void* dx) {
  LogprobsArgs a{};
  a.dtype = half ? Dtype::bf16 : Dtype::f32;
  a.x = x;
  a.B = N;
  a.V = a.stride_b = a.dx_stride_b = a.vocab_size = V;
  a.labels = labels;
  a.wide_labels = true;
  a.temperature = 0.7;
  a.logit_scale = 1;
  a.softcap = softcap;
  a.ignore_index = -100;
  a.logp = out;
  a.entropy = out + N;
  a.row_max = out + 2 * N;
  a.log_sum = out + 3 * N;
  a.sum_p2 = out + 4 * N;
  logprobs_rows(a, nullptr, 0, N);
  a.grad_logp = g;
  a.grad_entropy = h;
  a.dx = dx;
  logprobs_backward(a, 0, N * pieces_per_row(a));
}
}
