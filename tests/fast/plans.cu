// The plans of the CUDA forward, as the host makes them, and what the device makes of them for lengths that
// the host does not know. Runs on the CPU; prints what is wrong, or "right" and how many plans there were.
#include <cstdio>
#include <random>
#include <vector>

#include "sm90/plan/forward_plan.h"
#include "sm90/plan/part_plan.h"
#include "sm90/plan/segment_lengths.cuh"
#include "sm90/plan/tile_order.cuh"

namespace {
using namespace gdn;
using namespace gdn::sm90;
int faults = 0, plans = 0;

struct Call {
  int K, V, HV, N;
  int64_t T;  // of a batch entry
  bool packed;
  int64_t longest = 0, second = 0, third = 0;  // as the host is told
  void say(const char* what) const {
    std::printf("K %d V %d HV %d N %d T %lld %s, longest %lld: %s\n", K, V, HV, N, (long long)T,
                packed ? "packed" : "padded", (long long)longest, what);
    ++faults;
  }
};

const int some_offsets[2] = {};

ChunkForward problem(const Call& call) {
  ChunkForward p = {};
  p.K = call.K, p.V = call.V, p.H = p.HV = call.HV, p.N = call.N;
  p.B = call.packed ? 1 : call.N, p.T = call.T;
  p.cu_seqlens = call.packed ? some_offsets : nullptr;
  p.longest[0] = call.longest, p.longest[1] = call.second, p.longest[2] = call.third;
  p.multiprocessors = 132;
  return p;
}
ForwardPlan plan_for(const ChunkForward& p) {
  return with_heads(p, [&](auto heads) { return plan_of<decltype(heads)>(p); });
}
ForwardPlan plan_for(const Call& call) { return plan_for(problem(call)); }

// What choose_cut (choose_cut.cuh) takes for so many heads that forget, and the time that it promises.
std::pair<Cut, float> chosen_by_device(const ChunkForward& p, const ForwardPlan& plan, const std::vector<int>& lengths,
                                       float share) {
  std::vector<int> chunks;
  for (const int length : lengths) chunks.push_back(int(ceil_div(length, kChunk)));
  const int longest = *std::max_element(chunks.begin(), chunks.end());
  const CutCall call = with_heads(p, [&](auto heads) { return cut_call<decltype(heads)>(p, plan); });
  Candidate best = {};
  float least = kNever * 2;
  const auto offer = [&](const Candidate& x) {
    const float time = cut_time(call, OneByOne{chunks.data()}, int(chunks.size()), x, share);
    if (!(time > 0)) std::printf("no time of %d and %d chunks\n", x.first, x.rest), ++faults;
    if (time < least) best = x, least = time;
  };
  for (int i = 0; i < Candidate::kAll; ++i)
    if (const Candidate x = Candidate::of_grid(i, longest, call); x.is_one(longest)) offer(x);
  const Candidate coarse = best;
  for (int i = 0; i < Candidate::kNear && coarse.first < longest; ++i)
    if (const Candidate x = Candidate::near(i, coarse); x.is_one(longest)) offer(x);
  return {{std::max(best.first, 1), std::max(best.rest, 1)}, least};
}

// How many segments there are behind the first ones, that they have slots, and that the first ones and these
// have every token once; share: of the heads that forget.
int check(const Call& call, const ForwardPlan& plan, const std::vector<int>& lengths, float share = 0) {
  if (!plan.in_segments()) return 0;
  std::vector<int> offsets(1, 0);
  for (const int length : lengths) offsets.push_back(offsets.back() + length);
  ChunkForward p = problem(call);
  if (call.packed) p.cu_seqlens = offsets.data();
  const SegmentLengths segment = plan.cut_by_device ? SegmentLengths(chosen_by_device(p, plan, lengths, share).first)
                                             : planned_lengths(p, plan.cuts);
  int later = 0;
  for (const int length : lengths) {
    const int count = segment.later(length);
    const int before_last = segment.first + (count - 1) * segment.rest;  // of what the last of them begins with
    if (count == 0 ? length > segment.first : length <= before_last || length > before_last + segment.rest)
      call.say("tokens of no segment, or a segment of no tokens");
    later += count;
  }
  if (later > plan.later_segments) call.say("more segments than slots");
  return later;
}

void random_calls() {
  std::mt19937 random(1);
  const auto up_to = [&](int64_t most) { return int64_t(random() % uint64_t(most)) + 1; };
  const int sizes[][2] = {{64, 64}, {128, 128}, {96, 192}, {256, 256}, {256, 512}};
  for (int i = 0; i < 3000; ++i) {
    const auto [K, V] = sizes[up_to(5) - 1];
    const bool packed = up_to(4) > 1;
    const int N = up_to(3) > 1 ? int(up_to(4)) : int(up_to(40));
    Call call = {K, V, int(up_to(48)), N, up_to(up_to(2) > 1 ? 3000 : 70000), packed};
    if (packed && i % 2) {  // the lengths that are drawn below may be others
      call.longest = up_to(call.T);
      if (N > 1 && i % 4 == 1) call.second = std::min(call.longest, up_to(call.T));
      if (N > 2 && call.second && i % 8 == 1) call.third = std::min(call.second, up_to(call.T));
    }
    const ForwardPlan plan = plan_for(call);
    ++plans;
    for (int c = 0; c < plan.cuts.count; ++c) {
      const sm90::Cut& cut = plan.cuts.choices[c];
      if (cut.rest < 1 || cut.first < cut.rest) call.say("a cut without length");
      if (c > 0 && cut.longest < plan.cuts.choices[c - 1].longest) call.say("cuts in no order");
    }
    if (!plan.in_segments() && plan.later_segments + plan.forgets > 0) call.say("slots of no segments");
    if (plan.cut_by_device && plan.cuts.count > 0) call.say("cuts to choose from, and a chosen one");
    if (plan.forgets && (!plan.cut_by_device || plan.later_segments > kMostForgetting)) call.say("forgets what has no place");
    if (plan.cut_by_device && N > kMostOrdered) call.say("more sequences than the choice has place for");
    ChunkForward invariant = problem(call);
    invariant.batch_invariant = true;
    if (plan_for(invariant).in_segments()) call.say("cut, though the batch must not matter");
    if (!plan.in_segments()) continue;
    if (!packed) check(call, plan, std::vector<int>(size_t(N), int(call.T)));
    for (int draw = 0; packed && draw < 40; ++draw) {  // some of the tokens belong to no sequence
      std::vector<int> lengths(size_t(N), 0);
      int64_t left = call.T;
      for (int n = 0; n < N && left > 0; ++n) {
        lengths[size_t(n)] = int(draw % 4 == 0 ? left : std::min(left, up_to(1 + 2 * call.T / N)));
        left -= lengths[size_t(n)];
      }
      std::shuffle(lengths.begin(), lengths.end(), random);
      check(call, plan, lengths, float(up_to(5) - 1) / 4);
    }
  }
}

void known_calls() {
  const Call four = {128, 128, 32, 4, 32768, true}, eight = {128, 128, 16, 8, 32768, true};
  for (const Call& call : {four, eight}) {  // in blocks with half of V they take two turns
    const ForwardPlan plan = plan_for(call);
    if (plan.shape == BlockShape::kHalves || plan.in_segments()) call.say("equal sequences fill the GPU in one turn");
  }
  const Call pair = {128, 128, 32, 2, 32768, true};
  if (check(pair, plan_for(pair), {16384, 16384}) > 0) pair.say("equal ones are cut");
  if (check(pair, plan_for(pair), {28672, 4096}) == 0) pair.say("unequal ones are not cut");
  Call uneven = {128, 128, 8, 9, 20732, true};
  const std::vector<int> lengths = {300, 600, 900, 700, 15549, 800, 500, 683, 700};
  if (check(uneven, plan_for(uneven), lengths) > 0) uneven.say("cut, though equal ones would lose much");
  uneven.longest = 15549, uneven.second = 900, uneven.third = 800;
  if (check(uneven, plan_for(uneven), lengths) == 0) uneven.say("not cut, though the longest is known");
  uneven.longest = 2400, uneven.second = 2400, uneven.third = 2300;
  if (plan_for(uneven).in_segments()) uneven.say("cut, though the longest is known to be short");
  // Two sequences that are told, with times of an H200.
  const Call equal = {128, 128, 16, 2, 8192, true, 4096, 4096}, more = {128, 128, 24, 2, 8192, true, 4096, 4096};
  if (check(equal, plan_for(equal), {4096, 4096}) == 0) equal.say("not cut: 118 us, not 108");
  if (plan_for(more).in_segments()) more.say("cut: 128 us, not 119");
  const Call longer = {128, 128, 32, 2, 16384, true, 12288, 4096}, longest = {128, 128, 32, 2, 32768, true, 28672, 4096};
  if (plan_for(longer).cut_by_device) longer.say("cut by the device: 314 us, not 300");
  if (!plan_for(longest).cut_by_device) longest.say("not cut by the device: 593 us, not 552");
  const Call one = {128, 128, 8, 1, 32768, false};
  if (check(one, plan_for(one), {32768}) < 4) one.say("a long one of few heads is not cut");
  if (plan_for(Call{128, 128, 8, 8, 8192, true}).shape != BlockShape::kHalves)
    pair.say("tiles of half of V that fill no turn go in both halves");
  if (plan_for(Call{128, 128, 32, 8, 8192, true}).shape != BlockShape::kByLengths)
    pair.say("the host guesses lengths that the device knows");
  if (plan_for(Call{128, 128, 32, 8, 1024, false}).shape != BlockShape::kBoth)
    pair.say("the device chooses a shape for lengths that the host knows");
  const Call many = {128, 128, 64, 64, 65536, true};
  if (plan_for(many).in_segments()) many.say("cut, though the GPU is full");
}

// Single sequences, whose length the host knows: no cut that is longer or shorter by a chunk is better.
void near_cuts() {
  using Heads = sm90::Heads<128, true>;
  for (const int HV : {8, 16, 24, 32, 48, 64})
    for (const int64_t T : {1000, 2048, 4096, 8192, 20000, 32768, 100000}) {
      const Call call = {128, 128, HV, 1, T, true};
      const ChunkForward p = problem(call);
      const ForwardPlan plan = plan_for(call);
      ++plans;
      if (plan.cuts.count == 0) continue;  // whole, or chosen by the device
      const Estimate<Heads> estimate = {p};
      const int64_t chunks = ceil_div(T, sm90::kChunk);
      const auto time = [&](int first, int rest) {
        return estimate.segments({chunks, chunks}, estimate.cut({chunks, chunks}, first, rest),
                                 plan.shape == BlockShape::kHalves, 1e9);
      };
      const Cut& cut = plan.cuts.choices[0];
      const double chosen = time(cut.first, cut.rest);
      for (const int longer : {-1, 0, 1})
        for (const int other : {-1, 0, 1})
          if (cut.rest + other >= 4 && cut.first + longer >= cut.rest + other &&
              time(cut.first + longer, cut.rest + other) < chosen)
            call.say("a cut next to the chosen one is better");
    }
}

// A choice by the device costs a kernel, and a look back two: calls that gain nothing by them lose next to
// nothing. For equal lengths and for heads that all remember, by the times that plans reckon with.
void what_a_choice_may_cost() {
  using Heads = sm90::Heads<128, true>;
  int chosen = 0, forget = 0;
  for (const int HV : {8, 16, 24, 32, 48, 64})
    for (const int N : {1, 2, 4, 8})
      for (const int64_t T : {1024, 2048, 4096, 8192, 16384, 32768, 65536}) {
        const Call call = {128, 128, HV, N, T, true};
        const ChunkForward p = problem(call);
        const ForwardPlan plan = plan_for(call);
        chosen += plan.cut_by_device, forget += plan.forgets;
        if (!plan.cut_by_device) continue;
        const int64_t each = ceil_div(ceil_div(T, kChunk), N);
        const std::vector<int> lengths(size_t(N), int(each) * kChunk);
        const Estimate<Heads> estimate = {p};
        const double whole = std::min(estimate.whole(lengths_of({each, each}, N), true),
                                      estimate.whole(lengths_of({each, each}, N), false));
        const float none = chosen_by_device(p, plan, lengths, 0).second;
        const float most = chosen_by_device(p, plan, lengths, 1).second;
        if (none > 1.0501 * whole) call.say("a choice loses more than it may");
        if (plan.forgets && most > none) call.say("heads that forget take longer");
      }
  if (chosen < 10 || forget < 5) std::printf("%d plans chosen, %d that forget\n", chosen, forget), ++faults;
}
// What the device chooses a shape by: never more than a block needs when tiles go, longest first, to the block
// that is free first; all of it for equal lengths; and not less than two thirds of it.
void least_times() {
  std::mt19937 random(2);
  for (int draw = 0; draw < 2000; ++draw) {
    const int N = int(random() % 60) + 1, heads = int(random() % 64) + 1, blocks = 132;
    const bool equal = draw % 4 == 0;
    std::vector<int> lengths;
    for (int n = 0; n < N; ++n)
      lengths.push_back(equal && n > 0 ? lengths[0] : int(std::exp2(random() % 1000 / 100.)));
    std::sort(lengths.rbegin(), lengths.rend());
    const sm90::LeastTime least = {1.6f, 10.f, heads, blocks};
    std::vector<double> free(blocks, 0.);
    double bound = least.by_work(std::accumulate(lengths.begin(), lengths.end(), 0), N);
    for (int n = 0; n < N; ++n) {
      bound = std::max<double>(bound, least.with(lengths[size_t(n)], n));
      for (int tile = 0; tile < heads; ++tile)
        *std::min_element(free.begin(), free.end()) += least.of_tile(lengths[size_t(n)]);
    }
    const double time = *std::max_element(free.begin(), free.end());
    const Call call = {128, 128, heads, N, lengths[0], true};
    if (bound > time * 1.0001) call.say("a least time that is undercut");
    if (bound < time * (equal ? 0.9999 : 0.66)) call.say("a least time that is far too low");
  }
}

bool same(const ForwardPlan& a, const ForwardPlan& b) {
  const auto equal = [](const Cut& x, const Cut& y) {
    return x.first == y.first && x.rest == y.rest && x.longest == y.longest && x.later == y.later &&
           x.inner == y.inner;
  };
  return a.shape == b.shape && a.first == b.first && a.cut_by_device == b.cut_by_device && a.forgets == b.forgets && a.later_segments == b.later_segments && a.cuts.count == b.cuts.count &&
         a.cuts.maps_first == b.cuts.maps_first &&
         std::equal(a.cuts.choices, a.cuts.choices + a.cuts.count, b.cuts.choices, equal);
}

// Plans are kept by all that they depend on: each is made once for calls in turns, and again once as many
// others have been made as are kept; and what is found is what would have been made.
void kept_plans() {
  using Heads = sm90::Heads<128, true>;
  const Call first = {128, 128, 8, 3, 32768, true};
  Memo<PlanSizes, ForwardPlan, kMostPlans> known;
  int made = 0;
  const auto find = [&](const ChunkForward& p) {
    const ForwardPlan plan = known.find(plan_sizes(p), [&] { return ++made, make_plan<Heads>(planned(p)); });
    if (!same(plan, make_plan<Heads>(planned(p))) || !same(plan, plan_of<Heads>(p)))
      first.say("what is kept is another call's plan");
  };
  std::vector<ChunkForward> others(10, problem(first));
  others[0].N = 5, others[1].T = 30000, others[2].HV = 16, others[3].V = 256;
  others[4].multiprocessors = 78, others[5].cu_seqlens = nullptr, others[6].batch_invariant = true;
  others[7].T += sm90::kChunk, others[8].T -= 16 * sm90::kChunk, others[9].longest[0] = 30000;
  for (const ChunkForward& other : others) {  // each differs from the first in one of its sizes
    made = 0, known = {};
    for (int turn = 0; turn < 20; ++turn) find(problem(first)), find(other);
    if (made != 2) first.say("two calls in turns are planned again");
  }
  made = 0, known = {};
  for (int64_t T = 32768 - 16 * sm90::kChunk + 1; T <= 32768; T += 7) {
    Call call = first;
    call.T = T;
    find(problem(call));
  }
  if (made != 1) first.say("lengths of nearly as many chunks are planned again");
  made = 0, known = {};
  for (int64_t T = 2048; T <= 32768; T += 61) {  // as `python -m benchmarks.host` draws them
    Call call = first;
    call.T = T;
    if (planned_tokens(T) < T || planned_tokens(T) > T + T / 16 + sm90::kChunk)
      call.say("planned for fewer tokens, or for many more");
    find(problem(call));
  }
  if (made > int(kMostPlans) + 1) first.say("lengths that never repeat are planned again and again");
  for (int turn = 0; turn < 2; ++turn)
    for (int N = 1; N <= int(kMostPlans) + 1; ++N) {
      Call call = first;
      call.N = N;
      find(problem(call));
      if (known.size() > kMostPlans) call.say("more plans are kept than may be");
    }
  if (made < int(kMostPlans) + 2) first.say("more plans are known than may be kept");
}
// The segments of a part of a sequence cover it, all of them with chunks, and have memory; more of them pay
// only where blocks would be idle; a batch-invariant part has one.
void parts() {
  std::mt19937 random(3);
  const auto up_to = [&](int most) { return int(random() % unsigned(most)) + 1; };
  for (int i = 0; i < 500; ++i) {
    const int K = 8 * up_to(32), HV = 1 << (up_to(7) - 1);
    const Call call = {K, 8 * up_to(32), HV, 1, int64_t(1) << (up_to(20)), false};
    ChunkForward p = problem(call);
    p.T += up_to(100);
    p.use_qk_l2norm = i % 2;
    p.batch_invariant = i % 5 == 0;
    const ForwardPlan plan = with_heads(p, [&](auto heads) { return part_plan_of<decltype(heads)>(p); });
    const Cut cut = plan.cuts.choices[0];
    const int64_t chunks = ceil_div(p.T, kChunk);
    const SegmentLengths lengths = planned_lengths(p, plan.cuts);
    ++plans;
    if (plan.cuts.count != 1 || cut.first != 0 || plan.cut_by_device) call.say("a part has a first segment");
    if (lengths.later(int(p.T)) != plan.later_segments) call.say("a part has other segments than memory");
    if (int64_t{cut.rest} * (plan.later_segments - 1) >= chunks) call.say("a segment of a part has no chunk");
    if (plan.later_segments > 1 && cut.rest < 4) call.say("segments of a part are short");
    if (p.batch_invariant && plan.later_segments > 1) call.say("a batch-invariant part is cut");
    if (plan.forgets != (p.use_qk_l2norm && !p.batch_invariant)) call.say("a part forgets what is not certain");
    if (HV * 2 >= 4 * p.multiprocessors && !p.use_qk_l2norm && plan.later_segments > 1)
      call.say("a part of many heads is cut");
  }
  const auto segments = [](int HV, int64_t T) {
    ChunkForward p = problem({128, 128, HV, 1, T, false});
    return part_plan_of<sm90::Heads<128, true>>(p).later_segments;
  };
  if (segments(8, 65536) < 8) std::printf("a part of few heads is not cut\n"), ++faults;
  if (segments(8, 200) > 1) std::printf("a short part is cut\n"), ++faults;
}
}  // namespace

int main() {
  parts();
  random_calls();
  known_calls();
  near_cuts();
  what_a_choice_may_cost();
  least_times();
  kept_plans();
  if (faults == 0) std::printf("right: %d plans\n", plans);
  return faults != 0;
}
