// torch.ops.gdn_fast.*, by LibTorch's stable ABI only: one library for every Python and for every torch from
// TORCH_TARGET_VERSION (csrc/build.py) on. Only this file and tensors.h see torch; no device code.
#include <cuda_runtime_api.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <sstream>
#include <string>

#include "dispatch.h"
#include "params.h"
#include "tensors.h"

// In libtorch_cuda.so, which a torch without CUDA lacks. Weak, so that the library loads there too.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void** stream);

namespace {
using namespace gdn;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kWorkspaceAlignment = 256;

int multiprocessors(int32_t device) {
  int count = 0;
  const cudaError_t error = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  STD_TORCH_CHECK(error == cudaSuccess, "gdn_fast: ", cudaGetErrorString(error));
  return count;
}

// The kernels for a device.
const Architecture& kernels_on(int32_t device) {
  const Architecture* const found = architecture_on(device);
  STD_TORCH_CHECK(found != nullptr, "gdn_fast: ", why_none_on(device));
  return *found;
}

int64_t workspace_floats(const Architecture& kernels, const ChunkForward& p) {
  return static_cast<int64_t>((kernels.chunk_forward_workspace(p) + sizeof(float) - 1) / sizeof(float));
}

// A sentence why no kernel of this library can run here, or "".
std::string why_unavailable() {
  if (aoti_torch_get_current_cuda_stream == nullptr) return "This torch was built without CUDA.";
  int driver = 0, runtime = 0;
  cudaDriverGetVersion(&driver);  // of CUDA: 13000 for 13.0; 0 without a driver
  cudaRuntimeGetVersion(&runtime);
  if (driver / 1000 >= runtime / 1000) return "";
  std::ostringstream out;
  out << "The CUDA library was built with CUDA " << runtime / 1000 << '.' << runtime % 1000 / 10
      << " and needs a driver for CUDA " << runtime / 1000 << ".0 or newer; ";
  if (driver == 0)
    out << "there is no driver.";
  else
    out << "the driver is for CUDA " << driver / 1000 << '.' << driver % 1000 / 10 << '.';
  return out.str();
}

// A call of these sizes, without its tensors.
ChunkForward sized(int64_t device, int64_t B, int64_t T, int64_t H, int64_t HV, int64_t K, int64_t V, int64_t N,
                   bool is_bfloat16, bool is_packed, bool use_qk_l2norm, bool batch_invariant, int64_t longest,
                   int64_t second, int64_t third) {
  static const int32_t some_offsets = 0;
  ChunkForward p{};
  p.B = B, p.T = T, p.H = H, p.HV = HV, p.K = K, p.V = V, p.N = N;
  p.dtype = is_bfloat16 ? Dtype::kBFloat16 : Dtype::kFloat16;
  p.cu_seqlens = is_packed ? &some_offsets : nullptr;
  p.use_qk_l2norm = use_qk_l2norm, p.batch_invariant = batch_invariant;
  p.longest[0] = longest, p.longest[1] = second, p.longest[2] = third;
  p.multiprocessors = multiprocessors(static_cast<int32_t>(device));
  return p;
}

int64_t chunk_forward_workspace(int64_t device, int64_t B, int64_t T, int64_t H, int64_t HV, int64_t K, int64_t V,
                                int64_t N, bool is_bfloat16, bool is_packed, bool use_qk_l2norm, bool batch_invariant,
                                int64_t longest, int64_t second, int64_t third) {
  return workspace_floats(kernels_on(static_cast<int32_t>(device)),
                          sized(device, B, T, H, HV, K, V, N, is_bfloat16, is_packed, use_qk_l2norm, batch_invariant,
                                longest, second, third));
}

// What every call has: q, k, v, g, beta, the gate's parameters and cu_seqlens.
ChunkForward describe(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& beta,
                           const std::optional<Tensor>& A_log, const std::optional<Tensor>& dt_bias,
                           const std::optional<Tensor>& cu_seqlens, double scale, bool use_qk_l2norm,
                           bool use_beta_sigmoid, bool allow_neg_eigval, bool batch_invariant, int64_t longest,
                           int64_t second, int64_t third) {
  STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr, "gdn_fast: this torch was built without CUDA");
  STD_TORCH_CHECK(q.dim() == 4, "gdn_fast: q must have 4 dimensions [B, T, H, K], got ", list(q.sizes()));
  STD_TORCH_CHECK(v.dim() == 4, "gdn_fast: v must have 4 dimensions [B, T, HV, V], got ", list(v.sizes()));
  const int32_t device = q.get_device_index();
  const ScalarType dtype = q.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::BFloat16 || dtype == ScalarType::Half,
                  "gdn_fast: q must be bfloat16 or float16, got ", torch::headeronly::toString(dtype));

  const int64_t B = q.size(0), T = q.size(1), H = q.size(2), K = q.size(3), HV = v.size(2), V = v.size(3);
  ChunkForward p{};
  p.q = tma_rows(q, "q", device, dtype, {B, T, H, K});
  p.k = tma_rows(k, "k", device, dtype, {B, T, H, K});
  p.v = tma_rows(v, "v", device, dtype, {B, T, HV, V});
  p.g = side_rows(g, "g", device, {B, T, HV});
  p.beta = side_rows(beta, "beta", device, {B, T, HV});
  p.dtype = dtype_of(q, "q"), p.g_dtype = dtype_of(g, "g"), p.beta_dtype = dtype_of(beta, "beta");
  p.A_log = head_vector(A_log, "A_log", device, HV);
  p.dt_bias = head_vector(dt_bias, "dt_bias", device, HV);

  int64_t N = B;
  if (cu_seqlens) {
    check_place(*cu_seqlens, "cu_seqlens", device);
    STD_TORCH_CHECK(cu_seqlens->dim() == 1 && cu_seqlens->size(0) >= 1, "gdn_fast: cu_seqlens must have shape [N + 1], got ",
                    list(cu_seqlens->sizes()));
    STD_TORCH_CHECK(B == 1, "gdn_fast: q must have B = 1 with cu_seqlens, got ", list(q.sizes()));
    check_contiguous(*cu_seqlens, "cu_seqlens");
    N = cu_seqlens->size(0) - 1;
    p.cu_seqlens = cu_seqlens->data_ptr();
    p.cu_seqlens_64 = cu_seqlens->scalar_type() == ScalarType::Long;
    if (!p.cu_seqlens_64) check_dtype(*cu_seqlens, "cu_seqlens", ScalarType::Int);
  }

  p.B = B, p.T = T, p.H = H, p.HV = HV, p.K = K, p.V = V, p.N = N;
  p.scale = static_cast<float>(scale);
  p.use_qk_l2norm = use_qk_l2norm, p.use_beta_sigmoid = use_beta_sigmoid;
  p.allow_neg_eigval = allow_neg_eigval, p.use_gate = A_log.has_value(), p.batch_invariant = batch_invariant;
  p.longest[0] = longest, p.longest[1] = second, p.longest[2] = third;
  p.multiprocessors = multiprocessors(device);
  return p;
}

