// The machine's interface for the replacement of the CUDA runtime.
#pragma once
#include <cstdint>
#include <string>

#include "machine.h"

namespace emulator {

// Bytes of a kernel's parameters, and more.
constexpr size_t kMostParameters = 8192;

struct Launch {
  std::string name;  // of the kernel
  uint32_t grid[3], block[3];
  uint32_t cluster;         // blocks
  uint32_t dynamic_shared;  // bytes
  const void* params;
  bool beside = false;  // the launch before it: programmatic stream serialization
};

struct Options {
  uint64_t seed = 0;
  bool races = false;     // looks for accesses that nothing orders, and for those outside of a call's tensors
  bool of_launches = false;  // looks for races between launches alone, not inside of this one
  bool readers_fence = false;  // a fence.proxy.async of who reads counts too, if it follows what tells it of the write
  bool in_order = false;  // warps by their numbers, copies at once: for finding a fault again
};

// The contents of a CUtensorMap.
struct TensorMap {
  static constexpr uint64_t kMagic = 0x70616d726f736e65;
  uint64_t magic;
  void* base;
  int64_t dims[4], strides[3];  // elements; bytes
  int32_t box[4];
  bool half;  // fp16, else bf16 or
  bool wide;  // fp32
  int64_t size() const { return wide ? 4 : 2; }  // bytes of an element
};
static_assert(sizeof(TensorMap) <= 128, "it lies in a CUtensorMap");

// The cudaError_t of the last function of the runtime that failed, until cudaGetLastError returns it. emulator_end_call
// clears the error, because the next call asks cudaGetLastError after a launch, and would take the error for its own.
extern int last_error;

// Runs all blocks; why not, or "".
std::string run(const Kernel& kernel, const Launch& launch, const Options& how);

}  // namespace emulator
