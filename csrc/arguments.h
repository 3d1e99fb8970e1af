// The arguments that operators share, and the records of params.h that are made from them.
#pragma once
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "params.h"
#include "tensors.h"

namespace gdn {

// Parts of the operators' schemas, in the order of Inputs and Options. gdn_triton/fast/arguments.py
// has the same order.
inline const std::string kInputs =
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, Tensor? dt_bias, Tensor? "
    "cu_seqlens";
inline const std::string kOptions =
    "float scale, bool state_v_first, bool use_qk_l2norm, bool use_beta_sigmoid, bool "
    "allow_neg_eigval, "
    "bool batch_invariant, int[] longest";
// All that a plan depends on. sizes: B, T, H, HV, K, V, N, is_bfloat16, is_packed,
// use_qk_l2norm, batch_invariant, and the three entries of ChunkForward::longest.
inline const std::string kSizes = "int device, int[] sizes";

struct Inputs {
  const Tensor &q, &k, &v, &g, &beta;
  const std::optional<Tensor>&A_log, &dt_bias, &cu_seqlens;
};

struct Options {
  double scale;
  bool state_v_first, use_qk_l2norm, use_beta_sigmoid, allow_neg_eigval, batch_invariant;
  int64_t longest[3];
};

inline Options parse_options(double scale, bool state_v_first, bool use_qk_l2norm,
                             bool use_beta_sigmoid, bool allow_neg_eigval, bool batch_invariant,
                             const std::vector<int64_t>& longest) {
  STD_TORCH_CHECK(longest.size() == 3, "gdn_fast: longest must have 3 entries, got ",
                  list(longest));
  return {scale,
          state_v_first,
          use_qk_l2norm,
          use_beta_sigmoid,
          allow_neg_eigval,
          batch_invariant,
          {longest[0], longest[1], longest[2]}};
}

// A call of these sizes, without tensors. multiprocessors: of the device.
inline ChunkForward parse_sizes(const std::vector<int64_t>& sizes, int multiprocessors) {
  static const int32_t some_offsets = 0;
  STD_TORCH_CHECK(sizes.size() == 14, "gdn_fast: sizes must have 14 entries, got ", list(sizes));
  ChunkForward p{};
  p.B = sizes[0], p.T = sizes[1];
  p.H = static_cast<int>(sizes[2]), p.HV = static_cast<int>(sizes[3]);
  p.K = static_cast<int>(sizes[4]), p.V = static_cast<int>(sizes[5]),
  p.N = static_cast<int>(sizes[6]);
  p.dtype = sizes[7] ? Dtype::kBFloat16 : Dtype::kFloat16;
  p.cu_seqlens = sizes[8] ? &some_offsets : nullptr;
  p.use_qk_l2norm = sizes[9], p.batch_invariant = sizes[10];
  for (int i = 0; i < 3; ++i) p.longest[i] = sizes[11 + i];
  p.multiprocessors = multiprocessors;
  return p;
}

// The inputs and options of a call, checked; without the number of multiprocessors.
inline ChunkForward parse_inputs(const Inputs& x, const Options& options) {
  const Tensor &q = x.q, &v = x.v;
  STD_TORCH_CHECK(q.dim() == 4, "gdn_fast: q must have 4 dimensions [B, T, H, K], got ",
                  list(q.sizes()));
  STD_TORCH_CHECK(v.dim() == 4, "gdn_fast: v must have 4 dimensions [B, T, HV, V], got ",
                  list(v.sizes()));
  const int32_t device = q.get_device_index();
  const ScalarType dtype = q.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::BFloat16 || dtype == ScalarType::Half,
                  "gdn_fast: q must be bfloat16 or float16, got ",
                  torch::headeronly::toString(dtype));

  const int64_t B = q.size(0), T = q.size(1), H = q.size(2), K = q.size(3), HV = v.size(2),
                V = v.size(3);
  ChunkForward p{};
  p.q = tma_rows(q, "q", device, dtype, {B, T, H, K});
  p.k = tma_rows(x.k, "k", device, dtype, {B, T, H, K});
  p.v = tma_rows(v, "v", device, dtype, {B, T, HV, V});
  p.g = side_rows(x.g, "g", device, {B, T, HV});
  p.beta = side_rows(x.beta, "beta", device, {B, T, HV});
  p.dtype = dtype_of(q, "q"), p.g_dtype = dtype_of(x.g, "g"),
  p.beta_dtype = dtype_of(x.beta, "beta");
  p.A_log = head_vector(x.A_log, "A_log", device, HV);
  p.dt_bias = head_vector(x.dt_bias, "dt_bias", device, HV);

  int64_t N = B;
  if (x.cu_seqlens) {
    const Tensor& cu_seqlens = *x.cu_seqlens;
    check_place(cu_seqlens, "cu_seqlens", device);
    STD_TORCH_CHECK(cu_seqlens.dim() == 1 && cu_seqlens.size(0) >= 1,
                    "gdn_fast: cu_seqlens must have shape [N + 1], got ", list(cu_seqlens.sizes()));
    STD_TORCH_CHECK(B == 1, "gdn_fast: q must have B = 1 with cu_seqlens, got ", list(q.sizes()));
    check_contiguous(cu_seqlens, "cu_seqlens");
    N = cu_seqlens.size(0) - 1;
    p.cu_seqlens = cu_seqlens.data_ptr();
    p.cu_seqlens_64 = cu_seqlens.scalar_type() == ScalarType::Long;
    if (!p.cu_seqlens_64) check_dtype(cu_seqlens, "cu_seqlens", ScalarType::Int);
  }

