// dq and dk of two value heads of a key head, added by the two blocks that make them, a cluster. Each block owns 64
// channels of K: it gets the other's share of them in fp32, adds its own, rounds once and stores.
//
// A share is 64 tokens x 64 channels, 16 KB. The other block's threads write it into this block's S tile when all of
// this block's states and pairs have read that (`landing_free`, a barrier of the writer); this block's own share lies in
// the tile of do or q of the chunk, which nobody needs any more. A single warp adds the two and gives both tiles back, so
// no warpgroup waits for the other block's share, unless it is not there when the next chunk's S is. No load waits for
// it but those of the next q and the do after the next. A sum of two does not depend on their order.
#pragma once
#include "sm90/backward/common.cuh"

namespace gdn::sm90::backward {

constexpr int kShareBytes = 64 * 64 * sizeof(float);

GDN_DEVICE uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));  // read again where it is used
  return rank;
}
// The same place in the shared memory of the block with that rank.
GDN_DEVICE uint32_t address_in(uint32_t address, uint32_t rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
// 16 bytes to another block, counted at its barrier `bar`.
GDN_DEVICE void send_16(uint32_t to, float a, float b, float c, float d, uint32_t bar) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
      "f"(a), "f"(b), "f"(c), "f"(d), "r"(bar)
      : "memory");
}
// At a barrier of another block. It says that this warp has read something, by instructions whose values have been used,
// and publishes no data: a release at cluster scope would be a MEMBAR of the whole GPU, in every warp and chunk.
GDN_DEVICE void arrive_there_if(uint32_t bar, bool condition) {
  asm volatile(
      "{.reg .pred p;\n"
      "setp.ne.b32 p, %1, 0;\n"
      "@p mbarrier.arrive.shared::cluster.b64 _, [%0];}" ::"r"(bar),
      "r"(int{condition})
      : "memory");
}
GDN_DEVICE void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release;\n"
      "barrier.cluster.wait.acquire;" ::
          : "memory");
}
GDN_DEVICE void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
GDN_DEVICE void store_float4(uint32_t to, float a, float b, float c, float d) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
GDN_DEVICE float4 load_float4(uint32_t from) {
  float4 x;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
               : "r"(from)
               : "memory");
  return x;
}

// In a share, the 16 bytes of a thread of the warpgroup that holds the sums: those of eight channels, two rows and two
// channels each; those of the next eight channels are 2048 bytes further on. Neither the threads that write them nor
// the lanes that add them meet in a bank.
GDN_DEVICE uint32_t share_line(int warp, int lane) {
  return warp * 512 + lane / 4 * 64 + ((lane % 4 ^ lane / 8) * 16);
}

// The sum of two shares, rounded, to rows of 128 channels `stride` rows apart, by a warp.
GDN_DEVICE void add_shares(uint32_t own, uint32_t other, uint4* to, int stride, int rows, int lane) {
  const int row8 = lane % 8, columns = lane / 8;
  const uint32_t at = columns * 2048 + row8 * 64, turned = row8 / 2 * 16;
  own += at;
  other += at;
  to += columns + int64_t{row8} * stride * (kChannels / 8);
#pragma unroll 1
  for (int i = 0; i < 8; ++i) {  // 16 rows, 32 channels each
    const uint32_t part = i / 2 * 512 + i % 2 * 8192;
    uint32_t low[4], high[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float4 x = load_float4(own + part + (j * 16 ^ turned)), y = load_float4(other + part + (j * 16 ^ turned));
      low[j] = pack(__nv_bfloat16{}, x.x + y.x, x.y + y.y);
      high[j] = pack(__nv_bfloat16{}, x.z + y.z, x.w + y.w);
    }
    const int row = i / 2 * 16 + row8;
    uint4* const line = to + i % 2 * 4 + int64_t{i / 2 * 16} * stride * (kChannels / 8);
    if (row < rows) *line = make_uint4(low[0], low[1], low[2], low[3]);
    if (row + 8 < rows) line[int64_t{8} * stride * (kChannels / 8)] = make_uint4(high[0], high[1], high[2], high[3]);
  }
}

}  // namespace gdn::sm90::backward
