// Results of searches on the host, for later calls of the same sizes.
#pragma once
#include <cstddef>
#include <vector>

namespace gdn::sm90 {

// The results for the last kMost keys.
template <class Key, class Value, size_t kMost>
class Memo {
 public:
  template <class Make>
  Value find(const Key& key, const Make& make) {
    if (last_ < entries_.size() && entries_[last_].key == key) return entries_[last_].value;
    for (last_ = 0; last_ < entries_.size(); ++last_)
      if (entries_[last_].key == key) return entries_[last_].value;
    const Entry entry = {key, make()};
    if (entries_.size() < kMost) {
      entries_.push_back(entry);
    } else {
      entries_[last_ = oldest_] = entry;
      oldest_ = (oldest_ + 1) % kMost;
    }
    return entry.value;
  }
  size_t size() const { return entries_.size(); }

 private:
  struct Entry {
    Key key;
    Value value;
  };
  std::vector<Entry> entries_;
  size_t last_ = 0, oldest_ = 0;  // the entry of the last call; the one to replace next
};

}  // namespace gdn::sm90
