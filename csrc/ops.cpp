// torch.ops.gdn_fast.*, by LibTorch's stable ABI only: one library for every Python and for every
// torch from TORCH_TARGET_VERSION (csrc/build.py) on. Only this file, arguments.h and tensors.h see
// torch; no device code.
#include <cuda_runtime_api.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "arguments.h"
#include "dispatch.h"
#include "params.h"
#include "tensors.h"

// A function of libtorch_cuda.so, which a torch without CUDA lacks. Being weak, it lets the library
// load there too.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device,
                                                                                   void** stream);

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

// The number of floats that have room for so many bytes.
int64_t floats(size_t bytes) {
  return static_cast<int64_t>((bytes + sizeof(float) - 1) / sizeof(float));
}
int64_t forward_floats(const Architecture& kernels, const ChunkForward& p) {
  return floats(kernels.chunk_forward_workspace(p));
}
int64_t backward_floats(const Architecture& kernels, const ChunkForward& p,
                        int checkpoint_interval) {
  return floats(kernels.chunk_backward_workspace(p, checkpoint_interval));
}

// A sentence that says why no kernel of this library can run here, or "".
std::string why_unavailable() {
  if (aoti_torch_get_current_cuda_stream == nullptr) return "This torch was built without CUDA.";
  int driver = 0, runtime = 0;
  cudaDriverGetVersion(&driver);  // 13000 for CUDA 13.0; 0 without a driver
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

// ---- queries by sizes

int64_t chunk_forward_workspace(int64_t device, std::vector<int64_t> sizes) {
  const int32_t index = static_cast<int32_t>(device);
  return forward_floats(kernels_on(index), parse_sizes(sizes, multiprocessors(index)));
}

int64_t chunk_backward_workspace(int64_t device, std::vector<int64_t> sizes,
                                 int64_t checkpoint_interval) {
  const int32_t index = static_cast<int32_t>(device);
  return backward_floats(kernels_on(index), parse_sizes(sizes, multiprocessors(index)),
                         parse_checkpoint_interval(checkpoint_interval));
}

int64_t chunk_backward_checkpoint_interval(int64_t device, std::vector<int64_t> sizes) {
  const int32_t index = static_cast<int32_t>(device);
  return kernels_on(index).chunk_backward_checkpoint_interval(
      parse_sizes(sizes, multiprocessors(index)));
}

// ---- calls

// The inputs and options of a call, checked.
ChunkForward parse_call(const Inputs& inputs, const Options& options) {
  STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr,
                  "gdn_fast: this torch was built without CUDA");
  ChunkForward p = parse_inputs(inputs, options);
  p.multiprocessors = multiprocessors(inputs.q.get_device_index());
  return p;
}

void check_workspace(const Tensor& workspace, int32_t device, int64_t floats) {
  check_place(workspace, "workspace", device);
  check_dtype(workspace, "workspace", ScalarType::Float);  // a float can be NaN: tests poison it
  check_contiguous(workspace, "workspace");
  check_aligned(workspace, "workspace", kWorkspaceAlignment);
  STD_TORCH_CHECK(workspace.numel() >= floats, "gdn_fast: workspace must have ", floats,
                  " elements, got ", workspace.numel());
}

cudaStream_t current_stream(int32_t device) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return static_cast<cudaStream_t>(stream);
}

// Checks `workspace`, and runs `p` on the current stream of its device. name: of the operator;
// pool: null without one.
void run(const char* name, ChunkForward p, const Pool* pool, const Tensor& workspace,
         int32_t device) {
  const Architecture& kernels = kernels_on(device);
  check_workspace(workspace, device, forward_floats(kernels, p));
  p.workspace = workspace.data_ptr();

  const torch::stable::accelerator::DeviceGuard guard(device);
  const cudaStream_t stream = current_stream(device);
  const char* error =
      pool ? kernels.chunk_prefill(p, *pool, stream) : kernels.chunk_forward(p, stream);
  STD_TORCH_CHECK(error == nullptr, "gdn_fast::", name, " did not run: ", error);
}