// The states that sequences start from.
void start_from(ChunkForward& p, const std::optional<Tensor>& initial_state, int32_t device, bool v_first) {
  if (!initial_state) return;
  check_place(*initial_state, "initial_state", device);
  check_shape(*initial_state, "initial_state", {p.N, p.HV, v_first ? p.V : p.K, v_first ? p.K : p.V});
  const auto strides = initial_state->strides();
  p.h0 = initial_state->data_ptr();
  p.h0_dtype = dtype_of(*initial_state, "initial_state");
  p.h0_n = strides[0], p.h0_h = strides[1];
  p.h0_k = strides[v_first ? 3 : 2], p.h0_v = strides[v_first ? 2 : 3];
}

void check_workspace(const Tensor& workspace, int32_t device, int64_t floats) {
  check_place(workspace, "workspace", device);
  check_dtype(workspace, "workspace", ScalarType::Float);  // a float can be NaN: tests poison it
  check_contiguous(workspace, "workspace");
  check_aligned(workspace, "workspace", kWorkspaceAlignment);
  STD_TORCH_CHECK(workspace.numel() >= floats, "gdn_fast: workspace must have ", floats, " elements, got ",
                  workspace.numel());
}

cudaStream_t current_stream(int32_t device) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return static_cast<cudaStream_t>(stream);
}

