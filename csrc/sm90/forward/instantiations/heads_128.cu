// Heads with K from 65 to 128, except K = V = 128.
#include "sm90/forward/launch.cuh"

namespace gdn::sm90 {
using Kind = Heads<128>;
template const char* run_heads<__nv_bfloat16, Kind, false>(KernelParams&, const ForwardPlan&,
                                                           cudaStream_t);
template const char* run_heads<__half, Kind, false>(KernelParams&, const ForwardPlan&,
                                                    cudaStream_t);
template const char* run_part<__nv_bfloat16, Kind>(KernelParams&, const ForwardPlan&, PartStage,
                                                   cudaStream_t);
template const char* run_part<__half, Kind>(KernelParams&, const ForwardPlan&, PartStage,
                                            cudaStream_t);
}  // namespace gdn::sm90