void chunk_forward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                   const Tensor& beta, const std::optional<Tensor>& A_log,
                   const std::optional<Tensor>& dt_bias, const std::optional<Tensor>& cu_seqlens,
                   double scale, bool state_v_first, bool use_qk_l2norm, bool use_beta_sigmoid,
                   bool allow_neg_eigval, bool batch_invariant, std::vector<int64_t> longest,
                   const std::optional<Tensor>& initial_state, const Tensor& o,
                   const std::optional<Tensor>& final_state, const std::optional<Tensor>& states,
                   int64_t checkpoint_interval, const Tensor& workspace) {
  ChunkForward p = parse_call({q, k, v, g, beta, A_log, dt_bias, cu_seqlens},
                              parse_options(scale, state_v_first, use_qk_l2norm, use_beta_sigmoid,
                                            allow_neg_eigval, batch_invariant, longest));
  const int32_t device = q.get_device_index();
  start_from(p, initial_state, device, state_v_first);

  check_dtype(o, "o", q.scalar_type());
  p.o = written(o, "o", device, {p.B, p.T, p.HV, p.V});
  const StateOutput final = state_output(final_state, "final_state", p, device, state_v_first);
  p.ht = final.data, p.ht_n = final.n, p.ht_h = final.h, p.ht_k = final.k, p.ht_v = final.v;
  const int interval = parse_checkpoint_interval(checkpoint_interval);
  float* const checkpoints = checkpoint_states(states, device, p, interval);
  if (checkpoints == nullptr) return run("chunk_forward", p, nullptr, workspace, device);
  const int64_t state = int64_t{p.K} * p.V;
  Pool pool{};
  pool.o = {p.o, p.T * p.HV * p.V, int64_t{p.HV} * p.V, p.V};
  pool.from = {const_cast<void*>(p.h0), p.h0_n, p.h0_h, p.h0_k, p.h0_v, p.h0_dtype};
  pool.to = {p.ht, p.ht_n, p.ht_h, p.ht_k, p.ht_v, Dtype::kFloat32};
  pool.last_skipped = -1;
  pool.checkpoint_interval = interval <= p.T ? interval : 0;  // else no sequence is long enough
  pool.checkpoints = {checkpoints, p.HV * state, state, 1, p.K, Dtype::kFloat32};
  run("chunk_forward", p, &pool, workspace, device);
}

void chunk_prefill(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                   const Tensor& beta, const std::optional<Tensor>& A_log,
                   const std::optional<Tensor>& dt_bias, const std::optional<Tensor>& cu_seqlens,
                   double scale, bool state_v_first, bool use_qk_l2norm, bool use_beta_sigmoid,
                   bool allow_neg_eigval, bool batch_invariant, std::vector<int64_t> longest,
                   const Tensor& state, const Tensor& read_slots, const Tensor& write_slots,
                   const std::optional<Tensor>& has_initial_state, int64_t last_skipped,
                   const Tensor& o, int64_t checkpoint_interval,
                   const std::optional<Tensor>& checkpoints,
                   const std::optional<Tensor>& checkpoint_slots, const Tensor& workspace) {
  const ChunkForward p =
      parse_call({q, k, v, g, beta, A_log, dt_bias, cu_seqlens},
                 parse_options(scale, state_v_first, use_qk_l2norm, use_beta_sigmoid,
                               allow_neg_eigval, batch_invariant, longest));
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
  const int interval = parse_checkpoint_interval(checkpoint_interval);
  STD_TORCH_CHECK(interval == 0 || checkpoints.has_value(),
                  "gdn_fast: checkpoints must be a tensor where checkpoint_interval is not 0");
  if (interval > 0 && interval <= p.T) {  // else no sequence is long enough
    pool.checkpoint_interval = interval;
    pool.checkpoints = states(*checkpoints, "checkpoints", device, p, state_v_first);
    if (checkpoint_slots) {
      STD_TORCH_CHECK(checkpoint_slots->dim() == 2,
                      "gdn_fast: checkpoint_slots must have shape [N, M], got ",
                      list(checkpoint_slots->sizes()));
      pool.checkpoint_columns = checkpoint_slots->size(1);
      pool.checkpoint_slots =
          slots_of(*checkpoint_slots, "checkpoint_slots", device, {p.N, pool.checkpoint_columns});
    }
  }
  run("chunk_prefill", p, &pool, workspace, device);
}

