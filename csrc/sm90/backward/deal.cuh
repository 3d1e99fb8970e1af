// The tiles of packed sequences that each block of a walk takes. The device deals them out, since
// the host does not know the lengths: the longest sequences or segments first, each tile to the
// block with the least work. The result depends on the lengths alone, and no gradient depends on
// it.
//
// A *unit* is a sequence, or one of its segments where the walk has segments. Its tiles, one
// for each slice, are equally long. A cluster of two blocks takes the tiles of two neighbouring
// slices, which count as one.
#pragma once
#include <climits>

#include "sm90/backward/layout.cuh"
#include "sm90/plan/backward/times.cuh"

namespace gdn::sm90::backward {

constexpr int kTileStart = 1;  // the start and end of a tile take as long as so many chunks

// `links` has the list of a block's tiles: the first tile at the block's index, the tile after tile
// i at gridDim.x + i, and -1 at the end. Without links blocks take tiles in the order of the grid.
GDN_DEVICE int first_tile(const Params& params) {
  return params.links == nullptr ? int(blockIdx.x) : params.links[blockIdx.x];
}
GDN_DEVICE int next_tile(const Params& params, int index) {
  index += int(gridDim.x);
  if (params.links != nullptr) return params.links[index];
  return index < params.tiles ? index : -1;
}

// The longer unit has the greater key, and the first of equally long units.
GDN_DEVICE uint32_t unit_key(int unit, int chunks) {
  return uint32_t(chunks) << kUnitBits | (kMostUnits - 1 - unit);
}
GDN_DEVICE int chunks_of_key(uint32_t key) { return int(key >> kUnitBits); }
GDN_DEVICE int unit_of_key(uint32_t key) { return kMostUnits - 1 - int(key % kMostUnits); }

// Sorts keys from the greatest to the least, by a warp. `size` is a power of two.
GDN_DEVICE void sort_keys(uint32_t* keys, int size) {
  constexpr int kAtOnce = 4;  // pairs of a lane
  const int lane = int(threadIdx.x) % 32;
#pragma unroll 1
  for (int run = 2; run <= size; run *= 2) {
#pragma unroll 1
    for (int distance = run / 2; distance > 0; distance /= 2) {
      __syncwarp();
#pragma unroll 1
      for (int first = lane; first < size / 2; first += 32 * kAtOnce) {
        uint32_t x[kAtOnce], y[kAtOnce];
        const auto place = [&](int i) {
          const int pair = first + 32 * i;
          return 2 * pair - (pair & (distance - 1));
        };
        const auto exists = [&](int i) { return first + 32 * i < size / 2; };
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i)
          if (exists(i)) x[i] = keys[place(i)], y[i] = keys[place(i) + distance];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const bool falls = (place(i) & run) == 0;
          if (!exists(i) || (x[i] > y[i]) == falls) continue;
          keys[place(i)] = y[i];
          keys[place(i) + distance] = x[i];
        }
      }
    }
  }
  __syncwarp();
}

// The blocks or clusters that take the tiles.
struct Bins {
  int count, width;  // count: of blocks or clusters; width: tiles that one takes at a time
  int* links;
};

