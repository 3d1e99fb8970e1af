// One launch of one translated kernel, for callers that have no CUDA: what emulator/gluon.py calls.
#include <dlfcn.h>

#include <cstring>
#include <string>

#include "launch.h"

namespace {
const emulator::Kernel* kernel_in(const char* library) {
  void* const opened = dlopen(library, RTLD_NOW);
  return opened ? static_cast<const emulator::Kernel*>(dlsym(opened, "kernel")) : nullptr;
}
}  // namespace

extern "C" {

// Where each parameter lies, and its bytes, two numbers a parameter; the count of parameters, or -1 for more than `most`.
int emulator_parameters(const char* library, uint32_t* out, uint32_t most) {
  const emulator::Kernel* const kernel = kernel_in(library);
  if (!kernel || kernel->param_count > most) return -1;
  for (uint32_t i = 0; i < kernel->param_count; ++i)
    out[2 * i] = kernel->params[i].offset, out[2 * i + 1] = kernel->params[i].bytes;
  return int(kernel->param_count);
}

// params: kMostParameters bytes, at a multiple of 128. beside: the launch may begin before the previous one has ended.
// races: 0, or 1 to look for them, or 2 for those between launches alone. Why it failed, or "".
const char* emulator_launch(const char* library, const char* name, uint32_t blocks, uint32_t threads, uint32_t shared,
                            const void* params, int beside, uint64_t seed, int races) {
  static std::string error;
  const emulator::Kernel* const kernel = kernel_in(library);
  if (!kernel) return "no kernel in the library";
  const emulator::Launch what{name, {blocks, 1, 1}, {threads, 1, 1}, 1, shared, params, beside != 0};
  emulator::Options how;
  how.seed = seed, how.races = races != 0, how.of_launches = races == 2, how.readers_fence = true;
  error = emulator::run(*kernel, what, how);
  return error.c_str();
}
}