// Tokens from one state that is kept to the next; 0: none is kept.
int checked_every(int64_t every) {
  STD_TORCH_CHECK(every >= 0 && every % 64 == 0 && every < int64_t{1} << 31,
                  "gdn_fast: every must be 0 or a multiple of 64 below 2^31, got ", every);
  return static_cast<int>(every);
}

// The memory of ChunkBackward::states; null without any.
float* kept_states(const std::optional<Tensor>& x, int32_t device, const ChunkForward& p, int every) {
  STD_TORCH_CHECK(x.has_value() == (every > 0),
                  "gdn_fast: states must be a tensor if and only if every is not 0, got every = ", every);
  if (!x) return nullptr;
  const int64_t rows = p.B * p.T / every;
  STD_TORCH_CHECK(rows > 0, "gdn_fast: every must be at most the ", p.B * p.T, " tokens of the call, got ", every);
  check_dtype(*x, "states", ScalarType::Float);
  return static_cast<float*>(written(*x, "states", device, {rows, p.HV, p.V, p.K}));
}

// Checks `workspace`, and runs what `p` says on the current stream of its device; pool: null without one. name: of the
// operator.
void run(const char* name, ChunkForward p, const Pool* pool, const Tensor& workspace, int32_t device) {
  const Architecture& kernels = kernels_on(device);
  check_workspace(workspace, device, workspace_floats(kernels, p));
  p.workspace = workspace.data_ptr();

  const torch::stable::accelerator::DeviceGuard guard(device);
  const cudaStream_t stream = current_stream(device);
  const char* error = pool ? kernels.chunk_prefill(p, *pool, stream) : kernels.chunk_forward(p, stream);
  STD_TORCH_CHECK(error == nullptr, "gdn_fast::", name, " did not run: ", error);
}

void chunk_forward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& beta,
                   const std::optional<Tensor>& A_log, const std::optional<Tensor>& dt_bias,
                   const std::optional<Tensor>& initial_state, const std::optional<Tensor>& cu_seqlens, double scale,
                   bool state_v_first, bool use_qk_l2norm, bool use_beta_sigmoid, bool allow_neg_eigval,
                   bool batch_invariant, int64_t longest, int64_t second, int64_t third, const Tensor& o,
                   const std::optional<Tensor>& final_state, const std::optional<Tensor>& states, int64_t every,
                   const Tensor& workspace) {
  ChunkForward p = describe(q, k, v, g, beta, A_log, dt_bias, cu_seqlens, scale, use_qk_l2norm, use_beta_sigmoid,
                                 allow_neg_eigval, batch_invariant, longest, second, third);
  const int32_t device = q.get_device_index();
  const int64_t K = p.K, V = p.V, HV = p.HV;
  const int64_t rows = state_v_first ? V : K, columns = state_v_first ? K : V;
  start_from(p, initial_state, device, state_v_first);

  check_place(o, "o", device);
  check_dtype(o, "o", q.scalar_type());
  check_shape(o, "o", {p.B, p.T, HV, V});
  check_contiguous(o, "o");
  check_aligned(o, "o", kTmaAlignment);
  p.o = o.data_ptr();
  if (final_state) {
    check_place(*final_state, "final_state", device);
    check_dtype(*final_state, "final_state", ScalarType::Float);
    check_shape(*final_state, "final_state", {p.N, HV, rows, columns});
    check_contiguous(*final_state, "final_state");
    check_aligned(*final_state, "final_state", kTmaAlignment);
    p.ht = static_cast<float*>(final_state->data_ptr());
    p.ht_n = HV * K * V, p.ht_h = K * V;
    p.ht_k = state_v_first ? 1 : V, p.ht_v = state_v_first ? K : 1;
  }
  float* const left = kept_states(states, device, p, checked_every(every));
  if (left == nullptr) return run("chunk_forward", p, nullptr, workspace, device);
  const int64_t state = K * V;
  Pool pool{};
  pool.o = {p.o, p.T * HV * V, HV * V, V};
  pool.from = {const_cast<void*>(p.h0), p.h0_n, p.h0_h, p.h0_k, p.h0_v, p.h0_dtype};
  pool.to = {p.ht, p.ht_n, p.ht_h, p.ht_k, p.ht_v, Dtype::kFloat32};
  pool.last_skipped = -1;
  pool.checkpoint_interval = every <= p.T ? static_cast<int>(every) : 0;  // else no sequence is long enough
  pool.checkpoints = {left, HV * state, state, 1, K, Dtype::kFloat32};
  run("chunk_forward", p, &pool, workspace, device);
}

