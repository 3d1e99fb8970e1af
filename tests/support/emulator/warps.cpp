// Operations of the lanes of a warp, and the barriers of warps.
#include <limits>

#include "threads.h"

namespace emulator {

float part(const uint32_t* registers, int i, bool half_type) {
  const uint16_t x = uint16_t(registers[i / 2] >> 16 * (i % 2));
  return half_type ? from_half(x) : from_bf16(x);
}

namespace {

struct ShuffleArguments {
  Shuffle how;
  uint32_t x, b, c, result;
  bool in_range;
};
struct VoteArguments {
  uint32_t x, result;
};
struct MatrixArguments {
  uint32_t address;
  uint32_t* out;
  const uint32_t* x;
  int count;
  bool transposed;
};
struct RegisterArguments {
  uint32_t count;
  bool more;
};
struct MmaArguments {
  uint32_t* out;
  const uint32_t *a, *b, *c;
  int k;
  Format format;
};
void shuffle_lanes(Meeting& m) {
  for (uint32_t i = 0; i < 32; ++i) {
    if (!(m.mask >> i & 1)) continue;
    auto& own = *static_cast<ShuffleArguments*>(m.of[i]);
    const uint32_t clamp = own.c & 31, segment = own.c >> 8 & 31;
    const uint32_t most = (i & segment) | (clamp & ~segment), least = i & segment, b = own.b & 31;
    uint32_t from = 0;
    bool in_range = false;
    switch (own.how) {
      case Shuffle::kUp:
        from = i - b, in_range = int32_t(from) >= int32_t(most);
        break;
      case Shuffle::kDown:
        from = i + b, in_range = from <= most;
        break;
      case Shuffle::kButterfly:
        from = i ^ b, in_range = from <= most;
        break;
      case Shuffle::kIndex:
        from = least | (b & ~segment), in_range = from <= most;
        break;
    }
    if (!in_range) from = i;
    own.in_range = in_range;
    own.result = m.mask >> from & 1 ? static_cast<ShuffleArguments*>(m.of[from])->x : 0xdeadbeef;
  }
}

void move_matrices(Thread& t, Meeting& m) {
  auto argument = [&](uint32_t lane) -> MatrixArguments& { return *static_cast<MatrixArguments*>(m.of[lane]); };
  const int count = argument(0).count;
  const bool transposed = argument(0).transposed, loads = m.kind == Kind::kLoad;
  for (int i = 0; i < count; ++i)
    for (uint32_t row = 0; row < 8; ++row) {
      Thread& at = t.warp->states[8 * i + row]->thread;
      const uint32_t address = argument(8 * i + row).address;
      at.site = t.site;
      uint8_t* line = shared_at(at, address, 16);
      if (t.watched && loads) watch_read(at, address, 16);
      if (t.watched && !loads) watch_write(at, address, 16);
      for (uint32_t column = 0; column < 8; ++column) {
        const uint32_t lane = transposed ? column * 4 + row / 2 : row * 4 + column / 2;
        const uint32_t half = transposed ? row % 2 : column % 2;
        uint16_t x;
        if (loads) {
          std::memcpy(&x, line + 2 * column, 2);
          uint32_t& to = argument(lane).out[i];
          to = half ? (to & 0xffff) | uint32_t(x) << 16 : (to & 0xffff0000u) | x;
        } else {
          x = uint16_t(argument(lane).x[i] >> 16 * half);
          std::memcpy(line + 2 * column, &x, 2);
        }
      }
    }
}

void mma_lanes(Meeting& m) {
  const int k = static_cast<MmaArguments*>(m.of[0])->k;
  float a[16][16] = {}, b[16][8] = {};
  for (int lane = 0; lane < 32; ++lane) {
    const auto& x = *static_cast<MmaArguments*>(m.of[lane]);
    if (x.format == Format::k_tf32) {
      for (int i = 0; i < 4; ++i) a[lane / 4 + i % 2 * 8][lane % 4 + i / 2 * 4] = tf32(x.a[i]);
      for (int i = 0; i < 2; ++i) b[lane % 4 + i * 4][lane / 4] = tf32(x.b[i]);
      continue;
    }
    const bool half = x.format == Format::k_f16;
    for (int i = 0; i < k / 2; ++i)
      a[lane / 4 + i / 2 % 2 * 8][lane % 4 * 2 + i % 2 + i / 4 * 8] = part(x.a, i, half);
    for (int i = 0; i < k / 4; ++i) b[lane % 4 * 2 + i % 2 + i / 2 * 8][lane / 4] = part(x.b, i, half);
  }
  for (int lane = 0; lane < 32; ++lane) {
    const auto& x = *static_cast<MmaArguments*>(m.of[lane]);
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
      float sum = f(x.c[i]);
      for (int j = 0; j < k; ++j) sum += a[row][j] * b[j][column];
      x.out[i] = bits(sum);
    }
  }
}

void named_lanes(Thread& t, Meeting& m) {
  const auto& x = *static_cast<GroupArguments*>(m.of[t.lane]);
  if (x.number >= 16) fail(t, "a barrier with a number above 15");
  Named& barrier = t.block->named[x.number];
  const uint32_t threads = x.threads ? x.threads : t.block->alive;
  if (barrier.arrived == 0) barrier.expected = threads;
  if (barrier.expected != threads) fail(t, "a barrier at which warps expect different numbers of threads");
  barrier.arrived += 32;
  publish(t, barrier.clocks);
  if (barrier.arrived > barrier.expected) fail(t, "a barrier with more arrivals than expected");
  const bool complete = barrier.arrived == barrier.expected;
  if (x.waits && !complete) {
    for (uint32_t i = 0; i < 32; ++i) {
      if (!(m.mask >> i & 1)) continue;
      State& s = *t.warp->states[i];
      barrier.waiting.push_back(&s.thread);
      s.wait = Wait::kNamed;
      t.warp->ready &= ~(1u << i);
    }
    yield(state_of(t));
    return;
  }
  if (!complete) return;
  const Clocks clocks = barrier.clocks;
  uint64_t seen = 0;
  for (Thread* waiter : barrier.waiting) {
    make_ready(state_of(*waiter));
    if (!(seen >> waiter->warp->number & 1)) learn(*waiter, clocks);
    seen |= uint64_t{1} << waiter->warp->number;
  }
  if (x.waits) learn(t, clocks);
  barrier.waiting.clear();
  barrier.arrived = 0;
  barrier.clocks = {};
}

// PTX wants the warps of a warpgroup to wait for each other between two setmaxnreg. That they do not is found only
// where one warp comes to the second before another has come to the first. nvcc refuses counts that are no multiple of
// 8 from 24 to 256.
void check_registers(Thread& t, const RegisterArguments& x) {
  Warp& warp = *t.warp;
  if (warp.registers == 0) fail(t, "a setmaxnreg in a kernel whose bounds do not say what a thread has at launch");
  auto fail_of = [&](const char* what) {
    const std::string text = what + std::to_string(warp.registers) + " registers that a thread has";
    fail(t, text.c_str());
  };
  if (x.more && x.count < warp.registers) fail_of("a setmaxnreg.inc to fewer than the ");
  if (!x.more && x.count > warp.registers) fail_of("a setmaxnreg.dec to more than the ");
  const size_t number = warp.set_at.size();  // of setmaxnreg before this one
  for (const auto& other : t.block->warps) {
    if (other->number / 4 != warp.number / 4 || other.get() == &warp) continue;
    if (other->set_at.size() > number ? other->set_at[number] != t.site : !other->alive)
      fail(t, "a setmaxnreg that not all warps of the warpgroup execute");
    if (other->set_at.size() < number)
      fail(t, "a setmaxnreg before all warps of the warpgroup have executed the one before");
  }
  if (t.block->warps.size() < 4 * (warp.number / 4 + 1)) fail(t, "a setmaxnreg in less than a warpgroup");
}

// A warp takes what it lacks at once, when so much is free in the block's pool.
void set_registers_of_warp(Thread& t, Meeting& m) {
  const auto& x = *static_cast<RegisterArguments*>(m.of[t.lane]);
  check_registers(t, x);
  Warp& warp = *t.warp;
  Block& block = *t.block;
  warp.set_at.push_back(t.site);
  if (!x.more) {
    block.free_registers += 32 * (warp.registers - x.count);
    warp.registers = x.count;
    std::deque<Block::Raise> left;
    for (const Block::Raise& raise : block.raises) {
      const uint32_t lacks = 32 * (raise.registers - raise.warp->registers);
      if (lacks > block.free_registers) {
        left.push_back(raise);
        continue;
      }
      block.free_registers -= lacks;
      raise.warp->registers = raise.registers;
      for (State* s : raise.warp->states)
        if (s->wait == Wait::kRegisters) make_ready(*s);
    }
    block.raises = std::move(left);
    return;
  }
  const uint32_t lacks = 32 * (x.count - warp.registers);
  if (lacks <= block.free_registers) {
    block.free_registers -= lacks;
    warp.registers = x.count;
    return;
  }
  block.raises.push_back({&warp, x.count});
  for (uint32_t i = 0; i < 32; ++i)
    if (m.mask >> i & 1) {
      warp.states[i]->wait = Wait::kRegisters;
      warp.ready &= ~(1u << i);
    }
  yield(state_of(t));
}

void perform(Thread& t, Meeting& m) {
  switch (m.kind) {
    case Kind::kSync:
      ++t.warp->syncs;
      break;
    case Kind::kShuffle:
      shuffle_lanes(m);
      break;
    case Kind::kBallot:
    case Kind::kRedux: {
      uint32_t result = 0;
      int32_t most = std::numeric_limits<int32_t>::min();
      for (uint32_t i = 0; i < 32; ++i) {
        if (!(m.mask >> i & 1)) continue;
        const uint32_t x = static_cast<VoteArguments*>(m.of[i])->x;
        result |= uint32_t(x != 0) << i;
        most = std::max(most, int32_t(x));
      }
      for (uint32_t i = 0; i < 32; ++i)
        if (m.mask >> i & 1)
          static_cast<VoteArguments*>(m.of[i])->result = m.kind == Kind::kBallot ? result : uint32_t(most);
      break;
    }
    case Kind::kLoad:
    case Kind::kStore:
      move_matrices(t, m);
      break;
    case Kind::kMma:
      mma_lanes(m);
      break;
    case Kind::kWgmma:
      make_product(t, m);
      break;
    case Kind::kFence:
      break;
    case Kind::kRegisters:
      set_registers_of_warp(t, m);
      break;
    case Kind::kCommit:
      t.warp->groups.push_back(std::move(t.warp->open));
      t.warp->open.clear();
      break;
    case Kind::kWaitGroup:
      wait_products(t, static_cast<GroupArguments*>(m.of[t.lane])->number);
      break;
    case Kind::kNamed:
      named_lanes(t, m);
      break;
  }
}

}  // namespace