// Deals out the tiles of `count` units whose keys are sorted. empty: units without chunks are dealt
// out too.
GDN_DEVICE void deal(const uint32_t* keys, int count, bool empty, int slices,
                     const Divisor& by_slices, const Bins& bins) {
  const int lane = int(threadIdx.x) % 32;
  const uint32_t lower = (1u << lane) - 1;  // lanes
  int load[kBinRows],
      end[kBinRows];  // of bin 32 r + lane: its chunks, and the end of its list in `links`
#pragma unroll
  for (int r = 0; r < kBinRows; ++r) {
    const int bin = 32 * r + lane;
    load[r] = bin < bins.count ? 0 : INT_MAX;
    end[r] = bin * bins.width;
  }
  const auto below = [&](int level) {  // the number of bins with less work
    int sum = 0;
#pragma unroll
    for (int r = 0; r < kBinRows; ++r) sum += __popc(__ballot_sync(~0u, load[r] < level));
    return sum;
  };
#pragma unroll 1
  for (int first = 0; first < count;) {
    const int chunks = chunks_of_key(keys[first]), cost = chunks + kTileStart;
    if (chunks == 0 && !empty) break;
    int behind = first;  // then the first unit of another length
    uint32_t same;
    do {
      const int at = behind + lane;
      same = __ballot_sync(~0u, at < count && chunks_of_key(keys[at]) == chunks);
      behind += __popc(same);
    } while (same == ~0u);
    // In turns: every bin that a greedy deal would give a tile before any bin gets two receives
    // one. In the last turn the bins with the least work do.
    int left = (behind - first) * (slices / bins.width),
        next = first * slices;  // next: a tile, in the order of the keys
#pragma unroll 1
    while (left > 0) {
      int least = load[0];
#pragma unroll
      for (int r = 1; r < kBinRows; ++r) least = min(least, load[r]);
      least = -__reduce_max_sync(~0u, -least);
      int level = least + cost,
          last = kMostBins;  // level: bins below it get a tile; last: at most so many of those just
                             // below it
      const int some = below(level), each = min(some, left);  // each: tiles dealt out in a turn
      int turns = 1;
      if (some > left) {
        int low = least;
#pragma unroll 1
        while (level - low > 1) {
          const int middle = (low + level) / 2;
          (below(middle) >= left ? level : low) = middle;
        }
        last = left - below(level - 1);
      } else {  // as many turns at once as the same bins have
        int other = INT_MAX;
#pragma unroll
        for (int r = 0; r < kBinRows; ++r)
          if (load[r] >= level) other = min(other, load[r]);
        other = -__reduce_max_sync(~0u, -other);
        turns = min(left / each, (other - least) / cost);
      }
#pragma unroll
      for (int r = 0; r < kBinRows; ++r) {
        const bool is_last = load[r] == level - 1;
        const uint32_t all_last = __ballot_sync(~0u, is_last);
        const bool takes = load[r] < level && (!is_last || __popc(all_last & lower) < last);
        last -= __popc(all_last);
        const uint32_t takers = __ballot_sync(~0u, takes);
        if (takes) {
          int at = next + __popc(takers & lower) * bins.width;
#pragma unroll 1
          for (int turn = 0; turn < turns; ++turn, at += each * bins.width) {
            const int i = by_slices.divide(at),
                      tile = unit_of_key(keys[i]) * slices + at - i * slices;
            for (int w = 0; w < bins.width; ++w) bins.links[end[r] + w] = tile + w;
            end[r] = bins.count * bins.width + tile;
          }
          load[r] += turns * cost;
        }
        next += __popc(takers) * bins.width;
      }
      next += (turns - 1) * each * bins.width;
      left -= turns * each;
    }
    first = behind;
  }
#pragma unroll
  for (int r = 0; r < kBinRows; ++r) {
    if (load[r] == INT_MAX) continue;
    for (int w = 0; w < bins.width; ++w) bins.links[end[r] + w] = -1;
  }
}

// Chunks of the longest sequence, of all sequences, and of all without their last segments.
struct Chunks {
  int longest, all, walked;
};
GDN_DEVICE Chunks count_chunks(const ChunkForward& p, int segment) {
  Chunks x = {};
#pragma unroll 4
  for (int n = int(threadIdx.x) % 32; n < p.N; n += 32) {
    const int own = chunks_of_sequence(p, n);
    x.longest = max(x.longest, own);
    x.all += own;
    x.walked += last_segment(own, segment) * segment;
  }
  x.longest = __reduce_max_sync(~0u, x.longest);
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    x.all += __shfl_xor_sync(~0u, x.all, d);
    x.walked += __shfl_xor_sync(~0u, x.walked, d);
  }
  return x;
}

// Whether the walk forward takes less time in segments than over whole sequences, of which one
// block has `most` chunks.
GDN_DEVICE bool segments_pay(const Params& params, const Chunks& chunks, float most) {
  const ChunkForward& p = params.problem.forward;
  const float of_all = float(params.slices) / float(p.multiprocessors);
  const int walked = last_segment(chunks.longest, params.segment) * params.segment;
  float segments = time_of_segments(float(chunks.all) * of_all, float(params.segment));
  if (!has_states(params))
    segments += time_of_states(float(chunks.walked) * of_all, float(walked),
                               states_overlap(p, params.slices));
  return segments < most * kGradients;
}

