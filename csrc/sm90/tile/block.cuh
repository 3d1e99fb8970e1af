// What the kernels of both directions share about a block: the size of a tile, threads, barriers,
// and division by numbers that the host knows.
#pragma once
#include "common/ptx.cuh"

namespace gdn::sm90 {

constexpr int kTileBytes = 64 * 64 * 2;  // one swizzled tile of 64 rows x 64 16-bit values
constexpr int kSharedBytes = 232448;     // shared memory that a block may have

// A kernel with blocks of two shapes reads threadIdx.x where it is used: one reading for both would
// be live throughout, and spill. In kernels of one shape ptxas does that by itself, and better.
template <class C>
GDN_DEVICE uint32_t thread_of() {
  if constexpr (C::kTwoShapes) {
    return thread_index();
  } else {
    return threadIdx.x;
  }
}

// The lane, read anew: the compiler would otherwise keep every address of a loop that follows from
// it in a register.
GDN_DEVICE int fresh_lane() {
  uint32_t lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane)::"memory");
  return lane;
}

// With GDN_EVERY_LANE each lane of a warp arrives, which racecheck can follow: it does not see that
// a __syncwarp orders the accesses of all lanes before the arrival of one.
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
// The same with the number of the phase, of which the lowest bit is the parity.
GDN_DEVICE void wait_for(const uint64_t& bar, uint32_t phase) {
  mbarrier_wait(shared_address(&bar), phase & 1);
}

// Division by a number that the host knows, in a few instructions.
struct Divisor {
  uint64_t inverse;  // 2^64 / number, rounded up; 0 for 1
  static Divisor of(int number) { return {number > 1 ? UINT64_MAX / number + 1 : 0}; }
  GDN_DEVICE int divide(int x) const {
    return inverse == 0 ? x : int(__umul64hi(uint64_t(x), inverse));
  }
};

}  // namespace gdn::sm90
