// Runs a CUDA kernel on the CPU: a fiber for each CUDA thread, one block after another.
//
// Scheduling is greedy: one warp runs until all its threads wait for another warp, then the next
// one does. Both orders of warps are worth a run: a missing barrier shows in one of them. What is
// not modelled: memory order between blocks, time, and the contraction of products (write fma).
#pragma once
#undef _FORTIFY_SOURCE  // its longjmp only goes up the stack
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(...)

struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) double2 {
  double x, y;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(4) uchar4 {
  unsigned char x, y, z, w;
};

namespace emu {

// makecontext gives a fiber its stack; from then on the jumps of setjmp.h switch, which unlike
// swapcontext make no system call.
struct Fiber {
  ucontext_t context;
  jmp_buf resume;
  std::vector<char> stack;
  unsigned thread, turn;
  bool started, done;
};

struct Barrier {
  unsigned arrived = 0, phase = 0;
};

struct Index {
  unsigned x;
};

struct State {
  std::vector<Fiber> fibers;
  std::vector<uint64_t> slots;  // what each thread offers to its warp, in two turns
  std::vector<Barrier> warps;
  Barrier block;
  Fiber* current = nullptr;
  jmp_buf scheduler;
  std::function<void()> body;
  uint64_t progress = 0;  // arrivals at barriers and threads that ended
  int votes[2] = {0, 0};
  bool last_warp_first = false;
};

inline State state;
inline Index block_index, grid_size, block_size;

inline unsigned thread() { return state.current->thread; }

inline void yield() {
  if (!_setjmp(state.current->resume)) _longjmp(state.scheduler, 1);
}

inline void resume(Fiber& fiber) {
  state.current = &fiber;
  if (_setjmp(state.scheduler)) return;
  if (fiber.started) _longjmp(fiber.resume, 1);
  fiber.started = true;
  setcontext(&fiber.context);
}

inline void wait(Barrier& barrier, unsigned threads) {
  const unsigned phase = barrier.phase;
  ++state.progress;
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    ++barrier.phase;
    return;
  }
  while (barrier.phase == phase) yield();
}

// Each thread of a warp offers `mine` and reads what thread `source` of the warp offers. The turns
// alternate, so that nobody overwrites what a slower thread has yet to read.
template <class T>
T exchange(T mine, unsigned source) {
  static_assert(sizeof(T) <= 8, "one slot is eight bytes");
  uint64_t* slots = &state.slots[(state.current->turn ^= 1) * state.fibers.size()];
  std::memcpy(&slots[thread()], &mine, sizeof(T));
  wait(state.warps[thread() / 32], 32);
  T got;
  std::memcpy(&got, &slots[thread() / 32 * 32 + source], sizeof(T));
  return got;
}

inline void enter() {
  state.body();
  state.current->done = true;
  yield();
}

// Lets the fibers of one warp run until none of them gets further.
inline void run_warp(unsigned warp) {
  uint64_t before;
  do {
    before = state.progress;
    for (unsigned t = 32 * warp; t < 32 * warp + 32; ++t) {
      Fiber& fiber = state.fibers[t];
      if (fiber.done) continue;
      resume(fiber);
      if (fiber.done) ++state.progress;
    }
  } while (state.progress != before);
}

inline void run_block(unsigned threads) {
  const unsigned warps = threads / 32;
  state.warps.assign(warps, {});
  state.block = {};
  // Garbage in the slots, so that a lane that reads what nobody wrote shows.
  state.slots.assign(2 * threads, 0xdeadbeefdeadbeefull);
  state.fibers.resize(threads);
  for (unsigned t = 0; t < threads; ++t) {
    Fiber& fiber = state.fibers[t];
    fiber.thread = t;
    fiber.turn = 0;
    fiber.started = fiber.done = false;
    fiber.stack.resize(64 << 10);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, enter, 0);
  }
  for (bool all_done = false; !all_done;) {
    const uint64_t before = state.progress;
    for (unsigned k = 0; k < warps; ++k) run_warp(state.last_warp_first ? warps - 1 - k : k);
    all_done = true;
    for (const Fiber& fiber : state.fibers) all_done &= fiber.done;
    if (!all_done && state.progress == before)
      throw std::runtime_error("deadlock: not all threads of a warp or block reach a barrier");
  }
}

template <class Kernel, class... Arguments>
void launch(Kernel kernel, unsigned blocks, unsigned threads, Arguments... arguments) {
  grid_size = {blocks};
  block_size = {threads};
  state.body = [=] { kernel(arguments...); };
  for (unsigned b = 0; b < blocks; ++b) {
    block_index = {b};
    run_block(threads);
  }
}

struct ThreadIndex {
  struct X {
    operator unsigned() const { return thread(); }
  } x;
};

}  // namespace emu

#define threadIdx (emu::ThreadIndex{})
#define blockIdx (emu::block_index)
#define blockDim (emu::block_size)
#define gridDim (emu::grid_size)

inline void __syncthreads() { emu::wait(emu::state.block, emu::block_size.x); }
inline int __syncthreads_count(int vote) {
  int& votes = emu::state.votes[0];
  __syncthreads();
  if (emu::thread() == 0) votes = 0;
  __syncthreads();
  votes += vote != 0;
  __syncthreads();
  return votes;
}
template <class T>
T __shfl_sync(unsigned, T mine, unsigned lane) {
  return emu::exchange(mine, lane % 32);
}
template <class T>
T __shfl_down_sync(unsigned, T mine, unsigned delta) {
  const unsigned lane = emu::thread() % 32;
  return emu::exchange(mine, lane + delta < 32 ? lane + delta : lane);
}
template <class T>
T __shfl_xor_sync(unsigned, T mine, unsigned mask) {
  return emu::exchange(mine, (emu::thread() % 32) ^ mask);
}
inline unsigned __ballot_sync(unsigned, int vote) {
  unsigned votes = 0;
  for (unsigned lane = 0; lane < 32; ++lane)
    votes |= unsigned(emu::exchange(vote, lane) != 0) << lane;
  return votes;
}
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline float __uint_as_float(unsigned x) {
  float y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}
