// Shapes of blocks, roles and register budgets of the chunked forward on Hopper.
#pragma once
#include "sm90/heads.h"
#include "sm90/tile/block.cuh"

namespace gdn::sm90 {

// A block has 64 kStates channels of V of a (sequence, value head) pair; each state warpgroup has
// 64. With kStates = 1, two inverse warpgroups make the triangles of alternate chunks: for calls
// with fewer pairs than multiprocessors, and where two states do not fit.
//
// kPass: whole sequences; or sequences in segments that run concurrently, which take a pass for the
// effect of each segment on the state (an affine map, segments/fold.cuh) and a pass for the output.
enum class Pass { kWhole, kMaps, kSegments };

// Rows of a transposed state and of a transposed map M in SegmentBuffers: a multiple of 128.
constexpr __host__ GDN_DEVICE int state_rows(int V) { return (V + 127) / 128 * 128; }
constexpr __host__ GDN_DEVICE int map_rows(int keys) { return state_rows(keys); }

// kPool: the call is on a pool of states, KernelParams::pool.
// kPart: the maps of a part of a sequence, KernelParams::part.
template <class Type, class Heads, int kStates_, Pass kPass_, bool kPool_, bool kPart_ = false>
struct Config {
  using T = Type;
  static constexpr int kKeys = Heads::kKeys;
  static constexpr bool kExact = Heads::kExact;
  static constexpr Pass kPass = kPass_;
  static constexpr bool kPool = kPool_;
  static constexpr bool kPart = kPart_;
  static constexpr bool kOutput = kPass != Pass::kMaps;  // whether q, P and o are needed
  // Segments differ in length, and some do not exist: each has a block of its own, which the
  // hardware schedules.
  static constexpr bool kOneTile = kPass != Pass::kWhole;
  static constexpr int kStates = kStates_;
  // Whether its kernel has blocks of either kStates.
  static constexpr bool kTwoShapes = kPass == Pass::kWhole && kKeys != 256;
  // The number of inverse warpgroups; a state of 256 channels leaves registers for one.
  static constexpr int kInverses = kKeys == 256 ? 1 : 3 - kStates;
  static constexpr int kThreads = 128 * (1 + kStates + kInverses);
  // The inverse warpgroups make P, or two state warpgroups in turn, which would otherwise wait for
  // the single inverse warpgroup.
  static constexpr bool kStatesMakeP = kOutput && kStates == 2;
  static constexpr bool kInversesMakeP = kOutput && kStates == 1;
  // v is loaded by the warp that would store the o of a second state.
  static constexpr bool kValuesApart = kStates == 1;
  static constexpr int kKeyTiles = kKeys / 64;
  static_assert(kKeys == 64 || kKeys == 128 || (kKeys == 256 && kStates == 1));
  static constexpr int kMapRows = map_rows(kKeys);
  // Whether registers hold the rounded state as well as the state.
  static constexpr bool kKeepsRounded = kKeys <= 128;
  // Buffers of each kind of tile.
  static constexpr int kKStages = kKeys == 256 ? 2 : 4, kGateStages = 4;
  static constexpr int kQStages = kKeys == 256 ? 2 : 3;
  static constexpr int kTileStages = kOneTile ? 1 : 4;
  static constexpr int kVStages = kStates == 2 || kKeys == 256 ? 2 : 4;
  // Registers of a thread; the sum over warpgroups may not exceed the sum at launch. Inverse
  // warpgroups keep the registers of the launch, or release some where there are two states of
  // segments, whose code for starts and ends needs more.
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

// Warpgroup 0 has four single warps, the next warpgroups have states, and the last ones make
// inverses.
enum SingleWarp { kLoader, kStore0, kStore1, kGates };

// Named barriers; 0 is __syncthreads. Each inverse or state warpgroup has one, counted from these.
enum NamedBarrier { kInverseBarrier = 1, kStateBarrier = 3 };

}  // namespace gdn::sm90
