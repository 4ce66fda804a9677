// How the CTAs of a persistent kernel share its tiles: when one is nearly done with a tile, it takes another.
#pragma once
#include "../launch.cuh"
#include "../launch_counters.cuh"

namespace hf_flash::hopper {

using TileCounters = LaunchCounters<1024, 1, 15 * 1024>;
constexpr int kNoTile = -1;

// Of every counter: how many tiles were taken, and how many CTAs are done.
static __device__ int32_t tile_counters[TileCounters::kCount][2];

// `number`: TileCounters; kNone: the tile of its index is a CTA's only one.
struct TileCounter {
  int32_t* counts;

  explicit HF_DEVICE TileCounter(int number)
      : counts(number == TileCounters::kNone ? nullptr : tile_counters[number]) {}
  // The next tile that nobody has taken, of those from `first` on. A whole warp calls.
  HF_DEVICE int next(int first, int lane) const {
    return counts ? first + __shfl_sync(~0u, lane == 0 ? atomicAdd(&counts[0], 1) : 0, 0) : kNoTile;
  }
  // Once, after the last tile: the last CTA to come here leaves both counters zero.
  HF_DEVICE void finish() const {
    if (counts == nullptr || atomicAdd(&counts[1], 1) != int(gridDim.x) - 1) return;
    counts[0] = 0;
    counts[1] = 0;
  }
};

// CTAs for so many tiles, and the counter they share: one CTA a multiprocessor where tiles are more.
inline int share_tiles(int64_t tiles, cudaStream_t stream, int* counter, int64_t* ctas) {
  const int sm_count = device_facts().sm_count;
  *counter = TileCounters::kNone;
  if (tiles > sm_count)
    if (const int error = choose_counters<TileCounters>(stream, 1, counter)) return error;
  *ctas = *counter == TileCounters::kNone ? tiles : sm_count;
  return cudaSuccess;
}

}  // namespace hf_flash::hopper
