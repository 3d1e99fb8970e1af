// A kernel that chooses where the sequences of a call are cut into segments, by the lengths and the
// gates of the call. A CUDA graph therefore stays valid when these change. The kernel also chooses
// the order of heads in the launch of maps.
#pragma once
#include "sm90/plan/cut_time.cuh"
#include "sm90/plan/forgetting.cuh"
#include "sm90/tile/gates.cuh"
#include "sm90/tile/sequences.cuh"

namespace gdn::sm90 {

struct ChooseCutParams {
  ChunkForward problem;
  CutCall cut;
  DeviceCut* choice;  // written
  int* order;  // written: all value heads; heads that do not forget soon come first, since their
               // maps take longest
};
// kSamplers: threads of a head, each with its share of the samples. More samples in a thread would
// wait for memory one after the other.
constexpr int kChoiceThreads = 576, kSamples = 64, kSamplers = 16;
static_assert(kChoiceThreads >= kMostDeviceCutHeads && kChoiceThreads >= Candidate::kAll &&
              kChoiceThreads % 32 == 0 && 32 % kSamplers == 0);

// Whether a head's gates remember not much longer than plans assume, judged by the mean of kSamples
// gates from all over the call. kSamplers neighbouring threads judge a head; all threads of a warp
// call it.
GDN_DEVICE bool forgets_soon(const ChunkForward& p, int hv, int lane) {
  constexpr float kMuch = 1.25f;
  const int64_t tokens = p.cu_seqlens ? sequence_bound(p, p.N) : p.T;
  float sum = 0;
#pragma unroll
  for (int i = lane; i < kSamples; i += kSamplers) {
    const int64_t t = tokens * i / kSamples, batch = p.cu_seqlens ? 0 : i % p.B;
    const int64_t at = batch * p.g.batch + t * p.g.row + hv * p.g.head;
    if (t < p.T) sum += log2_decay(p, to_float(load_bits(p.g.data, at, p.g_dtype), p.g_dtype), hv);
  }
#pragma unroll
  for (int d = kSamplers / 2; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
  return sum * kMuch * float(kChunk * kWindow) / float(kSamples) <= -kForgotten;  // false for a NaN
}

// One block. Among equal times the candidate with the lowest number wins: the choice is the same on
// every run.
__global__ void __launch_bounds__(kChoiceThreads, 1)
    choose_cut(const __grid_constant__ ChooseCutParams call) {
  __shared__ int chunks[kMostOrdered];
  __shared__ int forgets[kMostDeviceCutHeads];
  __shared__ int longest, forgetting;
  __shared__ unsigned long long best[2];
  const ChunkForward& p = call.problem;
  const int thread = int(threadIdx.x);
  launch_dependents();
  if (thread == 0) {
    longest = forgetting = 0;
    best[0] = best[1] = ~0ull;
  }
  __syncthreads();
  for (int n = thread; n < p.N; n += kChoiceThreads) {
    chunks[n] = (sequence_length(p, n) + kChunk - 1) / kChunk;
    atomicMax(&longest, chunks[n]);
  }
  if (call.cut.forgets)
    for (int first = 0; first < p.HV; first += kChoiceThreads / kSamplers) {
      const int hv = first + thread / kSamplers;
      const bool soon = forgets_soon(p, min(hv, p.HV - 1), thread % kSamplers);
      if (hv < p.HV && thread % kSamplers == 0) {
        forgets[hv] = soon;
        if (soon) atomicAdd(&forgetting, 1);
      }
    }
  __syncthreads();
  if (call.cut.forgets && thread < p.HV) {
    int like_it = 0;  // heads before it
    for (int hv = 0; hv < thread; ++hv) like_it += forgets[hv] == forgets[thread];
    call.order[forgets[thread] ? p.HV - forgetting + like_it : like_it] = thread;
  }
  const float share = float(forgetting) / float(p.HV);
  const OneByOne length = {chunks};
  const auto offer = [&](unsigned long long& least, const Candidate& x) {
    const float time = cut_time(call.cut, length, p.N, x, share);
    atomicMin(&least,
              static_cast<unsigned long long>(__float_as_uint(time)) << 32 | unsigned(thread));
  };
  if (thread < Candidate::kAll)
    if (const Candidate x = Candidate::of_grid(thread, longest, call.cut); x.is_one(longest))
      offer(best[0], x);
  __syncthreads();
  const Candidate coarse = Candidate::of_grid(int(unsigned(best[0])), longest, call.cut);
  const bool cut = coarse.first < longest;
  if (cut && thread < Candidate::kNear)
    if (const Candidate x = Candidate::near(thread, coarse); x.is_one(longest)) offer(best[1], x);
  __syncthreads();
  const bool better = cut && best[1] >> 32 < best[0] >> 32;
  if (thread == 0) {
    const Candidate x = better ? Candidate::near(int(unsigned(best[1])), coarse) : coarse;
    *call.choice = {max(x.first, 1), max(x.rest, 1), x.late_halves};
  }
}

}  // namespace gdn::sm90
