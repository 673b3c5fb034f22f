// Which instruction set a CPU kernel runs with.
//
// Every csrc/cpu/*.cpp is compiled once per instruction set in PPO_ISAS (build_config.h, best
// first), with PPO_ISA naming the current one: "native" in a first-use build, several in a
// prebuilt wheel. Such a file puts all it defines into namespace ppo::PPO_ISA and calls no inline
// function of a shared header: the linker would keep one copy, perhaps the AVX-512 one, for all.
// Its caller declares the function in every namespace and picks one:
//
//   PPO_DECLARE(void gae_rows(const GaeArgs&, int64_t, int64_t))      // in namespace ppo
//   static const auto rows = PPO_PICK(gae_rows);
#pragma once
#include "build_config.h"

namespace ppo {

inline bool has_native() { return true; }
inline bool has_generic() { return true; }
#if defined(__x86_64__)
inline bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("bmi2");
}
inline bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}
#endif

}  // namespace ppo

#define PPO_DECLARE_ONE(isa, declaration) \
  namespace isa {                         \
  declaration;                            \
  }
#define PPO_DECLARE(declaration) PPO_ISAS(PPO_DECLARE_ONE, declaration)

#define PPO_PICK_ONE(isa, function) \
  if (::ppo::has_##isa()) return &::ppo::isa::function;
#define PPO_PICK(function)               \
  [] {                                   \
    PPO_ISAS(PPO_PICK_ONE, function)     \
    __builtin_unreachable();             \
  }()
