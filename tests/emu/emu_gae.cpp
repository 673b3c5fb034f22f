// The kernels and the launch code of csrc/gae.cuh, compiled for the emulator.
#define CUDA_EMU
#include "cuda_emu.h"
#include "gae.cuh"

void emu_gae(const ppo::GaeArgs& args, const ppo::GaePlan& plan, double* stats,
             bool last_warp_first) {
  emu::state.last_warp_first = last_warp_first;
  std::vector<double> scratch(ppo::gae_scratch(args, plan).bytes / 8 + 2, NAN);
  void* aligned = scratch.data() + (reinterpret_cast<uintptr_t>(scratch.data()) % 16) / 8;
  ppo::gae_launch(args, plan, aligned, stats, [](auto kernel, int64_t blocks, auto... arguments) {
    emu::launch(kernel, unsigned(blocks), ppo::kThreads, arguments...);
  });
}
