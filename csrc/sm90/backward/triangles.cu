// What a chunk's tokens have to do with each other, before any state is known: q k^T and k k^T of a key head, T of each
// of its value heads, and, where the chunk is steep, the decayed q k^T. A block has one chunk and key head.
#include "sm90/backward/common.cuh"
#include "sm90/triangles.cuh"

namespace gdn::sm90 {
namespace backward {
namespace {
constexpr int kThreads = 128;
// What Triangles has to know: one path for steep chunks and mild ones.
template <class Type>
struct Alone {
  using T = Type;
  static constexpr int kKeys = backward::kChannels, kStates = 1;
  static constexpr bool kTwoShapes = false;
};
}  // namespace
}  // namespace backward

template <class T>
struct SharedMemory<backward::Alone<T>> {
  union alignas(1024) {
    struct {
      uint8_t k[2][kTileBytes], q[2][kTileBytes];
    };
    struct {  // behind the products
      uint8_t a[1][kTileBytes], inverse[1][kTileBytes];  // as in the forward
      uint8_t t[kTileBytes], p[kTileBytes];
    };
  };
  uint8_t qk[kTileBytes], kk[kTileBytes];
  GateVectors gates;
  uint64_t full;
};

namespace backward {
namespace {
template <class T>
__global__ void __launch_bounds__(kThreads) triangles_kernel(const __grid_constant__ Params params) {
  using C = Alone<T>;
  extern __shared__ __align__(1024) uint8_t raw[];
  auto& sm = *reinterpret_cast<SharedMemory<C>*>(raw);
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
  // Blocks above the diagonal are read and never written.
  const auto clear = [&](uint8_t* from, uint32_t tiles) {
    for (uint32_t i = thread; i < tiles * kTileBytes / 16; i += kThreads)
      reinterpret_cast<uint4*>(from)[i] = make_uint4(0, 0, 0, 0);
  };
  clear(sm.qk, 2);
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
  const Triangles<C> own(sm, 1, thread % 32, warp);
  float kk[32] = {};
  {
    float qk[32] = {};
    const uint32_t k = shared_address(sm.k), q = shared_address(sm.q);
    own.issue_product(qk, q, k);
    own.issue_product(kk, k, k);
    wgmma_wait<0>();
    pin(qk);
    pin(kk);
    const auto store = [&](const uint8_t* tile, const float (&x)[32]) {
      own.store_strip(shared_address(tile), own.lower(0), [&](int b, int i) {
        return pack(T{}, x[8 * b + 2 * i], x[8 * b + 2 * i + 1]);
      });
    };
    store(sm.qk, qk);
    store(sm.kk, kk);
  }
  fence_async_proxy();
  __syncthreads();  // and the products have read k and q
  clear(sm.inverse[0], 3);
  if (thread == 0) {
    tma_store(&params.qk, shared_address(sm.qk), 0, 0, 0, slot * p.H + h);
    tma_store(&params.kk, shared_address(sm.kk), 0, 0, 0, slot * p.H + h);
    tma_store_commit();
  }

  const int group = p.HV / p.H;
#pragma unroll 1
  for (int i = 0; i < group; ++i) {
    const int64_t index = int64_t{slot} * p.HV + h * group + i;
    const Gates& gates = params.scratch.gates[index];
    if (thread < kChunk) {
      sm.gates.beta[thread] = gates.beta[thread];
      sm.gates.left[thread] = int16_t(-gates.power[thread]);
      sm.gates.score[thread] = gates.power[thread];
    }
    if (thread == 0) {
      sm.gates.steep = gates.steep;
      tma_store_wait_read();
    }
    __syncthreads();
    own.store_a(kk, sm.gates);
    const bool steep = sm.gates.steep;
    if (steep) {
      // From the rounded q k^T: the factors are powers of two.
      const uint32_t rows[2] = {biased_power<T>(sm.gates.score[warp * 16 + own.lane / 4]),
                                biased_power<T>(sm.gates.score[warp * 16 + own.lane / 4 + 8])};
#pragma unroll 1
      for (int b = 0; b <= warp; ++b) {
        uint32_t r[4];
        ldmatrix_x4(own.lines.block_at(shared_address(sm.qk), warp, b), r);
        const auto* left = reinterpret_cast<const uint32_t*>(sm.gates.left);
#pragma unroll
        for (int j = 0; j < 4; ++j)
          r[j] = multiply(T{}, r[j], power_of_two<T>(rows[j % 2], left[8 * b + 4 * (j / 2) + own.lane % 4]));
        own.keep_lower(r, own.lower(0), b == warp);
        stmatrix_x4(own.lines.block_at(shared_address(sm.p), warp, b), r);
      }
    }
    own.invert(shared_address(sm.t));
    fence_async_proxy();
    __syncthreads();
    if (thread == 0) {
      tma_store(&params.t, shared_address(sm.t), 0, 0, 0, int(index));
      if (steep) tma_store(&params.p, shared_address(sm.p), 0, 0, 0, int(index));
      tma_store_commit();
    }
  }
  if (thread == 0) tma_store_wait();
}
}  // namespace

const char* run_triangles(const Params& params, cudaStream_t stream) {
  using T = __nv_bfloat16;
  constexpr int kBytes = sizeof(SharedMemory<Alone<T>>);
  if (const char* error = check(cudaFuncSetAttribute(
          triangles_kernel<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes)))
    return error;
  const unsigned blocks = unsigned(int64_t{params.slots} * params.problem.forward.H);
  triangles_kernel<T><<<blocks, kThreads, kBytes, stream>>>(params);
  return check(cudaGetLastError());
}

}  // namespace backward
}  // namespace gdn::sm90
