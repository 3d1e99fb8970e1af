// How the backward deals tiles (csrc/sm90/backward/deal.cuh), for random lengths and some that are named: every tile once,
// and blocks as full as those of a greedy deal by the host, which takes the tiles of the longest units one by one. Runs in
// the emulator; prints what is wrong, or "right" and how many deals were of segments.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <queue>
#include <random>
#include <vector>

#include "sm90/backward/deal.cuh"

extern "C" void emulator_allow(uint64_t first, uint64_t bytes, int written);
extern "C" int emulator_end_call();

namespace {
using namespace gdn;
using namespace gdn::sm90;
using namespace gdn::sm90::backward;

__global__ void choosing_kernel(const __grid_constant__ Params params) {
  __shared__ uint32_t keys[kMostUnits];
  choose_walks(params, keys);
}
__global__ void dealing_kernel(const __grid_constant__ Params params) {
  __shared__ uint32_t keys[kMostUnits];
  deal_walk(params, blockIdx.x == 1, keys);
}

struct Call {
  std::vector<int> lengths;  // tokens
  int slices, blocks;
  bool exchange;
  int segment;  // chunks; 0: whole sequences
  bool may_be_whole, by_lengths;
};

int faults = 0;
void expect(bool right, const char* what, const Call& call) {
  if (right || ++faults > 20) return;
  std::printf("%s: %zu sequences, %d slices, %d blocks, exchange %d, segment %d\n", what, call.lengths.size(), call.slices,
              call.blocks, call.exchange, call.segment);
}
int chunks_of(int length) { return (length + kChunk - 1) / kChunk; }

// Chunks, with the start of each tile, of all blocks or clusters of two, in order of size.
std::vector<int> greedy(std::vector<int> units, int tiles, int blocks) {
  std::sort(units.rbegin(), units.rend());
  std::priority_queue<int, std::vector<int>, std::greater<int>> loads;
  for (int i = 0; i < blocks; ++i) loads.push(0);
  for (const int chunks : units)
    for (int i = 0; i < tiles; ++i) {
      const int least = loads.top();
      loads.pop();
      loads.push(least + chunks + kTileStart);
    }
  std::vector<int> sorted;
  for (; !loads.empty(); loads.pop()) sorted.push_back(loads.top());
  return sorted;
}

// chunks: of each unit, -1 where there is none; each: tiles of a unit.
void check(const Call& call, const std::vector<int>& links, const std::vector<int>& chunks, int each, int width) {
  const int blocks = call.blocks / width * width;
  std::vector<int> seen(chunks.size() * each), loads, units;
  for (int b = 0; b < blocks; ++b) {
    int load = 0;
    for (int i = links[b]; i >= 0; i = links[blocks + i]) {
      if (i >= int(seen.size()) || seen[i]++ > 0) return expect(false, "a tile twice, or none", call);
      expect(i % width == b % width, "a tile of the other block of the cluster", call);
      load += chunks[i / each] + kTileStart;
      if (width == 2 && b % 2 == 1) expect(seen[i - 1] == 1, "the other block has another tile", call);
    }
    if (b % width == 0) loads.push_back(load);
  }
  for (size_t i = 0; i < seen.size(); ++i)
    expect(seen[i] == (chunks[i / each] >= 0), "a tile that nobody takes, or that does not exist", call);
  for (const int x : chunks)
    if (x >= 0) units.push_back(x);
  std::sort(loads.begin(), loads.end());
  expect(loads == greedy(units, each / width, blocks / width), "not what the greedy deal has", call);
}

struct Chosen {
  bool segments, halves;  // of the walk forward, and of the walk back
};
Chosen run(const Call& call) {
  const int N = int(call.lengths.size());
  std::vector<int32_t> bounds = {0};
  for (const int x : call.lengths) bounds.push_back(bounds.back() + x);
  Params params = {};
  ChunkForward& p = params.problem.forward;
  p.cu_seqlens = bounds.data();
  p.N = N;
  p.T = bounds.back();
  p.HV = params.slices = call.slices;
  p.multiprocessors = call.blocks;
  params.by_slices = params.heads = Divisor::of(call.slices);
  params.back.by_halves = Divisor::of(2 * call.slices);
  params.back.shape = call.by_lengths ? BackShape::kByLengths : BackShape::kSlices;
  params.sums = call.exchange ? Sums::kCluster : Sums::kLater;
  params.segment = call.segment;
  params.may_be_whole = call.may_be_whole;
  params.makes_triangles = true;
  params.segments = call.segment > 0 ? int((p.T / kChunk + N) / call.segment) + N : 0;
  const int units = std::max(params.segments, N);
  std::vector<int> back(call.blocks + 2 * N * call.slices, -7), forward(call.blocks + units * call.slices, -7), order(N, -7);
  int segment = -7, halves = -7;
  params.scratch.back_links = back.data();
  params.scratch.forward_links = forward.data();
  params.scratch.order = order.data();
  params.scratch.segment = &segment;
  params.back.over_halves = &halves;
  const auto allow = [](const void* data, size_t bytes, bool written) {
    emulator_allow(reinterpret_cast<uint64_t>(data), bytes, written);
  };
  allow(bounds.data(), bounds.size() * 4, false);
  for (std::vector<int>* x : {&back, &forward, &order}) allow(x->data(), x->size() * 4, true);
  allow(&segment, 4, true);
  allow(&halves, 4, true);
  choosing_kernel<<<1, 32>>>(params);
  dealing_kernel<<<2, 32>>>(params);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) std::printf("%s\n", cudaGetErrorString(error));
  expect(error == cudaSuccess && emulator_end_call(), "the kernel failed", call);
  if (error != cudaSuccess) return {};

