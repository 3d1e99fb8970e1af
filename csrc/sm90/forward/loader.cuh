// The warps that load q, k and v by TMA.
#pragma once
#include "sm90/forward/walk.cuh"

namespace gdn::sm90 {

// One thread loads k and q, or v, or all of them. v has fewer stages: a thread that waits for one
// of them cannot load the tiles that the inverse warpgroups need next.
template <class C, bool kKeysQueries, bool kValues>
GDN_DEVICE void loader_role(SharedMemory<C>& sm, const KernelParams& params) {
  Walk<C, kKeysQueries ? Reader::kLoader : Reader::kLane> walk(sm, params);
  Ring<C::kKStages> k;
  Ring<C::kQStages> q;
  Ring<C::kVStages> v;
  const auto load_rows = [&](const CUtensorMap& map, auto& to, uint64_t& full, int column,
                             int head) {
    const uint32_t bar = shared_address(&full);
    mbarrier_expect(bar, sizeof(to));
    for (uint32_t i = 0; i < sizeof(to) / kTileBytes; ++i)
      tma_load(shared_address(to[i]), &map, bar, column + 64 * i, walk.tile().first + walk.row,
               head, walk.tile().batch);
  };
  for (bool more = walk.begin(); more; more = walk.next()) {
    const int hv = walk.tile().hv, h = params.group.divide(hv);
    if constexpr (kKeysQueries) {
      wait(sm.k_empty[k.stage], k.phase ^ 1);
      load_rows(params.k, sm.k[k.stage], sm.k_full[k.stage], 0, h);
      k.advance();
    }
    if constexpr (kValues) {
      wait(sm.v_empty[v.stage], v.phase ^ 1);
      load_rows(params.v, sm.v[v.stage], sm.v_full[v.stage], 64 * C::kStates * walk.tile().part,
                hv);
      v.advance();
    }
    if constexpr (kKeysQueries && C::kOutput) {
      wait(sm.q_empty[q.stage], q.phase ^ 1);
      load_rows(params.q, sm.q[q.stage], sm.q_full[q.stage], 0, h);
      q.advance();
    }
  }
}

}  // namespace gdn::sm90
