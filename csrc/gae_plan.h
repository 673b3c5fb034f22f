// How a gae call is spread over the GPU. Host code; no torch, no CUDA.
#pragma once
#include <cstdint>

namespace ppo {

constexpr int kUnit = 128;      // tokens of one warp: 4 a lane
constexpr int kWarps = 8;       // warps of a block
constexpr int kSegment = 2048;  // tokens a block takes when rows are split

enum Launch { kWarpPerRow, kBlockPerRow, kSplitRows };

struct GaePlan {
  Launch launch;
  int64_t blocks;
};

// Segments are numbered through all rows. Row s of a packed batch starts at segment
// start / kSegment + s, which leaves each row room for the segment it begins within another.
inline int64_t gae_segments(int64_t rows, int64_t length, int64_t tokens, bool packed) {
  return packed ? tokens / kSegment + rows : rows * ((length + kSegment - 1) / kSegment);
}

// length: T of padded rows, the mean length of packed ones (the GPU alone knows the others).
inline GaePlan gae_plan(int64_t rows, int64_t length, int64_t tokens, bool packed, int sms) {
  if (length <= 4 * kUnit) return {kWarpPerRow, (rows + kWarps - 1) / kWarps};
  if (rows >= 2 * sms || length <= 4 * kSegment) return {kBlockPerRow, rows};
  return {kSplitRows, gae_segments(rows, length, tokens, packed)};
}

}  // namespace ppo
