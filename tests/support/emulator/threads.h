// The threads of a cluster of blocks, as the machine keeps them, and what its parts ask of each other.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#include "launch.h"
#include "machine.h"

namespace emulator {

// Where the swizzle of 128 bytes puts what would lie at an address.
constexpr uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

constexpr int kMostWarps = 32;  // of a block
constexpr int kMostBlocks = 8;  // of a cluster
constexpr int kAgents = kMostBlocks * kMostWarps + kMostBlocks;  // warps, and each block's copies

// Up to which clock each agent is known: an access carries the clock of the agent that makes it. The last two entries are
// others: kPrerequisites is 1 if the launches before have been waited for, and kLearned is how many of Cluster::learned are
// known.
constexpr int kPrerequisites = kAgents, kLearned = kAgents + 1;
using Times = std::array<uint32_t, kAgents + 2>;

inline void join(Times& to, const Times& from) {
  for (size_t i = 0; i < to.size(); ++i) to[i] = std::max(to[i], from[i]);
}

struct Clocks {
  Times seen{};  // whose writes are there to be read
  Times past{};  // what is over. The end of a copy says that of all before its issue, and shows the copy's writes alone
};

inline void join(Clocks& to, const Clocks& from) {
  join(to.seen, from.seen);
  join(to.past, from.past);
}

// The clocks of a warp when it published a number in global memory.
struct Publication {
  uint32_t launch, cluster;
  Times seen;
};

enum class Wait { kNone, kWarp, kNamed, kBarrier, kCluster, kRegisters, kDone };

struct Barrier {  // an mbarrier
  uint32_t arrivals = 0, pending = 0;
  int64_t bytes = 0;
  uint64_t phase = 0;
  uint32_t site = 0;            // of its initialisation
  uint32_t by = 0, fences = 0;  // the thread that initialised it, and its Thread::barrier_fences then
  Clocks clocks{}, done{};
  std::vector<Thread*> waiting;
  struct Passed {
    uint16_t agent;
    uint32_t clock, site;
  };
  std::vector<Passed> passed;  // the warps that have seen the end of the last phase, when watched
};

struct Named {
  uint32_t arrived = 0, expected = 0;
  Clocks clocks{};
  std::vector<Thread*> waiting;
};

enum class Kind { kSync, kShuffle, kBallot, kRedux, kLoad, kStore, kMma, kWgmma, kFence, kCommit, kWaitGroup, kNamed, kRegisters };

// An operation of the lanes of a warp, which runs when all of them have arrived.
struct Meeting {
  Kind kind;
  uint32_t site, mask, arrived;
  void* of[32];
};

struct Range {
  uint32_t address, bytes;
};

// A product on its way: what it read, and what was there.
struct Flight {
  std::vector<Range> ranges;
  uint64_t sum;
  uint32_t site;
  Clocks clocks;
};

// The last accesses to a word of shared memory.
struct Word {
  uint32_t write_clock = 0;
  uint16_t writer = 0;  // agent
  uint16_t thread = 0;  // of the block
  uint32_t fences = 0;  // of the thread, when it wrote
  uint32_t syncs = 0;   // of the warp, when it wrote
  uint32_t site = 0;
  bool copied = false;  // by TMA and the like: through the asynchronous proxy
};

struct State {  // of a thread, what translated code does not see
  Thread thread;
  Wait wait = Wait::kNone;
  uint64_t generation = 0;  // of the cluster's barrier, once it has arrived there
  uint32_t barrier = 0;     // the mbarrier that it waits for
  std::vector<std::function<void()>> group;               // cp.async, not committed
  std::deque<std::vector<std::function<void()>>> groups;  // cp.async, committed
  std::vector<uint64_t> bulk_group;                       // numbers of copies
  std::deque<std::vector<uint64_t>> bulk_groups;
};

struct Warp {
  Block* block;
  uint32_t number, alive, ready;  // the last two: a bit a lane
  std::vector<State*> states;
  std::vector<Meeting> meetings;
  std::vector<Flight> open;                // products, not committed
  std::deque<std::vector<Flight>> groups;  // products, committed
  uint32_t agent, syncs;
  uint32_t registers;                      // of a thread, by the last setmaxnreg that is done
  std::vector<uint32_t> set_at = {};       // the sites of its setmaxnreg, begun or done
  Clocks clocks;
  Times fenced{};  // what it had seen at its last fence.proxy.async
};

// The warp's next accesses are later than all that other agents have learned of the warp.
inline void tick(Warp& warp) { warp.clocks.past[warp.agent] = ++warp.clocks.seen[warp.agent]; }

struct Cluster;
struct Block {
  Cluster* cluster;
  uint32_t rank, index[3];
  uint32_t alive;
  bool lets_next = false;   // it has executed launch_dependents
  uint32_t copied = 0;      // clock of the last copy into its shared memory
  uint32_t copy_site = 0;   // where that was issued
  uint8_t* shared;
  uint32_t shared_end;
  std::vector<std::unique_ptr<Warp>> warps;
  std::vector<std::unique_ptr<State>> threads;
  std::unordered_map<uint32_t, std::unique_ptr<Barrier>> barriers;
  std::vector<uint64_t> barrier_words;  // Thread::barriers
  std::array<Named, 16> named;
  uint32_t free_registers = 0;  // of those that the block had at launch; here a warp that ends gives none back
  struct Raise {
    Warp* warp;
    uint32_t registers;  // that a thread will have
  };
  std::deque<Raise> raises;  // the warps that wait for registers
  std::vector<Word> words;
  std::vector<uint32_t> reads;  // of a word, by the cluster's warps
};

struct Cluster {
  uint32_t number;  // of the launch
  std::vector<std::unique_ptr<Block>> blocks;
  std::map<uint64_t, std::function<void()>> copies;  // on their way, by a number of their own
  std::map<uint64_t, std::function<void()>> reads;   // of those out of shared memory: the first half of each
  uint64_t next_copy = 0;
  uint32_t warp_count = 0;
  uint32_t arrived = 0, alive = 0;  // at the cluster's barrier
  uint64_t generation = 0;
  Clocks clocks{}, done{};
  std::vector<State*> waiting;
  uint32_t copy_clock = 0;
  std::vector<std::shared_ptr<const Publication>> learned;  // of other launches, by warps of this cluster
};

struct Machine {
  const Launch* launch = nullptr;
  const Kernel* kernel = nullptr;
  std::mt19937_64 random;
  Cluster* cluster = nullptr;
  void* scheduler = nullptr;
  State* running = nullptr;
  std::string error;
  std::vector<void*> stacks;
};
extern Machine machine;
extern Options options;

// ---- machine.cpp -------------------------------------------------------------------------------------------------

// A copy that fails throws this, because copies also run while no thread does.
struct Failure {};

bool chance(int one_in);
std::string place(uint32_t site);
void make_ready(State& s);
void block_on(State& s, Wait wait);  // returns when somebody has made it ready
void yield(State& s);                // the same, for a thread that is not ready any more
inline State& state_of(Thread& t) { return *t.block->threads[t.index]; }

// ---- races.cpp ---------------------------------------------------------------------------------------------------

// A read of memory that `clocks` must know the last writer of; by_proxy: by WGMMA or TMA.
void check_read(Thread& t, Block& block, const Clocks& clocks, uint32_t address, uint32_t bytes, bool by_proxy);
void note_read(Block& block, const Warp& warp, uint32_t address, uint32_t bytes);
// A write behind all accesses that came before.
void check_write(Thread& t, Block& block, const Clocks& clocks, uint32_t address, uint32_t bytes);
void note_write(Thread& t, Block& block, uint32_t agent, uint32_t clock, uint32_t address, uint32_t bytes, bool copied);
// An arrival publishes all that the warp has done; a wait learns what others have.
void publish(Thread& t, Clocks& to);
void learn(Thread& t, const Clocks& from);
inline int copies_agent(const Block& block) { return kMostBlocks * kMostWarps + int(block.rank); }

// ---- memory.cpp --------------------------------------------------------------------------------------------------

std::string begin_launch(const Launch& launch);  // why it cannot be, or ""
void let_next(const Block& block);               // the block has ended

// ---- warps.cpp ---------------------------------------------------------------------------------------------------

struct GroupArguments {
  uint32_t number, threads;
  bool waits;
};
// Fails where other warps of the warpgroup have come to a setmaxnreg that this one, which ends, has not.
void check_registers_at_end(Thread& t);
// Until all lanes of the mask are there; the last of them does what they do.
void meet(Thread& t, Kind kind, uint32_t mask, void* of);
float part(const uint32_t* registers, int i, bool half_type);  // the 16-bit value number i

// ---- products.cpp ------------------------------------------------------------------------------------------------

void make_product(Thread& t, Meeting& m);
void wait_products(Thread& t, uint32_t left);

// ---- copies.cpp --------------------------------------------------------------------------------------------------

void run_copy(uint64_t number);  // if it is on its way still
void run_some_copy();
std::string unseen_copies(const Block& block);  // why a block may not end, or ""

}  // namespace emulator