// Fills `keys` with the sorted keys of a walk's units, and returns the number of units.
GDN_DEVICE int sort_units(const Params& params, int segment, uint32_t (&keys)[kMostUnits]) {
  const ChunkForward& p = params.problem.forward;
  const int lane = int(threadIdx.x) % 32, most = segment == kWholeSequences ? p.N : params.segments;
  int size = 2, units = 0;
  while (size < most) size *= 2;
  __syncwarp();
#pragma unroll 4
  for (int i = lane; i < size; i += 32) keys[i] = 0;
  __syncwarp();
#pragma unroll 1
  for (int n = lane; n < p.N; n += 32) {
    const int chunks = chunks_of_sequence(p, n);
    int unit = first_chunk(params, n) / segment + n, left = chunks;  // numbered as by first_segment
    do {
      keys[unit] = unit_key(unit, min(left, segment));
      left -= segment;
      ++unit;
      ++units;
    } while (left > 0);
  }
  sort_keys(keys, size);
#pragma unroll
  for (int d = 1; d < 32; d *= 2) units += __shfl_xor_sync(~0u, units, d);
  return units;
}

// A lower bound of the chunks of the block with the most work, for whole sequences whose keys are
// sorted: with b blocks, one of them has i + 1 or more of the i b + 1 longest tiles. A warp
// computes it for i up to 31. The median over random lengths of the greedy deal is up to 6 percent
// higher.
GDN_DEVICE float chunks_of_fullest(const Params& params, const uint32_t (&keys)[kMostUnits]) {
  const ChunkForward& p = params.problem.forward;
  const int i = int(threadIdx.x) % 32, sequence = params.by_slices.divide(i * p.multiprocessors);
  return float(
      __reduce_max_sync(~0u, sequence < p.N ? (i + 1) * chunks_of_key(keys[sequence]) : 0));
}

// Chooses whether the walk forward has segments, and whether the walk back is over halves, where
// the host leaves the choice to the device. A warp calls it, before any tile is dealt out.
GDN_DEVICE void choose_walks(const Params& params, uint32_t (&keys)[kMostUnits]) {
  const ChunkForward& p = params.problem.forward;
  const int lane = int(threadIdx.x) % 32;
  const Chunks chunks = count_chunks(p, params.segment > 0 ? params.segment : kWholeSequences);
  const float share = float(chunks.all) * float(params.slices) / float(p.multiprocessors);
  bool makes = params.makes_triangles;
  if (params.segment > 0) {
    float most = fmaxf(float(chunks.longest), share);
    if (params.scratch.order != nullptr) {
      sort_units(params, kWholeSequences, keys);
      for (int i = lane; i < p.N; i += 32) params.scratch.order[i] = unit_of_key(keys[i]);
      most = fmaxf(most, chunks_of_fullest(params, keys));
    }
    const bool whole = params.may_be_whole && !segments_pay(params, chunks, most + kTileStart);
    if (lane == 0) *params.scratch.segment = whole ? kWholeSequences : params.segment;
    makes = makes && (whole || has_states(params));
  }
  if (params.back.shape == BackShape::kByLengths) {
    const bool halves = halves_pay(float(chunks.longest), share, makes);
    if (lane == 0) *params.back.over_halves = halves;
  }
}

// Deals out the tiles of either walk, where the host asks for it. A warp calls it.
GDN_DEVICE void deal_walk(const Params& params, bool back, uint32_t (&keys)[kMostUnits]) {
  const ChunkForward& p = params.problem.forward;
  const int width = !back && params.sums == Sums::kCluster ? 2 : 1;
  const Bins bins = {p.multiprocessors / width, width,
                     back ? params.scratch.back_links : params.scratch.forward_links};
  if (bins.links == nullptr) return;
  const bool whole = params.segment == 0 || (back && !params.maps.exist);
  const int segment = whole ? kWholeSequences : *params.scratch.segment;
  const int units = sort_units(params, segment, keys);
  if (back && walks_back_over_halves(params)) {
    deal(keys, units, back, 2 * params.slices, params.back.by_halves, bins);
  } else {
    deal(keys, units, back, params.slices, params.by_slices, bins);
  }
}

}  // namespace gdn::sm90::backward