void check_registers_at_end(Thread& t) {
  for (const auto& other : t.block->warps)
    if (other->number / 4 == t.warp->number / 4 && other->set_at.size() > t.warp->set_at.size()) {
      t.site = other->set_at[t.warp->set_at.size()];
      fail(t, "a warp that ends before a setmaxnreg of its warpgroup");
    }
}

void meet(Thread& t, Kind kind, uint32_t mask, void* of) {
  Warp& warp = *t.warp;
  const uint32_t wanted = mask == ~0u ? warp.alive : mask;
  if (!(wanted >> t.lane & 1)) fail(t, "a lane outside of the mask");
  if (wanted & ~warp.alive) fail(t, "the mask has lanes that have ended");
  Meeting* found = nullptr;
  for (Meeting& m : warp.meetings)
    if (m.kind == kind && m.mask == wanted && (m.site == t.site || kind == Kind::kSync) && !(m.arrived >> t.lane & 1))
      found = &m;
  if (!found) {
    warp.meetings.push_back({kind, t.site, wanted, 0, {}});
    found = &warp.meetings.back();
  }
  found->arrived |= 1u << t.lane;
  found->of[t.lane] = of;
  if (found->arrived != wanted) {
    block_on(state_of(t), Wait::kWarp);
    return;
  }
  Meeting meeting = *found;
  warp.meetings.erase(warp.meetings.begin() + (found - warp.meetings.data()));
  for (uint32_t i = 0; i < 32; ++i)
    if (i != t.lane && meeting.mask >> i & 1) make_ready(*warp.states[i]);
  perform(t, meeting);
}

