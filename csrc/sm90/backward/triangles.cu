// What a chunk's tokens have to do with each other, before any state is known: q k^T and k k^T of a key head, T of each
// of its value heads, and, where the chunk is steep, the decayed q k^T. A block has one chunk and key head.
#include "sm90/backward/chunk_triangles.cuh"
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
    struct {  // behind the products
      SharedMemory<Alone<T>> scratch;
      uint8_t t[kTileBytes], p[kTileBytes];
    };
  };
  uint8_t qk[kTileBytes], kk[kTileBytes];
  GateVectors gates;
  uint64_t full;
};

template <class Kind>
__global__ void __launch_bounds__(kThreads) triangles_kernel(const __grid_constant__ Params params) {
  using T = typename Kind::T;
  using C = Alone<T>;
  extern __shared__ __align__(1024) uint8_t raw[];
  auto& sm = *reinterpret_cast<Memory<T>*>(raw);
  // deal_kernel, beside which this kernel runs, has waited for all that is read here. What comes next waits for this
  // kernel only, and so the last block waits for deal_kernel.
  if (!are_dealt(params) || blockIdx.x + 1 == gridDim.x) wait_for_prerequisites();
  if (makes_triangles_walking(params) && !walks_back_over_halves(params)) return;
  const ChunkForward& p = params.problem.forward;
  const int slot = blockIdx.x / p.H, h = blockIdx.x % p.H, thread = threadIdx.x;
  const Place place = place_of(params, slot);
  if (place.rows <= 0) return;
  if (thread == 0) {
    mbarrier_init(&sm.full, 1);
    mbarrier_init_fence();
    const uint32_t bar = shared_address(&sm.full);
    mbarrier_expect(bar, 4 * kTileBytes);
    for (int i = 0; i < 2; ++i) {
      tma_load(shared_address(sm.k[i]), &params.k, bar, 64 * i, place.first, h, place.batch);
      tma_load(shared_address(sm.q[i]), &params.q, bar, 64 * i, place.first, h, place.batch);
    }
  }
  clear_tiles(sm.qk, 2, thread);
  __syncthreads();
  wait_for(sm.full, 0);
  if (place.rows < kChunk) {  // of the next sequence, perhaps NaN
    for (int i = 0; i < 2; ++i) {
      clear_rows<C>(sm.k[i], place.rows);
      clear_rows<C>(sm.q[i], place.rows);
    }
  }
  fence_async_proxy();
  __syncthreads();

  const int warp = __shfl_sync(~0u, thread / 32, 0);
  const Triangles<C> own(sm.scratch, 1, thread % 32, warp);
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
    store_lower(own, kk, sm.kk);
  }
  fence_async_proxy();
  __syncthreads();  // and the products have read k and q
  clear_tiles(sm.scratch.inverse[0], 3, thread);
  if (thread == 0) {
    const auto at = [&](Pairs which) {
      return pairs_at<Kind>(params, which, slot, h, place.n, place.batch, place.first, place.rows);
    };
    tma_store(at(Pairs::kQueries), shared_address(sm.qk));
    tma_store(at(Pairs::kKeys), shared_address(sm.kk));
    tma_store_commit();
  }

  const int group = p.HV / p.H;
#pragma unroll 1
  for (int i = 0; i < group; ++i) {
    const int64_t index = int64_t{slot} * p.HV + h * group + i;
    const Gates& gates = params.scratch.gates[index];
    copy_factors(sm.gates, gates, thread);
    if (thread == 0) {
      sm.gates.steep = gates.steep;
      tma_store_wait_read();
    }
    __syncthreads();
    own.store_a(kk, sm.gates);
    const bool steep = sm.gates.steep;
    if (steep) decay_pairs(own, sm.gates, sm.qk, sm.p);
    own.invert(shared_address(sm.t));
    fence_async_proxy();
    __syncthreads();
    if (thread == 0) {
      tma_store(&params.t, shared_address(sm.t), 0, 0, 0, int(index));
      const int parts = Kind::kExact ? 1 : params.parts;
      if (steep)
        for (int half = 0; half < 2 * parts; ++half)
          tma_store(&params.ds, shared_address(sm.p), 0, 64 * (half % 2), 0, int(index) * parts + half / 2);
      tma_store_commit();
    }
  }
  if (thread == 0) tma_store_wait();
}
}  // namespace

template <class Kind>
const char* run_triangles(const Params& params, cudaStream_t stream) {
  const int64_t blocks = int64_t{params.slots} * params.problem.forward.H;
  constexpr int kBytes = sizeof(Memory<typename Kind::T>);
  return launch_blocks(&triangles_kernel<Kind>, params, blocks, kThreads, kBytes, 1, true, stream);
}

template const char* run_triangles<Kind<__nv_bfloat16, true>>(const Params&, cudaStream_t);
template const char* run_triangles<Kind<__nv_bfloat16, false>>(const Params&, cudaStream_t);
template const char* run_triangles<Kind<__half, false>>(const Params&, cudaStream_t);

}  // namespace gdn::sm90::backward
