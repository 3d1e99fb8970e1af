// Barriers in shared memory, copies by TMA and cp.async, and what is read of another block. A copy happens at a
// random moment between its issue and the moment at which somebody may rely on it. One out of shared memory has two
// such moments: it reads, and later it writes, or adds bf16 values to what is there.
#include <cstdlib>
#include <cstring>
#include <sstream>

#include "threads.h"

namespace emulator {
namespace {

constexpr uint32_t kBarrierBytes = 8;

Barrier& barrier_at(Thread& t, Block& block, uint32_t address) {
  const auto found = block.barriers.find(address);
  if (found == block.barriers.end()) fail(t, "a barrier that was not initialised");
  return *found->second;
}

// The barrier that a thread uses: after its initialisation, and before its invalidation.
Barrier& known_barrier_at(Thread& t, Block& block, uint32_t address) {
  Barrier& barrier = barrier_at(t, block, address);
  if (t.watched) {
    check_read(t, block, t.warp->clocks, address, kBarrierBytes, false);
    note_read(block, *t.warp, address, kBarrierBytes);
  }
  return barrier;
}

// Fails if an access to so many bytes touches a barrier of the block.
void check_no_barrier(Thread& t, const Block& block, uint32_t address, uint32_t bytes) {
  for (const auto& [at, barrier] : block.barriers) {
    if (at >= address + bytes || address >= at + kBarrierBytes) continue;
    const std::string what = "an access to the memory of a barrier, which was initialised before: " + place(barrier->site);
    fail(t, what.c_str());
  }
}

// A wait tells phases apart by their parity: once the next phase has ended too, it would not see that the phase which it
// is for has ended. So the end of a phase must come after what warps do that have seen the end of the one before.
void check_parity(Thread& t, const Barrier& barrier) {
  for (const Barrier::Passed& x : barrier.passed)
    if (barrier.clocks.past[x.agent] < x.clock) {
      std::ostringstream out;
      out << "a phase of a barrier may end before warp " << x.agent % kMostWarps
          << " has seen the end of the one before (" << place(x.site) << ")";
      fail(t, out.str().c_str());
    }
}

void finish_phase_if_due(Thread& t, Barrier& barrier) {
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  if (t.watched) check_parity(t, barrier);
  barrier.passed.clear();
  ++barrier.phase;
  barrier.pending = barrier.arrivals;
  barrier.done = barrier.clocks;
  for (Thread* waiter : barrier.waiting) make_ready(state_of(*waiter));
  barrier.waiting.clear();
}

// The barrier at which a copy arrives. A copy sees a barrier's initialisation only after a fence.
void check_fenced(Thread& t, Block& block, uint32_t address) {
  const Barrier& barrier = known_barrier_at(t, block, address);
  if (t.watched && block.threads[barrier.by]->thread.barrier_fences == barrier.fences)
    fail(t, "a copy that arrives at a barrier whose initialisation has no fence after it");
}

// The block of the cluster, and the address there.
Block& block_at(Thread& t, uint32_t& address) {
  const uint32_t rank = address >> 24;
  address &= 0xffffff;
  if (rank == 0) return *t.block;
  if (rank > t.block->cluster->blocks.size()) fail(t, "an address in no block of the cluster");
  return *t.block->cluster->blocks[rank - 1];
}

uint64_t add_copy(std::function<void()> run) {
  Cluster& cluster = *machine.cluster;
  const uint64_t number = cluster.next_copy++;
  cluster.copies[number] = std::move(run);
  return number;
}

// A copy into shared memory, as it was issued.
struct Issue {
  uint32_t clock = 0;  // of the agent of copies
  Times past{};        // of the warp
};

// Bytes of a copy have come to the block's barrier.
void complete(Thread& t, Block& block, uint32_t barrier_address, uint32_t bytes, const Issue& issue) {
  Barrier& barrier = barrier_at(t, block, barrier_address);
  barrier.bytes -= bytes;
  if (t.watched) {
    Clocks& clocks = barrier.clocks;
    const int agent = copies_agent(block);
    join(clocks.past, issue.past);
    clocks.seen[agent] = std::max(clocks.seen[agent], issue.clock);
    clocks.past[agent] = std::max(clocks.past[agent], issue.clock);
  }
  finish_phase_if_due(t, barrier);
}

// A copy into shared memory is about to be issued.
Issue begin_copy(Thread& t, Block& block, uint32_t address, uint32_t bytes) {
  check_no_barrier(t, block, address, bytes);
  if (!t.watched) return {};
  const uint32_t clock = ++t.block->cluster->copy_clock;
  block.copied = clock;
  block.copy_site = t.site;
  check_write(t, block, t.warp->clocks, address, bytes);
  note_write(t, block, uint32_t(copies_agent(block)), clock, address, bytes, true);
  const Issue issue = {clock, t.warp->clocks.past};
  tick(*t.warp);
  return issue;
}

struct Box {
  const TensorMap* map;
  int64_t at[4];
  int down;  // the dimension along which its rows lie
  uint32_t rows() const { return uint32_t(map->box[down]); }
};
// The bytes of global memory of row `row` of a box, or null where it lies outside; `inside`: the bytes that exist.
uint8_t* box_row(const Box& box, uint32_t row, uint32_t* inside) {
  const TensorMap& map = *box.map;
  auto* at = static_cast<uint8_t*>(map.base) + box.at[0] * map.size();
  for (int i = 0; i < 4; ++i) {
    const int64_t place = box.at[i] + (i == box.down ? row : 0);
    if (place < 0 || place >= map.dims[i]) return nullptr;
    if (i > 0) at += place * map.strides[i - 1];
  }
  *inside = uint32_t(std::min<int64_t>(map.box[0], map.dims[0] - box.at[0]) * map.size());
  return at;
}

void watch_box(Thread& t, const Box& box, GlobalAccess how, uint32_t copy) {
  for (uint32_t row = 0; t.watched && row < box.rows(); ++row) {
    uint32_t inside = 0;
    const uint8_t* const at = box_row(box, row, &inside);
    if (at) watch_global(t, reinterpret_cast<uint64_t>(at), inside, how, copy);
  }
}

Box box_of(Thread& t, uint64_t map, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t shared) {
  const auto* const m = reinterpret_cast<const TensorMap*>(map);
  if (m->magic != TensorMap::kMagic) fail(t, "a tensor map that was not encoded");
  if (shared % 128) fail(t, "a box that does not begin at 128 bytes");
  const int down = m->box[3] != 1 ? 3 : m->box[2] != 1 ? 2 : 1;
  if (m->box[0] * m->size() != 128 || m->box[1] * m->box[2] * m->box[3] != m->box[down])
    fail(t, "a box of another shape than 64 columns");
  return {m, {int32_t(c0), int32_t(c1), int32_t(c2), int32_t(c3)}, down};
}

// A copy out of shared memory reads it, and writes some time later what it has read: write(bytes).
void store_later(Thread& t, uint32_t from, uint32_t bytes, bool swizzles, std::function<void(const uint8_t*)> write) {
  shared_at(t, from, 16);
  shared_at(t, from + bytes - 16, 16);
  check_no_barrier(t, *t.block, from, bytes);
  if (t.watched) {
    check_read(t, *t.block, t.warp->clocks, from, bytes, true);
    note_read(*t.block, *t.warp, from, bytes);
  }
  Thread* const thread = &t;
  const Clocks clocks = t.watched ? t.warp->clocks : Clocks{};
  const auto values = std::make_shared<std::vector<uint8_t>>();
  const auto read = [=] {
    if (!values->empty()) return;
    check_no_barrier(*thread, *thread->block, from, bytes);
    if (thread->watched) {
      check_read(*thread, *thread->block, clocks, from, bytes, false);
      note_read(*thread->block, *thread->warp, from, bytes);
    }
    values->resize(bytes);
    for (uint32_t at = 0; at < bytes; at += 16)
      std::memcpy(values->data() + at, thread->block->shared + (swizzles ? swizzled(from + at) : from + at), 16);
  };
  const uint64_t number = add_copy([=] {
    read();
    write(values->data());
  });
  machine.cluster->reads[number] = read;
  state_of(t).bulk_group.push_back(number);
}

void store_box(Thread& t, const Box& box, uint32_t from, bool adds) {
  const uint32_t rows = box.rows();
  watch_box(t, box, GlobalAccess::kWrite, 0);
  store_later(t, from, rows * 128, true, [=](const uint8_t* values) {
    for (uint32_t row = 0; row < rows; ++row) {
      uint32_t inside = 0;
      uint8_t* const target = box_row(box, row, &inside);
      for (uint32_t at = 0; target && at < inside; at += 2) {
        uint16_t x, y;
        std::memcpy(&x, values + row * 128 + at, 2);
        if (adds) {
          std::memcpy(&y, target + at, 2);
          x = to_bf16(from_bf16(x) + from_bf16(y));
        }
        std::memcpy(target + at, &x, 2);
      }
    }
  });
}

// Checks a copy without a tensor map; address: in global memory.
void check_bulk(Thread& t, uint64_t address, uint32_t bytes) {
  if (bytes % 16 || address % 16) fail(t, "a bulk copy that is not of whole multiples of 16 bytes");
}

}  // namespace

void run_copy(uint64_t number) {
  auto& copies = machine.cluster->copies;
  const auto found = copies.find(number);
  if (found == copies.end()) return;
  const auto run = std::move(found->second);
  copies.erase(found);
  machine.cluster->reads.erase(number);
  run();
}

void run_some_copy() {
  auto& copies = machine.cluster->copies;
  auto it = copies.begin();
  std::advance(it, machine.random() % std::min<size_t>(copies.size(), 16));
  try {
    run_copy(it->first);
  } catch (const Failure&) {  // machine.error says why
  }
}

std::string unseen_copies(const Block& block) {
  if (!options.races || block.copied == 0) return "";
  for (const auto& warp : block.warps)
    if (warp->clocks.past[copies_agent(block)] >= block.copied) return "";
  return "block " + std::to_string(block.index[0]) + " may end before a copy into its shared memory has, which no warp of it has"
         " waited for (" + place(block.copy_site) + ")";
}

// ---- machine.h -----------------------------------------------------------------------------------------------------

void fail_at_barrier(Thread& t, uint32_t address, uint32_t bytes) {
  check_no_barrier(t, *t.block, address, bytes);
  std::abort();
}

void barrier_init(Thread& t, uint32_t barrier, uint32_t arrivals) {
  shared_at(t, barrier, kBarrierBytes);
  if (t.watched) watch_write(t, barrier, kBarrierBytes);
  auto& made = t.block->barriers[barrier];
  made = std::make_unique<Barrier>();
  made->arrivals = made->pending = arrivals;
  made->site = t.site;
  made->by = t.index, made->fences = t.barrier_fences;
  t.block->barrier_words[barrier / 512] |= uint64_t{1} << barrier / 8 % 64;
}
void barrier_inval(Thread& t, uint32_t barrier) {
  if (!barrier_at(t, *t.block, barrier).waiting.empty()) fail(t, "an mbarrier.inval while a thread waits at the barrier");
  if (t.watched) watch_write(t, barrier, kBarrierBytes);
  t.block->barriers.erase(barrier);
  t.block->barrier_words[barrier / 512] &= ~(uint64_t{1} << barrier / 8 % 64);
}
void barrier_arrive(Thread& t, uint32_t address, bool in_cluster, uint32_t count) {
  Block& block = in_cluster ? block_at(t, address) : *t.block;
  Barrier& barrier = known_barrier_at(t, block, address);
  if (barrier.pending < count) fail(t, "a barrier with more arrivals than expected");
  publish(t, barrier.clocks);
  barrier.pending -= count;
  finish_phase_if_due(t, barrier);
}
void barrier_expect(Thread& t, uint32_t address, uint32_t bytes) {
  barrier_at(t, *t.block, address).bytes += bytes;
  barrier_arrive(t, address, false);
}
bool barrier_try_wait(Thread& t, uint32_t address, uint32_t parity) {
  Barrier* barrier = &known_barrier_at(t, *t.block, address);
  if ((barrier->phase & 1) == parity) {
    const uint64_t phase = barrier->phase;
    barrier->waiting.push_back(&t);
    state_of(t).barrier = address;
    block_on(state_of(t), Wait::kBarrier);
    barrier = &barrier_at(t, *t.block, address);  // it may have been invalidated since the end of the phase
    if (barrier->phase != phase + 1) fail(t, "a wait that comes too late: the next phase has ended too");
  }
  learn(t, barrier->done);
  if (t.watched) {
    const auto agent = uint16_t(t.warp->agent);
    const auto is_own = [&](const Barrier::Passed& x) { return x.agent == agent; };
    if (std::none_of(barrier->passed.begin(), barrier->passed.end(), is_own))
      barrier->passed.push_back({agent, t.warp->clocks.seen[agent], t.site});
  }
  return true;
}
uint32_t map_to_rank(Thread& t, uint32_t address, uint32_t rank) {
  if (rank >= t.block->cluster->blocks.size()) fail(t, "a rank that the cluster does not have");
  return (rank + 1) << 24 | (address & 0xffffff);
}
void fence_proxy_async(Thread& t) {
  ++t.fences, ++t.barrier_fences;
  if (t.watched) t.warp->fenced = t.warp->clocks.seen;
}
void fence_mbarrier_init(Thread& t) { ++t.barrier_fences; }

void copy_async(Thread& t, uint32_t to, uint64_t from, uint32_t bytes, uint32_t read) {
  uint8_t* const target = shared_at(t, to, bytes);
  if (read && from % bytes) fail(t, "an access to global memory that is not aligned");
  if (t.watched) {
    watch_write(t, to, bytes);
    if (read) watch_global(t, from, read, GlobalAccess::kRead);
  }
  std::function<void()> run = [=] {
    if (read) std::memcpy(target, reinterpret_cast<const void*>(from), read);
    std::memset(target + read, 0, bytes - read);
  };
  if (chance(2)) {
    run();
  } else {
    state_of(t).group.push_back(std::move(run));
  }
}
void copy_async_commit(Thread& t) {
  State& s = state_of(t);
  s.groups.push_back(std::move(s.group));
  s.group.clear();
}
void copy_async_wait(Thread& t, uint32_t groups) {
  State& s = state_of(t);
  while (s.groups.size() > groups) {
    for (const auto& run : s.groups.front()) run();
    s.groups.pop_front();
  }
}

void tensor_load(Thread& t, uint32_t to, uint64_t map, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3,
                 uint32_t barrier) {
  const Box box = box_of(t, map, c0, c1, c2, c3, to);
  const uint32_t rows = box.rows(), bytes = rows * 128;
  shared_at(t, to, 128);
  shared_at(t, to + bytes - 128, 128);
  check_fenced(t, *t.block, barrier);
  const Issue issue = begin_copy(t, *t.block, to, bytes);
  watch_box(t, box, GlobalAccess::kRead, issue.clock);
  Thread* const thread = &t;
  add_copy([=] {
    for (uint32_t row = 0; row < rows; ++row) {
      uint32_t inside = 0;
      const uint8_t* const from = box_row(box, row, &inside);
      for (uint32_t chunk = 0; chunk < 128; chunk += 16) {
        uint8_t* const target = thread->block->shared + swizzled(to + row * 128 + chunk);
        const uint32_t length = !from || inside <= chunk ? 0 : std::min(16u, inside - chunk);
        if (length) std::memcpy(target, from + chunk, length);
        std::memset(target + length, 0, 16 - length);
      }
    }
    complete(*thread, *thread->block, barrier, bytes, issue);
  });
}
void tensor_store(Thread& t, uint64_t map, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t from) {
  store_box(t, box_of(t, map, c0, c1, c2, c3, from), from, false);
}
void tensor_add(Thread& t, uint64_t map, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t from) {
  const Box box = box_of(t, map, c0, c1, c2, c3, from);
  if (box.map->half) fail(t, "an addition of fp16 values, which the emulator does not know");
  store_box(t, box, from, true);
}
void bulk_load(Thread& t, uint32_t to, uint64_t from, uint32_t bytes, uint32_t barrier, uint32_t blocks) {
  check_bulk(t, from, bytes);
  shared_at(t, to, 16);
  shared_at(t, to + bytes - 16, 16);
  Thread* const thread = &t;
  const auto& all = t.block->cluster->blocks;
  for (uint32_t rank = 0; rank < 32; ++rank) {
    if (blocks == kOwnBlock ? rank != t.block->rank : (blocks >> rank & 1) == 0) continue;
    if (rank >= all.size()) fail(t, "a copy to no block of the cluster");
    Block* const block = all[rank].get();
    check_fenced(t, *block, barrier);
    const Issue issue = begin_copy(t, *block, to, bytes);
    if (t.watched) watch_global(t, from, bytes, GlobalAccess::kRead, issue.clock);
    add_copy([=] {
      std::memcpy(block->shared + to, reinterpret_cast<const void*>(from), bytes);
      complete(*thread, *block, barrier, bytes, issue);
    });
  }
}
void bulk_store(Thread& t, uint64_t to, uint32_t from, uint32_t bytes) {
  check_bulk(t, to, bytes);
  if (t.watched) watch_global(t, to, bytes, GlobalAccess::kWrite, 0);
  store_later(t, from, bytes, false,
              [=](const uint8_t* values) { std::memcpy(reinterpret_cast<void*>(to), values, bytes); });
}
void bulk_commit(Thread& t) {
  State& s = state_of(t);
  s.bulk_groups.push_back(std::move(s.bulk_group));
  s.bulk_group.clear();
}
void bulk_wait(Thread& t, uint32_t groups) {
  State& s = state_of(t);
  while (s.bulk_groups.size() > groups) {
    for (uint64_t number : s.bulk_groups.front()) run_copy(number);
    s.bulk_groups.pop_front();
  }
}
void bulk_wait_read(Thread& t, uint32_t groups) {
  State& s = state_of(t);
  auto& reads = machine.cluster->reads;
  for (size_t i = 0; i + groups < s.bulk_groups.size(); ++i)
    for (uint64_t number : s.bulk_groups[i])
      if (const auto read = reads.find(number); read != reads.end()) read->second();
  const auto written = [&](const auto& group) {
    return std::all_of(group.begin(), group.end(), [&](uint64_t number) { return !reads.count(number); });
  };
  while (!s.bulk_groups.empty() && s.bulk_groups.size() > groups && written(s.bulk_groups.front()))
    s.bulk_groups.pop_front();
}

}  // namespace emulator