void chunk_prefill(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& beta,
                   const std::optional<Tensor>& A_log, const std::optional<Tensor>& dt_bias, const Tensor& state,
                   const Tensor& read_slots, const Tensor& write_slots, const std::optional<Tensor>& has_initial_state,
                   int64_t last_skipped, const std::optional<Tensor>& cu_seqlens, double scale, bool state_v_first,
                   bool use_qk_l2norm, bool use_beta_sigmoid, bool allow_neg_eigval, bool batch_invariant,
                   int64_t longest, int64_t second, int64_t third,
                   const Tensor& o, int64_t every, const std::optional<Tensor>& checkpoints,
                   const std::optional<Tensor>& checkpoint_slots, const Tensor& workspace) {
  const ChunkForward p = describe(q, k, v, g, beta, A_log, dt_bias, cu_seqlens, scale, use_qk_l2norm,
                                       use_beta_sigmoid, allow_neg_eigval, batch_invariant, longest, second, third);
  const int32_t device = q.get_device_index();
  Pool pool{};
  pool.o = tma_rows(o, "o", device, q.scalar_type(), {p.B, p.T, p.HV, p.V});
  pool.from = states(state, "state", device, p, state_v_first);
  pool.from.dtype = dtype_of(state, "state");
  pool.to = pool.from;
  pool.read_slots = slots_of(read_slots, "read_slots", device, {p.N});
  pool.write_slots = slots_of(write_slots, "write_slots", device, {p.N});
  pool.last_skipped = static_cast<int>(last_skipped);
  if (has_initial_state) {
    check_place(*has_initial_state, "has_initial_state", device);
    check_dtype(*has_initial_state, "has_initial_state", ScalarType::Bool);
    check_shape(*has_initial_state, "has_initial_state", {p.N});
    check_contiguous(*has_initial_state, "has_initial_state");
    pool.has_state = static_cast<const bool*>(has_initial_state->data_ptr());
  }
  checked_every(every);
  STD_TORCH_CHECK(every == 0 || checkpoints.has_value(), "gdn_fast: checkpoints must be a tensor where every is not 0");
  if (every > 0 && every <= p.T) {  // else no sequence is long enough
    pool.checkpoint_interval = static_cast<int>(every);
    pool.checkpoints = states(*checkpoints, "checkpoints", device, p, state_v_first);
    if (checkpoint_slots) {
      STD_TORCH_CHECK(checkpoint_slots->dim() == 2, "gdn_fast: checkpoint_slots must have shape [N, M], got ",
                      list(checkpoint_slots->sizes()));
      pool.checkpoint_columns = checkpoint_slots->size(1);
      pool.checkpoint_slots = slots_of(*checkpoint_slots, "checkpoint_slots", device, {p.N, pool.checkpoint_columns});
    }
  }
  run("chunk_prefill", p, &pool, workspace, device);
}

int64_t backward_floats(const Architecture& kernels, const ChunkForward& p, int every) {
  return static_cast<int64_t>((kernels.chunk_backward_workspace(p, every) + sizeof(float) - 1) / sizeof(float));
}

int64_t chunk_backward_every(int64_t device, int64_t B, int64_t T, int64_t H, int64_t HV, int64_t K, int64_t V, int64_t N,
                             bool is_bfloat16, bool is_packed, bool use_qk_l2norm, bool batch_invariant,
                             int64_t longest, int64_t second, int64_t third) {
  return kernels_on(static_cast<int32_t>(device))
      .chunk_backward_checkpoint_interval(sized(device, B, T, H, HV, K, V, N, is_bfloat16, is_packed, use_qk_l2norm, batch_invariant,
                                  longest, second, third));
}

