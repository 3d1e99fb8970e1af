// The kinds of heads that there are kernels for, and the function that runs one. Each kind is compiled in two
// files of its own (instantiations/): without and with a pool of states.
#pragma once
#include <cuda_runtime.h>

#include "params.h"
#include "sm90/plan/cut.h"

namespace gdn::sm90 {

struct KernelParams;

// Channels of a head. kKeys: those of K that there is room for. kExact: K = V = kKeys, known to the
// compiler. Else K is any multiple of 8 up to kKeys and V any multiple of 8: beyond the call's own
// channels tiles and states are zero.
template <int kKeys_, bool kExact_ = false>
struct Heads {
  static constexpr int kKeys = kKeys_;
  static constexpr bool kExact = kExact_;
};

// Whether there is no kernel whose blocks own 128 channels of V: their state does not fit the registers.
template <class Heads>
constexpr bool only_halves() {
  return Heads::kKeys == 256;
}

// Which kernels: exactly 128 channels, or the least of 64, 128 and 256 that K fits in.
template <class Kernels>
auto with_heads(const ChunkForward& p, const Kernels& run) {
  if (p.K == 128 && p.V == 128) return run(Heads<128, true>{});
  if (p.K <= 64) return run(Heads<64>{});
  if (p.K <= 128) return run(Heads<128>{});
  return run(Heads<256>{});
}

inline const char* check(cudaError_t error) {
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// Null, or why it did not run. `params` has all but its tiles and parts. kPool: on a pool of states, by
// kernels of their own, since instructions cost time even where they are not executed.
template <class T, class Heads, bool kPool>
const char* run_heads(KernelParams& params, const Plan& plan, cudaStream_t stream);

}  // namespace gdn::sm90
