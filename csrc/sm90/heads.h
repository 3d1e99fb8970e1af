// The kinds of heads that there are kernels for.
#pragma once
#include "params.h"

namespace gdn::sm90 {

// Channels of a head. kKeys: those of K that there is room for. kExact: K = V = kKeys, known to the
// compiler. Else K is any multiple of 8 up to kKeys and V any multiple of 8: beyond the call's own
// channels tiles and states are zero.
template <int kKeys_, bool kExact_ = false>
struct Heads {
  static constexpr int kKeys = kKeys_;
  static constexpr bool kExact = kExact_;
};

// Whether there is no kernel whose blocks own 128 channels of V: their state does not fit the
// registers.
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

}  // namespace gdn::sm90