int64_t chunk_backward_workspace(int64_t device, int64_t B, int64_t T, int64_t H, int64_t HV, int64_t K, int64_t V, int64_t N,
                                 bool is_bfloat16, bool is_packed, bool use_qk_l2norm, bool batch_invariant,
                                 int64_t longest, int64_t second, int64_t third, int64_t every) {
  return backward_floats(kernels_on(static_cast<int32_t>(device)),
                         sized(device, B, T, H, HV, K, V, N, is_bfloat16, is_packed, use_qk_l2norm, batch_invariant,
                               longest, second, third),
                         checked_every(every));
}

void chunk_backward(const Tensor& dO, const std::optional<Tensor>& dht, const Tensor& q, const Tensor& k,
                    const Tensor& v, const Tensor& g, const Tensor& beta, const std::optional<Tensor>& A_log,
                    const std::optional<Tensor>& dt_bias, const std::optional<Tensor>& initial_state,
                    const std::optional<Tensor>& cu_seqlens, double scale, bool state_v_first, bool use_qk_l2norm,
                    bool use_beta_sigmoid, bool allow_neg_eigval, bool batch_invariant, int64_t longest,
                    int64_t second, int64_t third, const std::optional<Tensor>& states, int64_t every,
                    const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& dg, const Tensor& dbeta,
                    const std::optional<Tensor>& dh0, const std::optional<Tensor>& gate_sums, const Tensor& workspace) {
  ChunkBackward b{};
  b.forward = describe(q, k, v, g, beta, A_log, dt_bias, cu_seqlens, scale, use_qk_l2norm, use_beta_sigmoid,
                       allow_neg_eigval, batch_invariant, longest, second, third);
  ChunkForward& p = b.forward;
  const int32_t device = q.get_device_index();
  const ScalarType dtype = q.scalar_type();
  const int64_t B = p.B, T = p.T, H = p.H, HV = p.HV, K = p.K, V = p.V;
  const int64_t rows = state_v_first ? V : K, columns = state_v_first ? K : V;
  start_from(p, initial_state, device, state_v_first);
  b.dO = tma_rows(dO, "do", device, dtype, {B, T, HV, V});
  const StateGradient from = state_gradient(dht, p, device, state_v_first);
  b.dht = from.data, b.dht_n = from.n, b.dht_h = from.h, b.dht_k = from.k, b.dht_v = from.v;
  b.checkpoint_interval = checked_every(every);
  b.states = kept_states(states, device, p, b.checkpoint_interval);
  check_dtype(dq, "dq", dtype);
  check_dtype(dk, "dk", dtype);
  check_dtype(dv, "dv", dtype);
  b.dq = written(dq, "dq", device, {B, T, H, K});
  b.dk = written(dk, "dk", device, {B, T, H, K});
  b.dv = written(dv, "dv", device, {B, T, HV, V});
  b.dg = written(dg, "dg", device, {B, T, HV}), b.dg_dtype = side_dtype(dg, "dg");
  b.dbeta = written(dbeta, "dbeta", device, {B, T, HV}), b.dbeta_dtype = side_dtype(dbeta, "dbeta");
  if (dh0) {
    check_dtype(*dh0, "dh0", ScalarType::Float);
    b.dh0 = static_cast<float*>(written(*dh0, "dh0", device, {p.N, HV, rows, columns}));
    b.dh0_n = HV * K * V, b.dh0_h = K * V;
    b.dh0_k = state_v_first ? 1 : V, b.dh0_v = state_v_first ? K : 1;
  }
  STD_TORCH_CHECK(gate_sums.has_value() == A_log.has_value(), "gdn_fast: gate_sums must be a tensor if and only if A_log is");
  if (gate_sums) {
    check_dtype(*gate_sums, "gate_sums", ScalarType::Float);
    b.gate_sums = static_cast<float*>(written(*gate_sums, "gate_sums", device, {2, HV}));
  }
  const Architecture& kernels = kernels_on(device);
  check_workspace(workspace, device, backward_floats(kernels, p, b.checkpoint_interval));
  p.workspace = workspace.data_ptr();

  const torch::stable::accelerator::DeviceGuard guard(device);
  const char* error = kernels.chunk_backward(b, current_stream(device));
  STD_TORCH_CHECK(error == nullptr, "gdn_fast::chunk_backward did not run: ", error);
}

