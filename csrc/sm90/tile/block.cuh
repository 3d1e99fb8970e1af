// Definitions that the kernels of both directions share: the size of a tile, the thread of a block,
// barriers, and division by numbers that the host knows.
#pragma once
#include "common/ptx.cuh"

namespace gdn::sm90 {

constexpr int kTileBytes = 64 * 64 * 2;  // one swizzled tile of 64 rows x 64 16-bit values
constexpr int kSharedBytes = 232448;     // shared memory that a block may have

// A kernel with blocks of two shapes reads threadIdx.x where the index is used: a single read for
// both shapes would be live in the whole kernel, and would spill. In kernels of one shape ptxas
// rereads it by itself.
template <class C>
GDN_DEVICE uint32_t thread_of() {
  if constexpr (C::kTwoShapes) {
    return thread_index();
  } else {
    return threadIdx.x;
  }
}

// Reads the lane again: the compiler would otherwise keep every address of a loop that depends on
// the lane in a register.
GDN_DEVICE int fresh_lane() {
  uint32_t lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane)::"memory");
  return lane;
}

// With GDN_EVERY_LANE each lane of a warp arrives, which racecheck can follow: racecheck does not
// see that a __syncwarp orders the accesses of all lanes before the arrival of one lane.
#ifdef GDN_EVERY_LANE
constexpr int kWarpArrivals = 32;
#else
constexpr int kWarpArrivals = 1;
#endif
GDN_DEVICE void arrive(const uint64_t& bar, bool condition) {
  mbarrier_arrive_if(shared_address(&bar), kWarpArrivals == 32 || condition);
}
GDN_DEVICE void wait(const uint64_t& bar, uint32_t parity) {
  mbarrier_wait(shared_address(&bar), parity);
}
// Waits for a phase by its number: the lowest bit is the parity.
GDN_DEVICE void wait_for(const uint64_t& bar, uint32_t phase) {
  mbarrier_wait(shared_address(&bar), phase & 1);
}

// Divides by a number that the host knows, in a few instructions.
struct Divisor {
  uint64_t inverse;  // 2^64 / number, rounded up; 0 for 1
  static Divisor of(int number) { return {number > 1 ? UINT64_MAX / number + 1 : 0}; }
  GDN_DEVICE int divide(int x) const {
    return inverse == 0 ? x : int(__umul64hi(uint64_t(x), inverse));
  }
};

}  // namespace gdn::sm90