void chunk_backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                    const Tensor& beta, const std::optional<Tensor>& A_log,
                    const std::optional<Tensor>& dt_bias, const std::optional<Tensor>& cu_seqlens,
                    double scale, bool state_v_first, bool use_qk_l2norm, bool use_beta_sigmoid,
                    bool allow_neg_eigval, bool batch_invariant, std::vector<int64_t> longest,
                    const std::optional<Tensor>& initial_state, const Tensor& dO,
                    const std::optional<Tensor>& dht, const std::optional<Tensor>& states,
                    int64_t checkpoint_interval, const Tensor& dq, const Tensor& dk,
                    const Tensor& dv, const Tensor& dg, const Tensor& dbeta,
                    const std::optional<Tensor>& dh0, const std::optional<Tensor>& gate_sums,
                    const Tensor& workspace) {
  ChunkForward call =
      parse_call({q, k, v, g, beta, A_log, dt_bias, cu_seqlens},
                 parse_options(scale, state_v_first, use_qk_l2norm, use_beta_sigmoid,
                               allow_neg_eigval, batch_invariant, longest));
  const int32_t device = q.get_device_index();
  start_from(call, initial_state, device, state_v_first);
  ChunkBackward b =
      parse_backward(call, q, dO, dht, {dq, dk, dv, dg, dbeta, dh0, gate_sums}, state_v_first);
  ChunkForward& p = b.forward;
  b.checkpoint_interval = parse_checkpoint_interval(checkpoint_interval);
  b.states = checkpoint_states(states, device, p, b.checkpoint_interval);
  const Architecture& kernels = kernels_on(device);
  check_workspace(workspace, device, backward_floats(kernels, p, b.checkpoint_interval));
  p.workspace = workspace.data_ptr();

  const torch::stable::accelerator::DeviceGuard guard(device);
  const char* error = kernels.chunk_backward(b, current_stream(device));
  STD_TORCH_CHECK(error == nullptr, "gdn_fast::chunk_backward did not run: ", error);
}

// ---- a part of a sequence, in two calls for each direction (Part)

using Answer = size_t (*Architecture::*)(const ChunkForward&);
template <Answer kAnswer>
int64_t part_floats(int64_t device, std::vector<int64_t> sizes) {
  const int32_t index = static_cast<int32_t>(device);
  return floats((kernels_on(index).*kAnswer)(parse_sizes(sizes, multiprocessors(index))));
}
int64_t part_segment(int64_t device, std::vector<int64_t> sizes) {
  const int32_t index = static_cast<int32_t>(device);
  return kernels_on(index).part_segment(parse_sizes(sizes, multiprocessors(index)));
}

// The part of the call `p`, with its memory checked; bytes: of its workspace.
Part parse_part(ChunkForward& p, const Tensor& starts, const std::optional<Tensor>& carry,
                bool comes, const Tensor& workspace, int32_t device, Answer bytes) {
  STD_TORCH_CHECK(p.B == 1 && p.cu_seqlens == nullptr && p.T > 0,
                  "gdn_fast: a part must have B = 1, tokens and no cu_seqlens, got B = ", p.B,
                  ", T = ", p.T);
  const Architecture& kernels = kernels_on(device);
  check_workspace(workspace, device, floats((kernels.*bytes)(p)));
  p.workspace = workspace.data_ptr();
  check_dtype(starts, "starts", ScalarType::Float);
  Part part{kernels.part_segment(p), nullptr, nullptr, comes};
  part.starts =
      static_cast<float*>(written(starts, "starts", device, {floats(kernels.part_starts(p))}));
  if (carry) {
    check_dtype(*carry, "carry", ScalarType::Float);
    part.carry = static_cast<float*>(written(*carry, "carry", device, {p.HV, p.V + p.K, p.K}));
  }
  return part;
}