void backward_walks(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& dO, const Tensor& A_inv,
                    const Tensor& A_qk, const Tensor& g_cumsum, const Tensor& beta, const Tensor& own,
                    const std::optional<Tensor>& initial_state, const std::optional<Tensor>& dht,
                    const std::optional<Tensor>& cu_seqlens, const std::optional<Tensor>& chunk_offsets, double scale,
                    bool state_v_first, const Tensor& h, const Tensor& v_new, const Tensor& dh, const Tensor& dx,
                    const std::optional<Tensor>& dh0) {
  BackwardWalks w{};
  w.forward = describe(q, k, v, g_cumsum, beta, std::nullopt, std::nullopt, cu_seqlens, scale, false, false, false, false, 0, 0, 0);
  ChunkForward& p = w.forward;
  const int32_t device = q.get_device_index();
  const ScalarType dtype = q.scalar_type();
  const int64_t B = p.B, T = p.T, HV = p.HV, V = p.V;
  STD_TORCH_CHECK(h.dim() == 4, "gdn_fast: h must have 4 dimensions [slots, HV, K, V], got ", list(h.sizes()));
  // q and k may have zeros behind the keys' own width.
  const int64_t slots = h.size(0), K = h.size(2);
  STD_TORCH_CHECK(K <= p.K, "gdn_fast: h must have no more channels of K than q, which has ", p.K, ", got ", K);
  p.K = static_cast<int>(K);
  w.slots = slots;
  w.dO = tma_rows(dO, "do", device, dtype, {B, T, HV, V});
  w.own = side_rows(own, "own", device, {B, T, HV});
  check_dtype(g_cumsum, "g_cumsum", ScalarType::Float);
  check_dtype(beta, "beta", ScalarType::Float);
  check_dtype(own, "own", ScalarType::Float);
  for (const auto& [x, name] : {std::pair(&A_inv, "A_inv"), std::pair(&A_qk, "A_qk")}) check_dtype(*x, name, dtype);
  w.A_inv = written(A_inv, "A_inv", device, {B, T, HV, 64});
  w.A_qk = written(A_qk, "A_qk", device, {B, T, HV, 64});
  start_from(p, initial_state, device, state_v_first);
  const StateGradient from = state_gradient(dht, p, device, state_v_first);
  w.dht = from.data, w.dht_n = from.n, w.dht_h = from.h, w.dht_k = from.k, w.dht_v = from.v;
  STD_TORCH_CHECK(chunk_offsets.has_value() == cu_seqlens.has_value(),
                  "gdn_fast: chunk_offsets must be a tensor if and only if cu_seqlens is");
  if (chunk_offsets) {
    check_place(*chunk_offsets, "chunk_offsets", device);
    check_dtype(*chunk_offsets, "chunk_offsets", ScalarType::Int);
    check_shape(*chunk_offsets, "chunk_offsets", {p.N + 1});
    check_contiguous(*chunk_offsets, "chunk_offsets");
    w.chunk_offsets = static_cast<const int*>(chunk_offsets->data_ptr());
  }
  const auto made = [&](const Tensor& x, const char* name, Shape shape) {
    check_dtype(x, name, dtype);
    return written(x, name, device, shape);
  };
  w.h = made(h, "h", {slots, HV, K, V});
  w.dh = made(dh, "dh", {slots, HV, K, V});
  w.v_new = made(v_new, "v_new", {B, T, HV, V});
  w.dx = made(dx, "dx", {B, T, HV, V});
  if (dh0) {
    check_dtype(*dh0, "dh0", ScalarType::Float);
    w.dh0 = static_cast<float*>(written(*dh0, "dh0", device, {p.N, HV, state_v_first ? V : K, state_v_first ? K : V}));
    w.dh0_n = HV * K * V, w.dh0_h = K * V;
    w.dh0_k = state_v_first ? 1 : V, w.dh0_v = state_v_first ? K : 1;
  }
  const torch::stable::accelerator::DeviceGuard guard(device);
  const char* error = kernels_on(device).backward_walks(w, current_stream(device));
  STD_TORCH_CHECK(error == nullptr, "gdn_fast::backward_walks did not run: ", error);
}
}  // namespace

