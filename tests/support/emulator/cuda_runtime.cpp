// Replaces CUDA's runtime, and the one function of the driver that the library uses: one device, whose memory is the
// host's, and launches that have ended when they return.
//
// A kernel is compiled when it is first launched, from the C++ that build.py left in EMULATOR_FOLDER. The environment:
// EMULATOR_MULTIPROCESSORS (8), EMULATOR_SEED (0), EMULATOR_RACES (0 or 1), EMULATOR_IN_ORDER (0 or 1), EMULATOR_CXX (g++).
#include <cuda.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "launch.h"

namespace {

std::mutex mutex;
std::string message;                            // of the last launch that failed
std::map<const void*, std::string> names;       // of kernels, by the host's stub
std::map<std::string, const emulator::Kernel*> kernels;
uint64_t launches = 0;

const char* setting(const char* name, const char* otherwise) {
  const char* const found = std::getenv(name);
  return found && *found ? found : otherwise;
}

std::string source_of(const std::string& name) {
  std::ifstream index(std::string(EMULATOR_FOLDER) + "/kernels.txt");
  std::string known, file;
  while (index >> known >> file)
    if (known == name) return file;
  return "";
}

const emulator::Kernel* kernel_of(const std::string& name) {
  const auto found = kernels.find(name);
  if (found != kernels.end()) return found->second;
  const std::string file = source_of(name);
  if (file.empty()) {
    message = "the emulator knows no kernel " + name;
    return nullptr;
  }
  const std::string source = std::string(EMULATOR_FOLDER) + "/" + file, library = source + ".so";
  if (access(library.c_str(), R_OK) != 0) {
    const std::string made = library + "." + std::to_string(getpid());
    const std::string command = std::string(setting("EMULATOR_CXX", "g++")) + " " EMULATOR_FLAGS " -shared " + source +
                                " -o " + made + " -L" EMULATOR_FOLDER " -lemulator && mv " + made + " " + library;
    if (std::system(command.c_str()) != 0) {
      message = "the emulator could not compile " + source;
      return nullptr;
    }
  }
  void* const handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  void* const kernel = handle ? dlsym(handle, "kernel") : nullptr;
  if (!kernel) {
    message = dlerror();
    return nullptr;
  }
  return kernels[name] = static_cast<const emulator::Kernel*>(kernel);
}

cudaError_t failed(cudaError_t error) {
  emulator::last_error = error;
  return error;
}

cudaError_t launch(const void* stub, dim3 grid, dim3 block, uint32_t cluster, bool beside, size_t shared,
                   void** arguments) {
  const std::lock_guard<std::mutex> guard(mutex);
  const auto name = names.find(stub);
  if (name == names.end()) {
    message = "a launch of what was not registered";
    return failed(cudaErrorInvalidDeviceFunction);
  }
  const emulator::Kernel* const kernel = kernel_of(name->second);
  if (!kernel) return failed(cudaErrorInvalidDeviceFunction);
  std::vector<uint8_t> storage(2 * emulator::kMostParameters);
  auto* const params =
      reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(storage.data()) + 127) / 128 * 128);
  for (uint32_t i = 0; i < kernel->param_count; ++i)
    std::memcpy(params + kernel->params[i].offset, arguments[i], kernel->params[i].bytes);
  if (uint64_t(grid.x) * grid.y * grid.z % cluster != 0) {
    message = "a grid that is no whole number of clusters";
    return failed(cudaErrorInvalidConfiguration);
  }
  const emulator::Launch what{name->second,     {grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, cluster,
                              uint32_t(shared), params,                   beside};
  emulator::Options how;
  how.seed = std::strtoull(setting("EMULATOR_SEED", "0"), nullptr, 10) * 1000003 + launches++;
  how.races = std::atoi(setting("EMULATOR_RACES", "0")) != 0;
  how.in_order = std::atoi(setting("EMULATOR_IN_ORDER", "0")) != 0;
  const std::string error = emulator::run(*kernel, what, how);
  if (error.empty()) return cudaSuccess;
  message = error;
  return failed(cudaErrorLaunchFailure);
}

// The driver's function, as far as the library uses it.
CUresult encode(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* base, const cuuint64_t* dims,
                const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t*, CUtensorMapInterleave,
                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  if (rank != 4 || swizzle != CU_TENSOR_MAP_SWIZZLE_128B) return CUDA_ERROR_NOT_SUPPORTED;
  if (reinterpret_cast<uintptr_t>(base) % 16) return CUDA_ERROR_INVALID_VALUE;
  emulator::TensorMap made = {};
  made.magic = emulator::TensorMap::kMagic;
  made.base = base;
  made.half = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  for (int i = 0; i < 4; ++i) made.dims[i] = int64_t(dims[i]), made.box[i] = int32_t(box[i]);
  for (int i = 0; i < 3; ++i) {
    if (strides[i] % 16) return CUDA_ERROR_INVALID_VALUE;
    made.strides[i] = int64_t(strides[i]);
  }
  std::memcpy(static_cast<void*>(map), &made, sizeof(made));
  return CUDA_SUCCESS;
}

struct Configuration {
  dim3 grid, block;
  size_t shared;
  void* stream;
};
thread_local std::vector<Configuration> configurations;

}  // namespace

extern "C" {

// Functions that nvcc's host code calls before main, and for a launch by <<<>>>.
void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* stub, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*) {
  const std::lock_guard<std::mutex> guard(mutex);
  names[stub] = name;
}
char __cudaInitModule(void**) { return 1; }
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  const Configuration x = configurations.back();
  configurations.pop_back();
  *grid = x.grid, *block = x.block, *shared = x.shared, *static_cast<void**>(stream) = x.stream;
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* stub) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(stub));
  return cudaSuccess;
}
cudaError_t cudaLaunchKernel(const void* stub, dim3 grid, dim3 block, void** arguments, size_t shared, cudaStream_t) {
  return launch(stub, grid, block, 1, false, shared, arguments);
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared, cudaStream_t) {
  return launch(kernel, grid, block, 1, false, shared, arguments);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* stub, void** arguments) {
  uint32_t cluster = 1;
  bool beside = false;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    const cudaLaunchAttribute& x = config->attrs[i];
    if (x.id == cudaLaunchAttributeClusterDimension) cluster = x.val.clusterDim.x;
    if (x.id == cudaLaunchAttributeProgrammaticStreamSerialization) beside = x.val.programmaticStreamSerializationAllowed;
  }
  return launch(stub, config->gridDim, config->blockDim, cluster, beside, config->dynamicSmemBytes, arguments);
}

// Functions that the library calls by name.
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaGetLastError() {
  const auto error = cudaError_t(emulator::last_error);
  emulator::last_error = cudaSuccess;
  return error;
}
const char* cudaGetErrorString(cudaError_t error) { return error == cudaSuccess ? "no error" : message.c_str(); }
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = std::atoi(setting("EMULATOR_MULTIPROCESSORS", "8"));
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      return cudaSuccess;
    default:
      message = "the emulator does not know that attribute";
      return failed(cudaErrorInvalidValue);
  }
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  if (std::strcmp(name, "cuTensorMapEncodeTiled") != 0) return failed(cudaErrorInvalidValue);
  *function = reinterpret_cast<void*>(&encode);
  if (found) *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t count, cudaStream_t) {
  std::memset(to, value, count);
  return cudaSuccess;
}

// LibTorch's functions for CUDA, which a torch without CUDA lacks.
int32_t aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  *stream = nullptr;
  return 0;
}
}