// o: of the second call; else null.
void run_part_forward(const Inputs& inputs, const Options& options,
                      const std::optional<Tensor>& initial_state, const Tensor* o,
                      const std::optional<Tensor>& final_state, const Tensor& starts,
                      const std::optional<Tensor>& carry, bool comes, const Tensor& workspace) {
  ChunkForward p = parse_call(inputs, options);
  const int32_t device = inputs.q.get_device_index();
  start_from(p, initial_state, device, options.state_v_first);
  const Part part =
      parse_part(p, starts, carry, comes, workspace, device, &Architecture::part_forward_workspace);
  if (o) {
    check_dtype(*o, "o", inputs.q.scalar_type());
    p.o = written(*o, "o", device, {p.B, p.T, p.HV, p.V});
  }
  const StateOutput final =
      state_output(final_state, "final_state", p, device, options.state_v_first);
  p.ht = final.data, p.ht_n = final.n, p.ht_h = final.h, p.ht_k = final.k, p.ht_v = final.v;
  const torch::stable::accelerator::DeviceGuard guard(device);
  const auto run = o ? kernels_on(device).part_forward_walk : kernels_on(device).part_forward_maps;
  const char* error = run(p, part, current_stream(device));
  STD_TORCH_CHECK(error == nullptr, "gdn_fast: the part's forward did not run: ", error);
}

void part_forward_maps(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                       const Tensor& beta, const std::optional<Tensor>& A_log,
                       const std::optional<Tensor>& dt_bias,
                       const std::optional<Tensor>& cu_seqlens, double scale, bool state_v_first,
                       bool use_qk_l2norm, bool use_beta_sigmoid, bool allow_neg_eigval,
                       bool batch_invariant, std::vector<int64_t> longest,
                       const std::optional<Tensor>& initial_state,
                       const std::optional<Tensor>& carry, bool comes, const Tensor& starts,
                       const Tensor& workspace) {
  run_part_forward({q, k, v, g, beta, A_log, dt_bias, cu_seqlens},
                   parse_options(scale, state_v_first, use_qk_l2norm, use_beta_sigmoid,
                                 allow_neg_eigval, batch_invariant, longest),
                   initial_state, nullptr, {}, starts, carry, comes, workspace);
}

void part_forward_walk(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                       const Tensor& beta, const std::optional<Tensor>& A_log,
                       const std::optional<Tensor>& dt_bias,
                       const std::optional<Tensor>& cu_seqlens, double scale, bool state_v_first,
                       bool use_qk_l2norm, bool use_beta_sigmoid, bool allow_neg_eigval,
                       bool batch_invariant, std::vector<int64_t> longest,
                       const std::optional<Tensor>& initial_state, const Tensor& o,
                       const std::optional<Tensor>& final_state, const Tensor& starts,
                       const Tensor& workspace) {
  run_part_forward({q, k, v, g, beta, A_log, dt_bias, cu_seqlens},
                   parse_options(scale, state_v_first, use_qk_l2norm, use_beta_sigmoid,
                                 allow_neg_eigval, batch_invariant, longest),
                   initial_state, &o, final_state, starts, {}, true, workspace);
}

// walks: the second call.
void part_backward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
                   const Tensor& beta, const std::optional<Tensor>& A_log,
                   const std::optional<Tensor>& dt_bias, const std::optional<Tensor>& cu_seqlens,
                   double scale, bool state_v_first, bool use_qk_l2norm, bool use_beta_sigmoid,
                   bool allow_neg_eigval, bool batch_invariant, std::vector<int64_t> longest,
                   bool walks, const std::optional<Tensor>& initial_state, const Tensor& dO,
                   const std::optional<Tensor>& dht, const std::optional<Tensor>& carry,
                   const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& dg,
                   const Tensor& dbeta, const std::optional<Tensor>& dh0,
                   const std::optional<Tensor>& gate_sums, const Tensor& starts,
                   const Tensor& workspace) {
  ChunkForward p = parse_call({q, k, v, g, beta, A_log, dt_bias, cu_seqlens},
                              parse_options(scale, state_v_first, use_qk_l2norm, use_beta_sigmoid,
                                            allow_neg_eigval, batch_invariant, longest));
  const int32_t device = q.get_device_index();
  start_from(p, initial_state, device, state_v_first);
  const Part part =
      parse_part(p, starts, carry, true, workspace, device, &Architecture::part_backward_workspace);
  const ChunkBackward b =
      parse_backward(p, q, dO, dht, {dq, dk, dv, dg, dbeta, dh0, gate_sums}, state_v_first);
  const torch::stable::accelerator::DeviceGuard guard(device);
  const auto run =
      walks ? kernels_on(device).part_backward_walks : kernels_on(device).part_backward_maps;
  const char* error = run(b, part, current_stream(device));
  STD_TORCH_CHECK(error == nullptr, "gdn_fast: the part's backward did not run: ", error);
}