  p.B = B, p.T = T, p.H = H, p.HV = HV, p.K = K, p.V = V, p.N = N;
  p.scale = static_cast<float>(options.scale);
  p.use_qk_l2norm = options.use_qk_l2norm, p.use_beta_sigmoid = options.use_beta_sigmoid;
  p.allow_neg_eigval = options.allow_neg_eigval, p.use_gate = x.A_log.has_value();
  p.batch_invariant = options.batch_invariant;
  for (int i = 0; i < 3; ++i) p.longest[i] = options.longest[i];
  return p;
}

// Sets the states that sequences start from.
inline void start_from(ChunkForward& p, const std::optional<Tensor>& initial_state, int32_t device,
                       bool v_first) {
  if (!initial_state) return;
  check_place(*initial_state, "initial_state", device);
  check_shape(*initial_state, "initial_state",
              {p.N, p.HV, v_first ? p.V : p.K, v_first ? p.K : p.V});
  const auto strides = initial_state->strides();
  p.h0 = initial_state->data_ptr();
  p.h0_dtype = dtype_of(*initial_state, "initial_state");
  p.h0_n = strides[0], p.h0_h = strides[1];
  p.h0_k = strides[v_first ? 3 : 2], p.h0_v = strides[v_first ? 2 : 3];
}

// A contiguous fp32 output with a state of each sequence and value head; `data` is null without
// one.
struct StateOutput {
  float* data;
  int64_t n, h, k, v;  // strides of [N, HV, K, V]
};
inline StateOutput state_output(const std::optional<Tensor>& x, const char* name,
                                const ChunkForward& p, int32_t device, bool v_first) {
  if (!x) return {};
  check_dtype(*x, name, ScalarType::Float);
  const int64_t K = p.K, V = p.V;
  void* const data = written(*x, name, device, {p.N, p.HV, v_first ? V : K, v_first ? K : V});
  return {static_cast<float*>(data), p.HV * K * V, K * V, v_first ? 1 : V, v_first ? K : 1};
}

// Checks the number of tokens from one state that a forward leaves to the next; 0: it leaves none.
inline int parse_checkpoint_interval(int64_t interval) {
  STD_TORCH_CHECK(interval >= 0 && interval % 64 == 0 && interval < int64_t{1} << 31,
                  "gdn_fast: checkpoint_interval must be 0 or a multiple of 64 below 2^31, got ",
                  interval);
  return static_cast<int>(interval);
}

// Checks the tensor of ChunkBackward::states, and returns its memory; null without one.
inline float* checkpoint_states(const std::optional<Tensor>& x, int32_t device,
                                const ChunkForward& p, int interval) {
  STD_TORCH_CHECK(
      x.has_value() == (interval > 0),
      "gdn_fast: states must be a tensor if and only if checkpoint_interval is not 0, got "
      "checkpoint_interval = ",
      interval);
  if (!x) return nullptr;
  const int64_t rows = p.B * p.T / interval;
  STD_TORCH_CHECK(rows > 0, "gdn_fast: checkpoint_interval must be at most the ", p.B * p.T,
                  " tokens of the call, got ", interval);
  check_dtype(*x, "states", ScalarType::Float);
  return static_cast<float*>(written(*x, "states", device, {rows, p.HV, p.V, p.K}));
}

// The outputs of a backward.
struct BackwardOutputs {
  const Tensor &dq, &dk, &dv, &dg, &dbeta;
  const std::optional<Tensor>&dh0, &gate_sums;
};

// A backward of the call `p`, checked; without states and workspace.
inline ChunkBackward parse_backward(const ChunkForward& p, const Tensor& q, const Tensor& dO,
                                    const std::optional<Tensor>& dht, const BackwardOutputs& out,
                                    bool v_first) {
  ChunkBackward b{};
  b.forward = p;
  const int32_t device = q.get_device_index();
  const ScalarType dtype = q.scalar_type();
  const int64_t B = p.B, T = p.T, H = p.H, HV = p.HV, K = p.K, V = p.V;
  b.dO = tma_rows(dO, "do", device, dtype, {B, T, HV, V});
  const StateGradient from = state_gradient(dht, p, device, v_first);
  b.dht = from.data, b.dht_n = from.n, b.dht_h = from.h, b.dht_k = from.k, b.dht_v = from.v;
  check_dtype(out.dq, "dq", dtype);
  check_dtype(out.dk, "dk", dtype);
  check_dtype(out.dv, "dv", dtype);
  b.dq = written(out.dq, "dq", device, {B, T, H, K});
  b.dk = written(out.dk, "dk", device, {B, T, H, K});
  b.dv = written(out.dv, "dv", device, {B, T, HV, V});
  b.dg = written(out.dg, "dg", device, {B, T, HV}), b.dg_dtype = side_dtype(out.dg, "dg");
  b.dbeta = written(out.dbeta, "dbeta", device, {B, T, HV});
  b.dbeta_dtype = side_dtype(out.dbeta, "dbeta");
  const StateOutput to = state_output(out.dh0, "dh0", p, device, v_first);
  b.dh0 = to.data, b.dh0_n = to.n, b.dh0_h = to.h, b.dh0_k = to.k, b.dh0_v = to.v;
  STD_TORCH_CHECK(out.gate_sums.has_value() == p.use_gate,
                  "gdn_fast: gate_sums must be a tensor if and only if A_log is");
  if (out.gate_sums) {
    check_dtype(*out.gate_sums, "gate_sums", ScalarType::Float);
    b.gate_sums = static_cast<float*>(written(*out.gate_sums, "gate_sums", device, {2, HV}));
  }
  return b;
}

}  // namespace gdn
