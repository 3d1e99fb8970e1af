// Small kernels, each right in the forms none and barrier-freed, and wrong in one way in each other form: a copy of a tile
// through shared memory and a product of it; a second kernel that overlaps and copies the result; one whose warpgroups
// share registers; and two kernels, one of which reads values that the other has published. The machine must find each
// wrong form. Each argument is the name of a form, and the machine's words go to stdout, one line for each form.
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "common/ptx.cuh"
#include "common/tensor_map.h"
#include "sm90/tile/wgmma.cuh"

extern "C" void emulator_allow(uint64_t first, uint64_t bytes, int written);
extern "C" int emulator_end_call();

namespace {
using namespace gdn;
using namespace gdn::sm90;

enum Fault : int {
  kNone, kNoWait, kNoFence, kNoSync, kTooManyBytes, kOutside, kUnaligned, kOverwritten, kLanes, kNoStoreWait, kPhases,
  kLatePhase, kLeft, kNoTensor, kReadOnly, kBlocks, kEarly, kNobodyWaits, kRaiseBelow,
  kLowerAbove, kRegistersNeverFree, kOneWarpRaises, kEndsBeforeRaise, kTwoLowers, kUnread, kUntold, kPublishedEarly,
  kStoreGoesOn, kBarrierWritten, kBarrierLate, kBarrierUntold, kBarrierEarly, kBarrierLoaded, kBarrierStored,
  kBarrierTwice, kBarrierFreed, kBarrierFreedEarly, kFaults
};
const char* const names[kFaults] = {"none",      "no-wait",     "no-fence",  "no-sync", "too-many-bytes", "outside",
                                    "unaligned", "overwritten", "lanes",     "no-store-wait", "phases",   "late-phase",
                                    "left",      "no-tensor", "read-only",   "blocks",    "early",   "nobody-waits",
                                    "raise-below", "lower-above", "registers-never-free",
                                    "one-warp-raises", "ends-before-raise", "two-lowers",
                                    "unread", "untold", "published-early", "store-goes-on",
                                    "barrier-written", "barrier-late", "barrier-untold", "barrier-early",
                                    "barrier-loaded", "barrier-stored", "barrier-twice",
                                    "barrier-freed", "barrier-freed-early"};

constexpr int kBytes = 64 * 64 * 2;

// Forms with a barrier in the third tile, from the start.
template <int kFault>
constexpr bool kThirdBarrier = kFault >= kBarrierLoaded;

__device__ void mbarrier_invalidate(uint64_t* bar) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(shared_address(bar)) : "memory");
}

