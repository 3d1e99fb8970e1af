// From a sequence's first chunk to its last: the state is made again, and with it the gradients of
// each chunk. A block has a sequence and slice. Two state warpgroups also make dk
// (walk_forward_states.cuh), a third warpgroup has the pairs of tokens and makes dq, and there are
// single warps (walk_forward_memory.cuh).
#include "sm90/backward/walk_forward_states.cuh"
#include "sm90/launch_blocks.h"

namespace gdn::sm90::backward {
namespace {
constexpr int kThreads = 512;
// The number of blocks of q k^T and k k^T that are loaded while the products that they are
// multiplied with run. With one, bf16 other than K = V = 128 would spill.
template <class Kind>
constexpr int kBlocksAhead = Kind::kExact || std::is_same_v<typename Kind::T, __half> ? 1 : 0;
constexpr int kSinglesRegisters = 40, kStateRegisters = 176, kPairRegisters = 120;
constexpr int kLaunchRegisters = launch_registers(kThreads, kStateRegisters);
static_assert(kSinglesRegisters + 2 * kStateRegisters + kPairRegisters <= 4 * kLaunchRegisters);

// Sums 16 columns over a warp's 16 rows; a lane has four columns of two rows, already added.
GDN_DEVICE void column_sums(const float (&a)[4], int lane, uint32_t to) {
  const bool high = lane & 16, middle = lane & 8;
  const float x = (high ? a[2] : a[0]) + __shfl_xor_sync(~0u, high ? a[0] : a[2], 16);
  const float y = (high ? a[3] : a[1]) + __shfl_xor_sync(~0u, high ? a[1] : a[3], 16);
  float z = (middle ? y : x) + __shfl_xor_sync(~0u, middle ? x : y, 8);
  z += __shfl_xor_sync(~0u, z, 4);
  if ((lane & 4) == 0) store_float(to + ((lane >> 4) * 8 + lane % 4 * 2 + (lane >> 3 & 1)) * 4, z);
}
// Sums two rows over four lanes; lane % 2 selects the sum that a lane gets.
GDN_DEVICE float row_pair_sum(float row0, float row1, int lane) {
  const bool odd = lane & 1;
  const float x = (odd ? row1 : row0) + __shfl_xor_sync(~0u, odd ? row0 : row1, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Issues x = a b^T over 128 channels: a and b have two tiles of 64 channels each.
template <class T>
GDN_DEVICE void issue_row_products(float (&x)[32], const Descriptor& a, const Descriptor& b) {
  set_ss_n64(T{}, x, a.at(0), b.at(0));
#pragma unroll
  for (int i = 1; i < 8; ++i) {
    const uint32_t at = i / 4 * kTileBytes + i % 4 * 32;
    add_ss_n64(T{}, x, a.at(at), b.at(at));
  }
}

// Makes row strip `warp` of lower k k^T of a chunk, rounded. The triangles were made from k k^T
// too, but storing and loading it takes longer than making it again.
template <class T>
GDN_DEVICE void make_key_pairs(WalkMemory& sm, uint32_t stage, int warp) {
  // Opaque to the compiler, which would otherwise keep addresses that depend on stage and warp in
  // registers until dq is made.
  asm volatile("" : "+r"(stage), "+r"(warp));
  const int lane = fresh_lane();
  float x[32];
  {
    const Descriptor k = k_major(shared_address(sm.k[stage]));
    wgmma_fence();
    issue_row_products<T>(x, k, k);
    wgmma_commit();
    wgmma_wait<0>();
    pin(x);
  }
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    if (b > warp) break;
    uint32_t r[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = 8 * b + 2 * i, column = i / 2 * 8 + lane % 4 * 2,
                row = lane / 4 + i % 2 * 8;  // of the block
      r[i] = pack(T{}, b < warp || column <= row ? x[at] : 0.f,
                  b < warp || column < row ? x[at + 1] : 0.f);
    }
    stmatrix_x4(shared_address(sm.kk[key_block(warp, b)]) + lane * 16, r);
  }
  __syncwarp();
}

// Makes dP and N of a chunk in their tiles, and the sums of M. With P = do u^T and D = dx u^T,
//     dP = scale 2^e P 2^(d_i - d_j)    N = -beta D 2^(d_i - d_j)    M = dP o q k^T + N o k k^T
// strictly below the diagonal; own is the diagonal of scale 2^e P. LateSums are completed later,
// when no other warpgroup waits: the sums of M's columns, and of the rows of M and of D o k k^T.
struct LateSums {
  float column[4][4];
  float m[2], l[2];
};
template <class Kind, bool kCluster>
GDN_DEVICE void make_pairs(WalkMemory& sm, uint32_t it, int warp, float& own0, float& own1,
                           LateSums& late) {
  using T = typename Kind::T;
  constexpr int kLoadedAhead = kBlocksAhead<Kind>;
  const uint32_t stage = it % 2;
  const int lane = fresh_lane();
  const bool lead = lane == 0;
  const Lines lines(lane);
  const int row0 = 16 * warp + lane / 4;
  const ChunkFactors& factors = sm.factors[stage];
  make_key_pairs<T>(sm, stage, warp);
  float P[32], D[32];
  own0 = own1 = 0;
  wait_for(sm.do_full[stage], it / 2);
  wait_for(sm.dx_full, it);
  wait_for(sm.u_full, it);
  {
    const Descriptor dO = k_major(shared_address(sm.dO[stage])),
                     dx = k_major(shared_address(sm.dx));
    const Descriptor u = k_major(shared_address(sm.u));
    wgmma_fence();
    issue_row_products<T>(P, dO, u);
    issue_row_products<T>(D, dx, u);
    wgmma_commit();
  }
  const float f0 = factors.read[row0], f1 = factors.read[row0 + 8];
  const float beta0 = factors.beta[row0] * of_dx<T>(factors, row0);
  const float beta1 = factors.beta[row0 + 8] * of_dx<T>(factors, row0 + 8);
  wait_for(sm.pairs_full, it);
  if constexpr (kCluster)  // q k^T is in shared memory: dq may now replace it in global memory
    arrive_there_if(address_in(shared_address(&sm.pairs_read[it % 2]), 0),
                    warp == 0 && lead && cluster_rank() == 1);
  uint32_t qk[4][4], kk[4][4];
  const auto load = [&](int b) {
    ldmatrix_x4(lines.block_at(shared_address(sm.qk), warp, b), qk[b]);
    ldmatrix_x4(shared_address(sm.kk[key_block(warp, min(b, warp))]) + lane * 16,
                kk[b]);  // blocks above the diagonal are masked
  };
#pragma unroll
  for (int b = 0; b < kLoadedAhead; ++b) load(b);
  wgmma_wait<0>();
  pin(P);
  pin(D);
  arrive(sm.u_empty, lead);
  arrive(sm.dx_empty, lead);
  if (factors.steep) {
    const int d0 = factors.power[row0], d1 = factors.power[row0 + 8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const short2 c = reinterpret_cast<const short2*>(factors.power)[4 * j + lane % 4];
      // Entries above the diagonal may overflow, and are masked later. The other exponents are
      // above 0 where tokens grow, or where equal sums are rounded to both sides of a whole number.
      const float x0 = power_of_two_float(min(d0 - c.x, kMostExponent)),
                  x1 = power_of_two_float(min(d0 - c.y, kMostExponent));
      const float x2 = power_of_two_float(min(d1 - c.x, kMostExponent)),
                  x3 = power_of_two_float(min(d1 - c.y, kMostExponent));
      P[4 * j] *= x0, P[4 * j + 1] *= x1, P[4 * j + 2] *= x2, P[4 * j + 3] *= x3;
      D[4 * j] *= x0, D[4 * j + 1] *= x1, D[4 * j + 2] *= x2, D[4 * j + 3] *= x3;
    }
  }
  float m0 = 0, m1 = 0, l0 = 0, l1 = 0;
#pragma unroll
  for (int b = 0; b < 4; ++b) {
    uint32_t n4[4], p4[4];
    float (&column)[4] = late.column[b];
    if (b + kLoadedAhead < 4) load(b + kLoadedAhead);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = 8 * b + 2 * i, j = 16 * b + i / 2 * 8 + lane % 4 * 2, row = row0 + i % 2 * 8;
      const float f = i % 2 ? f1 : f0, beta = i % 2 ? beta1 : beta0;
      const float p0 = f * P[at], p1 = f * P[at + 1];
      float& own = i % 2 ? own1 : own0;
      if (j == row) own = p0;
      if (j + 1 == row) own = p1;
      const bool below0 = j < row, below1 = j + 1 < row;
      p4[i] = pack(T{}, below0 ? p0 : 0.f, below1 ? p1 : 0.f);
      const float d0 = below0 ? D[at] : 0.f, d1 = below1 ? D[at + 1] : 0.f;
      n4[i] = pack(T{}, -beta * d0, -beta * d1);
      const float2 q2 = unpack(T{}, qk[b][i]), k2 = unpack(T{}, kk[b][i]), r = unpack(T{}, p4[i]);
      const float l = d0 * k2.x, h = d1 * k2.y;
      const float M0 = r.x * q2.x - beta * l, M1 = r.y * q2.y - beta * h;
      (i % 2 ? l1 : l0) += l + h;
      (i % 2 ? m1 : m0) += M0 + M1;
      if (i % 2 == 0) {
        column[i] = M0;
        column[i + 1] = M1;
      } else {
        column[i - 1] += M0;
        column[i] += M1;
      }
    }
    __syncwarp();
    stmatrix_x4(lines.block_at(shared_address(sm.qk), warp, b), p4);
    stmatrix_x4(lines.block_at(shared_address(sm.n), warp, b), n4);
  }
#pragma unroll
  for (int d = 1; d < 4; d *= 2) {
    own0 += __shfl_xor_sync(~0u, own0, d);
    own1 += __shfl_xor_sync(~0u, own1, d);
  }
  if (lane % 4 == 0) {
    store_float(shared_address(sm.own) + row0 * 4, own0);
    store_float(shared_address(sm.own) + row0 * 4 + 32, own1);
  }
  late.m[0] = m0, late.m[1] = m1, late.l[0] = l0, late.l[1] = l1;
}

GDN_DEVICE void end_sums(WalkMemory& sm, float* parts, int warp, const LateSums& late) {
  const int lane = fresh_lane(), row = 16 * warp + lane / 4 + lane % 2 * 8;
#pragma unroll
  for (int b = 0; b < 4; ++b)
    column_sums(late.column[b], lane, shared_address(sm.column[warp]) + 64 * b);
  const float m = row_pair_sum(late.m[0], late.m[1], lane),
              l = row_pair_sum(late.l[0], late.l[1], lane);
  if (lane % 4 < 2) {
    store_float(shared_address(sm.row) + row * 4, m);
    parts[kBetaPart * kChunk + row] = l;
  }
}

template <class Kind, bool kCluster>
GDN_DEVICE void pairs(WalkMemory& sm, const Params& params, int warp) {
  using T = typename Kind::T;
#pragma unroll 1
  for (uint32_t it = 0;; ++it) {
    const uint32_t stage = it % 2;
    wait_for(sm.k_full[stage], it / 2);
    const int block = sm.chunk[stage].block;
    if (block < 0) return;
    float* const parts = params.scratch.parts + int64_t{block} * (kParts * kChunk);
    float own0, own1;
    LateSums late;
    make_pairs<Kind, kCluster>(sm, it, warp, own0, own1, late);
    const int lane = fresh_lane();
    const bool lead = lane == 0;
    const Lines lines(lane);
    const int row0 = 16 * warp + lane / 4;
    fence_async_proxy();
    __syncwarp();
    arrive(sm.n_full, lead);
    named_barrier(1, 128);  // dP is in its tile, and the sums of the previous chunk have been read
    float acc[64];
    wait_for(sm.S_full, it);
    {
      const Descriptor dO = k_major(shared_address(sm.dO[stage])),
                       columns = mn_major(shared_address(sm.S));
      wgmma_fence();
      set_ss_n128_mn(T{}, acc, dO.at(0), columns.at(0));
#pragma unroll
      for (int i = 1; i < 8; ++i)
        add_ss_n128_mn(T{}, acc, dO.at(i / 4 * kTileBytes + i % 4 * 32),
                       columns.at(i / 4 * 2 * kTileBytes + i % 4 * 2048));
      wgmma_commit();
    }
    wait_for(sm.q_full,
             it);  // here: otherwise the compiler would place the sums between the products, which
                   // would wait for them
    end_sums(sm, parts, warp, late);
    wgmma_wait<0>();
    pin(acc);
    arrive(sm.S_empty, lead);
    {
      const float2 sums = row_sums<T, 8>(acc, shared_address(sm.q), lines, warp);
      arrive(sm.q_read, lane == lane_after(__float_as_uint(sums.x + sums.y)));
      const float a0 = sm.factors[stage].start[row0], a1 = sm.factors[stage].start[row0 + 8];
      if (lane % 4 == 0) {
        parts[kQueryPart * kChunk + row0] = a0 * sums.x;
        parts[kQueryPart * kChunk + row0 + 8] = a1 * sums.y;
      }
#pragma unroll
      for (int i = 0; i < 64; ++i) acc[i] *= i % 4 < 2 ? a0 : a1;
      const Descriptor dp = k_major(shared_address(sm.qk)),
                       columns = mn_major(shared_address(sm.k[stage]));
      pin(acc);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i) add_ss_n128_mn(T{}, acc, dp.at(i * 32), columns.at(i * 2048));
      wgmma_commit();
      wgmma_wait<0>();
      pin(acc);
    }
    named_barrier(1, 128);  // all of do has been read, and the sums are stored
    uint32_t vote = 0;
    if (warp == 0) {
      float sums = 0;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int t = lane + 32 * i;
        float m = sm.row[t];
#pragma unroll
        for (int j = 0; j < 4; ++j) m -= sm.column[j][t];
        parts[kPairsPart * kChunk + t] = m;
        sums += m;
      }
      vote = vote_on(__float_as_uint(sums));
    }
    // Once all warps have arrived, the sums of the next chunk overwrite these.
    arrive(sm.pairs_empty, lane == lane_of_vote(vote));
    store_gradient<T, 8>(acc, own0, own1, shared_address(sm.k[stage]), shared_address(sm.dO[stage]),
                         lines, warp);
    arrive(sm.dq_full[stage], lead);
    arrive(sm.k_empty[stage], lead);
  }
}

