// The producer warpgroup of the one-pass backward: one warp loads keys and queries, one row statistics, two add dq.
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
    HF_NO_UNROLL
    for (int tile = w.first_tile; tile < w.last_tile; ++tile) {
      const int row = w.q_rows.row + tile * kQueries;
      mbarrier_wait(&s.q_released[stage], phase ^ 1);
      mbarrier_expect_bytes(&s.q_arrived[stage], T::bytes(kQueries));
      T::template load<kQueries>(s.q[stage], &a.q, &s.q_arrived[stage], a.copies, row, w.first_head + head,
                                 w.q_rows.outer);
      mbarrier_wait(&s.grad_out_released[stage], phase ^ 1);
      mbarrier_expect_bytes(&s.grad_out_arrived[stage], T::bytes(kQueries));
      T::template load<kQueries>(s.grad_out[stage], &a.grad_out, &s.grad_out_arrived[stage], a.copies, row,
                                 w.first_head + head, w.q_rows.outer);
      if (++stage == 2) stage = 0, phase ^= 1;
    }
  }
}

// One warp brings LSE and delta, by plain loads and stores: racecheck takes reads of what bulk copies bring for races.
// Those of a tile come under the work on the one before, where the stage has been read.
template <class Config>
HF_DEVICE void bring_statistics(const BackwardArguments& a, const BackwardWork& w, BackwardShared<Config>& s) {
  const int lane = threadIdx.x % 32;
  int stage = 0;
  HF_NO_UNROLL
  for (int head = 0; head < w.group; ++head) {
    HF_NO_UNROLL
    for (int tile = w.first_tile; tile < w.last_tile; ++tile) {
      const int64_t index = s.first_tile + int64_t(head) * a.queries.tiles + tile;
      if (lane < Config::kQueries / 4) {
        s.lse[stage][lane] = reinterpret_cast<const float4*>(a.workspace.lse_log2 + index * Config::kQueries)[lane];
        s.delta[stage][lane] = reinterpret_cast<const float4*>(a.workspace.delta + index * Config::kQueries)[lane];
      }
      stage ^= 1;
      barrier_sync(kTileBarrier, kTileThreads);
    }
  }
  barrier_arrive(kTileBarrier, kTileThreads);
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
