// The module `_C`. Importing it registers the kernels of the other files with torch's dispatcher;
// what it exposes to Python is about the build itself.
#include <pybind11/pybind11.h>

#include "build_config.h"
#include "cpu/isa.h"
#include "gae_plan.h"

namespace py = pybind11;

namespace {

#define PPO_ISA_NAME(isa, unused) \
  if (ppo::has_##isa()) return #isa;

const char* isa_in_use() {
  PPO_ISAS(PPO_ISA_NAME, )
  return "";
}

py::dict build_info() {
  py::dict info = py::module_::import("json").attr("loads")(PPO_BUILD_INFO);
  info["isa"] = isa_in_use();
  return info;
}

py::dict gae_plan(int64_t rows, int64_t length, int sms) {
  const ppo::GaePlan plan = ppo::gae_plan(rows, length, rows * length, false, sms);
  constexpr const char* names[] = {"warp per row", "block per row", "split rows"};
  py::dict out;
  out["launch"] = names[plan.launch];
  out["blocks"] = plan.blocks;
  out["threads"] = 32 * ppo::kWarps;
  out["segment"] = ppo::kSegment;
  return out;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.def("build_info", &build_info, "Compilers, flags, CUDA architectures and what was left out.");
  m.def("gae_plan", &gae_plan, "How padded rows are spread over a GPU.", py::arg("rows"),
        py::arg("length"), py::arg("sms"));
}
