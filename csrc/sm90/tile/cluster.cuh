// Barriers in the shared memory of another block of the cluster.
#pragma once
#include "common/ptx.cuh"

namespace gdn::sm90 {

GDN_DEVICE uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));  // volatile: read where it is used
  return rank;
}
// The address of the same place in the shared memory of the block with this rank.
GDN_DEVICE uint32_t address_in(uint32_t address, uint32_t rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
// Arrives at a barrier of another block. The arrival says that this warp has seen a phase of a
// barrier, and publishes no data: a release at cluster scope would be a MEMBAR of the whole GPU.
GDN_DEVICE void arrive_there_if(uint32_t bar, bool condition) {
  asm volatile(
      "{.reg .pred p;\n"
      "setp.ne.b32 p, %1, 0;\n"
      "@p mbarrier.arrive.shared::cluster.b64 _, [%0];}" ::"r"(bar),
      "r"(int{condition})
      : "memory");
}
// Arrives at a barrier of another block that reads data of this block after its wait.
GDN_DEVICE void publish_there_if(uint32_t bar, bool condition) {
  asm volatile(
      "{.reg .pred p;\n"
      "setp.ne.b32 p, %1, 0;\n"
      "@p mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];}" ::"r"(bar),
      "r"(int{condition})
      : "memory");
}
// Waits for data that another block has published.
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

}  // namespace gdn::sm90
