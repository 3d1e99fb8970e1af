// Shared memory of the chunked forward: the buffers that the roles of a block exchange, and their
// barriers.
#pragma once
#include "sm90/forward/config.cuh"
#include "sm90/tile/gates.cuh"

namespace gdn::sm90 {

// The rows of one sequence or segment, a value head, and a part of its columns.
struct Tile {
  int n, hv, batch;
  int part;           // which 64 kStates channels of V
  int segment;        // number among the later segments; a first segment has that of the next one
  int map;            // Pass::kMaps: 0 for b, 1 for M
  bool exists;        // false: the block has no tile, or with Pass::kWhole no further tile
  bool begins, ends;  // whether its sequence begins, ends with it
  int first;          // its first row in the batch entry
  int length;         // rows
  int frame_begins;   // Pass::kSegments: the row at which the state's frame begins anew; -1, or
                      // length: none
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
  uint8_t a[C::kInverses][kTileBytes];
  uint8_t inverse[C::kInverses][kTileBytes];
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
  int stop[C::kStates][4];  // with a pool, by warp: rows left of the tile when the state is stored
};

// A position in a ring of buffers: the phase flips after each round. A reader waits for `phase` at
// the full barrier, a writer for the opposite phase at the empty barrier.
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

}  // namespace gdn::sm90
