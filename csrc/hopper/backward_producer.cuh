// The producer warpgroup of the one-pass backward: one thread loads keys, queries and row statistics, two warps add dq.
#pragma once
#include "../mask.cuh"
#include "backward_block.cuh"

namespace hf_flash::hopper {

template <class Config>
HF_DEVICE void load_keys(const BackwardArguments& a, const BackwardWork& w, BackwardShared<Config>& s) {
  using T = typename Config::OperandTile;
  constexpr int kKeys = Config::kKeys;
  mbarrier_expect_bytes(&s.kv_arrived, 2 * T::bytes(kKeys));
  const int key_row = w.k_rows.row + w.first_key;
  T::template load<kKeys>(s.k, &a.k, &s.kv_arrived, a.copies, key_row, w.kv_head, w.k_rows.outer);
  T::template load<kKeys>(s.v, &a.v, &s.kv_arrived, a.copies, key_row, w.kv_head, w.k_rows.outer);
}

template <class Config>
HF_DEVICE void load_queries(const BackwardArguments& a, const BackwardWork& w, BackwardShared<Config>& s) {
  using T = typename Config::OperandTile;
  constexpr int kQueries = Config::kQueries;
  int stage = 0, phase = 0;
  HF_NO_UNROLL
  for (int head = 0; head < w.group; ++head) {
    const int lse = int(s.first_tile) + head * a.queries.tiles, delta = lse + int(a.queries.all_tiles());
    HF_NO_UNROLL
    for (int tile = w.first_tile; tile < w.last_tile; ++tile) {
      const int row = w.q_rows.row + tile * kQueries;
      mbarrier_wait(&s.q_released[stage], phase ^ 1);
      mbarrier_expect_bytes(&s.q_arrived[stage], T::bytes(kQueries) + 4 * kQueries);
      T::template load<kQueries>(s.q[stage], &a.q, &s.q_arrived[stage], a.copies, row, w.first_head + head,
                                 w.q_rows.outer);
      tma_load_5d(s.lse[stage], &a.statistics, &s.q_arrived[stage], 0, lse + tile, 0, 0, 0);
      mbarrier_wait(&s.grad_out_released[stage], phase ^ 1);
      mbarrier_expect_bytes(&s.grad_out_arrived[stage], T::bytes(kQueries) + 4 * kQueries);
      T::template load<kQueries>(s.grad_out[stage], &a.grad_out, &s.grad_out_arrived[stage], a.copies, row,
                                 w.first_head + head, w.q_rows.outer);
      tma_load_5d(s.delta[stage], &a.statistics, &s.grad_out_arrived[stage], 0, delta + tile, 0, 0, 0);
      if (++stage == 2) stage = 0, phase ^= 1;
    }
  }
}

// One warp adds the part of dq that one consumer warpgroup computes to the fp32 buffer. Deterministic: key tiles in
// descending order, each when its predecessor's sum is in memory.
template <class Config>
HF_DEVICE void add_dq(const BackwardArguments& a, const BackwardWork& w, const Mask& mask, BackwardShared<Config>& s,
                      int warpgroup) {
  using Split = DqSplit<Config>;
  constexpr int kQueries = Config::kQueries;
  const bool elected = threadIdx.x % 32 == 0, wanted = a.workspace.dq != nullptr;
  const float* const source = s.dq + warpgroup * Split::kFloats0;
  const uint32_t bytes = 4 * (warpgroup ? Split::kFloats1 : Split::kFloats0);
  int32_t* owed = nullptr;                  // deterministic: the turn to pass on once the last sum is in memory
  HF_NO_UNROLL
  for (int head = 0; head < w.group; ++head) {
    HF_NO_UNROLL
    for (int tile = w.first_tile; tile < w.last_tile; ++tile) {
      const int64_t index = s.first_tile + int64_t(head) * a.queries.tiles + tile;
      barrier_arrive(kDqFreeBarrier + warpgroup, 160);
      if (owed) {
        bulk_wait<0>();
        turn_pass(owed);
        owed = nullptr;
      }
      barrier_sync(kDqFullBarrier + warpgroup, 160);
      if (elected && wanted) {
        if (a.workspace.turns) {
          owed = a.workspace.turns + 2 * index + warpgroup;
          const int seen = mask.keys(min((tile + 1) * kQueries, mask.q_length) - 1).end - w.first_key;
          turn_await(owed, ceil_div(seen, Config::kKeys) - 1);   // so many later tiles of keys are seen
        }
        float* const target = a.workspace.dq + index * (kQueries * Config::kHeadDim) + warpgroup * Split::kFloats0;
        bulk_reduce_add(target, source, bytes);
        bulk_commit();
        bulk_wait_read<0>();
      }
      __syncwarp();
    }
  }
  if (elected && wanted) bulk_wait<0>();
  if (owed) turn_pass(owed);
}

}  // namespace hf_flash::hopper
