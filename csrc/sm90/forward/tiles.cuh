// The tiles of a call: the sequence or segment, the value head, the channels of V and the rows of
// each.
#pragma once
#include "sm90/forward/config.cuh"
#include "sm90/forward/kernel_params.cuh"
#include "sm90/forward/shared_memory.cuh"
#include "sm90/plan/segment_lengths.cuh"
#include "sm90/plan/tile_order.cuh"
#include "sm90/tile/sequences.cuh"

namespace gdn::sm90 {

template <class C>
GDN_HOST_DEVICE int values(const ChunkForward& p) {
  return C::kExact ? C::kKeys : p.V;
}
// The number of parts of V, of 64 kStates channels each.
template <class C>
GDN_HOST_DEVICE int value_parts(const ChunkForward& p) {
  return (values<C>(p) + 64 * C::kStates - 1) / (64 * C::kStates);
}

GDN_DEVICE int64_t slot_at(const Slots& slots, int64_t i) {
  if (slots.data == nullptr) return i;
  return slots.is_64 ? static_cast<const int64_t*>(slots.data)[i]
                     : static_cast<const int32_t*>(slots.data)[i];
}

// Whether sequence n is skipped, since its slot to read is padding.
GDN_DEVICE bool is_skipped(const Pool& pool, int n) {
  return slot_at(pool.read_slots, n) <= pool.last_skipped;
}

// Sets the rows of a tile to the sequence tile.n. A skipped sequence has length 0.
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

// Not read from the cache of the multiprocessor: the kernel that writes it may overlap with the
// start of this one.
GDN_DEVICE DeviceCut device_cut(const KernelParams& params) {
  const int4 words = __ldcg(reinterpret_cast<const int4*>(params.segments.device_cut));
  return {words.x, words.y, words.z};
}
// The lengths of segments, by choose_cut or by the plan.
GDN_DEVICE SegmentLengths lengths_of_segments(const KernelParams& params) {
  if (params.segments.device_cut != nullptr) {
    const DeviceCut chosen = device_cut(params);
    return SegmentLengths(chosen.first, chosen.rest);
  }
  return planned_lengths(params.problem, params.segments.cuts);
}

// Sets a tile to the later segment tile.segment. Few sequences have segments: a loop is enough.
template <class C>
GDN_DEVICE void locate_segment(const KernelParams& params, Tile& tile, SegmentLengths lengths) {
  const ChunkForward& p = params.problem;
  int index = tile.segment;
  tile.exists = tile.begins = tile.ends = false;
  for (tile.n = 0; tile.n < p.N; ++tile.n) {
    locate_sequence<C>(params, tile);
    const int count = lengths.later(tile.length);
    if (index < count) {
      const int before = lengths.first + index * lengths.rest;
      tile.exists = true;
      tile.ends = index == count - 1;
      tile.first += before;
      tile.length = min(tile.length - before, lengths.rest);
      return;
    }
    index -= count;
  }
  tile.length = 0;
}

// The number of sequence n's second segment, if it has one.
template <class C>
GDN_DEVICE int second_segment(const KernelParams& params, int n, SegmentLengths lengths) {
  Tile tile;
  int segment = 0;
#pragma unroll 1
  for (tile.n = 0; tile.n < n; ++tile.n) {
    locate_sequence<C>(params, tile);
    segment += lengths.later(tile.length);
  }
  return segment;
}

// Sets a tile whose n, hv and part are known to all rows from the sequence's first marked segment
// on.
template <class C>
GDN_DEVICE void locate_again(const KernelParams& params, Tile& tile) {
  wait_for_prerequisites();  // for the later segments, which make the marks
  const int parts = state_rows(values<C>(params.problem)) / 64;
  const int* const marks =
      params.segments.marks + (int64_t{tile.n} * params.problem.HV + tile.hv) * parts;
  tile.segment = kUnmarked;
#pragma unroll
  for (int i = 0; i < C::kStates; ++i)
    tile.segment = min(tile.segment, __ldcg(marks + tile.part * C::kStates + i));
  tile.exists = tile.segment != kUnmarked;
  tile.length = 0;
  if (!tile.exists) return;
  const SegmentLengths lengths = lengths_of_segments(params);
  locate_sequence<C>(params, tile);
  const int index = tile.segment - second_segment<C>(params, tile.n, lengths);
  const int before = lengths.first + index * lengths.rest;
  tile.begins = false;
  tile.ends = true;
  tile.first += before;
  tile.length -= before;
}

template <class C>
GDN_DEVICE Tile tile_at(const KernelParams& params, int index) {
  const ChunkForward& p = params.problem;
  Tile tile;
  // The parts of a map are those of b, then those of M, whose rows are channels of K.
  const int of_values = value_parts<C>(p);
  const int parts = of_values + (C::kPass == Pass::kMaps ? C::kMapRows / 64 / C::kStates : 0);
  tile.part = index % parts;
  index /= parts;
  if constexpr (C::kPass == Pass::kMaps) {
    tile.map = tile.part >= of_values;
    tile.part -= tile.map * of_values;
  }
  tile.segment = tile.n = params.heads.divide(index);
  tile.hv = index - tile.n * p.HV;
  if constexpr (C::kPass == Pass::kMaps) {
    if (params.segments.order != nullptr) {  // all of a head's maps before the next head's
      const int segments = params.tiles / (parts * p.HV);
      const int rank = index / segments;
      tile.segment = index - rank * segments;
      tile.hv = __ldcg(params.segments.order + rank);
    }
  }
  tile.frame_begins = -1;
  if (C::kPass == Pass::kWhole && params.dealing.ordered) tile.n = lengths_of_call().order[tile.n];
  if (C::kPass == Pass::kSegments && params.segments.group == SegmentGroup::kAgain) {
    locate_again<C>(params, tile);
  } else if (C::kPass == Pass::kWhole ||
             (C::kPass == Pass::kSegments && params.segments.group == SegmentGroup::kFirst)) {
    tile.exists = tile.begins = tile.ends = true;
    locate_sequence<C>(params, tile);
    if constexpr (C::kPass == Pass::kSegments) {
      const SegmentLengths lengths = lengths_of_segments(params);
      tile.ends = tile.length <= lengths.first;
      tile.length = min(tile.length, lengths.first);
      tile.segment = second_segment<C>(params, tile.n, lengths);
    }
  } else {
    locate_segment<C>(params, tile, lengths_of_segments(params));
    // A last segment needs no map where no segment follows. Later segments have a launch for each
    // shape of blocks.
    const bool is_none = C::kPass == Pass::kMaps
                             ? tile.ends && !(C::kPart && params.part.maps_last)
                             : params.segments.device_cut != nullptr &&
                                   bool(device_cut(params).late_halves) != (C::kStates == 1);
    if (is_none) {
      tile.exists = false;
      tile.length = 0;
    }
    if (C::kPass == Pass::kSegments && params.segments.windows != nullptr && tile.exists &&
        !tile.ends) {
      const int* const window = params.segments.windows + int64_t{tile.segment} * p.HV + tile.hv;
      tile.frame_begins = tile.length - __ldcg(window) * kChunk;
    }
  }
  return tile;
}

// The first of the 64 channels of V that a state warpgroup has in this tile.
template <class C>
GDN_DEVICE int first_value_channel(const Tile& tile, int warpgroup) {
  return (C::kStates == 1 ? tile.part : tile.part * C::kStates + warpgroup) * 64;
}

// The place of 8 contiguous channels of o.
GDN_DEVICE uint4* o_line(const Pool& pool, int batch, int64_t row, int hv, int column) {
  const Rows& o = pool.o;
  const int64_t at = batch * o.batch + row * o.row + hv * o.head + column;
  return reinterpret_cast<uint4*>(static_cast<uint16_t*>(const_cast<void*>(o.data)) + at);
}

}  // namespace gdn::sm90
