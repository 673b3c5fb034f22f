// The CUDA side of gae.cpp: raw pointers and a stream, so that nvcc never parses torch.
#include "gae.cuh"

namespace ppo {

int multiprocessors() {
  int device = 0, n = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&n, cudaDevAttrMultiProcessorCount, device);
  return n;
}

int64_t gae_scratch_bytes(const GaeArgs& args, const GaePlan& plan) {
  return gae_scratch(args, plan).bytes;
}

// nullptr, or what went wrong.
const char* gae_cuda(const GaeArgs& args, const GaePlan& plan, void* scratch, double* stats,
                     void* stream) {
  gae_launch(args, plan, scratch, stats, [&](auto kernel, int64_t blocks, auto... arguments) {
    kernel<<<unsigned(blocks), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(arguments...);
  });
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace ppo
