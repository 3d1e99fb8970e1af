// Checks of an operator's tensors, and the records of params.h that are made from them. A failing
// check raises, and names the argument, the expected and the given value.
#pragma once
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <sstream>
#include <string>

#include "params.h"

namespace gdn {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Shape = std::initializer_list<int64_t>;

// The alignment that TMA requires of base addresses and strides, in bytes.
constexpr int64_t kTmaAlignment = 16;

template <class Range>
inline std::string list(const Range& numbers) {
  std::ostringstream out;
  const char* separator = "[";
  for (int64_t number : numbers) {
    out << separator << number;
    separator = ", ";
  }
  out << (numbers.size() == 0 ? "[]" : "]");
  return out.str();
}

// The dtype of a tensor that kernels read.
inline Dtype dtype_of(const Tensor& x, const char* name) {
  switch (x.scalar_type()) {
    case ScalarType::BFloat16:
      return Dtype::kBFloat16;
    case ScalarType::Half:
      return Dtype::kFloat16;
    case ScalarType::Float:
      return Dtype::kFloat32;
    default:
      STD_TORCH_CHECK(false, "gdn_fast: ", name, " must be bfloat16, float16 or float32, got ",
                      torch::headeronly::toString(x.scalar_type()));
  }
}

inline void check_dtype(const Tensor& x, const char* name, ScalarType expected) {
  STD_TORCH_CHECK(x.scalar_type() == expected, "gdn_fast: ", name, " must be ",
                  torch::headeronly::toString(expected), ", got ",
                  torch::headeronly::toString(x.scalar_type()));
}

inline void check_place(const Tensor& x, const char* name, int32_t device) {
  STD_TORCH_CHECK(x.is_cuda(), "gdn_fast: ", name,
                  " must be on a CUDA device, got a tensor elsewhere");
  STD_TORCH_CHECK(x.get_device_index() == device, "gdn_fast: ", name,
                  " must be on the device of q, cuda:", device,
                  ", got cuda:", x.get_device_index());
}

inline void check_shape(const Tensor& x, const char* name, Shape expected) {
  const auto sizes = x.sizes();
  bool equal = sizes.size() == expected.size();
  for (size_t i = 0; equal && i < sizes.size(); ++i) equal = sizes[i] == expected.begin()[i];
  STD_TORCH_CHECK(equal, "gdn_fast: ", name, " must have shape ", list(expected), ", got ",
                  list(sizes));
}

inline void check_contiguous(const Tensor& x, const char* name) {
  STD_TORCH_CHECK(x.is_contiguous(), "gdn_fast: ", name, " must be contiguous, got strides ",
                  list(x.strides()));
}

inline void check_aligned(const Tensor& x, const char* name, int64_t bytes) {
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(x.data_ptr()) % bytes == 0, "gdn_fast: ", name,
                  " must begin at a multiple of ", bytes, " bytes, got ", x.data_ptr());
}

// q, k, v or a pool's o [B, T, heads, D], which TMA reads or writes in place.
inline Rows tma_rows(const Tensor& x, const char* name, int32_t device, ScalarType dtype,
                     Shape shape) {
  check_place(x, name, device);
  check_dtype(x, name, dtype);
  check_shape(x, name, shape);
  const auto strides = x.strides();
  STD_TORCH_CHECK(strides[3] == 1, "gdn_fast: the last dimension of ", name,
                  " must be dense, got strides ", list(strides));
  const int64_t multiple = kTmaAlignment / 2;  // elements of 2 bytes
  for (int i = 0; i < 3; ++i)
    STD_TORCH_CHECK(strides[i] % multiple == 0, "gdn_fast: the strides of ", name,
                    " must be multiples of ", multiple, ", got strides ", list(strides));
  check_aligned(x, name, kTmaAlignment);
  return {x.data_ptr(), strides[0], strides[1], strides[2]};
}

// g or beta [B, T, HV], at any strides.
inline Rows side_rows(const Tensor& x, const char* name, int32_t device, Shape shape) {
  check_place(x, name, device);
  check_shape(x, name, shape);
  const auto strides = x.strides();
  return {x.data_ptr(), strides[0], strides[1], strides[2]};
}

// Slots: row numbers of a pool.
inline Slots slots_of(const Tensor& x, const char* name, int32_t device, Shape shape) {
  check_place(x, name, device);
  check_shape(x, name, shape);
  check_contiguous(x, name);
  const bool is_64 = x.scalar_type() == ScalarType::Long;
  if (!is_64) check_dtype(x, name, ScalarType::Int);
  return {x.data_ptr(), is_64};
}

// States [rows, HV, K, V] or, V first, [rows, HV, V, K], at any strides, to write to.
inline States states(const Tensor& x, const char* name, int32_t device, const ChunkForward& p,
                     bool v_first) {
  check_place(x, name, device);
  const int64_t rows = x.dim() > 0 ? x.size(0) : 0;
  check_shape(x, name, {rows, p.HV, v_first ? p.V : p.K, v_first ? p.K : p.V});
  const auto strides = x.strides();
  const bool is_double = x.scalar_type() == ScalarType::Double;
  return {x.data_ptr(),
          strides[0],
          strides[1],
          strides[v_first ? 3 : 2],
          strides[v_first ? 2 : 3],
          is_double ? Dtype::kFloat64 : dtype_of(x, name)};
}

inline const float* head_vector(const std::optional<Tensor>& x, const char* name, int32_t device,
                                int64_t HV) {
  if (!x) return nullptr;
  check_place(*x, name, device);
  check_dtype(*x, name, ScalarType::Float);
  check_shape(*x, name, {HV});
  check_contiguous(*x, name);
  return static_cast<const float*>(x->data_ptr());
}

// The memory of a contiguous output.
inline void* written(const Tensor& x, const char* name, int32_t device, Shape shape) {
  check_place(x, name, device);
  check_shape(x, name, shape);
  check_contiguous(x, name);
  check_aligned(x, name, kTmaAlignment);
  return x.data_ptr();
}

// The gradient of a gate or beta [B, T, HV], in its dtype.
inline Dtype side_dtype(const Tensor& x, const char* name) {
  return x.scalar_type() == ScalarType::Double ? Dtype::kFloat64 : dtype_of(x, name);
}

// The gradient of a final state, or none: its strides are those of [N, HV, K, V].
struct StateGradient {
  const float* data;
  int64_t n, h, k, v;
};
inline StateGradient state_gradient(const std::optional<Tensor>& dht, const ChunkForward& p,
                                    int32_t device, bool v_first) {
  if (!dht) return {};
  check_place(*dht, "dht", device);
  check_dtype(*dht, "dht", ScalarType::Float);
  check_shape(*dht, "dht", {p.N, p.HV, v_first ? p.V : p.K, v_first ? p.K : p.V});
  const auto strides = dht->strides();
  return {static_cast<const float*>(dht->data_ptr()), strides[0], strides[1],
          strides[v_first ? 3 : 2], strides[v_first ? 2 : 3]};
}

}  // namespace gdn