// out = x + x^T x, in bf16, of one tile; 128 threads.
template <int kFault>
__global__ void kernel(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap out, uint16_t* elements) {
  extern __shared__ __align__(1024) uint8_t raw[];
  __shared__ uint64_t full, turns;
  launch_dependents();
  const uint32_t tile = shared_address(raw), result = tile + kBytes, bar = shared_address(&full);
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  uint64_t* const third = reinterpret_cast<uint64_t*>(raw + 2 * kBytes) + 100;
  if (thread == 0) {
    mbarrier_init(&full, 1);
    mbarrier_init(&turns, 1);
    if (kThirdBarrier<kFault>) mbarrier_init(third, 1);
    if (kFault == kBarrierTwice) mbarrier_init(third, 1);
    mbarrier_init_fence();
  }
  __syncthreads();
  if (thread == 0) {
    mbarrier_expect(bar, kBytes + (kFault == kTooManyBytes ? 16 : 0));
    tma_load(tile, &x, bar, 0, 0, 0, 0);
    if (kFault == kLeft || kFault == kBarrierLoaded) {  // a copy that nobody waits for
      mbarrier_expect(shared_address(&turns), kBytes);
      tma_load(result + kBytes, &x, shared_address(&turns), 0, 0, 0, 0);
    }
  }
  if (kFault != kNoWait) mbarrier_wait(bar, 0);
  // A row strip of 16 for a warp: its own x, from the tile.
  float d[32];
  for (int b = 0; b < 4; ++b) {
    uint32_t r[4];
    const int row = 16 * warp + lane % 16, column = 2 * b + lane / 16;
    ldmatrix_x4(tile + row * 128 + (column ^ row % 8) * 16, r);
    for (int i = 0; i < 4; ++i) {
      const float2 v = unpack(__nv_bfloat16{}, r[i]);
      d[8 * b + i / 2 * 4 + i % 2 * 2] = v.x;
      d[8 * b + i / 2 * 4 + i % 2 * 2 + 1] = v.y;
    }
  }
  // Two phases, of which warp 0 waits for the first: nothing keeps the second from ending before warp 0 has seen that.
  if (kFault == kPhases || kFault == kLatePhase) {
    if (warp == 0) mbarrier_wait(shared_address(&turns), 0);
    if (warp == 1) mbarrier_arrive_if(shared_address(&turns), lane == 0);
    if (kFault == kPhases && (warp == 1 || warp == 2)) named_barrier(2, 64);
    if (warp == 1) mbarrier_arrive_if(shared_address(&turns), lane == 0);
  }
  if (kFault == kBarrierWritten && thread == 5) store_shared_4(shared_address(&turns) + 4, 0);
  if (kFault == kBarrierLate && thread == 32) store_shared_4(shared_address(third), 0);
  if (kFault == kBarrierLate && thread == 64) mbarrier_init(third, 1);
  if (kFault == kBarrierUntold && thread == 32) mbarrier_init(third, 1);
  if (kFault == kBarrierUntold && warp == 2) mbarrier_arrive_if(shared_address(third), lane == 0);
  if (kFault == kBarrierFreed || kFault == kBarrierFreedEarly) {
    if (warp == 1) mbarrier_arrive_if(shared_address(third), lane == 0);
    mbarrier_wait(shared_address(third), 0);
    if (kFault == kBarrierFreed) __syncthreads();
    if (thread == 0) mbarrier_invalidate(third);
    __syncthreads();
    if (thread == 5) store_shared_4(shared_address(third), 0);
  }
  if (kFault == kNoTensor && elements[64 * 64 + thread] == 1) d[0] = 0;
  if (kFault == kReadOnly) elements[thread] = 1;
  if (kFault == kOutside) store_shared_4(result + 3 * kBytes, thread);
  if (kFault == kUnaligned) store_shared_4(result + 2, thread);
  if (kFault == kLanes && warp == 0) {  // no __syncwarp between the lanes
    if (lane == 1) store_shared_4(result, 1);
    if (load_shared_4(result) == 2) d[0] = 0;
  }
  pin(d);
  wgmma_fence();
  for (int i = 0; i < 4; ++i) {
    // A (row) and B (column) K-major: x x^T.
    const uint64_t start = (uint64_t{1} << 62) | (uint64_t{1024 / 16} << 32) | uint64_t((tile + i * 32) >> 4 & 0x3fff);
    wgmma_ss_n64(__nv_bfloat16{}, d, start, start, 1);
  }
  wgmma_commit();
  if (kFault == kOverwritten && thread == 5) store_shared_4(tile + 4 * thread, 0);
  wgmma_wait<0>();
  pin(d);
  for (int b = 0; b < 4; ++b) {
    uint32_t r[4];
    for (int i = 0; i < 4; ++i)
      r[i] = pack(__nv_bfloat16{}, d[8 * b + i / 2 * 4 + i % 2 * 2], d[8 * b + i / 2 * 4 + i % 2 * 2 + 1]);
    const int row = 16 * warp + lane % 16, column = 2 * b + lane / 16;
    stmatrix_x4(result + row * 128 + (column ^ row % 8) * 16, r);
  }
  if (kFault != kNoFence) fence_async_proxy();
  if (kFault != kNoSync) __syncthreads();
  if (thread == 0) {
    tma_store(&out, kFault == kBarrierStored ? result + kBytes : result, 0, 0, 0, 0);
    tma_store_commit();
    if (kFault == kBarrierEarly) mbarrier_init(third - kBytes / 8, 1);
    if (kFault != kNoStoreWait) tma_store_wait_read();
    if (kFault == kNoStoreWait) store_shared_4(result, 7);
  }
}

template <int kFault>
__global__ void copy(const uint16_t* from, uint16_t* to) {
  if (kFault != kEarly && kFault != kNobodyWaits) wait_for_prerequisites();
  for (int i = threadIdx.x; i < 64 * 64; i += blockDim.x) to[i] = kFault == kNobodyWaits ? 0 : from[i];
}

template <int R>
__device__ void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(R));
}
template <int R>
__device__ void lower_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(R));
}

// 128 registers a thread at launch: what the four warpgroups have may add up to 512.
template <int kFault>
__global__ void __launch_bounds__(512, 1) share_registers() {
  const int warp = threadIdx.x / 32, warpgroup = warp / 4;
  if (warpgroup == 0) {
    if (kFault == kLowerAbove) {
      lower_registers<136>();
    } else {
      lower_registers<40>();
    }
    if (kFault == kTwoLowers && warp == 0) lower_registers<32>();
  } else if (warpgroup < 3) {
    if (kFault == kEndsBeforeRaise && warp == 4) return;
    raise_registers<168>();
  } else if (kFault == kRaiseBelow) {
    raise_registers<120>();
  } else if (kFault == kRegistersNeverFree) {
    raise_registers<144>();
  } else if (kFault == kOneWarpRaises) {
    if (warp == 12) {
      raise_registers<128>();
    } else {
      lower_registers<128>();
    }
  } else {
    raise_registers<136>();
  }
}