template <class Kind, Sums kSums, bool kCut>
__global__ void __launch_bounds__(kThreads, 1)
    walk_forward_kernel(const __grid_constant__ Params params) {
  static_assert(sizeof(WalkMemory) <= 232448, "shared memory of a block");
  constexpr bool kCluster = kSums == Sums::kCluster;
  extern __shared__ __align__(1024) uint8_t raw[];
  WalkMemory& sm = *reinterpret_cast<WalkMemory*>(raw);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), warpgroup = warp / 4;
  if (params.again != nullptr) {
    wait_for_prerequisites();
    if (*params.again == 0) return;
  }
  if (threadIdx.x == 0) init_barriers<typename Kind::T>(sm);
  __syncthreads();
  if constexpr (kCluster) cluster_sync();  // the other block has initialised its barriers
  if (warpgroup == 0) {
    set_registers<kSinglesRegisters, kLaunchRegisters>();
    if (warp == 0) {
      load_most<Kind, kCut>(sm, params);
    } else if (warp == 1) {
      load_and_store<Kind, 2, kSums>(sm, params, params.dO, sm.dO, sm.do_full, sm.dq_full,
                                     sm.aside[1], false, params.dq, sm.dq_there, sm.dq_taken);
    } else if (warp == 2) {
      load_and_store<Kind, 1, kSums>(sm, params, params.q, &sm.q, &sm.q_full, &sm.dk_full,
                                     sm.aside[2], true, params.dk, sm.dk_there, sm.dk_taken);
    } else {
      values<Kind>(sm, params);
    }
  } else if (warpgroup <= 2) {
    set_registers<kStateRegisters, kLaunchRegisters>();
    states<Kind, kCut>(sm, params, warpgroup - 1, warp % 4);
  } else {
    set_registers<kPairRegisters, kLaunchRegisters>();
    pairs<Kind, kCluster>(sm, params, warp % 4);
  }
  if constexpr (kCluster) {  // a block's barriers exist until the other block has arrived
    __syncwarp();
    cluster_sync();
  }
}
}  // namespace

