// Whether segments that forget (windows.cuh) have ended with the state that the next one has started from.
#include "sm90/backward/windows.cuh"
#include "sm90/launch_blocks.h"

namespace gdn::sm90::backward {
namespace {
constexpr int kThreads = 256;  // a warp compares its share of a state: StateDifference

// A block has a segment and slice.
template <class Kind>
__global__ void __launch_bounds__(kThreads) segment_check_kernel(const __grid_constant__ Params params) {
  wait_for_prerequisites();
  const SegmentTile<Kind> tile = cut_tile<Kind>(params, blockIdx.x);
  const int64_t index = segment_index<Kind>(params, tile.n, tile.segment, tile.slice);
  if (tile.segment >= tile.last || params.cut.forgotten[index] == 0) return;
  const int64_t own = int64_t{threadIdx.x / 32} * 16 * kChannels + threadIdx.x % 32 * 4;
  const float* const ended = params.cut.ends + index * (kChannels * kChannels) + own;
  const float* const given =
      starts_of<Kind>(params, tile.n) + segment_matrix<Kind>(params, tile.n, tile.segment + 1, tile.slice) + own;
  StateDifference difference;
#pragma unroll 4
  for (int row = 0; row < 16; ++row) {
    const float4 x = *reinterpret_cast<const float4*>(ended + row * kChannels);
    const float4 y = *reinterpret_cast<const float4*>(given + row * kChannels);
    difference.add(x.x, y.x);
    difference.add(x.y, y.y);
    difference.add(x.z, y.z);
    difference.add(x.w, y.w);
  }
  difference.judge(params.cut.wrong);
}
}  // namespace

template <class Kind>
const char* run_segment_check(const Params& params, cudaStream_t stream) {
  const int64_t blocks = int64_t{params.problem.forward.N} * params.segments_of_batch * params.slices;
  return launch_small(&segment_check_kernel<Kind>, params, unsigned(blocks), kThreads, stream);
}

template const char* run_segment_check<Kind<__nv_bfloat16, true>>(const Params&, cudaStream_t);

}  // namespace gdn::sm90::backward
