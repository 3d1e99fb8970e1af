// The times at which tiles end if each goes to the multiprocessor that is free first. No CUDA.
#pragma once
#include <algorithm>
#include <cstdint>

namespace gdn::sm90 {

// Tiles are added in the order in which multiprocessors take them.
class Schedule {
 public:
  explicit Schedule(int multiprocessors) : multiprocessors_(multiprocessors) {
    groups_[0] = {0, multiprocessors};
  }
  // Tiles that take equally long. At most kMostKinds calls may have a count above 0.
  void add(int64_t count, double time) {
    // A tile for each multiprocessor.
    const int64_t rounds = std::max<int64_t>(count / multiprocessors_ - 1, 0);
    for (int i = 0; i < size_; ++i) groups_[i].free += double(rounds) * time;
    count -= rounds * multiprocessors_;
    while (count > 0) {
      Group& first = *std::min_element(
          groups_, groups_ + size_, [](const Group& a, const Group& b) { return a.free < b.free; });
      const int64_t busy = std::min(count, first.count);
      if (busy < first.count) groups_[size_++] = {first.free, first.count - busy};
      first = {first.free + time, busy};
      count -= busy;
    }
  }
  double end() const {
    double last = 0;
    for (int i = 0; i < size_; ++i) last = std::max(last, groups_[i].free);
    return last;
  }
  static constexpr int kMostKinds = 4;

 private:
  struct Group {  // multiprocessors that are free at the same time
    double free;
    int64_t count;
  };
  int multiprocessors_, size_ = 1;
  Group groups_[kMostKinds + 1] = {};
};

}  // namespace gdn::sm90