template <class Kind>
const char* run_walk_forward(Params& params, cudaStream_t stream) {
  const ChunkForward& p = params.problem.forward;
  params.tiles = (params.segment > 0 ? params.segments : p.N) * params.slices;
  params.links = params.scratch.forward_links;
  const unsigned blocks =
      unsigned(params.tiles < p.multiprocessors ? params.tiles : p.multiprocessors);
  const auto launch = [&](auto* whole, auto* cut, int cluster) {
    constexpr int kBytes = sizeof(WalkMemory);
    return launch_blocks(params.maps.exist ? cut : whole, params, blocks / cluster * cluster,
                         kThreads, kBytes, cluster, params.maps.exist || params.again != nullptr,
                         stream);
  };
  constexpr bool kCut = kCuts<Kind>;
  if constexpr (Kind::kExact)
    if (params.sums == Sums::kCluster)
      return launch(&walk_forward_kernel<Kind, Sums::kCluster, false>,
                    &walk_forward_kernel<Kind, Sums::kCluster, kCut>, 2);
  if (params.sums == Sums::kNone)
    return launch(&walk_forward_kernel<Kind, Sums::kNone, false>,
                  &walk_forward_kernel<Kind, Sums::kNone, kCut>, 1);
  return launch(&walk_forward_kernel<Kind, Sums::kLater, false>,
                &walk_forward_kernel<Kind, Sums::kLater, kCut>, 1);
}

template const char* run_walk_forward<Kind<__nv_bfloat16, true>>(Params&, cudaStream_t);
template const char* run_walk_forward<Kind<__nv_bfloat16, false>>(Params&, cudaStream_t);
template const char* run_walk_forward<Kind<__half, false>>(Params&, cudaStream_t);

}  // namespace gdn::sm90::backward
