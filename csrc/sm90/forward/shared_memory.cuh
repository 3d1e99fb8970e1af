// Shared memory of the chunked forward: what the roles of a block leave there for each other, and how they wait for it.
#pragma once
#include "sm90/forward/config.cuh"

namespace gdn::sm90 {

// What the gates make of a chunk's tokens; frame.cuh has the symbols e, d, y, D and G.
struct GateVectors {
  float4 x[kChunk / 2];  // of tokens 2 i, 2 i + 1: (c0, c1, f0, f1) in x' = c v - f (k S')
  float r[kChunk];       // o = r (q S' + P' u')
  float beta[kChunk];
  // Of a steep chunk, powers of two that stay in the triangles: A'_ij has -left_i + left_j, P'_ij has
  // score_i + left_j.
  int16_t left[kChunk];   // -d
  int16_t score[kChunk];  // y + d, or d where P' u' is lifted
  float lift[kChunk];     // steep, fp16: 2^y, which multiplies P' u'; 2^d of q S' where that comes first
  float pre;              // S' is multiplied by this before the chunk reads it,
  float post;             // by this, 2^D, before it adds the chunk's u',
  float end;              // and by this, 2^G, to be the state after the chunk.
  int decay;              // D
  int steep;              // the chunk's decay does not fit the frame
};

// The rows of one sequence or segment, a value head, and a part of its columns.
struct Tile {
  int n, hv, batch;
  int part;     // of V: which 64 kStates channels
  int slot;     // index of this segment among the later ones; of a first segment, of the one after it
  int map;      // Pass::kMaps: 0 for b, 1 for M
  bool exists;  // false: the block has no tile, or, of Pass::kWhole, no further one
  bool begins, ends;  // its sequence begins, ends with it
  int first;    // its first row in the batch entry
  int length;   // rows
  int frame_begins;  // Pass::kSegments: the row at which the state's frame begins anew; -1, or length: none
};

template <class C>
struct SharedMemory {
  // Tiles of 64 rows x 64 columns, 128-byte swizzle.
  alignas(1024) uint8_t k[C::kKStages][C::kKeyTiles][kTileBytes];
  uint8_t q[C::kQStages][C::kKeyTiles][kTileBytes];
  uint8_t v[C::kVStages][C::kStates][kTileBytes];
  uint8_t t[kTStages][kTileBytes];  // strict-lower (I + A)^-1
  uint8_t p[kPStages][kTileBytes];  // lower q k^T
  uint8_t o[C::kStates][kTileBytes];
  // Scratch of the inverse, fp16, same swizzle: A, and its inverse with the unit diagonal.
  uint8_t a[C::kMakers][kTileBytes];
  uint8_t inverse[C::kMakers][kTileBytes];
  GateVectors gates[C::kGateStages];
  uint64_t k_full[C::kKStages], k_empty[C::kKStages];
  uint64_t q_full[C::kQStages], q_empty[C::kQStages];
  uint64_t v_full[C::kVStages], v_empty[C::kVStages];
  uint64_t t_full[kTStages], t_empty[kTStages];
  uint64_t p_full[kPStages], p_empty[kPStages];
  uint64_t o_full[C::kStates], o_empty[C::kStates];
  uint64_t gates_full[C::kGateStages], gates_empty[C::kGateStages];
  uint64_t tile_full[C::kTileStages], tile_empty[C::kTileStages];  // unless C::kOneTile
  Tile tiles[C::kTileStages];
  int stop[C::kStates][4];  // of a pool, a state's warps: rows left of the tile when the state is stored
#ifdef GDN_PROFILE
  uint32_t profile[40];
#endif
};

// A position in a ring of buffers: the phase flips each time round. A reader waits for `phase` on
// the full barrier, a writer for the opposite on the empty one.
template <int N>
struct Ring {
  int stage = 0;
  uint32_t phase = 0;
  GDN_DEVICE void advance() {
    if (++stage == N) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// What a block of Pass::kWhole knows of the sequences of a packed call, in shared memory behind that of
// its roles; dealing.cuh fills it.
struct Lengths {
  // Of LeastTime::with, in the order of Shape: floats, which order as integers, since none is negative.
  int least[2];
  int all_chunks;
  int halves;  // whether blocks should own 64 channels of V, not 128
  uint16_t order[kMostOrdered];  // the longest first, and as given among equal ones
};

constexpr int kLengthsAt = kSharedBytes - int(sizeof(Lengths));
extern __shared__ __align__(1024) uint8_t raw_shared_memory[];
GDN_DEVICE Lengths& lengths_of_call() {
  return *reinterpret_cast<Lengths*>(raw_shared_memory + kLengthsAt);
}

// ---- waiting, with the time spent in it when profiling ----------------------------------------

enum ProfileSlot {
  kWaitK, kWaitGates, kWaitV, kWaitT, kWaitP, kWaitO, kWaitSk, kWaitU, kWaitKv, kWaitOut,
  kMakeP, kTotalState,
  kAuxWaitK, kAuxWaitQ, kAuxWaitGates, kAuxWaitT, kAuxWaitP, kAuxKk, kAuxQk, kAuxInverse,
  kAuxIssueQk, kAuxIssueKk, kAuxStoreP, kAuxStoreA, kAuxEight, kAuxSixteen, kAuxBarrier, kAuxColumn,
  kTotalAux, kLoadK, kLoadQ, kLoadV, kGatesEmpty, kTotalGates, kGatesWork
};
#ifdef GDN_PROFILE
GDN_DEVICE uint32_t clock_now() {
  uint32_t t;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(t)::"memory");
  return t;
}
template <class C>
GDN_DEVICE void charge(SharedMemory<C>& sm, int slot, uint32_t since) {
  const uint32_t spent = clock_now() - since;
  const bool lead = slot < kAuxWaitK ? thread_of<C>() == 128 : slot < kLoadK ? thread_of<C>() == 384
                    : slot < kGatesEmpty ? thread_of<C>() == 0 : thread_of<C>() == 96;
  asm volatile("{.reg .pred p; setp.ne.b32 p, %2, 0; @p red.shared.add.u32 [%0], %1;}" ::"r"(
                   shared_address(&sm.profile[slot])),
               "r"(spent), "r"(int{lead})
               : "memory");
}
#else
GDN_DEVICE uint32_t clock_now() { return 0; }
template <class C>
GDN_DEVICE void charge(SharedMemory<C>&, int, uint32_t) {}
#endif
template <class C>
GDN_DEVICE void wait(SharedMemory<C>& sm, const uint64_t& bar, uint32_t parity, int slot) {
  const uint32_t since = clock_now();
  mbarrier_wait(shared_address(&bar), parity);
  charge(sm, slot, since);
}
// With GDN_EVERY_LANE each lane of a warp arrives, which racecheck can follow: it does not see that a
// __syncwarp orders the accesses of all lanes before the arrival of one.
#ifdef GDN_EVERY_LANE
constexpr int kWarpArrivals = 32;
#else
constexpr int kWarpArrivals = 1;
#endif
GDN_DEVICE void arrive(const uint64_t& bar, bool condition) {
  mbarrier_arrive_if(shared_address(&bar), kWarpArrivals == 32 || condition);
}

}  // namespace gdn::sm90
