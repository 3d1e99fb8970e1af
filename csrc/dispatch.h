// The architectures of this library, and which of them a GPU runs. No torch.
#pragma once
#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>

#include "params.h"

namespace gdn {

// The kernels of one architecture, as the operators call them.
//
// A function that launches kernels returns null, or why it did not run; the words stay valid. Its
// caller has set the device, and B, T, N, H, HV are >= 1.
struct Architecture {
  const char* name;  // of its folder in csrc and of its row in csrc/build.py
  int major, minor;  // the compute capability of the GPUs that run its machine code

  // Bytes of scratch memory that chunk_forward and chunk_prefill need. Depends on B, T, H, HV, K,
  // V, N, dtype, use_qk_l2norm, batch_invariant, longest, multiprocessors, and on whether
  // cu_seqlens is null; the other fields may be unset.
  size_t (*chunk_forward_workspace)(const ChunkForward&);

  // Tokens from cu_seqlens[N] on get o = 0; a sequence without tokens gets ht = h0.
  const char* (*chunk_forward)(const ChunkForward&, cudaStream_t);

  // The same on a pool, or with checkpoints: h0, ht and o are not read, and T may be 0.
  const char* (*chunk_prefill)(const ChunkForward&, const Pool&, cudaStream_t);

  // The number of tokens from one state to the next that a forward leaves for chunk_backward, which
  // takes less time with them; 0: a forward leaves none. Depends on the same fields as
  // chunk_backward_workspace.
  int (*chunk_backward_checkpoint_interval)(const ChunkForward&);

  // Bytes of scratch memory that chunk_backward needs, with states after each `checkpoint_interval`
  // tokens, or without, 0. Depends on B, T, H, HV, K, V, N, dtype, use_qk_l2norm, batch_invariant,
  // longest, multiprocessors, and on whether cu_seqlens is null.
  size_t (*chunk_backward_workspace)(const ChunkForward&, int checkpoint_interval);

  // As chunk_forward. A sequence without tokens gets dh0 = dht.
  const char* (*chunk_backward)(const ChunkBackward&, cudaStream_t);

  // A part of a sequence (Part), in two calls for each direction, between which the devices
  // exchange maps. They depend on the same fields as chunk_forward_workspace. The workspace of the
  // second call is that of the first, unchanged, and so are the inputs. B = N = 1, T >= 1.
  int (*part_segment)(const ChunkForward&);    // chunks of a segment
  size_t (*part_starts)(const ChunkForward&);  // bytes of Part::starts
  size_t (*part_forward_workspace)(const ChunkForward&);
  // The maps of the segments, folded from h0 into Part::carry; o and ht are not written.
  const char* (*part_forward_maps)(const ChunkForward&, const Part&, cudaStream_t);
  // o and ht. h0: the state that the part starts from; null: that of part_forward_maps.
  const char* (*part_forward_walk)(const ChunkForward&, const Part&, cudaStream_t);
  // K = V = 128 in bfloat16 alone. h0 and Part::starts are those of part_forward_walk; the outputs
  // are given to both calls, since the first has scratch memory in them.
  size_t (*part_backward_workspace)(const ChunkForward&);
  // The reverse maps of the segments, folded from dht into Part::carry.
  const char* (*part_backward_maps)(const ChunkBackward&, const Part&, cudaStream_t);
  // The gradients, for dht, which may differ from that of the first call.
  const char* (*part_backward_walks)(const ChunkBackward&, const Part&, cudaStream_t);

  // Chunk indices without a chunk are not written. A sequence without tokens gets dh0 = dht.
  const char* (*backward_walks)(const BackwardWalks&, cudaStream_t);
};

// The architecture whose machine code this CUDA device runs; null: why_none_on() says why there is
// none.
const Architecture* architecture_on(int device);

// The end of a sentence that says why architecture_on() found none for a device.
std::string why_none_on(int device);

}  // namespace gdn
