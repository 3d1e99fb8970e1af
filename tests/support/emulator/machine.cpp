// Runs the blocks of a launch, one cluster at a time. Each thread has a stack and runs until it waits for others. The next
// warp is drawn at random, so an order that a kernel does not enforce does not hold by chance.
//
// The machine does not model times and the memory system, and of registers only the number that setmaxnreg leaves to a
// warp. All threads see writes to shared and global memory at once. Two blocks of different clusters never run at the same
// time, and neither do two launches.
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <tuple>

#include "threads.h"

namespace emulator {

Machine machine;
Options options;

// ---- stacks ----------------------------------------------------------------------------------------------------

extern "C" void emulator_switch(void** save, void* load);
extern "C" void emulator_first();
asm(R"(
.text
.globl emulator_switch
.hidden emulator_switch
emulator_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
.globl emulator_first
.hidden emulator_first
emulator_first:
  mov %r12, %rdi
  call *%r13
  ud2
)");

namespace {

constexpr size_t kStackBytes = 512 << 10;  // of address space; pages come when they are touched

std::string name_of(const Thread& t) {
  std::ostringstream out;
  out << "block " << t.block->index[0];
  if (t.block->index[1]) out << "," << t.block->index[1];
  out << ", warp " << t.warp->number << ", lane " << t.lane;
  return out.str();
}

[[noreturn]] void leave() {
  if (!machine.running) throw Failure();  // in a copy: on the scheduler's stack
  void* unused = nullptr;
  emulator_switch(&unused, machine.scheduler);
  std::abort();
}

}  // namespace

// The line of PTX, and the lines of the source that it was made from, the innermost first.
std::string place(uint32_t site) {
  struct Location {
    int file, line, column;
    bool operator<(const Location& x) const { return std::tie(file, line, column) < std::tie(x.file, x.line, x.column); }
  };
  std::ifstream file(machine.kernel->ptx);
  std::string line, text;
  std::map<int, std::string> files;
  std::map<Location, Location> inlined;  // where the code of a location was inlined, last
  Location location = {};
  for (uint32_t number = 1; std::getline(file, line); ++number) {
    Location at = {}, outer = {};
    char name[1024];
    if (number <= site && std::sscanf(line.c_str(), " .loc %d %d %d", &at.file, &at.line, &at.column) == 3) {
      location = at;
      inlined.erase(at);
      const size_t where = line.find("inlined_at ");
      if (where != std::string::npos &&
          std::sscanf(line.c_str() + where, "inlined_at %d %d %d", &outer.file, &outer.line, &outer.column) == 3)
        inlined[at] = outer;
    }
    if (std::sscanf(line.c_str(), " .file %d \"%1023[^\"]\"", &at.file, name) == 2) files[at.file] = name;
    if (number == site) text = line;
  }
  std::ostringstream out;
  for (int depth = 0; location.file && depth < 8; ++depth) {
    const std::string path = files[location.file];
    out << path.substr(path.rfind('/') + 1) << ":" << location.line << ", ";
    const auto outer = inlined.find(location);
    location = outer == inlined.end() ? Location{} : outer->second;
  }
  const size_t first = text.find_first_not_of(" \t");
  out << "PTX line " << site << ": " << (first == std::string::npos ? "" : text.substr(first, 100));
  return out.str();
}

bool chance(int one_in) { return machine.random() % uint64_t(one_in) == 0; }

void yield(State& s) { emulator_switch(&s.thread.stack_pointer, machine.scheduler); }

void make_ready(State& s) {
  s.wait = Wait::kNone;
  s.thread.warp->ready |= 1u << s.thread.lane;
}
void block_on(State& s, Wait wait) {
  s.wait = wait;
  s.thread.warp->ready &= ~(1u << s.thread.lane);
  yield(s);
}

namespace {

// ---- running ----------------------------------------------------------------------------------------------------

// Runs a thread: the kernel, and then the copies that the thread has not waited for.
void thread_main(State* s) {
  Thread& t = s->thread;
  machine.kernel->run(t, uint64_t(machine.launch->params));
  for (const auto& group : s->groups)
    for (const auto& run : group) run();
  for (const auto& run : s->group) run();
  for (const auto& group : s->bulk_groups)
    for (uint64_t number : group) run_copy(number);
  for (uint64_t number : s->bulk_group) run_copy(number);
  s->wait = Wait::kDone;
  t.warp->ready &= ~(1u << t.lane);
  t.warp->alive &= ~(1u << t.lane);
  --t.block->alive;
  --t.block->cluster->alive;
  if (t.warp->alive == 0) {
    for (const auto& group : t.warp->groups)
      if (!group.empty()) fail(t, "a warp that ends before its products");
    check_registers_at_end(t);
  }
  leave();
}

void* stack_number(size_t i) {
  while (machine.stacks.size() <= i) {
    void* const stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
    if (stack == MAP_FAILED) std::abort();
    mprotect(stack, 4096, PROT_NONE);
    machine.stacks.push_back(stack);
  }
  return machine.stacks[i];
}

std::string where_all_wait(const Cluster& cluster) {
  std::ostringstream out;
  out << "no thread can go on";
  for (const auto& block : cluster.blocks)
    for (const auto& warp : block->warps) {
      std::map<std::pair<int, uint32_t>, std::pair<int, uint32_t>> places;
      for (const State* s : warp->states)
        if (s->wait != Wait::kDone) {
          auto& found = places[{int(s->wait), s->thread.site}];
          ++found.first;
          found.second = s->barrier;
        }
      for (const auto& [where, who] : places) {
        static const char* const names[] = {"nothing", "their warp", "a named barrier", "an mbarrier", "the cluster",
                                            "registers of their block", ""};
        out << "\n  block " << block->index[0] << ", warp " << warp->number << ": " << who.first << " lanes wait for "
            << names[where.first];
        if (Wait(where.first) == Wait::kBarrier) {
          const Barrier& x = *block->barriers.at(who.second);
          out << " at " << who.second << " (phase " << x.phase << ", " << x.pending << " of " << x.arrivals
              << " arrivals and " << x.bytes << " bytes to come)";
        }
        out << ", " << place(where.second);
      }
    }
  return out.str();
}

// A stack on which emulator_switch begins thread_main: r15, r14, r13, r12, rbx, rbp, where to go, and two words so that
// calls find multiples of 16 bytes.
void* fresh_stack(size_t number, State* s) {
  auto** top = reinterpret_cast<void**>(static_cast<uint8_t*>(stack_number(number)) + kStackBytes - 64) - 9;
  std::fill(top, top + 9, nullptr);
  top[2] = reinterpret_cast<void*>(&thread_main);
  top[3] = s;
  top[6] = reinterpret_cast<void*>(&emulator_first);
  return top;
}

std::unique_ptr<Warp> make_warp(Block& block, uint32_t number, uint32_t lanes, uint32_t threads) {
  auto warp = std::make_unique<Warp>();
  warp->block = &block;
  warp->number = number;
  warp->syncs = 0;
  warp->registers = machine.kernel->registers;
  warp->agent = block.rank * kMostWarps + number;
  warp->clocks = {};
  warp->clocks.seen[warp->agent] = warp->clocks.past[warp->agent] = 1;
  warp->clocks.seen[kPrerequisites] = !machine.launch->beside;
  warp->alive = warp->ready = lanes == 32 ? ~0u : (1u << lanes) - 1;
  for (uint32_t lane = 0; lane < lanes; ++lane) {
    auto s = std::make_unique<State>();
    const uint32_t index = 32 * number + lane;
    s->thread = {nullptr, &block, warp.get(), index, lane, 0, block.shared, block.shared_end, block.barrier_words.data(),
                 options.races, 0, 0};
    s->thread.stack_pointer = fresh_stack(block.rank * threads + index, s.get());
    warp->states.push_back(s.get());
    block.threads.push_back(std::move(s));
  }
  return warp;
}

std::unique_ptr<Block> make_block(const Launch& launch, Cluster& cluster, uint64_t number, uint32_t rank) {
  const uint32_t threads = launch.block[0] * launch.block[1] * launch.block[2];
  auto block = std::make_unique<Block>();
  block->cluster = &cluster;
  block->rank = rank;
  block->index[0] = uint32_t(number % launch.grid[0]);
  block->index[1] = uint32_t(number / launch.grid[0] % launch.grid[1]);
  block->index[2] = uint32_t(number / launch.grid[0] / launch.grid[1]);
  block->alive = threads;
  block->shared_end = machine.kernel->dynamic_start + launch.dynamic_shared;
  block->shared = static_cast<uint8_t*>(std::aligned_alloc(1024, (block->shared_end + 1023) / 1024 * 1024));
  std::memset(block->shared, 0xff, block->shared_end);  // NaN
  block->barrier_words.assign(block->shared_end / 512 + 1, 0);
  if (options.races) {
    block->words.assign(block->shared_end / 4 + 1, {});
    block->reads.assign(block->words.size() * cluster.warp_count, 0);
  }
  for (uint32_t first = 0; first < threads; first += 32)
    block->warps.push_back(make_warp(*block, first / 32, std::min(32u, threads - first), threads));
  return block;
}

// Until all threads have ended, or machine.error says why they cannot.
void run_threads(Cluster& cluster) {
  std::vector<Warp*> all, ready;
  for (const auto& block : cluster.blocks)
    for (const auto& warp : block->warps) all.push_back(warp.get());
  uint64_t held_back = 0;  // warps that are not drawn for a while: an unlucky order lasts
  for (uint64_t step = 0; cluster.alive > 0 && machine.error.empty(); ++step) {
    if (step % 512 == 0) held_back = options.in_order ? 0 : machine.random() & machine.random();
    ready.clear();
    for (size_t i = 0; i < all.size(); ++i)
      if (all[i]->ready && !(held_back >> i % 64 & 1)) ready.push_back(all[i]);
    if (ready.empty())
      for (Warp* warp : all)
        if (warp->ready) ready.push_back(warp);
    if (!cluster.copies.empty() && (ready.empty() || options.in_order || chance(8))) {
      run_some_copy();
      continue;
    }
    if (ready.empty()) {
      machine.error = where_all_wait(cluster);
      break;
    }
    Warp& warp = *ready[options.in_order ? 0 : machine.random() % ready.size()];
    for (uint32_t lane = 0; lane < warp.states.size() && machine.error.empty(); ++lane) {
      if (!(warp.ready >> lane & 1)) continue;
      machine.running = warp.states[lane];
      emulator_switch(&machine.scheduler, warp.states[lane]->thread.stack_pointer);
      machine.running = nullptr;
    }
  }
  while (machine.error.empty() && !cluster.copies.empty()) run_some_copy();
}

void run_cluster(const Launch& launch, uint64_t first_block) {
  Cluster cluster;
  machine.cluster = &cluster;
  const uint32_t threads = launch.block[0] * launch.block[1] * launch.block[2];
  cluster.number = uint32_t(first_block / launch.cluster);
  cluster.warp_count = (threads + 31) / 32 * launch.cluster;
  cluster.alive = threads * launch.cluster;
  for (uint32_t rank = 0; rank < launch.cluster; ++rank)
    cluster.blocks.push_back(make_block(launch, cluster, first_block + rank, rank));
  run_threads(cluster);
  for (const auto& block : cluster.blocks) {
    let_next(*block);
    if (machine.error.empty()) machine.error = unseen_copies(*block);
    std::free(block->shared);
  }
  machine.cluster = nullptr;
}

}  // namespace

// ---- machine.h ----------------------------------------------------------------------------------------------------

float from_half(uint16_t x) {
  _Float16 y;
  std::memcpy(&y, &x, 2);
  return float(y);
}
uint16_t to_half(float x) {
  const _Float16 y = static_cast<_Float16>(x);
  uint16_t z;
  std::memcpy(&z, &y, 2);
  return z;
}

void fail(Thread& t, const char* what) {
  machine.error = name_of(t) + ": " + what + " (" + place(t.site) + ")";
  leave();
}

uint32_t block_index(Thread& t, int dimension) { return t.block->index[dimension]; }
uint32_t block_count(Thread&, int dimension) { return machine.launch->grid[dimension]; }
uint32_t block_threads(Thread&, int dimension) { return machine.launch->block[dimension]; }
uint32_t cluster_rank(Thread& t) { return t.block->rank; }

// ---- launch.h -----------------------------------------------------------------------------------------------------

std::string run(const Kernel& kernel, const Launch& launch, const Options& how) {
  options = how;
  machine.launch = &launch;
  machine.kernel = &kernel;
  machine.random.seed(how.seed);
  machine.error = begin_launch(launch);
  if (launch.cluster > uint32_t(kMostBlocks)) return "a cluster of more than 8 blocks";
  if (uint64_t(launch.block[0]) * launch.block[1] * launch.block[2] > 32 * kMostWarps)
    return "a block of more than 1024 threads";
  const uint64_t blocks = uint64_t(launch.grid[0]) * launch.grid[1] * launch.grid[2];
  for (uint64_t first = 0; first < blocks && machine.error.empty(); first += launch.cluster)
    run_cluster(launch, first);
  return machine.error;
}

}  // namespace emulator
