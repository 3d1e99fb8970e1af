// The fitted constants of the forward's plans. No CUDA.
#pragma once
#include "sm90/heads.h"

namespace gdn::sm90 {

// Microseconds, fitted to the times of 363 plans of 31 calls on an H200.
struct Costs {
  float both, half, map;  // a chunk with 128 channels of V in a block, with 64, and of a map
  float tile;             // the start and end of a tile
  float fold, launches;   // a segment of the fold, in plans of the host; three more launches
  // In cut_time a segment of the fold takes fold_head for each head and fold_map for each head that
  // has an M, and at least fold_least.
  float fold_least, fold_head, fold_map;
};

template <class Heads>
constexpr Costs costs() {
  return Heads::kKeys == 64    ? Costs{1.74f, 1.28f, 1.4f, 3.5f, 1.7f, 12.5f, 1.7f, 0.03f, 0.03f}
         : Heads::kKeys == 128 ? Costs{2.25f, 1.6f, 1.87f, 10, 0.6f, 10, 2.3f, 0.1f, 0.12f}
                               : Costs{0, 2.55f, 2.05f, 9, 15.7f, 13, 15.7f, 0.4f, 0.5f};
}

constexpr float kSecondLaunch = 2;  // the delay of maps that are not launched first
constexpr float kNoSegments = 2;    // the launches for segments where no sequence is cut
// Maps that are walked in windows (forgetting.cuh): the search for a window, and the launch that
// walks sequences again.
constexpr float kVerdict = 2, kAgain = 3;
constexpr int kWindow = 15;  // chunks that a plan assumes a window to have
// The launch of later segments in blocks of the shape that is not chosen.
constexpr float kOtherShape = 2;
constexpr float kChoice = 6;    // the kernel choose_cut
constexpr float kNever = 1e9f;  // the time of a cut that is not possible

}  // namespace gdn::sm90
