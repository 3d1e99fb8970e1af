// The order in which the blocks of a packed call of whole sequences take their tiles, and the shape
// of the blocks. Each block finds both from cu_seqlens, and a CUDA graph therefore stays valid when
// the offsets change.
#pragma once
#include "sm90/plan/cut.h"
#include "sm90/tile/block.cuh"
#include "sm90/tile/sequences.cuh"

namespace gdn::sm90 {

// The sequences of a packed call by length, in shared memory after that of the block's roles.
struct Lengths {
  // Results of LeastTime::with, in the order of BlockShape: the bits of floats, which order like
  // integers since none is negative.
  int least[2];
  int all_chunks;
  int halves;                    // whether blocks have 64 channels of V, not 128
  uint16_t order[kMostOrdered];  // the longest first; equal lengths in the order of the call
};

constexpr int kLengthsAt = kSharedBytes - int(sizeof(Lengths));
extern __shared__ __align__(1024) uint8_t raw_shared_memory[];
GDN_DEVICE Lengths& lengths_of_call() {
  return *reinterpret_cast<Lengths*>(raw_shared_memory + kLengthsAt);
}

// Lower bounds of the time of blocks that take the longest tiles first: the work divided by the
// blocks; and, since one block has j + 1 of the first j * blocks + 1 tiles, j + 1 times the last of
// these tiles.
struct LeastTime {
  float chunk, tile;  // microseconds, of Costs
  int tiles, blocks;  // tiles of a sequence; blocks that run at once
  GDN_HOST_DEVICE float of_tile(int chunks) const { return float(chunks) * chunk + tile; }
  // The bound by the sequence with this rank, the longest having rank 0.
  GDN_HOST_DEVICE float with(int chunks, int rank) const {
    return float(((rank + 1) * tiles - 1) / blocks + 1) * of_tile(chunks);
  }
  GDN_HOST_DEVICE float by_work(int chunks, int N) const {
    return (float(chunks) * chunk + float(N) * tile) * float(tiles) / float(blocks);
  }
};

// Reads the address of the block's shared memory again: a single read for find_order and for the
// roles would be live in the whole kernel, and the state's registers would spill.
GDN_DEVICE uint32_t shared_memory_now() {
  uint32_t address = shared_address(raw_shared_memory);
  asm volatile("" : "+r"(address));
  return address;
}

// Fills Lengths. All threads of the block call it, before the memory of its roles is in use.
GDN_DEVICE void find_order(const ChunkForward& p, const Dealing& dealing, int threads) {
  const uint32_t chunks = shared_memory_now(), out = chunks + kLengthsAt;
  const uint32_t least = out + offsetof(Lengths, least), all = out + offsetof(Lengths, all_chunks);
  const int thread = int(thread_index());
  if (thread == 0) {
    store_shared_4(least, 0);
    store_shared_4(least + 4, 0);
    store_shared_4(all, 0);
  }
  for (int n = thread; n < p.N; n += threads)
    store_shared_4(chunks + 4 * n, (sequence_length(p, n) + kChunk - 1) / kChunk);
  __syncthreads();
  const LeastTime both = {dealing.chunk[0], dealing.tile, p.HV * ((p.V + 127) / 128),
                          int(gridDim.x)};
  const LeastTime halves = {dealing.chunk[1], both.tile, p.HV * ((p.V + 63) / 64), int(gridDim.x)};
  for (int n = thread; n < p.N; n += threads) {
    const int own = int(load_shared_4(chunks + 4 * n));
    int rank = 0;
#pragma unroll 4
    for (int i = 0; i < p.N; ++i) {
      const int other = int(load_shared_4(chunks + 4 * i));
      rank += other > own || (other == own && i < n);
    }
    store_shared_2(out + offsetof(Lengths, order) + 2 * rank, uint16_t(n));
    add_shared(all, own);
    max_shared(least, __float_as_int(both.with(own, rank)));
    max_shared(least + 4, __float_as_int(halves.with(own, rank)));
  }
  __syncthreads();
  const int all_chunks = int(load_shared_4(all));
  const auto time = [&](const LeastTime& of, uint32_t at) {
    return fmaxf(__uint_as_float(load_shared_4(at)), of.by_work(all_chunks, p.N));
  };
  if (thread == 0)
    store_shared_4(out + offsetof(Lengths, halves), time(halves, least + 4) <= time(both, least));
  __syncthreads();
}

}  // namespace gdn::sm90
