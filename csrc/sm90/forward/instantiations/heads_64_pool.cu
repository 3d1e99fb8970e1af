// Heads with K up to 64, on a pool of states.
#include "sm90/forward/launch.cuh"

namespace gdn::sm90 {
using Kind = Heads<64>;
template const char* run_heads<__nv_bfloat16, Kind, true>(KernelParams&, const ForwardPlan&,
                                                          cudaStream_t);
template const char* run_heads<__half, Kind, true>(KernelParams&, const ForwardPlan&, cudaStream_t);
}  // namespace gdn::sm90
