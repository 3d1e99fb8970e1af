// The function that runs one kind of heads. Each kind is compiled in two files (instantiations/):
// without and with a pool of states.
#pragma once
#include <cuda_runtime.h>

#include "sm90/heads.h"
#include "sm90/plan/cut.h"

namespace gdn::sm90 {

struct KernelParams;

// Returns null, or why it did not run. `params` is complete except for its tiles. kPool: with a
// pool of states, which has separate kernels, since instructions cost time even where they are not
// executed.
template <class T, class Heads, bool kPool>
const char* run_heads(KernelParams& params, const ForwardPlan& plan, cudaStream_t stream);

// The same for one of the two calls of a part of a sequence.
enum class PartStage { kMaps, kWalk };
template <class T, class Heads>
const char* run_part(KernelParams& params, const ForwardPlan& plan, PartStage stage,
                     cudaStream_t stream);

}  // namespace gdn::sm90
