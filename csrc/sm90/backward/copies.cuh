// Copies between global and shared memory, and the wait for triangles that another kernel makes.
#pragma once
#include "sm90/backward/layout.cuh"

namespace gdn::sm90::backward {

// Waits for the triangles of a key head's chunk `chunk_index`, and returns how many of `count`
// chunks from there on, in steps of `step`, have their triangles without a gap. All lanes of a warp
// call it: loads of 32 words take as long as a load of one word, which with the fence takes as long
// as a chunk of the walk.
GDN_DEVICE int wait_for_triangles(const Params& params, int chunk_index, int step, int count,
                                  int h) {
  const int* const ready = params.scratch.triangles_ready;
  if (ready == nullptr) return count;
  const int lane = threadIdx.x % 32;
  uint32_t there;
  do {
    const int* const of_chunk = ready + (chunk_index + lane * step) * params.problem.forward.H + h;
    there = __ballot_sync(~0u, lane >= count || load_published(of_chunk) != 0);
  } while ((there & 1) == 0);
  fence_async_proxy_of_all();
  return there == ~0u ? 32 : __ffs(int(~there)) - 1;
}

GDN_DEVICE void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(bar)
      : "memory");
}

// Copies bytes from shared to global memory, unchanged.
GDN_DEVICE void bulk_store(void* to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
}

// As bulk_load, to the same place in every block of the cluster whose bit is set in `blocks`; it
// signals the same barrier in each.
GDN_DEVICE void bulk_load_to(uint32_t blocks, uint32_t to, const void* from, uint32_t bytes,
                             uint32_t bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(bar), "h"(uint16_t(blocks))
      : "memory");
}

// Loads kTiles * 64 columns of a chunk's rows, by a whole warp; also() issues the loads of `bytes`
// more bytes. Rows past the sequence's end belong to others, and may be NaN: they are zeroed before
// `full` is signalled. Only this warp waits for such a load, at a separate barrier, `aside`.
template <int kTiles, class Also>
GDN_DEVICE void load_rows(const CUtensorMap& map, uint8_t (*to)[kTileBytes], uint64_t& full,
                          uint64_t& aside, uint32_t& aside_phase, int column, int row, int head,
                          int batch, int rows, int bytes, const Also& also) {
  const bool lead = threadIdx.x % 32 == 0, whole = rows >= kChunk;
  const uint32_t bar = shared_address(whole ? &full : &aside);
  if (lead) {
    mbarrier_expect(bar, kTiles * kTileBytes + bytes);
    for (int i = 0; i < kTiles; ++i)
      tma_load(shared_address(to[i]), &map, bar, column + 64 * i, row, head, batch);
    also(bar);
  }
  __syncwarp();
  if (whole) {
    if constexpr (kWarpArrivals == 32)
      mbarrier_arrive_if(bar, !lead);  // the first lane has arrived by mbarrier_expect
    return;
  }
  mbarrier_wait(bar, aside_phase);
  aside_phase ^= 1;
#pragma unroll 1
  for (int i = 0; i < kTiles; ++i)
#pragma unroll 1
    for (int line = rows * 8 + threadIdx.x % 32; line < kChunk * 8; line += 32)
      reinterpret_cast<uint4*>(to[i])[line] = make_uint4(0, 0, 0, 0);
  fence_async_proxy();
  __syncwarp();
  arrive(full, lead);
}
struct Nothing {
  GDN_DEVICE void operator()(uint32_t) const {}
};

}  // namespace gdn::sm90::backward
