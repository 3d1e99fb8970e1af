// Heads with K up to 64.
#include "sm90/forward/launch.cuh"

namespace gdn::sm90 {
using Kind = Heads<64>;
template const char* run_heads<__nv_bfloat16, Kind, false>(KernelParams&, const ForwardPlan&,
                                                           cudaStream_t);
template const char* run_heads<__half, Kind, false>(KernelParams&, const ForwardPlan&,
                                                    cudaStream_t);
template const char* run_part<__nv_bfloat16, Kind>(KernelParams&, const ForwardPlan&, PartStage,
                                                   cudaStream_t);
template const char* run_part<__half, Kind>(KernelParams&, const ForwardPlan&, PartStage,
                                            cudaStream_t);
}  // namespace gdn::sm90