STABLE_TORCH_LIBRARY(gdn_fast, m) {
  m.def("why_unavailable() -> str");
  m.def(
      "chunk_forward_workspace(int device, int B, int T, int H, int HV, int K, int V, int N, bool is_bfloat16, "
      "bool is_packed, bool use_qk_l2norm, bool batch_invariant, int longest, int second, int third) -> int");
  m.def(
      "chunk_forward(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, Tensor? dt_bias, "
      "Tensor? initial_state, Tensor? cu_seqlens, float scale, bool state_v_first, bool use_qk_l2norm, "
      "bool use_beta_sigmoid, bool allow_neg_eigval, bool batch_invariant, int longest, int second, int third, "
      "Tensor(a!) o, Tensor(b!)? final_state, Tensor(c!)? states, int every, "
      "Tensor(d!) workspace) -> ()");
  // checkpoints may be `state`.
  m.def(
      "chunk_prefill(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, Tensor? dt_bias, "
      "Tensor(a!) state, Tensor read_slots, Tensor write_slots, Tensor? has_initial_state, int last_skipped, "
      "Tensor? cu_seqlens, float scale, bool state_v_first, bool use_qk_l2norm, bool use_beta_sigmoid, "
      "bool allow_neg_eigval, bool batch_invariant, int longest, int second, int third, Tensor(b!) o, int every, "
      "Tensor(c!)? checkpoints, "
      "Tensor? checkpoint_slots, Tensor(d!) workspace) -> ()");
  m.def(
      "chunk_backward_every(int device, int B, int T, int H, int HV, int K, int V, int N, bool is_bfloat16, "
      "bool is_packed, bool use_qk_l2norm, bool batch_invariant, int longest, int second, int third) -> int");
  m.def(
      "chunk_backward_workspace(int device, int B, int T, int H, int HV, int K, int V, int N, bool is_bfloat16, "
      "bool is_packed, bool use_qk_l2norm, bool batch_invariant, int longest, int second, int third, int every) -> int");
  m.def(
      "chunk_backward(Tensor do, Tensor? dht, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, "
      "Tensor? dt_bias, Tensor? initial_state, Tensor? cu_seqlens, float scale, bool state_v_first, "
      "bool use_qk_l2norm, bool use_beta_sigmoid, bool allow_neg_eigval, bool batch_invariant, int longest, "
      "int second, int third, Tensor? states, int every, Tensor(a!) dq, "
      "Tensor(b!) dk, Tensor(c!) dv, Tensor(d!) dg, Tensor(e!) dbeta, Tensor(f!)? dh0, Tensor(g!)? gate_sums, "
      "Tensor(h!) workspace) -> ()");
  m.def(
      "backward_walks(Tensor q, Tensor k, Tensor v, Tensor do, Tensor A_inv, Tensor A_qk, Tensor g_cumsum, Tensor beta, "
      "Tensor own, Tensor? initial_state, Tensor? dht, Tensor? cu_seqlens, Tensor? chunk_offsets, float scale, "
      "bool state_v_first, Tensor(a!) h, Tensor(b!) v_new, Tensor(c!) dh, Tensor(d!) dx, Tensor(e!)? dh0) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(gdn_fast, CompositeExplicitAutograd, m) {
  m.impl("why_unavailable", TORCH_BOX(&why_unavailable));
  m.impl("chunk_forward_workspace", TORCH_BOX(&chunk_forward_workspace));
  m.impl("chunk_backward_every", TORCH_BOX(&chunk_backward_every));
  m.impl("chunk_backward_workspace", TORCH_BOX(&chunk_backward_workspace));
}
STABLE_TORCH_LIBRARY_IMPL(gdn_fast, CUDA, m) {
  m.impl("chunk_forward", TORCH_BOX(&chunk_forward));
  m.impl("chunk_prefill", TORCH_BOX(&chunk_prefill));
  m.impl("chunk_backward", TORCH_BOX(&chunk_backward));
  m.impl("backward_walks", TORCH_BOX(&backward_walks));
}
// The same functions for CPU tensors: their checks say what is wrong with them.
STABLE_TORCH_LIBRARY_IMPL(gdn_fast, CPU, m) {
  m.impl("chunk_forward", TORCH_BOX(&chunk_forward));
  m.impl("chunk_prefill", TORCH_BOX(&chunk_prefill));
  m.impl("chunk_backward", TORCH_BOX(&chunk_backward));
  m.impl("backward_walks", TORCH_BOX(&backward_walks));
}