void backward_walks(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& dO,
                    const Tensor& A_inv, const Tensor& A_qk, const Tensor& g_cumsum,
                    const Tensor& beta, const Tensor& own,
                    const std::optional<Tensor>& initial_state, const std::optional<Tensor>& dht,
                    const std::optional<Tensor>& cu_seqlens,
                    const std::optional<Tensor>& chunk_offsets, double scale, bool state_v_first,
                    const Tensor& h, const Tensor& v_new, const Tensor& dh, const Tensor& dx,
                    const std::optional<Tensor>& dh0) {
  BackwardWalks w{};
  const std::optional<Tensor> none;
  w.forward = parse_call({q, k, v, g_cumsum, beta, none, none, cu_seqlens},
                         Options{scale, state_v_first, false, false, false, false, {}});
  ChunkForward& p = w.forward;
  const int32_t device = q.get_device_index();
  const ScalarType dtype = q.scalar_type();
  const int64_t B = p.B, T = p.T, HV = p.HV, V = p.V;
  STD_TORCH_CHECK(h.dim() == 4, "gdn_fast: h must have 4 dimensions [chunks, HV, K, V], got ",
                  list(h.sizes()));
  // q and k may be padded with zeros past the width of the keys.
  const int64_t chunks = h.size(0), K = h.size(2);
  STD_TORCH_CHECK(K <= p.K, "gdn_fast: h must have no more channels of K than q, which has ", p.K,
                  ", got ", K);
  p.K = static_cast<int>(K);
  w.chunks = chunks;
  w.dO = tma_rows(dO, "do", device, dtype, {B, T, HV, V});
  w.own = side_rows(own, "own", device, {B, T, HV});
  check_dtype(g_cumsum, "g_cumsum", ScalarType::Float);
  check_dtype(beta, "beta", ScalarType::Float);
  check_dtype(own, "own", ScalarType::Float);
  for (const auto& [x, name] : {std::pair(&A_inv, "A_inv"), std::pair(&A_qk, "A_qk")})
    check_dtype(*x, name, dtype);
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
  const auto output = [&](const Tensor& x, const char* name, Shape shape) {
    check_dtype(x, name, dtype);
    return written(x, name, device, shape);
  };
  w.h = output(h, "h", {chunks, HV, K, V});
  w.dh = output(dh, "dh", {chunks, HV, K, V});
  w.v_new = output(v_new, "v_new", {B, T, HV, V});
  w.dx = output(dx, "dx", {B, T, HV, V});
  const StateOutput to = state_output(dh0, "dh0", p, device, state_v_first);
  w.dh0 = to.data, w.dh0_n = to.n, w.dh0_h = to.h, w.dh0_k = to.k, w.dh0_v = to.v;
  const torch::stable::accelerator::DeviceGuard guard(device);
  const char* error = kernels_on(device).backward_walks(w, current_stream(device));
  STD_TORCH_CHECK(error == nullptr, "gdn_fast::backward_walks did not run: ", error);
}
}  // namespace

