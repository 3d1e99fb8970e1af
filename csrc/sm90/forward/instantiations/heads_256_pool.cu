// Heads with K from 129 to 256, on a pool of states.
#include "sm90/forward/launch.cuh"

namespace gdn::sm90 {
using Kind = Heads<256>;
template const char* run_heads<__nv_bfloat16, Kind, true>(KernelParams&, const ForwardPlan&,
                                                          cudaStream_t);
template const char* run_heads<__half, Kind, true>(KernelParams&, const ForwardPlan&, cudaStream_t);
}  // namespace gdn::sm90
