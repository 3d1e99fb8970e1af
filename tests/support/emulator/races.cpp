// Looks for accesses to shared memory that nothing orders.
//
// Each warp has a clock, and knows the clocks of the others up to what barriers have told it. A word of shared memory keeps
// who wrote it last, and when each warp last read it: an access must know of all that it conflicts with. Within a warp a
// lane reads what another one wrote only behind __syncwarp or a barrier. What WGMMA and TMA read must have
// fence.proxy.async after its write, in the thread that wrote it or, with Options::readers_fence, in the one that reads.
// mbarrier.init and mbarrier.inval write the memory of a barrier, and other operations of threads read it.
#include <sstream>

#include "threads.h"

namespace emulator {
namespace {

constexpr uint32_t word_of(uint32_t address) { return address / 4; }

[[noreturn]] void race(Thread& t, const char* what, uint32_t address, const Word& word, const char* other) {
  std::ostringstream out;
  out << what << " at shared address " << address << " and " << other << " (" << place(word.site)
      << ") are not ordered";
  fail(t, out.str().c_str());
}

// Whether `clocks` knows of what the word's last writer did.
bool knows(const Clocks& clocks, const Word& word) { return clocks.seen[word.writer] >= word.write_clock; }

}  // namespace

void check_read(Thread& t, Block& block, const Clocks& clocks, uint32_t address, uint32_t bytes, bool by_proxy) {
  if (options.of_launches) return;
  for (uint32_t w = word_of(address); w <= word_of(address + bytes - 1); ++w) {
    const Word& word = block.words[w];
    if (word.write_clock == 0) continue;
    if (!knows(clocks, word)) race(t, "a read", w * 4, word, "a write");
    if (!by_proxy || word.copied) continue;
    const bool by_reader = options.readers_fence && word.writer != t.warp->agent &&
                           t.warp->fenced[word.writer] >= word.write_clock;
    if (!by_reader && block.threads[word.thread]->thread.fences <= word.fences)
      race(t, "a read by WGMMA or TMA", w * 4, word, "a write without a fence.proxy.async after it");
  }
}

void note_read(Block& block, const Warp& warp, uint32_t address, uint32_t bytes) {
  const uint32_t count = block.cluster->warp_count;
  const uint32_t number = warp.block->rank * uint32_t(warp.block->warps.size()) + warp.number;
  for (uint32_t w = word_of(address); w <= word_of(address + bytes - 1); ++w)
    block.reads[w * count + number] = warp.clocks.seen[warp.agent];
}

void check_write(Thread& t, Block& block, const Clocks& clocks, uint32_t address, uint32_t bytes) {
  if (options.of_launches) return;
  const uint32_t count = block.cluster->warp_count;
  for (uint32_t w = word_of(address); w <= word_of(address + bytes - 1); ++w) {
    const Word& word = block.words[w];
    if (word.write_clock != 0 && !knows(clocks, word)) race(t, "a write", w * 4, word, "a write");
    for (uint32_t i = 0; i < count; ++i) {
      const uint32_t per_block = count / uint32_t(block.cluster->blocks.size());
      if (block.reads[w * count + i] > clocks.past[i / per_block * kMostWarps + i % per_block]) {
        std::ostringstream out;
        out << "a write at shared address " << w * 4 << " and a read by warp " << i % per_block << " of block "
            << i / per_block << " of the cluster are not ordered";
        fail(t, out.str().c_str());
      }
    }
  }
}

void note_write(Thread& t, Block& block, uint32_t agent, uint32_t clock, uint32_t address, uint32_t bytes, bool copied) {
  for (uint32_t w = word_of(address); w <= word_of(address + bytes - 1); ++w)
    block.words[w] = {clock, uint16_t(agent), uint16_t(t.index), t.fences, t.warp->syncs, t.site, copied};
}

void publish(Thread& t, Clocks& to) {
  if (!t.watched) return;
  Warp& warp = *t.warp;
  join(to, warp.clocks);
  tick(warp);
}
void learn(Thread& t, const Clocks& from) {
  if (!t.watched) return;
  join(t.warp->clocks, from);
  ++t.warp->syncs;
}

void watch_read(Thread& t, uint32_t address, uint32_t bytes) {
  check_read(t, *t.block, t.warp->clocks, address, bytes, false);
  for (uint32_t w = word_of(address); w <= word_of(address + bytes - 1); ++w) {
    const Word& word = t.block->words[w];
    if (word.write_clock && !word.copied && word.writer == t.warp->agent && word.thread != t.index &&
        word.syncs == t.warp->syncs)
      race(t, "a read", w * 4, word, "a write by another lane of the warp");
  }
  note_read(*t.block, *t.warp, address, bytes);
}
void watch_write(Thread& t, uint32_t address, uint32_t bytes) {
  check_write(t, *t.block, t.warp->clocks, address, bytes);
  note_write(t, *t.block, t.warp->agent, t.warp->clocks.seen[t.warp->agent], address, bytes, false);
}

}  // namespace emulator
