// The inverse warpgroups: T of every chunk, and P where the state warpgroups do not make it.
#pragma once
#include "sm90/forward/walk.cuh"
#include "sm90/tile/triangles.cuh"

namespace gdn::sm90 {

// Zeroes the rows of a chunk's k that belong to the next sequence: a NaN in them would survive a
// product with 0. The rows of v are zeroed where v is read (state.cuh), and the rows of q only
// reach rows of o that are not stored.
template <class C>
GDN_DEVICE void clear_tail(SharedMemory<C>& sm, const Triangles<C>& own, int rows, int k_stage) {
#pragma unroll 1
  for (int tile = 0; tile < C::kKeyTiles; ++tile) clear_rows<C>(sm.k[k_stage][tile], rows);
  fence_async_proxy();
  own.barrier();
}

template <class C>
GDN_DEVICE void inverse_role(SharedMemory<C>& sm, const KernelParams& params, int warpgroup,
                             int warp) {
  const bool lead = thread_of<C>() % 32 == 0;
  Walk<C> walk(sm, params);
  uint32_t it = 0;  // chunks so far, of all inverse warpgroups
  Ring<C::kQStages> q;
  float kk[32];

  // Goes to this warpgroup's next chunk, if there is one.
  const auto next = [&] {
    bool more = true;
#pragma unroll 1
    for (int i = 0; i < C::kInverses && more; ++i) {
      more = walk.next();
      ++it;
      q.advance();
    }
    return more;
  };
  // Issues k k^T of chunk `it`. If there is no such chunk, the product reads the stage of chunk
  // `otherwise`, to which the loader must not be writing, and the result is unused. With a branch
  // around the product the compiler may wait for the product at once.
  const auto begin_chunk = [&](const Triangles<C>& own, bool exists, uint32_t otherwise) {
    if (exists) {
      wait(sm.k_full[it % C::kKStages], it / C::kKStages & 1);
      if (walk.rows() < kChunk) clear_tail(sm, own, walk.rows(), it % C::kKStages);
    }
    const uint32_t tile = shared_address(sm.k[(exists ? it : otherwise) % C::kKStages]);
    own.issue_product(kk, tile, tile);
  };
  const auto finish_kk = [&] {
    wgmma_wait<0>();
    pin(kk);
  };
  const auto here = [&] {
    return Triangles<C>(kInverseBarrier + warpgroup, fresh_lane(), warp, sm.a[warpgroup],
                        sm.inverse[warpgroup]);
  };

  bool more = walk.begin();
  for (int i = 0; i < warpgroup && more; ++i) {
    more = walk.next();
    ++it;
    q.advance();
  }
  begin_chunk(here(), more, it);
  finish_kk();
#pragma unroll 1
  while (more) {
    const Triangles<C> own = here();
    const uint32_t now = it, q_now = q.stage, t = now % kTStages, p = now % kPStages;
    const GateVectors& gates = sm.gates[now % C::kGateStages];
    bool at_empty = false;  // a tile without a chunk
    float qk[32];
    wait(sm.gates_full[now % C::kGateStages], now / C::kGateStages & 1);
    own.barrier();  // the previous chunk's scratch has been read
    own.store_a(kk, gates);
    if constexpr (C::kInversesMakeP) {  // after A is stored: the state waits for T
      wait(sm.q_full[q_now], q.phase);
      own.issue_product(qk, shared_address(sm.q[q_now]), shared_address(sm.k[now % C::kKStages]));
    } else {
      static_assert(C::kInverses == 1);
      more = walk.next_or_empty();
      ++it;
      q.advance();
      at_empty = more && walk.at_empty();
      // Past an empty tile the loader already loads the next tile's k into the stage of chunk `it`.
      begin_chunk(own, more && !at_empty, now);
    }
    wait(sm.t_empty[t], now / kTStages & 1 ^ 1);
    own.invert(shared_address(sm.t[t]));
    fence_async_proxy();
    __syncwarp();
    arrive(sm.t_full[t], lead);

    if constexpr (C::kInversesMakeP) {
      wgmma_wait<0>();
      pin(qk);
      arrive(sm.k_empty[now % C::kKStages], lead);
      wait(sm.p_empty[p], now / kPStages & 1 ^ 1);
      own.finish_p(qk, sm.p[p], gates);
      arrive(sm.p_full[p], lead);
      arrive(sm.q_empty[q_now], lead);
      more = next();
      begin_chunk(own, more, it);
    }
    arrive(sm.gates_empty[now % C::kGateStages], lead);
    finish_kk();
    if constexpr (!C::kInversesMakeP) {
      // The stage of this k is returned only here, because the product may have read it in place
      // of a chunk that does not exist. The state warpgroups return the same stage even later,
      // because they wait for T first.
      arrive(sm.k_empty[now % C::kKStages], lead);
      if (at_empty) {
        more = walk.begin();
        begin_chunk(here(), more, it);
        finish_kk();
      }
    }
  }
}

}  // namespace gdn::sm90
