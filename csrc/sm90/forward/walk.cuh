// The walk of a role over the tiles of its block and the chunks of each tile.
//
// The loader finds the tiles of a block, one after another, and publishes each in shared memory. No
// other role searches for a tile, and blocks can take their tiles while they run.
#pragma once
#include "sm90/forward/shared_memory.cuh"
#include "sm90/forward/tiles.cuh"

namespace gdn::sm90 {

// Reads the block's tile number `turn` again: in registers it would be live during the whole loop.
template <class C>
GDN_DEVICE const Tile& tile_now(const SharedMemory<C>& sm, uint32_t turn) {
  asm volatile("" ::: "memory");
  return sm.tiles[C::kOneTile ? 0 : turn % C::kTileStages];
}

// Waits for the block's tile number `turn`; not with C::kOneTile. Returns whether there is such a
// tile.
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
  if constexpr (!C::kOneTile && kReader == Reader::kLane)
    mbarrier_arrive_if(shared_address(&empty), true);
  if constexpr (!C::kOneTile && kReader == Reader::kWarp) {
    __syncwarp();
    arrive(empty, thread_of<C>() % 32 == 0);
  }
}

// All chunks of all tiles of this block, in order, for roles that carry nothing from one chunk to
// the next.
template <class C, Reader kReader = Reader::kWarp>
struct Walk {
  SharedMemory<C>& sm;
  const KernelParams& params;
  uint32_t turn = 0;  // tiles so far
  int index;    // of the tile, in the order in which blocks take them; the loader alone uses it
  int row = 0;  // of the chunk's first token, in the sequence

  GDN_DEVICE Walk(SharedMemory<C>& s, const KernelParams& p)
      : sm(s), params(p), index(blockIdx.x) {}
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
  template <bool kPastEmpty = true>
  GDN_DEVICE bool next() {
    row += kChunk;
    if (row < tile().length) return true;
    if constexpr (C::kOneTile) {
      return false;
    } else {
      leave();
      return kPastEmpty ? begin() : enter_tile(sm, turn);
    }
  }
  // As next(), but stops at a tile without a chunk, where at_empty() holds and from which begin()
  // goes on. A role that looks for its next chunk before it has published its result of the present
  // one needs this: the loader publishes the fourth tile ahead once all roles have left the present
  // tile, and the other roles leave it once they have that result.
  GDN_DEVICE bool next_or_empty() { return next<false>(); }
  GDN_DEVICE bool at_empty() const { return !C::kOneTile && tile().exists && tile().length == 0; }
  GDN_DEVICE int rows() const { return min(tile().length - row, kChunk); }

 private:
  GDN_DEVICE void leave() {
    leave_tile<C, kReader>(sm, turn);
    ++turn;
    row = 0;
    if constexpr (kReader == Reader::kLoader) {
      // The loads of the tile's last chunk have been issued, up to kKStages chunks before the
      // states end with it. This hides the time of the atomic, and is late enough to balance tiles
      // of different lengths.
      const int blocks = int(gridDim.x), block = int(blockIdx.x);
      if (params.dealing.taken) {
        wait_for_prerequisites();  // for the kernel that sets it to 0
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
