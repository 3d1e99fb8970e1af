// The gates warp: makes the factors that the other roles use (frame.cuh) from a chunk's gates and
// betas.
#pragma once
#include "sm90/forward/walk.cuh"
#include "sm90/tile/frame.cuh"
#include "sm90/tile/gates.cuh"

namespace gdn::sm90 {

struct GateInputs {  // of tokens 2 lane and 2 lane + 1, as given
  uint32_t g[2], beta[2];
};

template <class C>
GDN_DEVICE GateInputs load_gates(const ChunkForward& p, const Walk<C>& walk, int lane) {
  const Tile& tile = walk.tile();
  const int row = walk.row + 2 * lane;
  const bool inside[2] = {row < tile.length, row + 1 < tile.length};
  const auto load = [&](uint32_t (&to)[2], const Rows& x, Dtype dtype) {
    int64_t at = tile.batch * x.batch + tile.hv * x.head;
    at += int64_t{tile.first + row} * x.row;
#pragma unroll
    for (int i = 0; i < 2; ++i, at += x.row) to[i] = inside[i] ? load_bits(x.data, at, dtype) : 0;
  };
  GateInputs x;
  load(x.g, p.g, p.g_dtype);
  load(x.beta, p.beta, p.beta_dtype);
  return x;
}

template <class C>
GDN_DEVICE void write_gates(GateVectors& out, float (&g)[2], const float (&beta)[2], float scale,
                            float& G, bool anew, int lane) {
  using T = typename C::T;
  using F = Frame<T>;
  // From a NaN on, or a growth beyond fp32's range, all results are NaN, and none before it.
  const uint32_t bad0 = __ballot_sync(~0u, !(g[0] < kGrowthLimit));
  const uint32_t bad1 = __ballot_sync(~0u, !(g[1] < kGrowthLimit));
  const uint32_t up_to_here = ~0u >> (31 - lane);
  const bool poisoned0 = (bad0 & up_to_here) || (bad1 & up_to_here >> 1);
  const bool poisoned1 = (bad0 | bad1) & up_to_here;
  if (poisoned0) g[0] = 0.f;
  if (poisoned1) g[1] = 0.f;
  // Inclusive sums over tokens.
  float sum = g[0] + g[1];
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const float below = __shfl_up_sync(~0u, sum, d);
    if (lane >= d) sum += below;
  }
  float before = __shfl_up_sync(~0u, sum, 1);
  if (lane == 0) before = 0.f;
  g[0] += before;
  g[1] = sum;
  const float last = __shfl_sync(~0u, sum, 31);

  const ChunkFrame chunk = chunk_frame<T>(G, last, anew);
  float c[2], r[2], f[2];
  int left[2], score[2];
  float lift[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const TokenFrame x = token_frame<T>(chunk, g[i]);
    c[i] = exp2_approx(-x.e);
    f[i] = exp2_approx(x.d);
    left[i] = int(-x.d);
    if constexpr (F::kLiftsOutput) {
      // P' u' comes first and is multiplied by 2^y. Where q S' comes first (K over 128), q S' is
      // multiplied by 2^d, and y is 0.
      r[i] = exp2_approx(C::kKeepsRounded ? x.e - x.y : x.e);
      lift[i] = exp2_approx(C::kKeepsRounded ? x.y : x.d);
      score[i] = int(x.d);
    } else {
      r[i] = exp2_approx(x.e - x.y);
      score[i] = int(x.y + x.d);
    }
  }
  G = chunk.next;
  if (poisoned0) r[0] = NAN;
  if (poisoned1) r[1] = NAN;
  if (bad0 | bad1) G = NAN;
  out.x[lane] = make_float4(beta[0] * c[0], beta[1] * c[1], beta[0] * f[0], beta[1] * f[1]);
  reinterpret_cast<float2*>(out.r)[lane] = make_float2(scale * r[0], scale * r[1]);
  reinterpret_cast<float2*>(out.beta)[lane] = make_float2(beta[0], beta[1]);
  reinterpret_cast<short2*>(out.left)[lane] = make_short2(short(left[0]), short(left[1]));
  reinterpret_cast<short2*>(out.score)[lane] = make_short2(short(score[0]), short(score[1]));
  if constexpr (F::kLiftsOutput)
    reinterpret_cast<float2*>(out.lift)[lane] = make_float2(lift[0], lift[1]);
  if (lane == 0) {
    out.pre = exp2_approx(chunk.enter);
    out.post = exp2_approx(chunk.D);
    out.end = exp2_approx(G);
    out.decay = int(chunk.D);
    out.steep = chunk.steep;
  }
}

template <class C>
GDN_DEVICE void gates_role(SharedMemory<C>& sm, const KernelParams& params) {
  using T = typename C::T;
  const ChunkForward& p = params.problem;
  const int lane = thread_of<C>() % 32;
  Walk<C> walk(sm, params);
  Ring<C::kGateStages> ring;
  float G = Frame<T>::kTop;
  bool more = walk.begin();
  GateInputs next;
  if (more) next = load_gates(p, walk, lane);
  while (more) {
    float g[2], beta[2];
    // Not unrolled where there are two states: the roles share a small instruction cache, and few
    // registers are left.
#pragma unroll(C::kStates)
    for (int i = 0; i < 2; ++i) {
      const bool inside = 2 * lane + i < walk.rows();
      const float g_given = to_float(i ? next.g[1] : next.g[0], p.g_dtype);
      const float beta_given = to_float(i ? next.beta[1] : next.beta[0], p.beta_dtype);
      const float g_i = inside ? log2_decay(p, g_given, walk.tile().hv) : 0.f;
      const float beta_i = inside ? activate_beta(p, beta_given) : 0.f;
      (i ? g[1] : g[0]) = g_i;
      (i ? beta[1] : beta[0]) = beta_i;
    }
    if (walk.row == 0) G = Frame<T>::kTop;
    const bool anew = C::kPass == Pass::kSegments && walk.row == walk.tile().frame_begins;
    more = walk.next_or_empty();
    const bool at_empty = more && walk.at_empty();
    if (more && !at_empty) next = load_gates(p, walk, lane);
    wait(sm.gates_empty[ring.stage], ring.phase ^ 1);
    write_gates<C>(sm.gates[ring.stage], g, beta, p.scale, G, anew, lane);
    arrive(sm.gates_full[ring.stage], true);
    ring.advance();
    if (at_empty) {
      more = walk.begin();
      if (more) next = load_gates(p, walk, lane);
    }
  }
}

}  // namespace gdn::sm90
