// dq and dk of two value heads of a key head, added by the two blocks that make them, a cluster. Each block owns 64
// channels of K: a single warp reads the other block's dq or dk of them in its tile, adds this block's own, and stores
// the sum. Both are rounded before, as head_sum_kernel has them, so that the sums have that kernel's bits.
//
// No warpgroup waits for the other block. A tile is loaded again when the other block has read its half of it: `taken`.
#pragma once
#include "sm90/backward/common.cuh"

namespace gdn::sm90::backward {

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
// At a barrier of another block. It says that this warp has read something, by instructions whose values have been used,
// and publishes no data: a release at cluster scope would be a MEMBAR of the whole GPU.
GDN_DEVICE void arrive_there_if(uint32_t bar, bool condition) {
  asm volatile(
      "{.reg .pred p;\n"
      "setp.ne.b32 p, %1, 0;\n"
      "@p mbarrier.arrive.shared::cluster.b64 _, [%0];}" ::"r"(bar),
      "r"(int{condition})
      : "memory");
}
// The same where the other block will read what this one has written.
GDN_DEVICE void publish_there_if(uint32_t bar, bool condition) {
  asm volatile(
      "{.reg .pred p;\n"
      "setp.ne.b32 p, %1, 0;\n"
      "@p mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];}" ::"r"(bar),
      "r"(int{condition})
      : "memory");
}
// For what the other block has published.
GDN_DEVICE void wait_for_there(const uint64_t& bar, uint32_t parity) {
  asm volatile(
      "{.reg .pred p;\n"
      "WAIT_%=: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n"
      "@!p bra WAIT_%=;}" ::"r"(shared_address(&bar)),
      "r"(parity & 1)
      : "memory");
}
GDN_DEVICE void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release;\n"
      "barrier.cluster.wait.acquire;" ::
          : "memory");
}
// 16 bytes of another block.
GDN_DEVICE void load_there_16(uint32_t from, uint32_t (&x)[4]) {
  asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(from)
               : "memory");
}

// The sum of this block's tile at `own` and of the other one's there, rounded, to rows of 128 channels `stride` rows
// apart, by a warp.
GDN_DEVICE void add_halves(uint32_t own, uint4* to, int stride, int rows, int lane) {
  using T = __nv_bfloat16;
  const int row4 = lane / 8, column = lane % 8;
  own += row4 * 128 + (column ^ row4) * 16;
  to += column + int64_t{row4} * stride * (kChannels / 8);
  // Rows that are left from this lane's first of 16 on.
#pragma unroll 1
  for (int left = min(rows, kChunk) - row4; left > 0; left -= 16) {
    const uint32_t other = address_in(own, cluster_rank() ^ 1);
    uint32_t x[4][4];
#pragma unroll
    for (int j = 0; j < 4; ++j) load_there_16((other ^ j % 2 * 64) + j * 512, x[j]);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t y[4];
      load_shared_16((own ^ j % 2 * 64) + j * 512, y);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 a = unpack(T{}, x[j][i]), b = unpack(T{}, y[i]);
        y[i] = pack(T{}, a.x + b.x, a.y + b.y);
      }
      if (4 * j < left) to[int64_t{4 * j} * stride * (kChannels / 8)] = make_uint4(y[0], y[1], y[2], y[3]);
    }
    own += 2048;
    to += int64_t{16} * stride * (kChannels / 8);
  }
}

}  // namespace gdn::sm90::backward