// A tile of ones by TMA, and a number that says that it is there.
template <int kFault>
__global__ void give(const __grid_constant__ CUtensorMap out, int* there) {
  extern __shared__ __align__(1024) uint8_t raw[];
  launch_dependents();
  const uint32_t tile = shared_address(raw);
  for (int i = threadIdx.x; i < kBytes / 4; i += blockDim.x) store_shared_4(tile + 4 * i, 0x3f803f80);
  fence_async_proxy();
  __syncthreads();
  if (threadIdx.x != 0) return;
  if (kFault == kPublishedEarly) publish(there, 1);
  tma_store(&out, tile, 0, 0, 0, 0);
  tma_store_commit();
  if (kFault != kStoreGoesOn) tma_store_wait();
  if (kFault != kPublishedEarly) publish(there, 1);
}
// Beside it.
template <int kFault>
__global__ void take(const uint16_t* from, const int* there, uint16_t* to) {
  if (kFault != kUnread && threadIdx.x == 0)
    while (load_published(there) == 0) {
    }
  if (kFault != kUntold) __syncthreads();
  for (int i = threadIdx.x; i < 64 * 64; i += blockDim.x) to[i] = from[i];
  wait_for_prerequisites();
}

float bf16(uint16_t x) {
  const uint32_t y = uint32_t(x) << 16;
  float z;
  std::memcpy(&z, &y, 4);
  return z;
}

// One block beside the launch before.
template <class... Parameters, class... Arguments>
cudaError_t launch_beside(void (*kernel)(Parameters...), unsigned threads, const Arguments&... arguments) {
  cudaLaunchAttribute beside = {};
  beside.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  beside.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = 1;
  config.blockDim = threads;
  config.attrs = &beside;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
}

template <int kFault>
std::string run_published(const CUtensorMap& map, uint16_t (&out)[64 * 64], uint16_t (&copied)[64 * 64]) {
  static int there;
  there = 0;
  emulator_allow(reinterpret_cast<uint64_t>(&there), sizeof there, 1);
  for (const uint16_t* memory : {out, copied}) emulator_allow(reinterpret_cast<uint64_t>(memory), kBytes, 1);
  give<kFault><<<1, 64, 2 * kBytes>>>(map, &there);
  cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) error = launch_beside(take<kFault>, 64, out + 0, &there, copied + 0);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  if (!emulator_end_call()) return "a launch outlives the call";
  for (const uint16_t x : copied)
    if (x != 0x3f80) return "a wrong number";
  return "right";
}

template <int kFault>
std::string run() {
  alignas(16) static uint16_t x[64 * 64], out[64 * 64], copied[64 * 64];
  for (int i = 0; i < 64 * 64; ++i) x[i] = uint16_t(0x3f80 + (i * 37 % 5 << 5)), out[i] = copied[i] = 0xffff;  // 1 to 2
  for (const uint16_t* memory : {x, out, copied}) emulator_allow(reinterpret_cast<uint64_t>(memory), kBytes, memory != x);
  CUtensorMap maps[2];
  const void* const memory[2] = {x, out};
  for (int i = 0; i < 2; ++i)
    if (const char* error = make_map(&maps[i], Dtype::kBFloat16, {memory[i], 64 * 64, 64, 64}, 1, 64, 1, 64)) return error;
  kernel<kFault><<<kFault == kBlocks ? 2 : 1, 128, 3 * kBytes>>>(maps[0], maps[1], x);
  cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return cudaGetErrorString(error);
  error = launch_beside(copy<kFault>, 128, out + 0, copied + 0);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  if (!emulator_end_call()) return "a launch outlives the call";
  for (int i = 0; i < 64; ++i)
    for (int j = 0; j < 64; ++j) {
      float want = bf16(x[64 * i + j]);
      for (int k = 0; k < 64; ++k) want += bf16(x[64 * i + k]) * bf16(x[64 * j + k]);
      const float found = bf16(copied[64 * i + j]);
      if (!(found >= want * 0.995f && found <= want * 1.005f)) return "a wrong number";
    }
  share_registers<kFault><<<1, 512>>>();
  error = cudaGetLastError();
  if (error != cudaSuccess) return cudaGetErrorString(error);
  return run_published<kFault>(maps[1], out, copied);
}

template <int kFault = 0>
std::string run_named(const std::string& name) {
  if constexpr (kFault == kFaults) {
    return "no such fault";
  } else {
    return name == names[kFault] ? run<kFault>() : run_named<kFault + 1>(name);
  }
}
}  // namespace

int main(int, char** arguments) {
  while (*++arguments) {
    std::puts(run_named(*arguments).c_str());
    emulator_end_call();
  }
}
