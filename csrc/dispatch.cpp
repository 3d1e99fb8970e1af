// The choice of an architecture by the GPU. A second architecture needs a folder next to sm90, a
// row of kArchitectures, and rows in csrc/build.py and gdn_triton/fast/architectures.py.
#include "dispatch.h"

#include <atomic>
#include <sstream>

#include "sm90/entry.h"

namespace gdn {
namespace {
constexpr Architecture kArchitectures[] = {
    {"sm90", 9, 0, sm90::chunk_forward_workspace, sm90::chunk_forward, sm90::chunk_prefill,
     sm90::backward::chunk_backward_checkpoint_interval, sm90::backward::chunk_backward_workspace,
     sm90::backward::chunk_backward, sm90::part_segment, sm90::part_starts,
     sm90::part_forward_workspace, sm90::part_forward_maps, sm90::part_forward_walk,
     sm90::backward::part_backward_workspace, sm90::backward::part_backward_maps,
     sm90::backward::part_backward_walks, sm90::backward::backward_walks},
};

struct Capability {
  int major, minor;
  cudaError_t error;  // of the queries
};
Capability capability_of(int device) {
  Capability x = {};
  x.error = cudaDeviceGetAttribute(&x.major, cudaDevAttrComputeCapabilityMajor, device);
  if (x.error == cudaSuccess)
    x.error = cudaDeviceGetAttribute(&x.minor, cudaDevAttrComputeCapabilityMinor, device);
  return x;
}
}  // namespace

const Architecture* architecture_on(int device) {
  // Each call of an operator asks, and the answer for a device never changes: it is cached.
  constexpr int kMostCached = 64;  // devices with smaller numbers are cached
  static std::atomic<const Architecture*> cache[kMostCached];
  const bool is_cached = device >= 0 && device < kMostCached;
  if (is_cached)
    if (const Architecture* const found = cache[device].load(std::memory_order_relaxed))
      return found;
  const Capability gpu = capability_of(device);
  if (gpu.error != cudaSuccess) return nullptr;
  for (const Architecture& x : kArchitectures) {
    if (x.major != gpu.major || x.minor != gpu.minor) continue;
    if (is_cached) cache[device].store(&x, std::memory_order_relaxed);
    return &x;
  }
  return nullptr;
}

std::string why_none_on(int device) {
  const Capability gpu = capability_of(device);
  if (gpu.error != cudaSuccess) return cudaGetErrorString(gpu.error);
  std::ostringstream out;
  out << "the library has kernels for GPUs of compute capability ";
  const char* separator = "";
  for (const Architecture& x : kArchitectures) {
    out << separator << x.major << '.' << x.minor;
    separator = ", ";
  }
  out << "; cuda:" << device << " has " << gpu.major << '.' << gpu.minor;
  return out.str();
}

}  // namespace gdn
