// The module `_C`. Importing it registers the kernels of the other files with torch's dispatcher;
// what it exposes to Python is about the build itself.
#include <pybind11/pybind11.h>

#include "build_config.h"
#include "cpu/isa.h"

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

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.def("build_info", &build_info, "Compilers, flags, CUDA architectures and what was left out.");
}
