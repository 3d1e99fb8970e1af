// The launch of the chunked forward on Hopper: its scratch memory, and its kernels in their order.
// forward_plan.h plans a call, and dispatch.h has the contracts of these functions.
#include "common/tensor_map.h"
#include "sm90/entry.h"
#include "sm90/forward/config.cuh"
#include "sm90/forward/kernel_params.cuh"
#include "sm90/forward/run_heads.h"
#include "sm90/launch_blocks.h"
#include "sm90/plan/choose_cut.cuh"
#include "sm90/plan/forward_plan.h"
#include "sm90/plan/part_plan.h"
#include "sm90/tile/growth.cuh"
#include "sm90/tile/l2norm.cuh"

namespace gdn::sm90 {
namespace {
size_t normalized_bytes(const ChunkForward& p) { return size_t(p.B) * p.T * p.H * p.K * 2; }

const char* unsupported(const ChunkForward& p) {
  if (p.K < 8 || p.K > 256 || p.K % 8 != 0)
    return "the Hopper kernel needs K to be a multiple of 8, up to 256";
  if (p.V < 8 || p.V % 8 != 0) return "the Hopper kernel needs V to be a multiple of 8";
  if (p.dtype != Dtype::kBFloat16 && p.dtype != Dtype::kFloat16)
    return "the Hopper kernel needs q, k, v in bfloat16 or float16";
  if (p.T >= kTokenLimit) return "the Hopper kernel needs T below 2^30";
  return nullptr;
}

// Where q and k over their norms are in the workspace.
struct Normalized {
  uint4 *q, *k;
  explicit Normalized(const ChunkForward& p)
      : q(static_cast<uint4*>(p.workspace)), k(q + normalized_bytes(p) / sizeof(uint4)) {}
  Rows rows(const ChunkForward& p, const uint4* x) const {
    return {x, p.T * p.H * p.K, int64_t{p.H} * p.K, p.K};
  }
};

// Writes q and k over their norms to the workspace.
template <class T, class Heads>
const char* normalize(const ChunkForward& p, const Rows& q, const Rows& k, const Normalized& out,
                      cudaStream_t stream) {
  constexpr int kLanes = Heads::kKeys / 8;
  const int64_t rows = p.B * p.T * p.H;
  const dim3 grid(unsigned(ceil_div(rows * kLanes, kNormThreads)), 2);
  l2norm_kernel<T, kLanes, Heads::kExact>
      <<<grid, kNormThreads, 0, stream>>>(q, k, out.q, out.k, rows, p.T, p.H, p.K);
  return check(cudaGetLastError());
}

const char* make_maps(KernelParams& params, const Rows& q, const Rows& k, const Rows& o) {
  const ChunkForward& p = params.problem;
  if (const char* error = make_map(&params.q, p.dtype, q, p.B, p.T, p.H, p.K)) return error;
  if (const char* error = make_map(&params.k, p.dtype, k, p.B, p.T, p.H, p.K)) return error;
  if (const char* error = make_map(&params.v, p.dtype, p.v, p.B, p.T, p.HV, p.V)) return error;
  if (o.data == nullptr) return nullptr;
  return make_map(&params.o, p.dtype, o, p.B, p.T, p.HV, p.V);
}

// Elements of the maps, and of the states that segments start from.
template <class Heads>
size_t segment_floats(const ChunkForward& p, const ForwardPlan& plan, size_t rows) {
  return size_t(plan.later_segments) * p.HV * rows * Heads::kKeys;
}
template <class Heads>
size_t map_floats(const ChunkForward& p, const ForwardPlan& plan) {
  return segment_floats<Heads>(p, plan, state_rows(p.V) + map_rows(Heads::kKeys));
}
template <class Heads>
size_t start_floats(const ChunkForward& p, const ForwardPlan& plan) {
  return segment_floats<Heads>(p, plan, state_rows(p.V));
}

// Elements of SegmentBuffers::windows and ::marks.
size_t window_ints(const ChunkForward& p, const ForwardPlan& plan) {
  return plan.forgets ? size_t(plan.later_segments) * p.HV : 0;
}
size_t mark_ints(const ChunkForward& p, const ForwardPlan& plan) {
  return plan.forgets ? size_t(p.N) * p.HV * state_rows(p.V) / 64 : 0;
}

// Dealing::taken or SegmentBuffers::device_cut, padded to the alignment of the next array.
constexpr size_t kDealBytes = 256;
// SegmentBuffers::order.
size_t order_bytes(const ChunkForward& p) { return size_t(ceil_div(p.HV, 64)) * 256; }

__global__ void __launch_bounds__(32, 1) set_to_zero(int* taken) {
  launch_dependents();
  if (threadIdx.x == 0) *taken = 0;
}

// pool: null without one.
template <class T, class Heads>
const char* run(const ChunkForward& p, const Pool* pool, cudaStream_t stream) {
  KernelParams params = {};
  params.problem = p;
  if (pool) params.pool = *pool;
  Rows q = p.q, k = p.k;
  char* workspace = static_cast<char*>(p.workspace);
  if (p.use_qk_l2norm && p.B * p.T > 0) {
    const Normalized x(p);
    if (const char* error = normalize<T, Heads>(p, q, k, x, stream)) return error;
    q = x.rows(p, x.q), k = x.rows(p, x.k);
    workspace += 2 * normalized_bytes(p);
  }
  const Rows o = pool ? pool->o : Rows{p.o, p.T * p.HV * p.V, int64_t{p.HV} * p.V, p.V};
  if (p.B * p.T > 0)  // a tensor map of no elements is refused, and not needed
    if (const char* error = make_maps(params, q, k, o)) return error;
  const ForwardPlan plan = plan_of<Heads>(p);
  params.shape = plan.shape;
  params.dealing = deal<Heads>(p, plan, workspace);
  if (params.dealing.taken) {
    set_to_zero<<<1, 32, 0, stream>>>(params.dealing.taken);
    if (const char* error = check(cudaGetLastError())) return error;
    workspace += kDealBytes;
  }
  DeviceCut* choice = nullptr;
  int* order = nullptr;
  if (plan.cut_by_device) {
    choice = reinterpret_cast<DeviceCut*>(workspace);
    order = reinterpret_cast<int*>(workspace + kDealBytes);
    workspace += kDealBytes + order_bytes(p);
    const ChooseCutParams call = {p, cut_call<Heads>(p, plan), choice, order};
    choose_cut<<<1, kChoiceThreads, 0, stream>>>(call);
    if (const char* error = check(cudaGetLastError())) return error;
  }
  float* const maps = reinterpret_cast<float*>(workspace);
  float* const starts = maps + map_floats<Heads>(p, plan);
  int* const windows = reinterpret_cast<int*>(starts + start_floats<Heads>(p, plan));
  params.heads = Divisor::of(p.HV);
  params.group = Divisor::of(p.HV / p.H);
  params.segments = {plan.cuts,
                     choice,
                     order,
                     false,
                     SegmentGroup::kFirst,
                     maps,
                     starts,
                     plan.forgets ? windows : nullptr,
                     plan.forgets ? windows + window_ints(p, plan) : nullptr};
  return pool ? run_heads<T, Heads, true>(params, plan, stream)
              : run_heads<T, Heads, false>(params, plan, stream);
}

const char* run_supported(const ChunkForward& p, const Pool* pool, cudaStream_t stream) {
  if (const char* reason = unsupported(p)) return reason;
  if (p.HV == 0 || (p.N == 0 && p.T == 0)) return nullptr;
  return with_heads(p, [&](auto heads) {
    return p.dtype == Dtype::kBFloat16 ? run<__nv_bfloat16, decltype(heads)>(p, pool, stream)
                                       : run<__half, decltype(heads)>(p, pool, stream);
  });
}

// The parts of the workspace of a part of a sequence, after q and k over their norms.
struct PartBuffers {
  float *maps, *growth;
  int *windows, *marks;
  int64_t words;
};
template <class Heads>
PartBuffers part_buffers(const ChunkForward& p, const ForwardPlan& plan, void* at) {
  PartBuffers x = {};
  float* const first = static_cast<float*>(at);
  x.maps = first;
  x.growth = x.maps + map_floats<Heads>(p, plan);
  x.windows = reinterpret_cast<int*>(x.growth + growth_floats(p));
  x.marks = x.windows + window_ints(p, plan);
  x.words = reinterpret_cast<float*>(x.marks + mark_ints(p, plan)) - first;
  return x;
}

template <class T, class Heads>
const char* run_stage(const ChunkForward& p, const Part& part, PartStage stage,
                      cudaStream_t stream) {
  KernelParams params = {};
  params.problem = p;
  Rows q = p.q, k = p.k;
  char* workspace = static_cast<char*>(p.workspace);
  if (p.use_qk_l2norm) {
    const Normalized x(p);
    if (stage == PartStage::kMaps)
      if (const char* error = normalize<T, Heads>(p, q, k, x, stream)) return error;
    q = x.rows(p, x.q), k = x.rows(p, x.k);
    workspace += 2 * normalized_bytes(p);
  }
  const Rows o = {p.o, p.T * p.HV * p.V, int64_t{p.HV} * p.V, p.V};
  if (const char* error = make_maps(params, q, k, o)) return error;
  const ForwardPlan plan = part_plan_of<Heads>(p);
  const PartBuffers buffers = part_buffers<Heads>(p, plan, workspace);
  params.heads = Divisor::of(p.HV);
  params.group = Divisor::of(p.HV / p.H);
  params.segments.cuts = plan.cuts;
  params.segments.group = SegmentGroup::kFirst;
  params.segments.maps = buffers.maps;
  params.segments.starts = part.starts;
  params.segments.windows = plan.forgets ? buffers.windows : nullptr;
  params.segments.marks = plan.forgets ? buffers.marks : nullptr;
  params.part = {part.carry != nullptr, buffers.growth, part.carry, part.comes};
  if (plan.forgets && stage == PartStage::kMaps)
    if (const char* error = check(make_growth(p, buffers.growth, stream))) return error;
  return run_part<T, Heads>(params, plan, stage, stream);
}

const char* run_supported_part(const ChunkForward& p, const Part& part, PartStage stage,
                               cudaStream_t stream) {
  if (const char* reason = unsupported(p)) return reason;
  return with_heads(p, [&](auto heads) {
    return p.dtype == Dtype::kBFloat16
               ? run_stage<__nv_bfloat16, decltype(heads)>(p, part, stage, stream)
               : run_stage<__half, decltype(heads)>(p, part, stage, stream);
  });
}

}  // namespace

int part_segment(const ChunkForward& p) {
  return with_heads(
      p, [&](auto heads) { return part_plan_of<decltype(heads)>(p).cuts.choices[0].rest; });
}

size_t part_starts(const ChunkForward& p) {
  return with_heads(p, [&](auto heads) {
    using Heads = decltype(heads);
    return start_floats<Heads>(p, part_plan_of<Heads>(p)) * sizeof(float);
  });
}

size_t part_forward_workspace(const ChunkForward& p) {
  if (unsupported(p)) return 0;
  const int64_t words = with_heads(p, [&](auto heads) {
    using Heads = decltype(heads);
    return part_buffers<Heads>(p, part_plan_of<Heads>(p), nullptr).words;
  });
  return (p.use_qk_l2norm ? 2 * normalized_bytes(p) : 0) + size_t(words) * sizeof(float);
}

const char* part_forward_maps(const ChunkForward& p, const Part& part, cudaStream_t stream) {
  return run_supported_part(p, part, PartStage::kMaps, stream);
}

const char* part_forward_walk(const ChunkForward& p, const Part& part, cudaStream_t stream) {
  return run_supported_part(p, part, PartStage::kWalk, stream);
}

size_t chunk_forward_workspace(const ChunkForward& p) {
  if (unsupported(p)) return 0;
  const size_t of_plan = with_heads(p, [&](auto heads) {
    using Heads = decltype(heads);
    const ForwardPlan plan = plan_of<Heads>(p);
    const size_t words = map_floats<Heads>(p, plan) + start_floats<Heads>(p, plan) +
                         window_ints(p, plan) + mark_ints(p, plan);
    const size_t of_choice = plan.cut_by_device ? kDealBytes + order_bytes(p) : 0;
    return (are_taken<Heads>(p, plan) ? kDealBytes : of_choice) + words * sizeof(float);
  });
  return (p.use_qk_l2norm ? 2 * normalized_bytes(p) : 0) + of_plan;
}

const char* chunk_forward(const ChunkForward& p, cudaStream_t stream) {
  return run_supported(p, nullptr, stream);
}

const char* chunk_prefill(const ChunkForward& p, const Pool& pool, cudaStream_t stream) {
  return run_supported(p, &pool, stream);
}

}  // namespace gdn::sm90
