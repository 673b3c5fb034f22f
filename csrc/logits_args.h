// Tensors of logits and labels to the arguments of the kernels in cpu/logprobs.h.
#pragma once
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <vector>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "cpu/logprobs.h"

namespace ppo {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Maybe = std::optional<Tensor>;

inline Dtype dtype_of(const Tensor& logits) {
  switch (logits.scalar_type()) {
    case ScalarType::Float: return Dtype::f32;
    case ScalarType::BFloat16: return Dtype::bf16;
    case ScalarType::Half: return Dtype::f16;
    case ScalarType::Double: return Dtype::f64;
    default: STD_TORCH_CHECK(false, "a tensor must be fp32, bf16, fp16 or fp64");
  }
  return Dtype::f32;
}

inline ScalarType real_of(const Tensor& logits) {
  return logits.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

// A contiguous tensor of reals on the CPU. torch::stable::new_empty goes through the dispatcher, five
// times a call: as long as the loss of a thousand tokens takes.
inline Tensor empty(torch::headeronly::IntHeaderOnlyArrayRef shape, ScalarType type) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t i = shape.size(); i-- > 1;) strides[i - 1] = strides[i] * shape[i];
  AtenTensorHandle made;
  const AOTITorchError error = aoti_torch_empty_strided(
      int64_t(shape.size()), shape.data(), strides.data(),
      type == ScalarType::Double ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32(),
      aoti_torch_device_type_cpu(), 0, &made);
  STD_TORCH_CHECK(error == AOTI_TORCH_SUCCESS, "no memory for the results");
  return Tensor(made);
}

// Pointer to one real per row, null for none.
inline void* reals(const Maybe& x, const Tensor& logits, const Tensor& labels, const char* name) {
  if (!x) return nullptr;
  STD_TORCH_CHECK(x->scalar_type() == real_of(logits) && x->numel() == labels.numel() &&
                      x->is_contiguous(),
                  name, " must be contiguous, one number per label, of the dtype of the outputs");
  return x->mutable_data_ptr();
}

inline int64_t leading_stride(const Tensor& x) { return x.dim() == 3 ? x.stride(0) : 0; }

inline LogprobsArgs args_of(const Tensor& logits, const Tensor& labels,
                            const Maybe& temperatures, double temperature,
                            double logit_scale, double softcap, int64_t ignore_index,
                            const Maybe& shard) {
  const int64_t dim = logits.dim();
  STD_TORCH_CHECK((dim == 2 || dim == 3) && labels.dim() == dim - 1,
                  "logits must be [N, V] or [A, B, V], labels [N] or [A, B]");
  for (int64_t i = 0; i < dim - 1; ++i)
    STD_TORCH_CHECK(labels.size(i) == logits.size(i), "labels must have the shape of the rows");
  STD_TORCH_CHECK(logits.stride(dim - 1) == 1 || logits.size(dim - 1) == 1,
                  "the last dimension of logits must be contiguous");
  STD_TORCH_CHECK(labels.is_contiguous(), "labels must be contiguous");
  const bool wide = labels.scalar_type() == ScalarType::Long;
  STD_TORCH_CHECK(wide || labels.scalar_type() == ScalarType::Int, "labels must be int64 or int32");
  LogprobsArgs a{};
  a.dtype = dtype_of(logits);
  a.x = logits.const_data_ptr();
  a.B = logits.size(dim - 2);
  a.V = logits.size(dim - 1);
  a.stride_a = leading_stride(logits);
  a.stride_b = logits.stride(dim - 2);
  a.labels = labels.const_data_ptr();
  a.wide_labels = wide;
  a.temperatures = reals(temperatures, logits, labels, "temperatures");
  a.temperature = temperature;
  a.logit_scale = logit_scale;
  a.softcap = softcap;
  a.ignore_index = ignore_index;
  a.vocab_size = a.V;
  if (shard) {
    STD_TORCH_CHECK(shard->scalar_type() == ScalarType::Long && shard->numel() == 2,
                    "shard must be int64 [2]: the first column and the vocabulary size");
    const int64_t* range = static_cast<const int64_t*>(shard->const_data_ptr());
    a.first = range[0];
    a.vocab_size = range[1];
  }
  return a;
}

// A fresh gradient of hundreds of MB spends more time in page faults than in arithmetic. Asking for
// huge pages leaves one fault per 2 MB; where the system has none to give, nothing changes. Only
// for sizes that malloc maps and unmaps on their own, so that the advice ends with the tensor.
inline Tensor empty_like_with_huge_pages(const Tensor& logits) {
  Tensor out = torch::stable::new_empty(logits, logits.sizes());
#if defined(__linux__)
  constexpr uintptr_t PAGE = 2 << 20;
  uintptr_t begin = reinterpret_cast<uintptr_t>(out.mutable_data_ptr());
  uintptr_t end = (begin + out.numel() * out.element_size()) / PAGE * PAGE;
  begin = (begin + PAGE - 1) / PAGE * PAGE;
  if (end > begin + 32 * PAGE)
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
  return out;
}

}  // namespace ppo
