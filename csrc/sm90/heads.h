// The kinds of heads that there are kernels for.
#pragma once
#include "params.h"

namespace gdn::sm90 {

// Channels of a head. kKeys: the channels of K that tiles have room for. kExact: K = V = kKeys,
// known to the compiler. Otherwise K is any multiple of 8 up to kKeys and V any multiple of 8;
// tiles and states are zero beyond the call's own channels.
template <int kKeys_, bool kExact_ = false>
struct Heads {
  static constexpr int kKeys = kKeys_;
  static constexpr bool kExact = kExact_;
};

// Whether blocks can only have 64 channels of V: a state with 128 does not fit into the registers.
template <class Heads>
constexpr bool only_halves() {
  return Heads::kKeys == 256;
}

// Runs the kernels of a call: those of exactly 128 channels, or of the least of 64, 128 and 256
// that K fits in.
template <class Kernels>
auto with_heads(const ChunkForward& p, const Kernels& run) {
  if (p.K == 128 && p.V == 128) return run(Heads<128, true>{});
  if (p.K <= 64) return run(Heads<64>{});
  if (p.K <= 128) return run(Heads<128>{});
  return run(Heads<256>{});
}

}  // namespace gdn::sm90
