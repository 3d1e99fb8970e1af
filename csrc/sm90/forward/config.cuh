// Shapes, roles and budgets of the chunked forward on Hopper.
#pragma once
#include "sm90/heads.h"
#include "sm90/tile/block.cuh"

namespace gdn::sm90 {

// What a block does. It owns 64 kStates channels of V of a (sequence, value head), each state
// warpgroup 64. kStates = 1: two warpgroups make the triangles of every second chunk each; for
// calls with fewer pairs than multiprocessors, and where two states do not fit.
//
// kPass: whole sequences; or sequences in segments that run side by side, which takes a pass for
// what each segment makes of the state it starts from (an affine map, see fold.cuh), and one for
// the output.
enum class Pass { kWhole, kMaps, kSegments };

// Rows of a state and of a map M, transposed, in SegmentBuffers: whole blocks of them.
constexpr __host__ GDN_DEVICE int state_rows(int V) { return (V + 127) / 128 * 128; }
constexpr __host__ GDN_DEVICE int map_rows(int keys) { return state_rows(keys); }

// kPool: the call is on a pool of states, KernelParams::pool.
template <class Type, class Heads, int kStates_, Pass kPass_, bool kPool_>
struct Config {
  using T = Type;
  static constexpr int kKeys = Heads::kKeys;
  static constexpr bool kExact = Heads::kExact;
  static constexpr Pass kPass = kPass_;
  static constexpr bool kPool = kPool_;
  static constexpr bool kOutput = kPass != Pass::kMaps;  // q, P and o are needed
  // SegmentBuffers differ in length, and some are none: a block for each, which the hardware hands
  // out.
  static constexpr bool kOneTile = kPass != Pass::kWhole;
  static constexpr int kStates = kStates_;
  // Its kernel has blocks of either kStates.
  static constexpr bool kTwoShapes = kPass == Pass::kWhole && kKeys != 256;
  // Warpgroups that make triangles; a state of 256 channels leaves registers for one.
  static constexpr int kInverses = kKeys == 256 ? 1 : 3 - kStates;
  static constexpr int kThreads = 128 * (1 + kStates + kInverses);
  // Who makes P: the inverse warpgroups, or states in turns, which would wait for a single inverse
  // warpgroup.
  static constexpr bool kStatesMakeP = kOutput && kStates == 2;
  static constexpr bool kInversesMakeP = kOutput && kStates == 1;
  // v is loaded by the warp that has no second state's o to store.
  static constexpr bool kValuesApart = kStates == 1;
  static constexpr int kKeyTiles = kKeys / 64;
  static_assert(kKeys == 64 || kKeys == 128 || (kKeys == 256 && kStates == 1));
  static constexpr int kMapRows = map_rows(kKeys);
  // Whether the state, rounded for its reads, has registers beside the state.
  static constexpr bool kKeepsRounded = kKeys <= 128;
  // Tiles in flight.
  static constexpr int kKStages = kKeys == 256 ? 2 : 4, kGateStages = 4;
  static constexpr int kQStages = kKeys == 256 ? 2 : 3;
  static constexpr int kTileStages = kOneTile ? 1 : 4;
  static constexpr int kVStages = kStates == 2 || kKeys == 256 ? 2 : 4;
  // Registers a thread; the sum over warpgroups may not exceed the sum at launch. Inverse
  // warpgroups have what every thread has at launch, or less beside two states of segments, whose
  // code for starts and ends needs more.
  static constexpr bool kLowersInverses = kStates == 2 && kPass == Pass::kSegments;
  static constexpr int kSinglesRegisters = kStates == 2 && !kLowersInverses ? 32 : 40;
  static constexpr int kStateRegisters = kLowersInverses ? 184
                                         : kStates == 2  ? 176
                                         : kKeys == 256  ? 248
                                                         : 208;
  static constexpr int kLaunchRegisters = launch_registers(kThreads, kStateRegisters);
  static constexpr int kInverseRegisters = kLowersInverses ? 104 : kLaunchRegisters;
  static_assert(kSinglesRegisters + kStates * kStateRegisters + kInverses * kInverseRegisters <=
                kThreads / 128 * kLaunchRegisters);
};
constexpr int kTStages = 2, kPStages = 2;

// Warpgroup 0 is four single warps, the next are states, the last make triangles.
enum SingleWarp { kLoader, kStore0, kStore1, kGates };

// Named barriers; 0 is __syncthreads. One for each warpgroup that makes triangles.
enum NamedBarrier { kInverseBarrier = 1, kStateBarrier = 3 };

}  // namespace gdn::sm90