// ---- machine.h -----------------------------------------------------------------------------------------------------

void sync_warp(Thread& t, uint32_t mask) { meet(t, Kind::kSync, mask, nullptr); }
uint32_t shuffle(Thread& t, Shuffle how, uint32_t x, uint32_t b, uint32_t c, uint32_t mask, bool* in_range) {
  ShuffleArguments arguments{how, x, b, c, 0, false};
  meet(t, Kind::kShuffle, mask, &arguments);
  if (in_range) *in_range = arguments.in_range;
  return arguments.result;
}
uint32_t ballot(Thread& t, bool x, uint32_t mask) {
  VoteArguments arguments{x, 0};
  meet(t, Kind::kBallot, mask, &arguments);
  return arguments.result;
}
bool vote_all(Thread& t, bool x, uint32_t mask) { return ballot(t, !x, mask) == 0; }
bool vote_any(Thread& t, bool x, uint32_t mask) { return ballot(t, x, mask) != 0; }
uint32_t redux_max_s32(Thread& t, uint32_t x, uint32_t mask) {
  VoteArguments arguments{x, 0};
  meet(t, Kind::kRedux, mask, &arguments);
  return arguments.result;
}
uint32_t redux_add_s32(Thread& t, uint32_t x, uint32_t mask) {
  for (uint32_t n = 1; n < 32; n *= 2) x += shuffle(t, Shuffle::kButterfly, x, n, 0x1f, mask, nullptr);
  return x;
}
void load_matrices(Thread& t, uint32_t address, uint32_t* out, int count, bool transposed) {
  MatrixArguments arguments{address, out, nullptr, count, transposed};
  meet(t, Kind::kLoad, ~0u, &arguments);
}
void store_matrices(Thread& t, uint32_t address, const uint32_t* x, int count, bool transposed) {
  MatrixArguments arguments{address, nullptr, x, count, transposed};
  meet(t, Kind::kStore, ~0u, &arguments);
}
void mma(Thread& t, uint32_t* out, const uint32_t* a, const uint32_t* b, const uint32_t* c, int k, Format format) {
  MmaArguments arguments{out, a, b, c, k, format};
  meet(t, Kind::kMma, ~0u, &arguments);
}

