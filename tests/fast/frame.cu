// The frame of the CUDA forward's state: what csrc/sm90/tile/frame.cuh promises, for random gates. Runs on the
// CPU; prints what is wrong, or "right" and how many chunks were steep.
#include <algorithm>
#include <cstdio>
#include <random>
#include <vector>

#include "sm90/tile/frame.cuh"

namespace {
using namespace gdn::sm90;
constexpr int kTokens = 64;
constexpr float kFloor = -160;  // of a token's log2 decay
int faults = 0, steep = 0, mild = 0;

void expect(bool right, const char* what, float G, int token) {
  if (!right && ++faults <= 20) std::printf("%s, G = %g, token %d\n", what, G, token);
}
bool whole(float x) { return x == std::floor(x); }
// A rounding of a number below 64, and whether x, which is one, and y have this sum but for that.
constexpr double kRounding = 0x1p-19;
bool adds_up(float x, float y, float sum) { return std::fabs(double(x) + y - sum) <= kRounding; }

// The chunk behind one that left G; g: inclusive sums of log2 decays; anew: its frame begins anew. Returns what it
// leaves.
template <class T>
float check(float G, const std::vector<float>& g, bool decays, bool anew = false) {
  using F = Frame<T>;
  const float last = g.back();
  const ChunkFrame chunk = chunk_frame<T>(G, last, anew);
  if (anew) {  // as that of a walk that begins with this chunk, whatever came before
    const ChunkFrame first = chunk_frame<T>(F::kTop, last);
    expect(chunk.G == first.G && chunk.D == first.D && chunk.next == first.next, "a frame remembers", G, -1);
  }
  expect(chunk.steep == (last < -F::kRange), "steep chunks are those wider than the range", G, -1);
  expect(chunk.enter == (chunk.G == G ? 0 : G - F::kTop), "the state enters another frame", G, -1);
  expect(adds_up(chunk.next, chunk.D, chunk.G + last), "the state leaves another frame", G, -1);
  chunk.steep ? ++steep : ++mild;
  float least_before = 1e30f;  // of e
  for (int i = 0; i < kTokens; ++i) {
    const TokenFrame x = token_frame<T>(chunk, g[i]);
    const float in_frame = chunk.G + g[i];
    expect(adds_up(x.e, x.d, in_frame), "e and d are not the token's decay", G, i);
    if (!chunk.steep) {
      expect(chunk.D == 0 && x.d == 0 && x.y == 0, "a mild chunk has factors in its triangles", G, i);
      continue;
    }
    expect(whole(chunk.D) && whole(x.d) && whole(x.y), "not a power of two", G, i);
    expect(x.e - x.y >= -F::kMostPower - kRounding, "r is not a normal number", G, i);
    if (!decays) continue;
    expect(chunk.G >= 0 && chunk.G <= F::kTop, "a steep chunk begins out of range", G, i);
    expect(chunk.next >= 0 && chunk.next <= 1, "a steep chunk ends out of range", G, i);
    expect(x.e >= -kRounding && x.e <= F::kSteepUnits + 1, "e is out of range", G, i);
    constexpr float kMostGrowth = std::max(F::kTop - F::kSteepUnits, 0.f);  // of fp16: G is no fraction
    expect(x.d <= kMostGrowth && x.d >= chunk.D, "d is out of range", G, i);
    expect(x.e <= least_before + 1, "e grows", G, i);
    least_before = std::fmin(least_before, x.e);
    expect(x.y >= -kMostGrowth && x.y <= -x.d, "y is out of range", G, i);
    if (!F::kLiftsOutput) {
      expect(x.y - x.e <= F::kMostLift, "P' u' is out of range", G, i);
      // Where q S' keeps a factor that it should not, all that it gives is beyond 16 bits and 24 more.
      if (x.y < -x.d) expect(x.e - x.y - chunk.G <= -48, "a clamped y lets the state through", G, i);
    }
  }
  return chunk.next;
}

template <class T>
void check_many() {
  std::mt19937 random(5);
  std::uniform_real_distribution<float> uniform(0, 1);
  const auto walk = [&](auto decay, bool decays) {
    float G = Frame<T>::kTop;
    for (int chunk = 0; chunk < 40; ++chunk) {
      std::vector<float> g;
      float sum = 0;
      for (int i = 0; i < kTokens; ++i) g.push_back(sum += std::fmax(decay(chunk, i), kFloor));
      G = check<T>(G, g, decays, chunk % 5 == 3);
    }
  };
  for (int round = 0; round < 200; ++round) {
    const float strength = std::exp2(uniform(random) * 16 - 8);
    const int at = int(uniform(random) * kTokens), every = 1 + int(uniform(random) * 4);
    walk([&](int, int) { return -strength * uniform(random); }, true);
    walk([&](int, int) { return uniform(random) < 0.02f ? kFloor : -strength * uniform(random) / 64; }, true);
    walk([&](int chunk, int i) { return chunk % every == 0 && i == at ? kFloor : 0.f; }, true);
    walk([&](int chunk, int i) { return chunk % every == 0 && i / 16 == at / 16 ? -strength : 0.f; }, true);
    // A chunk just inside and just outside of the range, and of each block of 16 tokens.
    const float edge = Frame<T>::kRange + (round % 2 ? 0.01f : -0.01f);
    walk([&](int, int) { return -edge / kTokens; }, true);
    walk([&](int, int) { return -edge / 16; }, true);
    walk([&](int, int) { return 4 * strength / 256 * (uniform(random) - 0.5f); }, false);
  }
  for (const float G : {-72.f, -40.f, -1e-3f, 0.f, 0.999f, 23.9f, 24.f, 40.f})
    check<T>(G, std::vector<float>(kTokens, -160.f * kTokens), true);
}
}  // namespace

int main() {
  check_many<__nv_bfloat16>();
  check_many<__half>();
  if (steep < 10000 || mild < 10000) std::printf("too few: %d steep, %d mild\n", steep, mild), ++faults;
  if (faults == 0) std::printf("right: %d steep chunks, %d mild\n", steep, mild);
  return faults != 0;
}
