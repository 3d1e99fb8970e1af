// The triangles of all chunks, which need no state: q k^T of a key head, T of each of its value
// heads, and the decayed q k^T of a steep chunk.
#include "sm90/backward/chunk_triangles.cuh"
#include "sm90/backward/copies.cuh"
#include "sm90/launch_blocks.h"

namespace gdn::sm90::backward {
namespace {
constexpr int kThreads = 128;

template <class T>
struct Memory {
  union alignas(1024) {
    struct {
      uint8_t k[2][kTileBytes], q[2][kTileBytes];
    };
    struct {  // after the products
      InverseScratch scratch;
      uint8_t t[kTileBytes], p[kTileBytes];
    };
  };
  uint8_t qk[kTileBytes];
  GateVectors factors;
  uint64_t full;
};

// Makes and stores the triangles of a chunk and key head. 128 threads call it with their named
// barrier `barrier`; they wait for phase `phase` of sm.full.
template <class Kind>
GDN_DEVICE void make_chunk(Memory<typename Kind::T>& sm, const Params& params, const Place& place,
                           int chunk_index, int h, int thread, int barrier, uint32_t phase) {
  using T = typename Kind::T;
  using C = Alone<T>;
  const ChunkForward& p = params.problem.forward;
  const auto sync = [&] { named_barrier(barrier, kThreads); };
  if (thread == 0) {
    const uint32_t bar = shared_address(&sm.full);
    mbarrier_expect(bar, 4 * kTileBytes);
    for (int i = 0; i < 2; ++i) {
      tma_load(shared_address(sm.k[i]), &params.k, bar, 64 * i, place.first, h, place.batch);
      tma_load(shared_address(sm.q[i]), &params.q, bar, 64 * i, place.first, h, place.batch);
    }
  }
  clear_tiles(sm.qk, 1, thread);
  wait_for(sm.full, phase);
  if (place.rows < kChunk) {  // the other rows belong to the next sequence, and may be NaN
    for (int i = 0; i < 2; ++i) {
      clear_rows<C>(sm.k[i], place.rows);
      clear_rows<C>(sm.q[i], place.rows);
    }
  }
  fence_async_proxy();
  sync();

  const int warp = __shfl_sync(~0u, thread / 32, 0);
  const Triangles<C> own(barrier, thread % 32, warp, sm.scratch.a, sm.scratch.inverse);
  float kk[32] = {};
  {
    float qk[32] = {};
    const uint32_t k = shared_address(sm.k), q = shared_address(sm.q);
    own.issue_product(qk, q, k);
    own.issue_product(kk, k, k);
    wgmma_wait<0>();
    pin(qk);
    pin(kk);
    store_lower(own, qk, sm.qk);
  }
  fence_async_proxy();
  sync();  // and the products have read k and q
  clear_tiles(sm.scratch.inverse, 3, thread);
  if (thread == 0) {
    tma_store(pairs_at<Kind>(params, chunk_index, h, place.n, place.batch, place.first, place.rows),
              shared_address(sm.qk));
    tma_store_commit();
  }

  const int group = p.HV / p.H;
#pragma unroll 1
  for (int i = 0; i < group; ++i) {
    const int64_t index = int64_t{chunk_index} * p.HV + h * group + i;
    const ChunkFactors& factors = params.scratch.factors[index];
    copy_factors(sm.factors, factors, thread);
    if (thread == 0) {
      sm.factors.steep = factors.steep;
      tma_store_wait_read();
    }
    sync();
    own.store_a(kk, sm.factors);
    const bool steep = sm.factors.steep;
    if (steep) decay_pairs(own, sm.factors, sm.qk, sm.p);
    own.invert(shared_address(sm.t));
    fence_async_proxy();
    sync();
    if (thread == 0) {
      bulk_store(t_at(params, int(index)), shared_address(sm.t), kTileBytes);
      const int parts = Kind::kExact ? 1 : params.parts;
      if (steep)
        for (int half = 0; half < 2 * parts; ++half)
          bulk_store(ds_at(params, int(index) * parts + half / 2, half % 2), shared_address(sm.p),
                     kTileBytes);
      tma_store_commit();
    }
  }
  if (thread == 0) tma_store_wait();
}

template <class T>
GDN_DEVICE void init(Memory<T>& sm) {
  mbarrier_init(&sm.full, 1);
  mbarrier_init_fence();
}

template <class Kind>
__global__ void __launch_bounds__(kThreads)
    triangles_kernel(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) uint8_t raw[];
  auto& sm = *reinterpret_cast<Memory<typename Kind::T>*>(raw);
  // deal_kernel, with which this kernel overlaps, has waited for all that is read here. The next
  // kernel waits for this one only, and the last block therefore waits for deal_kernel.
  if (!are_dealt(params) || blockIdx.x + 1 == gridDim.x) wait_for_prerequisites();
  if (makes_triangles_walking(params) && !walks_back_over_halves(params)) return;
  const int H = params.problem.forward.H, chunk_index = blockIdx.x / H, h = blockIdx.x % H,
            thread = threadIdx.x;
  const Place place = place_of(params, chunk_index);
  if (place.rows <= 0) return;
  if (thread == 0) init(sm);
  __syncthreads();
  make_chunk<Kind>(sm, params, place, chunk_index, h, thread, 1, 0);
}

// Makes the triangles while the walk back runs, on the multiprocessors that the walk back leaves
// idle. A block of this kernel has the shared memory of a whole multiprocessor, and is launched
// before the blocks of the walk back, which wait for the triangles of each chunk
// (Scratch::triangles_ready). The teams of a block take chunks in the order in which the walk back
// needs them, or from both ends of a sequence in turn where the walk of the state runs as well.
constexpr int kTeams = 4;
template <class Kind>
__global__ void __launch_bounds__(kTeams* kThreads, 1)
    overlapping_triangles_kernel(const __grid_constant__ Params params) {
  using T = typename Kind::T;
  static_assert(kTeams * sizeof(Memory<T>) <= 232448, "shared memory of a block");
  extern __shared__ __align__(1024) uint8_t raw[];
  const int team = __shfl_sync(~0u, threadIdx.x / kThreads, 0), thread = threadIdx.x % kThreads,
            barrier = 1 + team;
  auto& sm = reinterpret_cast<Memory<T>*>(raw)[team];
  const bool last = blockIdx.x + 1 == gridDim.x;
  if (!are_dealt(params)) wait_for_prerequisites();  // else as in triangles_kernel
  launch_dependents();
  if (thread == 0) init(sm);
  __syncthreads();
  const ChunkForward& p = params.problem.forward;
  const bool both_ends = params.segment > 0 && !has_states(params);
  const int rounds = int((p.T + kChunk - 1) / kChunk), jobs = rounds * p.N * p.H;
  uint32_t phase = 0;
#pragma unroll 1
  for (int job = blockIdx.x * kTeams + team; job < jobs; job += gridDim.x * kTeams) {
    const int h = job % p.H, n = job / p.H % p.N, round = job / (p.H * p.N),
              length = sequence_length(p, n);
    const int chunks = length > 0 ? (length + kChunk - 1) / kChunk : 0;
    if (round >= chunks) continue;
    const int from_end = both_ends ? round / 2 : round;
    const int c = both_ends && round % 2 ? round / 2 : chunks - 1 - from_end;
    const int chunk_index = first_chunk(params, n) + c, before = c * kChunk;
    const Place place = {n, p.cu_seqlens ? 0 : n,
                         (p.cu_seqlens ? int(sequence_bound(p, n)) : 0) + before, length - before};
    make_chunk<Kind>(sm, params, place, chunk_index, h, thread, barrier, phase++);
    if (thread == 0) publish(params.scratch.triangles_ready + chunk_index * p.H + h, 1);
    named_barrier(barrier, kThreads);  // the tiles that the next chunk overwrites have been stored
  }
  if (last && are_dealt(params)) wait_for_prerequisites();
}
}  // namespace

template <class Kind>
const char* run_triangles(const Params& params, cudaStream_t stream) {
  const int64_t blocks = int64_t{params.chunks} * params.problem.forward.H;
  constexpr int kBytes = sizeof(Memory<typename Kind::T>);
  if (params.triangle_blocks > 0)
    return launch_blocks(&overlapping_triangles_kernel<Kind>, params, params.triangle_blocks,
                         kTeams * kThreads, kTeams * kBytes, 1, true, stream);
  return launch_blocks(&triangles_kernel<Kind>, params, blocks, kThreads, kBytes, 1, true, stream);
}

template const char* run_triangles<Kind<__nv_bfloat16, true>>(const Params&, cudaStream_t);
template const char* run_triangles<Kind<__nv_bfloat16, false>>(const Params&, cudaStream_t);
template const char* run_triangles<Kind<__half, false>>(const Params&, cudaStream_t);

}  // namespace gdn::sm90::backward