STABLE_TORCH_LIBRARY(gdn_fast, m) {
  const auto define = [&](const std::string& schema) { m.def(schema.c_str()); };
  const std::string call = kInputs + ", " + kOptions;
  define("why_unavailable() -> str");
  define("chunk_forward_workspace(" + kSizes + ") -> int");
  define("chunk_backward_workspace(" + kSizes + ", int checkpoint_interval) -> int");
  define("chunk_backward_checkpoint_interval(" + kSizes + ") -> int");
  define("chunk_forward(" + call +
         ", Tensor? initial_state, Tensor(a!) o, Tensor(b!)? final_state, Tensor(c!)? states, "
         "int checkpoint_interval, Tensor(d!) workspace) -> ()");
  // checkpoints may be `state`.
  define(
      "chunk_prefill(" + call +
      ", Tensor(a!) state, Tensor read_slots, Tensor write_slots, Tensor? has_initial_state, int "
      "last_skipped, "
      "Tensor(b!) o, int checkpoint_interval, Tensor(c!)? checkpoints, Tensor? checkpoint_slots, "
      "Tensor(d!) workspace) -> ()");
  define("chunk_backward(" + call +
         ", Tensor? initial_state, Tensor do, Tensor? dht, Tensor? states, int "
         "checkpoint_interval, Tensor(a!) dq, "
         "Tensor(b!) dk, Tensor(c!) dv, Tensor(d!) dg, Tensor(e!) dbeta, Tensor(f!)? dh0, "
         "Tensor(g!)? gate_sums, "
         "Tensor(h!) workspace) -> ()");
  define("part_segment(" + kSizes + ") -> int");
  define("part_starts(" + kSizes + ") -> int");
  define("part_forward_workspace(" + kSizes + ") -> int");
  define("part_backward_workspace(" + kSizes + ") -> int");
  define("part_forward_maps(" + call +
         ", Tensor? initial_state, Tensor(a!)? carry, bool comes, Tensor(b!) starts, "
         "Tensor(c!) workspace) -> ()");
  define("part_forward_walk(" + call +
         ", Tensor? initial_state, Tensor(a!) o, Tensor(b!)? final_state, Tensor(c!) starts, "
         "Tensor(d!) workspace) -> ()");
  define("part_backward(" + call +
         ", bool walks, Tensor? initial_state, Tensor do, Tensor? dht, Tensor(a!)? carry, "
         "Tensor(b!) dq, Tensor(c!) dk, Tensor(d!) dv, Tensor(e!) dg, Tensor(f!) dbeta, "
         "Tensor(g!)? dh0, Tensor(h!)? gate_sums, Tensor starts, Tensor(i!) workspace) -> ()");
  define(
      "backward_walks(Tensor q, Tensor k, Tensor v, Tensor do, Tensor A_inv, Tensor A_qk, Tensor "
      "g_cumsum, "
      "Tensor beta, Tensor own, Tensor? initial_state, Tensor? dht, Tensor? cu_seqlens, Tensor? "
      "chunk_offsets, "
      "float scale, bool state_v_first, Tensor(a!) h, Tensor(b!) v_new, Tensor(c!) dh, Tensor(d!) "
      "dx, "
      "Tensor(e!)? dh0) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(gdn_fast, CompositeExplicitAutograd, m) {
  m.impl("why_unavailable", TORCH_BOX(&why_unavailable));
  m.impl("chunk_forward_workspace", TORCH_BOX(&chunk_forward_workspace));
  m.impl("chunk_backward_workspace", TORCH_BOX(&chunk_backward_workspace));
  m.impl("chunk_backward_checkpoint_interval", TORCH_BOX(&chunk_backward_checkpoint_interval));
  m.impl("part_segment", TORCH_BOX(&part_segment));
  m.impl("part_starts", TORCH_BOX(&part_floats<&Architecture::part_starts>));
  m.impl("part_forward_workspace", TORCH_BOX(&part_floats<&Architecture::part_forward_workspace>));
  m.impl("part_backward_workspace",
         TORCH_BOX(&part_floats<&Architecture::part_backward_workspace>));
}
STABLE_TORCH_LIBRARY_IMPL(gdn_fast, CUDA, m) {
  m.impl("chunk_forward", TORCH_BOX(&chunk_forward));
  m.impl("chunk_prefill", TORCH_BOX(&chunk_prefill));
  m.impl("chunk_backward", TORCH_BOX(&chunk_backward));
  m.impl("backward_walks", TORCH_BOX(&backward_walks));
  m.impl("part_forward_maps", TORCH_BOX(&part_forward_maps));
  m.impl("part_forward_walk", TORCH_BOX(&part_forward_walk));
  m.impl("part_backward", TORCH_BOX(&part_backward));
}
// The same functions for CPU tensors, whose checks name the wrong tensor.
STABLE_TORCH_LIBRARY_IMPL(gdn_fast, CPU, m) {
  m.impl("chunk_forward", TORCH_BOX(&chunk_forward));
  m.impl("chunk_prefill", TORCH_BOX(&chunk_prefill));
  m.impl("chunk_backward", TORCH_BOX(&chunk_backward));
  m.impl("backward_walks", TORCH_BOX(&backward_walks));
  m.impl("part_forward_maps", TORCH_BOX(&part_forward_maps));
  m.impl("part_forward_walk", TORCH_BOX(&part_forward_walk));
  m.impl("part_backward", TORCH_BOX(&part_backward));
}
