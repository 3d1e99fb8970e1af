// Which architecture csrc/dispatch.cpp takes for a GPU, on a machine with GPUs of many kinds that are not there. Runs on the
// CPU; prints the rows, the answer for each GPU, and how often CUDA was asked.
#include <cstdio>
#include <iterator>

#include "dispatch.cpp"

namespace {
constexpr int kGpus[][2] = {{9, 0}, {8, 0}, {9, 0}, {10, 0}};  // compute capabilities
int questions = 0;
}  // namespace

extern "C" cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  ++questions;
  if (device < 0 || device >= int(std::size(kGpus))) return cudaErrorInvalidDevice;
  *value = kGpus[device][attribute == cudaDevAttrComputeCapabilityMajor ? 0 : 1];
  return cudaSuccess;
}
extern "C" const char* cudaGetErrorString(cudaError_t) { return "there is no such device"; }

namespace gdn::sm90 {
size_t chunk_forward_workspace(const ChunkForward&) { return 1; }
const char* chunk_forward(const ChunkForward&, cudaStream_t) { return "forward"; }
const char* chunk_prefill(const ChunkForward&, const Pool&, cudaStream_t) { return "prefill"; }
int part_segment(const ChunkForward&) { return 4; }
size_t part_starts(const ChunkForward&) { return 5; }
size_t part_forward_workspace(const ChunkForward&) { return 6; }
const char* part_forward_maps(const ChunkForward&, const Part&, cudaStream_t) { return "maps"; }
const char* part_forward_walk(const ChunkForward&, const Part&, cudaStream_t) { return "walk"; }
namespace backward {
int chunk_backward_checkpoint_interval(const ChunkForward&) { return 3; }
size_t chunk_backward_workspace(const ChunkForward&, int) { return 2; }
const char* chunk_backward(const ChunkBackward&, cudaStream_t) { return "backward"; }
size_t part_backward_workspace(const ChunkForward&) { return 7; }
const char* part_backward_maps(const ChunkBackward&, const Part&, cudaStream_t) { return "back"; }
const char* part_backward_walks(const ChunkBackward&, const Part&, cudaStream_t) { return "both"; }
const char* backward_walks(const BackwardWalks&, cudaStream_t) { return "walks"; }
}  // namespace backward
}  // namespace gdn::sm90

int main() {
  for (const gdn::Architecture& x : gdn::kArchitectures) std::printf("row %s %d %d\n", x.name, x.major, x.minor);
  for (int turn = 0; turn < 2; ++turn)
    for (int device = -1; device < 5; ++device) {
      questions = 0;
      const gdn::Architecture* const found = gdn::architecture_on(device);
      const int asked = questions;
      std::printf("%d %s, asked %d\n", device, found ? found->name : gdn::why_none_on(device).c_str(), asked);
    }
  const gdn::Architecture& x = *gdn::architecture_on(0);
  std::printf("%s %s %s %s %d %d %d\n", x.chunk_forward({}, nullptr), x.chunk_prefill({}, {}, nullptr),
              x.chunk_backward({}, nullptr), x.backward_walks({}, nullptr), int(x.chunk_forward_workspace({})),
              int(x.chunk_backward_workspace({}, 0)), x.chunk_backward_checkpoint_interval({}));
  std::printf("%s %s %s %s %d %d %d %d\n", x.part_forward_maps({}, {}, nullptr), x.part_forward_walk({}, {}, nullptr),
              x.part_backward_maps({}, {}, nullptr), x.part_backward_walks({}, {}, nullptr), x.part_segment({}),
              int(x.part_starts({})), int(x.part_forward_workspace({})), int(x.part_backward_workspace({})));
}