void named_barrier(Thread& t, uint32_t id, uint32_t threads, bool waits) {
  GroupArguments arguments{id, threads, waits};
  meet(t, Kind::kNamed, ~0u, &arguments);
}
void cluster_arrive(Thread& t) {
  Cluster& cluster = *t.block->cluster;
  publish(t, cluster.clocks);
  state_of(t).generation = cluster.generation + 1;
  if (++cluster.arrived < cluster.alive) return;
  cluster.arrived = 0;
  ++cluster.generation;
  cluster.done = cluster.clocks;
  for (State* s : cluster.waiting) make_ready(*s);
  cluster.waiting.clear();
}
void cluster_wait(Thread& t) {
  Cluster& cluster = *t.block->cluster;
  if (cluster.generation < state_of(t).generation) {
    cluster.waiting.push_back(&state_of(t));
    block_on(state_of(t), Wait::kCluster);
  }
  learn(t, cluster.done);
}

void wgmma(Thread& t, const Product& product) { meet(t, Kind::kWgmma, ~0u, const_cast<Product*>(&product)); }
void wgmma_fence(Thread& t) { meet(t, Kind::kFence, ~0u, nullptr); }
void wgmma_commit(Thread& t) { meet(t, Kind::kCommit, ~0u, nullptr); }
void wgmma_wait(Thread& t, uint32_t groups) {
  GroupArguments arguments{groups, 0, false};
  meet(t, Kind::kWaitGroup, ~0u, &arguments);
}
void set_registers(Thread& t, uint32_t count, bool more) {
  RegisterArguments arguments{count, more};
  meet(t, Kind::kRegisters, ~0u, &arguments);
}

}  // namespace emulator
