// Checks accesses to global memory: whether they stay inside of the tensors that a call was given, and whether conflicting
// accesses are ordered.
//
// Inside of a launch, blocks of different clusters are not ordered, and the warps of one cluster are as in races.cpp.
//
// A launch that does not overlap begins when the previous launch has ended. An overlapping launch begins as soon as each
// block of the previous one has executed launch_dependents or has ended. For a thread that has executed
// griddepcontrol.wait, and for threads that have learned from it, the previous launch has ended. A launch for which no
// thread has waited may still run when the next one has ended: `Order` has these launches. If a warp of such a launch has
// published a number, and a warp of a later launch has read it, the reader's next accesses come after all that the
// publisher knew.
#include <algorithm>
#include <map>
#include <memory>
#include <sstream>

#include "threads.h"

namespace emulator {
namespace {

struct Tensor {
  uint64_t first, end;
  bool written;  // by the call
};
std::vector<Tensor> tensors;  // none: any address will do

using Launches = std::vector<uint32_t>;  // by their numbers

struct Order {
  std::string name;
  Launches at_start, after_wait;   // those that may be running still
  bool waits = false;              // a thread has waited
  bool waits_before_next = false;  // before the next launch may begin
};
std::map<uint32_t, Order> orders;  // of the launches of a call
uint32_t number = 0;               // of the launch that runs
bool first_of_call = true;

constexpr uint32_t kSeveral = ~0u;
std::map<uint64_t, std::shared_ptr<const Publication>> published;  // by address

struct Access {
  uint32_t launch = 0, cluster = 0, clock = 0, site = 0;
  uint16_t agent = 0;
  bool atomic = false;
};
// Two bytes of global memory. Reads are those of the last two launches that have read them.
struct Unit {
  Access write, read, earlier_read;
};
constexpr uint64_t kUnit = 2, kUnits = 2048;  // bytes; of a page
using Page = std::array<Unit, kUnits>;
std::map<uint64_t, std::unique_ptr<Page>> pages;
Page* last_page = nullptr;
uint64_t last_index = 0;

Unit& unit_at(uint64_t address) {
  const uint64_t unit = address / kUnit, index = unit / kUnits;
  if (!last_page || last_index != index) {
    auto& found = pages[index];
    if (!found) found = std::make_unique<Page>();
    last_page = found.get(), last_index = index;
  }
  return (*last_page)[unit % kUnits];
}

// The launches that may still run when this one has ended.
const Launches& outlive(const Order& x) { return x.waits ? x.after_wait : x.at_start; }

bool contains(const Launches& launches, uint32_t x) {
  return std::find(launches.begin(), launches.end(), x) != launches.end();
}

// Whether what this thread does next comes after the access: after a write, so that it is seen; after a read, so that it is
// over.
bool comes_after(const Thread& t, const Access& x, bool atomic, bool write) {
  if (x.launch == 0 || (atomic && x.atomic)) return true;
  const Clocks& clocks = t.warp->clocks;
  if (x.launch != number) {
    const Order& order = orders.at(number);
    if (!contains(clocks.seen[kPrerequisites] ? order.after_wait : order.at_start, x.launch)) return true;
    const auto end = t.block->cluster->learned.begin() + clocks.seen[kLearned];
    return std::any_of(t.block->cluster->learned.begin(), end, [&](const auto& from) {
      return from->launch == x.launch && from->cluster == x.cluster && from->seen[x.agent] >= x.clock;
    });
  }
  if (options.of_launches) return true;
  return x.cluster == t.block->cluster->number && (write ? clocks.seen : clocks.past)[x.agent] >= x.clock;
}

[[noreturn]] void unordered(Thread& t, const char* what, uint64_t address, const Access& x, const char* other) {
  std::ostringstream out;
  out << what << " of global memory at " << address << " and " << other << " by ";
  if (x.launch != number) {
    out << "the kernel " << orders.at(x.launch).name;
  } else if (x.cluster == kSeveral) {
    out << "several blocks";
  } else if (x.cluster != t.block->cluster->number) {
    out << "another block, " << place(x.site) << ",";
  } else {
    const bool copied = x.agent >= kMostBlocks * kMostWarps;
    out << (copied ? "a copy" : "warp " + std::to_string(x.agent % kMostWarps)) << " of the same cluster, "
        << place(x.site) << ",";
  }
  out << " are not ordered";
  fail(t, out.str().c_str());
}

void look_inside(Thread& t, uint64_t address, uint64_t bytes, bool writes) {
  for (const Tensor& x : tensors)
    if (address >= x.first && address + bytes <= x.end && (x.written || !writes)) return;
  std::ostringstream out;
  out << (writes ? "a write to" : "a read of") << " global memory at " << address << " that is not inside of a tensor"
      << (writes ? " which the call writes" : " of the call");
  fail(t, out.str().c_str());
}

}  // namespace

int last_error = 0;

void watch_global(Thread& t, uint64_t address, uint64_t bytes, GlobalAccess how, uint32_t copy) {
  const auto params = reinterpret_cast<uint64_t>(machine.launch->params);
  if (address >= params && address < params + kMostParameters) return;  // by a generic address
  const bool reads = how != GlobalAccess::kWrite, writes = how != GlobalAccess::kRead;
  const bool atomic = how == GlobalAccess::kAtomic;
  if (!tensors.empty() && !options.of_launches) look_inside(t, address, bytes, writes);
  const uint32_t cluster = t.block->cluster->number;
  const int agent = copy ? copies_agent(*t.block) : int(t.warp->agent);
  const uint32_t clock = copy ? copy : t.warp->clocks.seen[agent];
  const Access now = {number, cluster, clock, t.site, uint16_t(agent), atomic};
  for (uint64_t at = address / kUnit * kUnit; at < address + bytes; at += kUnit) {
    Unit& unit = unit_at(at);
    if (!comes_after(t, unit.write, atomic, true)) unordered(t, writes ? "a write" : "a read", at, unit.write, "a write");
    if (writes)
      for (const Access& x : {unit.read, unit.earlier_read})
        if (!comes_after(t, x, atomic, false)) unordered(t, "a write", at, x, "a read");
    if (reads) {
      if (unit.read.launch != number) {
        unit.earlier_read = unit.read;
        unit.read = now;
      } else {
        const bool several = unit.read.cluster != cluster;
        unit.read = now;
        if (several) unit.read.cluster = kSeveral;
      }
    }
    if (writes) unit.write = now;
  }
}

void publish_global(Thread& t, uint64_t address, uint32_t x) {
  const State& state = state_of(t);
  if (!state.bulk_group.empty() || !state.bulk_groups.empty()) fail(t, "a number is published before a store has ended");
  if (t.watched) {
    watch_global(t, address, sizeof x, GlobalAccess::kAtomic);
    const Publication all = {number, t.block->cluster->number, t.warp->clocks.seen};
    published[address] = std::make_shared<const Publication>(all);
    tick(*t.warp);
  }
  std::memcpy(reinterpret_cast<void*>(address), &x, sizeof x);
}
uint32_t load_published(Thread& t, uint64_t address) {
  uint32_t x;
  std::memcpy(&x, reinterpret_cast<const void*>(address), sizeof x);
  if (t.watched) {
    watch_global(t, address, sizeof x, GlobalAccess::kAtomic);
    const auto found = published.find(address);
    auto& learned = t.block->cluster->learned;
    if (x != 0 && found != published.end() && found->second->launch != number) {
      learned.push_back(found->second);
      t.warp->clocks.seen[kLearned] = uint32_t(learned.size());
    }
  }
  return x;
}

void launch_dependents(Thread& t) {
  if (!t.watched || t.block->lets_next) return;
  t.block->lets_next = true;
  if (t.warp->clocks.seen[kPrerequisites]) orders.at(number).waits_before_next = true;
}
void wait_for_prerequisites(Thread& t) {
  if (!t.watched) return;
  t.warp->clocks.seen[kPrerequisites] = 1;
  orders.at(number).waits = true;
}
void let_next(const Block& block) {
  if (!options.races || block.lets_next) return;
  for (const auto& warp : block.warps)
    if (warp->clocks.seen[kPrerequisites]) orders.at(number).waits_before_next = true;
}

std::string begin_launch(const Launch& launch) {
  if (!options.races) return "";
  if (launch.beside && first_of_call) return "the first launch of a call overlaps with earlier launches";
  first_of_call = false;
  Order order;
  order.name = launch.name;
  if (const auto last = orders.find(number); last != orders.end()) {
    const Order& before = last->second;
    order.after_wait = outlive(before);
    order.at_start = order.after_wait;
    if (launch.beside) {
      order.at_start = before.waits_before_next ? before.after_wait : before.at_start;
      order.at_start.push_back(number);
    }
  }
  orders[++number] = std::move(order);
  return "";
}

}  // namespace emulator

extern "C" {

// The memory of a tensor of the call that follows, which may touch that of its tensors alone.
void emulator_allow(uint64_t first, uint64_t bytes, int written) {
  emulator::tensors.push_back({first, first + bytes, written != 0});
}
// The next launch of the call has tensors of its own.
void emulator_end_launch() { emulator::tensors.clear(); }
// A call has ended. Whether its last launch ends behind all others, so that what comes next may rely on them.
int emulator_end_call() {
  const auto last = emulator::orders.find(emulator::number);
  const bool ended = last == emulator::orders.end() || emulator::outlive(last->second).empty();
  emulator_end_launch();
  emulator::orders.clear();
  emulator::pages.clear();
  emulator::published.clear();
  emulator::last_page = nullptr;
  emulator::first_of_call = true;
  emulator::last_error = 0;
  return ended;
}
}
