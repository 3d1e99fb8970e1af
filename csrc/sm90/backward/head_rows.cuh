// Loads of [B, T, HV] tensors (g, beta, dg, dbeta) for kernels in which a block has a chunk and
// several neighbouring value heads, a warp each. A single warp would touch 2 or 4 bytes of each
// row; together the warps access contiguous rows, and transpose them through shared memory.
#pragma once
#include "sm90/backward/layout.cuh"

namespace gdn::sm90::backward {

constexpr int kMostHeads = 16;  // of a block

// A grid of (chunks, blocks of heads), with 32 threads for each head.
struct HeadBlocks {
  dim3 grid;
  unsigned threads;
  explicit HeadBlocks(const Params& params) {
    const int HV = params.problem.forward.HV, blocks = int(ceil_div(HV, kMostHeads));
    grid = dim3(unsigned(params.chunks), unsigned(blocks));
    threads = unsigned(ceil_div(HV, blocks)) * 32;
  }
};

// Values by head and token. A lane reads two tokens of its warp's head at once.
struct HeadRows {
  float x[kMostHeads][kChunk + 2];
};

// The two values of a thread: rows `row` and `row` + 32 of the chunk, for one head.
struct HeadThread {
  int row, head, hv;
  bool exists;
  GDN_DEVICE explicit HeadThread(const Params& params) {
    const int heads = blockDim.x / 32;
    row = threadIdx.x / heads;
    head = threadIdx.x - row * heads;
    hv = blockIdx.y * heads + head;
    exists = hv < params.problem.forward.HV;
  }
  GDN_DEVICE bool has(const Place& place, int i) const {
    return exists && row + 32 * i < place.rows;
  }
  // Zeros past the sequence's end.
  GDN_DEVICE void load(uint32_t (&bits)[2], const Rows& from, Dtype dtype,
                       const Place& place) const {
    int64_t at = place.batch * from.batch + hv * from.head + int64_t{place.first + row} * from.row;
#pragma unroll
    for (int i = 0; i < 2; ++i, at += 32 * from.row)
      bits[i] = has(place, i) ? load_bits(from.data, at, dtype) : 0;
  }
  GDN_DEVICE void give(HeadRows& to, const uint32_t (&bits)[2], Dtype dtype) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) to.x[head][row + 32 * i] = to_float(bits[i], dtype);
  }
};

}  // namespace gdn::sm90::backward
