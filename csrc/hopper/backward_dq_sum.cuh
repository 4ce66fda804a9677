// dq of the one-pass backward on its way through the fp32 buffer in global memory: how warpgroups share it, whose
// turn it is to add, and the conversion at the end. The buffer keeps the order of accumulator fragments, so that
// copies are contiguous.
#pragma once
#include "backward_plan.cuh"

namespace hf_flash::hopper {

// How the two warpgroups share dq of a tile. Queries not a multiple of 64: it is computed transposed, 64 columns of
// the head each, of which the second may be partly idle (kThreads1 threads hold results). 64 queries: the first and
// the last kColumns columns of the head, whole panels; where these overlap the second skips kSkip1 of its vectors.
// 128 queries: 64 rows each. The second warpgroup must not have a branch or a shape of its own, or ptxas serialises
// wgmma (C7519).
template <class Config> struct DqSplit {
  static constexpr int kHeadDim = Config::kHeadDim, kQueries = Config::kQueries, kPanelWidth = Config::kPanelWidth;
  static constexpr bool kTransposed = kQueries % 64 != 0, kByColumns = kQueries == 64;
  static constexpr int kColumns = round_up(kHeadDim / 2, kPanelWidth);
  static constexpr int kThreads1 = kTransposed ? 2 * (kHeadDim - 64) : 128;
  static constexpr int kSkip1 = kByColumns ? (2 * kColumns - kHeadDim) / 8 : 0;
  static constexpr int kVectors = kTransposed ? kQueries / 8 : kByColumns ? kColumns / 8 : kHeadDim / 8;   // float4
  static constexpr int kFloats0 = kVectors * 4 * 128, kFloats1 = (kVectors - kSkip1) * 4 * kThreads1;
  static_assert(kFloats0 + kFloats1 == kQueries * kHeadDim, "every element of dq has one owner");
  static_assert((kHeadDim - kColumns) % kPanelWidth == 0, "an MN-major operand starts with a panel");

  // First panel of k that a warpgroup's columns of dq come from.
  static HF_DEVICE int first_panel(int warpgroup) {
    return warpgroup * (kTransposed ? 64 : kByColumns ? kHeadDim - kColumns : 0) / kPanelWidth;
  }
  // Where vector i of a thread lies in a tile of the fp32 buffer, in floats.
  static HF_DEVICE int offset(int warpgroup, int thread, int i) {
    return warpgroup * (kFloats0 - kSkip1 * kThreads1 * 4) + (i * (warpgroup ? kThreads1 : 128) + thread) * 4;
  }
  static HF_DEVICE bool owns(int warpgroup, int thread, int i) {
    return warpgroup == 0 || (thread < kThreads1 && i >= kSkip1);
  }
  // Row (query) and column of element e of vector i of a thread.
  static HF_DEVICE void locate(int warpgroup, int thread, int i, int e, int& row, int& column) {
    const int r = thread / 32 * 16 + thread % 32 / 4 + 8 * (e / 2), c = 8 * i + 2 * (thread % 4) + e % 2;
    row = kTransposed ? c : kByColumns ? r : 64 * warpgroup + r;
    column = kTransposed ? 64 * warpgroup + r : kByColumns ? warpgroup * (kHeadDim - kColumns) + c : c;
  }
};

// Deterministic sums: each half of a tile of dq has a turn, which counts the key tiles that are done; the one whose
// number it has goes next.
HF_DEVICE void turn_await(const int32_t* turn, int place) {
  while (*static_cast<const volatile int32_t*>(turn) != place) __nanosleep(32);
  __threadfence();
  fence_async_global();
}
HF_DEVICE void turn_pass(int32_t* turn) {
  __threadfence();
  atomicAdd(turn, 1);
}

struct ConvertArguments {
  Params p;
  TileGrid queries;
  BackwardWorkspace workspace;
};

// dq from fp32 fragments to its place in grad_q, scaled. One block converts one tile.
template <class Config>
__global__ void __launch_bounds__(256) backward_convert_kernel(const __grid_constant__ ConvertArguments a) {
  using Element = typename Config::Element;
  using Split = DqSplit<Config>;
  constexpr int kHeadDim = Config::kHeadDim, kQueries = Config::kQueries, kRow = kHeadDim + 8;   // spreads the banks
  HF_DYNAMIC_SHARED(memory);
  auto* const tile = reinterpret_cast<Element*>(memory);   // [kQueries][kRow]
  grid_dependency_wait();
  // The last sums first: they are still in the L2 cache.
  const TilePlace place = a.queries.place(gridDim.x - 1 - blockIdx.x);
  const Sequence sequence(a.p, place.batch);
  const int first_row = place.tile * kQueries;
  if (first_row >= sequence.q_length) return;

  const int warpgroup = threadIdx.x / 128, thread = threadIdx.x % 128;
  const float* const source =
      a.workspace.dq + (a.queries.first_tile(place.batch, place.head) + place.tile) * (kQueries * kHeadDim);
  HF_UNROLL
  for (int i = 0; i < Split::kVectors; ++i) {
    if (!Split::owns(warpgroup, thread, i)) continue;
    const float4 f = *reinterpret_cast<const float4*>(source + Split::offset(warpgroup, thread, i));
    const float x[4] = {f.x, f.y, f.z, f.w};
    HF_UNROLL
    for (int e = 0; e < 4; ++e) {
      int row, column;
      Split::locate(warpgroup, thread, i, e, row, column);
      tile[row * kRow + column] = Element(x[e] * a.p.scale);
    }
  }
  __syncthreads();
  Element* const grad_q = sequence.q_base<Element>(a.p.grad_q, place.head);
  for (int i = threadIdx.x; i < kQueries * kHeadDim / 8; i += 256) {
    const int row = i / (kHeadDim / 8), column = i % (kHeadDim / 8) * 8;
    if (first_row + row < sequence.q_length && column < a.p.head_dim)
      *reinterpret_cast<uint4*>(grad_q + (first_row + row) * a.p.grad_q.row_stride + column) =
          *reinterpret_cast<const uint4*>(tile + row * kRow + column);
  }
}

}  // namespace hf_flash::hopper
