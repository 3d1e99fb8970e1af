// The size of a chunk, and division that rounds up. No CUDA.
#pragma once
#include <cstdint>

namespace gdn::sm90 {

constexpr int kChunk = 64;  // tokens of a chunk

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace gdn::sm90
