// Shapes, roles, budgets and shared memory of the chunked forward on Hopper.
#pragma once
#include <type_traits>

#include "../common/ptx.cuh"
#include "../params.h"
#include "heads.h"

namespace gdn::sm90 {

constexpr int kChunk = 64;    // tokens of a chunk

// What a block does. It owns 64 kStates channels of V of a (sequence, value head), each state
// warpgroup 64. kStates = 1: two warpgroups make the triangles of every second chunk each; for calls
// with fewer pairs than multiprocessors, and where two states do not fit.
//
// kPass: whole sequences; or sequences in segments that run side by side, which takes a pass for
// what each segment makes of the state it starts from (an affine map, see segments.cuh), and one for
// the output.
enum class Pass { kWhole, kMaps, kSegments };

// Rows of a state and of a map M, transposed, in Segments: whole blocks of them.
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
  // Segments differ in length, and some are none: a block for each, which the hardware hands out.
  static constexpr bool kOneTile = kPass != Pass::kWhole;
  static constexpr int kStates = kStates_;
  // Its kernel has blocks of either kStates.
  static constexpr bool kTwoShapes = kPass == Pass::kWhole && kKeys != 256;
  // Warpgroups that make triangles; a state of 256 channels leaves registers for one.
  static constexpr int kMakers = kKeys == 256 ? 1 : 3 - kStates;
  static constexpr int kThreads = 128 * (1 + kStates + kMakers);
  // Who makes P: makers, or states in turns, which wait for a single maker otherwise.
  static constexpr bool kStatesMakeP = kOutput && kStates == 2;
  static constexpr bool kMakersMakeP = kOutput && kStates == 1;
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
  // Registers a thread; the sum over warpgroups may not exceed 512. Makers have what every thread
  // has at launch.
  static constexpr int kSinglesRegisters = kStates == 2 ? 32 : 40;
  static constexpr int kStateRegisters = kStates == 2 ? 176 : kKeys == 256 ? 248 : 208;
  static constexpr int kMakerRegisters = 65536 / kThreads / 8 * 8;
  static_assert(kSinglesRegisters + kStates * kStateRegisters + kMakers * kMakerRegisters <= 512);
};
constexpr int kTStages = 2, kPStages = 2;

// Warpgroup 0 is four single warps, the next are states, the last make triangles.
enum SingleWarp { kLoader, kStore0, kStore1, kGates };

constexpr int kTileBytes = 64 * 64 * 2;  // one swizzled tile of 64 rows x 64 16-bit values

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

// Named barriers; 0 is __syncthreads. One for each warpgroup that makes triangles.
enum NamedBarrier { kMakerBarrier = 1, kStateBarrier = 3 };

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

// Segments of sequences. A slot is a segment that is not the first of its sequence; those of sequence
// 0 come first. States and maps are transposed, in rows of kKeys; R = state_rows().
struct Segments {
  Cuts cuts;
  bool first;    // Pass::kSegments: the tiles are first segments, else the later ones
  float* maps;   // [slots, HV, R + kMapRows, kKeys]: b, then M (its rows: K of what comes in)
  float* starts; // [slots, HV, R, kKeys]: what a segment starts from
};

// Division by a number that the host knows, in a few instructions.
struct Divisor {
  uint64_t inverse;  // 2^64 / number, rounded up; 0 for 1
  static Divisor of(int number) { return {number > 1 ? UINT64_MAX / number + 1 : 0}; }
  GDN_DEVICE int divide(int x) const {
    return inverse == 0 ? x : int(__umul64hi(uint64_t(x), inverse));
  }
};