  std::vector<int> whole, nonempty;
  for (const int x : call.lengths) {
    whole.push_back(chunks_of(x));
    nonempty.push_back(x > 0 ? chunks_of(x) : -1);
  }
  expect(call.by_lengths ? halves == 0 || halves == 1 : halves == -7, "no choice of halves", call);
  check(call, back, whole, halves == 1 ? 2 * call.slices : call.slices, 1);
  const int width = call.exchange ? 2 : 1;
  const bool in_segments = call.segment > 0 && segment == call.segment;
  if (!in_segments) {
    expect(call.segment == 0 ? segment == -7 : segment == kWholeSequences, "no choice", call);
    check(call, forward, nonempty, call.slices, width);
  } else {
    std::vector<int> lengths(params.segments, -1);
    for (int n = 0; n < N; ++n) {
      int at = (bounds[n] / kChunk + n) / call.segment + n;
      for (int left = whole[n]; left > 0; left -= call.segment) lengths[at++] = std::min(left, call.segment);
    }
    check(call, forward, lengths, call.slices, width);
  }
  if (call.segment > 0) {
    std::vector<int> wanted(N);
    for (int n = 0; n < N; ++n) wanted[n] = n;
    std::stable_sort(wanted.begin(), wanted.end(), [&](int a, int b) { return whole[a] > whole[b]; });
    expect(order == wanted, "the order of sequences", call);
  }
  return {in_segments, halves == 1};
}

std::vector<int> random_lengths(std::mt19937& random) {
  const auto below = [&](int x) { return int(random() % unsigned(x)); };
  const int kind = below(6), N = kind == 0 ? 900 + below(125) : kind == 1 ? 2 + below(3) : 2 + below(100);
  const int longest = 1 << (1 + below(kind == 0 ? 9 : 15));
  std::vector<int> lengths(N);
  for (int& x : lengths) x = below(4) == 0 ? longest : below(5) == 0 ? 0 : below(longest + 1);
  if (kind == 2) lengths[below(N)] = 40 * longest;
  return lengths;
}
}  // namespace

int main() {
  std::mt19937 random(3);
  int cut = 0, whole = 0, halved = 0;
  for (int i = 0; i < 250; ++i) {
    Call call = {random_lengths(random), 1 + int(random() % 70), 1 + int(random() % kMostBins), false, 0, true, i % 2 == 0};
    call.exchange = random() % 2 && call.blocks > 1;
    if (call.exchange) call.slices += call.slices % 2;
    int64_t tokens = 0;
    for (const int x : call.lengths) tokens += x;
    const int lengths[] = {0, 4, 16, 64};
    call.segment = lengths[random() % 4];
    const int64_t N = int64_t(call.lengths.size());
    if (call.segment > 0 && (tokens / kChunk + N) / call.segment + N > kMostUnits) call.segment = 0;
    const Chosen choice = run(call);
    (choice.segments ? cut : whole)++;
    halved += choice.halves;
  }
  // On an H200, with segments of 32 chunks.
  const std::vector<int> even(4, 8192), uneven = {4000, 16000, 368, 12400};
  const auto goes_in_segments = [&](const std::vector<int>& lengths, int slices) {
    return run({lengths, slices, 132, true, 32, true, false}).segments;
  };
  const auto goes_over_halves = [&](const std::vector<int>& lengths, int slices) {
    return run({lengths, slices, 132, true, 32, true, true}).halves;
  };
  const Call named = {uneven, 32, 132, true, 32, true, true};
  expect(!goes_in_segments(even, 32), "4 x 8192 in segments", named);
  expect(!goes_in_segments(uneven, 64), "uneven sequences of 64 heads in segments", named);
  expect(goes_in_segments(uneven, 32), "uneven sequences of 32 heads are whole", named);
  expect(goes_in_segments(even, 16), "4 x 8192 of 16 heads are whole", named);
  expect(run({even, 32, 132, true, 32, false, false}).segments, "no segments though the host wants them", named);
  std::vector<int> one_long(16, 800), equal(16, 1184);
  one_long[3] = 6624;
  expect(goes_over_halves(one_long, 8), "one long sequence of 8 heads over slices", named);
  expect(!goes_over_halves(equal, 8), "equal sequences of 8 heads over halves", named);
  expect(!goes_over_halves(even, 32), "4 x 8192 of 32 heads over halves", named);
  if (cut < 20 || whole < 100 || halved < 20 || halved > 105)
    std::printf("too few: %d in segments, %d whole, %d over halves\n", cut, whole, halved), ++faults;
  if (faults == 0)
    std::printf("right: %d deals of segments, %d of whole sequences, %d over halves\n", cut, whole, halved);
  return faults != 0;
}
