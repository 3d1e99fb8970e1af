// The gate of the CUDA kernels and its derivative: what csrc/sm90/gates.cuh makes of raw gates and rates of any
// size, against double. Runs in the emulator, where a kernel reads the host's memory. Prints what is wrong, or "right" and how many were compared.
#include <cmath>
#include <cstdio>
#include <vector>

#include "sm90/tile/gates.cuh"

namespace {
struct Gate {
  float x, A_log, g, slope;
};

__global__ void gates_kernel(Gate* gates, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count) return;
  Gate& gate = gates[i];
  gate.g = gdn::sm90::log_decay(gate.x, gate.A_log);
  gate.slope = gdn::sm90::log_decay_slope(gate.x, gate.A_log, gate.g);
}

// An exponent of the size s is rounded to s 2^-24. The fast logarithm of a softplus above 1/16 is off by 2^-22.
double allowed(const Gate& gate) {
  return 0x1p-17 + 0x1p-23 * (std::fabs(double(gate.A_log)) + std::fabs(double(gate.x)) + 8);
}

bool near(float got, double exact, const Gate& gate) {
  constexpr double kLeast = 0x1p-126, kMost = 0x1p128;
  if (std::isnan(exact)) return std::isnan(got);
  // Past the range of float32, or where exp(A_log) alone is: decays that are 0 by far.
  if (std::isinf(got)) return got < 0 && (exact < -kMost * (1 - allowed(gate)) || (gate.A_log > 88.7 && exact < -1e4));
  if (std::fabs(exact) < kLeast) return std::fabs(got) <= kLeast;
  return std::fabs(got - exact) <= allowed(gate) * std::fabs(exact);
}
}  // namespace

int main() {
  std::vector<Gate> gates;
  const auto add = [&](float x, float A_log) { gates.push_back({x, A_log, 0, 0}); };
  for (float A_log : {-120.f, -80.f, -5.f, 0.f, 2.8f, 30.f, 60.f, 88.f, 88.6f, 89.f, 100.f, 150.f}) {
    for (int i = -440; i <= 120; ++i) add(i * 0.5f + 0.03f, A_log);
    for (int i = -12; i <= 24; ++i) add(i * 0.25f - A_log, A_log);  // decays that are neither 0 nor 1
    for (float x : {20.f, 20.00001f, -40.f, -39.99999f, -40.00001f, -INFINITY, 1e30f}) add(x, A_log);
  }
  add(NAN, 0), add(NAN, 100), add(-200, NAN), add(1, NAN);
  const int count = int(gates.size());
  gates_kernel<<<(count + 127) / 128, 128>>>(gates.data(), count);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return std::printf("%s\n", cudaGetErrorString(error)), 1;
  int faults = 0;
  for (const Gate& gate : gates) {
    const double x = gate.x, rate = std::exp(double(gate.A_log));
    const double g = -rate * (x > 20 ? x : std::log1p(std::exp(x)));
    const double slope = -rate * (x > 20 ? 1 : 1 / (1 + std::exp(-x)));
    if (near(gate.g, g, gate) && near(gate.slope, slope, gate)) continue;
    if (++faults <= 20)
      std::printf("x = %g, A_log = %g: g = %g, not %g; its derivative %g, not %g\n", gate.x, gate.A_log, gate.g, g,
                  gate.slope, slope);
  }
  if (!faults) std::printf("right: %d gates\n", count);
  return faults != 0;
}