struct KernelParams {
  CUtensorMap q, k, v, o;
  ChunkForward problem;
  Segments segments;
  Shape shape;     // Pass::kWhole
  Dealing dealing; // Pass::kWhole
  int tiles;  // of the grid: (sequence or segment, value head, map, part of V); unless Pass::kWhole
  Divisor heads, group;  // HV, and value heads of a key head
  Pool pool;  // of C::kPool
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
constexpr int kSharedBytes = 232448;  // what a block may have
constexpr int kLengthsAt = kSharedBytes - int(sizeof(Lengths));
extern __shared__ __align__(1024) uint8_t raw_shared_memory[];
GDN_DEVICE Lengths& lengths_of_call() {
  return *reinterpret_cast<Lengths*>(raw_shared_memory + kLengthsAt);
}

template <class C>
GDN_HOST_DEVICE int values(const ChunkForward& p) {
  return C::kExact ? C::kKeys : p.V;
}
// How many parts V has, of 64 kStates channels each.
template <class C>
GDN_HOST_DEVICE int value_parts(const ChunkForward& p) {
  return (values<C>(p) + 64 * C::kStates - 1) / (64 * C::kStates);
}

GDN_HOST_DEVICE int64_t sequence_bound(const ChunkForward& p, int n) {
  return p.cu_seqlens_64 ? static_cast<const int64_t*>(p.cu_seqlens)[n]
                         : static_cast<const int32_t*>(p.cu_seqlens)[n];
}

// A kernel with blocks of two shapes reads threadIdx.x where it is used: one reading for both would be live
// throughout, and spill. In kernels of one shape ptxas does that by itself, and better.
template <class C>
GDN_DEVICE uint32_t thread_of() {
  if constexpr (C::kTwoShapes) {
    return thread_index();
  } else {
    return threadIdx.x;
  }
}

// The lengths of segments, in tokens.
struct Segment {
  int first, rest;
  GDN_HOST_DEVICE explicit Segment(const Cut& cut)
      : first(cut.first * kChunk), rest(cut.rest * kChunk) {}
  // Of a sequence, behind its first.
  GDN_HOST_DEVICE int later(int length) const {
    return length > first ? (length - first - 1) / rest + 1 : 0;
  }
};

GDN_DEVICE int64_t slot_at(const Slots& slots, int64_t i) {
  return slots.is_64 ? static_cast<const int64_t*>(slots.data)[i]
                     : static_cast<const int32_t*>(slots.data)[i];
}

// Whether sequence n is skipped: its state to read is padding.
GDN_DEVICE bool is_skipped(const Pool& pool, int n) {
  return slot_at(pool.read_slots, n) <= pool.last_skipped;
}

GDN_HOST_DEVICE int sequence_length(const ChunkForward& p, int n) {
  return static_cast<int>(p.cu_seqlens ? sequence_bound(p, n + 1) - sequence_bound(p, n) : p.T);
}

// The sequence of a tile whose tile.n is set. One that is skipped has no length.
template <class C>
GDN_DEVICE void locate_sequence(const KernelParams& params, Tile& tile) {
  const ChunkForward& p = params.problem;
  tile.batch = p.cu_seqlens ? 0 : tile.n;
  tile.first = p.cu_seqlens ? static_cast<int>(sequence_bound(p, tile.n)) : 0;
  tile.length = sequence_length(p, tile.n);
  if constexpr (C::kPool) {
    if (is_skipped(params.pool, tile.n)) tile.length = 0;
  }
}

// Of the cuts to choose from the first that was chosen for so long a sequence and so many segments.
// Skipped sequences count, so that which they are changes no bits of another.
GDN_HOST_DEVICE Segment segment_of(const KernelParams& params) {
  const Cuts& cuts = params.segments.cuts;
  const int N = cuts.count > 1 ? params.problem.N : 0;
  int longest = 0, choice = 0;
  GDN_ROLLED
  for (int n = 0; n < N; ++n) longest = max(longest, sequence_length(params.problem, n));
  GDN_ROLLED
  for (; choice + 1 < cuts.count; ++choice) {
    const Cut& cut = cuts.choices[choice];
    if (longest > cut.longest * kChunk) continue;
    const Segment segment(cut);
    int later = 0, inner = 0;
    GDN_ROLLED
    for (int n = 0; n < N; ++n) {
      const int count = segment.later(sequence_length(params.problem, n));
      later += count;
      inner += max(count - 1, 0);
    }
    if (later <= cut.later && inner <= cut.inner) break;
  }
  return Segment(cuts.choices[choice]);
}

// The later segment of a tile whose tile.slot is set. Few sequences have segments: a loop will do.
template <class C>
GDN_DEVICE void locate_segment(const KernelParams& params, Tile& tile, Segment segment) {
  const ChunkForward& p = params.problem;
  int index = tile.slot;
  tile.exists = tile.begins = tile.ends = false;
  for (tile.n = 0; tile.n < p.N; ++tile.n) {
    locate_sequence<C>(params, tile);
    const int count = segment.later(tile.length);
    if (index < count) {
      const int before = segment.first + index * segment.rest;
      tile.exists = true;
      tile.ends = index == count - 1;
      tile.first += before;
      tile.length = min(tile.length - before, segment.rest);
      return;
    }
    index -= count;
  }
  tile.length = 0;
}

// The slot of the second segment of sequence n, if it has one.
template <class C>
GDN_DEVICE int second_slot(const KernelParams& params, int n, Segment segment) {
  Tile tile;
  int slot = 0;
#pragma unroll 1
  for (tile.n = 0; tile.n < n; ++tile.n) {
    locate_sequence<C>(params, tile);
    slot += segment.later(tile.length);
  }
  return slot;
}

template <class C>
GDN_DEVICE Tile tile_at(const KernelParams& params, int index) {
  const ChunkForward& p = params.problem;
  Tile tile;
  // A map's parts are those of b, then those of M, whose rows are channels of K.
  const int of_values = value_parts<C>(p);
  const int parts = of_values + (C::kPass == Pass::kMaps ? C::kMapRows / 64 / C::kStates : 0);
  tile.part = index % parts;
  index /= parts;
  if constexpr (C::kPass == Pass::kMaps) {
    tile.map = tile.part >= of_values;
    tile.part -= tile.map * of_values;
  }
  tile.slot = tile.n = params.heads.divide(index);
  tile.hv = index - tile.n * p.HV;
  if (C::kPass == Pass::kWhole && params.dealing.ordered) tile.n = lengths_of_call().order[tile.n];
  if (C::kPass == Pass::kWhole || (C::kPass == Pass::kSegments && params.segments.first)) {
    tile.exists = tile.begins = tile.ends = true;
    locate_sequence<C>(params, tile);
    if constexpr (C::kPass == Pass::kSegments) {
      const Segment segment = segment_of(params);
      tile.ends = tile.length <= segment.first;
      tile.length = min(tile.length, segment.first);
      tile.slot = second_slot<C>(params, tile.n, segment);
    }
  } else {
    locate_segment<C>(params, tile, segment_of(params));
    if (C::kPass == Pass::kMaps && tile.ends) {  // nothing starts from the end of a last segment
      tile.exists = false;
      tile.length = 0;
    }
  }
  return tile;
}

// Of V: the first of the 64 channels that a state warpgroup of the block owns in this tile.
template <class C>
GDN_DEVICE int first_value_channel(const Tile& tile, int slot) {
  return (C::kStates == 1 ? tile.part : tile.part * C::kStates + slot) * 64;
}

// 8 channels of o, which lie together.
GDN_DEVICE uint4* o_line(const Pool& pool, int batch, int64_t row, int hv, int column) {
  const Rows& o = pool.o;
  const int64_t at = batch * o.batch + row * o.row + hv * o.head + column;
  return reinterpret_cast<uint4*>(static_cast<uint16_t*>(const_cast<void*>(o.data)) + at);
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

// ---- the tiles of a block ------------------------------------------------------------------------
//
// The loader finds a block's tiles, one after another, and leaves each in shared memory for the other
// roles: no other role searches for it, and blocks may be given their tiles while they run.

// The block's tile number `turn`, read anew: kept in registers it would be live through the loop.
template <class C>
GDN_DEVICE const Tile& tile_now(const SharedMemory<C>& sm, uint32_t turn) {
  asm volatile("" ::: "memory");
  return sm.tiles[C::kOneTile ? 0 : turn % C::kTileStages];
}

// Waits for the block's tile number `turn`, unless C::kOneTile. Returns whether there is such a tile.
template <class C>
GDN_DEVICE bool enter_tile(const SharedMemory<C>& sm, uint32_t turn) {
  const uint32_t stage = turn % C::kTileStages;
  mbarrier_wait(shared_address(&sm.tile_full[stage]), turn / C::kTileStages & 1);
  return sm.tiles[stage].exists;
}

enum class Reader { kLoader, kLane, kWarp };  // the loader, another single thread, or a warp

template <class C, Reader kReader = Reader::kWarp>
GDN_DEVICE void leave_tile(const SharedMemory<C>& sm, uint32_t turn) {
  const uint64_t& empty = sm.tile_empty[turn % C::kTileStages];
  if constexpr (!C::kOneTile && kReader == Reader::kLane) mbarrier_arrive_if(shared_address(&empty), true);
  if constexpr (!C::kOneTile && kReader == Reader::kWarp) {
    __syncwarp();
    arrive(empty, thread_of<C>() % 32 == 0);
  }
}

// All chunks of all tiles of this block, in order: for the roles that carry nothing from a chunk to
// the next.
template <class C, Reader kReader = Reader::kWarp>
struct Walk {
  SharedMemory<C>& sm;
  const KernelParams& params;
  uint32_t turn = 0;  // tiles so far
  int index;          // of the tile, in the order in which they are taken; the loader's
  int row = 0;        // of the chunk's first token, in the sequence

  GDN_DEVICE Walk(SharedMemory<C>& s, const KernelParams& p) : sm(s), params(p), index(blockIdx.x) {}
  GDN_DEVICE const Tile& tile() const { return sm.tiles[turn % C::kTileStages]; }

  GDN_DEVICE bool begin() {
    if constexpr (C::kOneTile) {
      return tile().length > 0;
    } else {
      for (;; leave()) {
        if constexpr (kReader == Reader::kLoader) deal();
        if (!enter_tile(sm, turn)) return false;
        if (tile().length > 0) return true;
      }
    }
  }
  GDN_DEVICE bool next() {
    row += kChunk;
    if (row < tile().length) return true;
    if constexpr (C::kOneTile) {
      return false;
    } else {
      leave();
      return begin();
    }
  }
  GDN_DEVICE int rows() const { return min(tile().length - row, kChunk); }

 private:
  GDN_DEVICE void leave() {
    leave_tile<C, kReader>(sm, turn);
    ++turn;
    row = 0;
    if constexpr (kReader == Reader::kLoader) {
      // By now the loads of the tile's last chunk are issued, up to kKStages chunks before the states end
      // with it: that is early enough for what this takes, and late enough for tiles of unlike length.
      const int blocks = int(gridDim.x), block = int(blockIdx.x);
      if (params.dealing.taken) {
        wait_for_prerequisites();  // the kernel that has set it to 0
        index = blocks + atomicAdd(params.dealing.taken, 1);
      } else {
        index = int(turn) * blocks + (turn % 2 ? blocks - 1 - block : block);
      }
    }
  }
  GDN_DEVICE void deal() {
    const uint32_t stage = turn % C::kTileStages;
    mbarrier_wait(shared_address(&sm.tile_empty[stage]), turn / C::kTileStages & 1 ^ 1);
    Tile found = {};
    const ChunkForward& p = params.problem;
    if (index < p.N * p.HV * value_parts<C>(p)) found = tile_at<C>(params, index);
    sm.tiles[stage] = found;
    mbarrier_arrive_if(shared_address(&sm.tile_full[stage]), true);
  }
};

}  // namespace gdn::sm90
