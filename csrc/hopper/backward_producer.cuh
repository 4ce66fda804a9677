// The producer warpgroup of the one-pass backward: a thread loads keys, queries and row statistics, two warps add dq,
// one finds the tiles of keys and stores their dk and dv.
#pragma once
#include "../mask.cuh"
#include "backward_block.cuh"

namespace hf_flash::hopper {

// Fills in the tile of keys of this number. A whole warp calls; false: its sequence has no such tile. What is known
// goes to shared memory and is read again, as the producers have few registers.
template <class Config>
HF_DEVICE bool describe_work(BackwardWork& w, const BackwardArguments& a, int number, int lane) {
  const TilePlace place = a.keys.place(number);
  if (lane == 0) w.batch = place.batch, w.part = place.head, w.first_key = place.tile * Config::kKeys;
  __syncwarp();
  if (lane == 0) {
    const Sequence sequence(a.p, w.batch);
    w.q_length = sequence.q_length, w.k_length = sequence.k_length;
    w.q_rows = a.q_layout.sequence(w.batch, sequence.q_row, sequence.q_length);
    w.k_rows = a.k_layout.sequence(w.batch, sequence.k_row, sequence.k_length);
  }
  __syncwarp();
  const bool exists = w.first_key < w.k_length;
  __syncwarp();
  if (!exists || lane != 0) return exists;
  // A deterministic sum starts with the last key tile. Blocks then wait only for tiles that were taken before theirs,
  // and under a causal mask, where that tile is the one on the diagonal, they hardly wait at all.
  if (a.workspace.turns) w.first_key = (w.k_length - 1) / Config::kKeys * Config::kKeys - w.first_key;
  w.kv_head = w.part / a.parts.parts;
  w.first_head = a.parts.first_head(a.p, w.part);
  w.group = a.parts.first_head(a.p, w.part + 1) - w.first_head;
  w.statistics = int(a.queries.first_tile(w.batch, w.first_head));
  const Range queries = Mask(w.q_length, w.k_length, a.p.window_left, a.p.window_right)
                            .queries(w.first_key, w.first_key + Config::kKeys);
  w.first_tile = queries.empty() ? 0 : queries.begin / Config::kQueries;
  w.last_tile = queries.empty() ? 0 : ceil_div(queries.end, Config::kQueries);
  w.sums = a.parts.place(a.p, Sequence(a.p, w.batch), w.batch, w.part, w.first_key, Config::kHeadDim);
  return true;
}

// One warp: dk and dv from where the consumers have staged them.
template <class Config>
HF_DEVICE void store_results(const BackwardArguments& a, const BackwardWork& w, BackwardShared<Config>& s, int lane) {
  using T = typename Config::OperandTile;
  barrier_sync(kResultsBarrier, 288);
  if (lane != 0) return;
  if (a.parts.sums == nullptr) {            // else the consumers have
    const int row = w.k_rows.row + w.first_key;
    if (a.p.grad_v.data) T::template store<Config::kKeys>(&a.grad_v, s.ds, a.copies, row, w.kv_head, w.k_rows.outer);
    if (a.p.grad_k.data) T::template store<Config::kKeys>(&a.grad_k, s.dq, a.copies, row, w.kv_head, w.k_rows.outer);
    bulk_commit();
    bulk_wait_read<0>();
  }
  mbarrier_arrive(&s.results_stored);
}

// One warp: takes a tile of keys when the queries of the one before are loaded, and stores the results of that.
// Deterministic sums wait for tiles of lower number, so that those are taken before.
template <class Config> HF_DEVICE void schedule(const BackwardArguments& a, BackwardShared<Config>& s, int lane) {
  const TileCounter counter(a.counter);
  const int end = int(a.keys.all_tiles());
  int number = a.workspace.turns && counter.counts ? counter.next(0, lane) : int(blockIdx.x);
  HF_NO_UNROLL
  for (int count = 0;; ++count) {
    BackwardWork& w = s.work[count & 1];
    if (count > 0) mbarrier_wait(&s.queries_loaded, (count & 1) ^ 1);
    mbarrier_wait(&s.work_released[count & 1], (count >> 1 & 1) ^ 1);
    if (count > 0) number = counter.next(a.workspace.turns ? 0 : gridDim.x, lane);
    while (uint32_t(number) < uint32_t(end) && !describe_work<Config>(w, a, number, lane))
      number = counter.next(a.workspace.turns ? 0 : gridDim.x, lane);
    if (lane == 0) {
      if (uint32_t(number) >= uint32_t(end)) w.first_key = -1;
      mbarrier_arrive(&s.work_arrived[opaque(count) & 1]);
    }
    if (count > 0) store_results<Config>(a, s.work[(count & 1) ^ 1], s, lane);
    if (uint32_t(number) >= uint32_t(end)) break;
  }
  if (lane == 0) counter.finish();
}

// One thread.
template <class Config> HF_DEVICE void load(const BackwardArguments& a, BackwardShared<Config>& s) {
  using T = typename Config::OperandTile;
  constexpr int kKeys = Config::kKeys, kQueries = Config::kQueries;
  int loaded = 0;                           // tiles of queries
  HF_NO_UNROLL
  for (int count = 0;; ++count) {
    mbarrier_wait(&s.work_arrived[count & 1], count >> 1 & 1);
    const BackwardWork& w = s.work[count & 1];
    if (w.first_key < 0) break;
    mbarrier_wait(&s.kv_released, (count & 1) ^ 1);
    mbarrier_expect_bytes(&s.kv_arrived, 2 * T::bytes(kKeys));
    const int key_row = w.k_rows.row + w.first_key;
    T::template load<kKeys>(s.k, &a.k, &s.kv_arrived, a.copies, key_row, w.kv_head, w.k_rows.outer);
    T::template load<kKeys>(s.v, &a.v, &s.kv_arrived, a.copies, key_row, w.kv_head, w.k_rows.outer);
    HF_NO_UNROLL
    for (int head = 0; head < w.group; ++head) {
      HF_NO_UNROLL
      for (int tile = w.first_tile; tile < w.last_tile; ++tile, ++loaded) {
        const int stage = loaded & 1, phase = loaded >> 1 & 1, row = w.q_rows.row + tile * kQueries;
        const int lse = w.statistics + head * a.queries.tiles + tile, delta = lse + int(a.queries.all_tiles());
        mbarrier_wait(&s.q_released[stage], phase ^ 1);
        if (loaded == 0) grid_dependency_wait();   // for the statistics
        mbarrier_expect_bytes(&s.q_arrived[stage], T::bytes(kQueries) + 4 * kQueries);
        T::template load<kQueries>(s.q[stage], &a.q, &s.q_arrived[stage], a.copies, row, w.first_head + head,
                                   w.q_rows.outer);
        tma_load_5d(s.lse[stage], &a.statistics, &s.q_arrived[stage], 0, lse, 0, 0, 0);
        mbarrier_wait(&s.grad_out_released[stage], phase ^ 1);
        mbarrier_expect_bytes(&s.grad_out_arrived[stage], T::bytes(kQueries) + 4 * kQueries);
        T::template load<kQueries>(s.grad_out[stage], &a.grad_out, &s.grad_out_arrived[stage], a.copies, row,
                                   w.first_head + head, w.q_rows.outer);
        tma_load_5d(s.delta[stage], &a.statistics, &s.grad_out_arrived[stage], 0, delta, 0, 0, 0);
      }
    }
    mbarrier_arrive(&s.queries_loaded);
    mbarrier_arrive(&s.work_released[opaque(count) & 1]);
  }
}

// One warp adds the part of dq that one consumer warpgroup computes to the fp32 buffer. Deterministic: key tiles in
// descending order, each when its predecessor's sum is in memory.
template <class Config> HF_DEVICE void add_dq(const BackwardArguments& a, BackwardShared<Config>& s, int warpgroup) {
  using Split = DqSplit<Config>;
  constexpr int kQueries = Config::kQueries;
  const bool elected = threadIdx.x % 32 == 0, wanted = a.workspace.dq != nullptr;
  const float* const source = s.dq + warpgroup * Split::kFloats0;
  const uint32_t bytes = 4 * (warpgroup ? Split::kFloats1 : Split::kFloats0);
  grid_dependency_wait();                   // for the zeros
  int owed = -1;                            // deterministic: the turn to pass on once the last sum is in memory
  const auto pass_turn = [&] {
    if (owed < 0) return;
    bulk_wait<0>();
    turn_pass(a.workspace.turns + owed);
    owed = -1;
  };
  HF_NO_UNROLL
  for (int count = 0;; ++count) {
    mbarrier_wait(&s.work_arrived[count & 1], count >> 1 & 1);
    const BackwardWork& w = s.work[count & 1];
    if (w.first_key < 0) break;
    mbarrier_wait(&s.results_stored, (count & 1) ^ 1);   // dq_free is complete
    HF_NO_UNROLL
    for (int head = 0; head < w.group; ++head) {
      HF_NO_UNROLL
      for (int tile = w.first_tile; tile < w.last_tile; ++tile) {
        const int index = w.statistics + head * a.queries.tiles + tile;
        barrier_arrive(kDqFreeBarrier + warpgroup, 160);
        pass_turn();
        barrier_sync(kDqFullBarrier + warpgroup, 160);
        if (elected && wanted) {
          if (a.workspace.turns) {
            owed = 2 * index + warpgroup;
            const Mask mask(w.q_length, w.k_length, a.p.window_left, a.p.window_right);
            const int seen = mask.keys(min((tile + 1) * kQueries, mask.q_length) - 1).end - w.first_key;
            const int later_tiles = ceil_div(seen, Config::kKeys) - 1;   // of keys that are seen
            turn_await(a.workspace.turns + owed, later_tiles);
          }
          float* const target = a.workspace.dq + int64_t(index) * (kQueries * Config::kHeadDim);
          bulk_reduce_add(target + warpgroup * Split::kFloats0, source, bytes);
          bulk_commit();
          bulk_wait_read<0>();
        }
        __syncwarp();
      }
    }
    barrier_arrive(kDqFreeBarrier + warpgroup, 160);   // for dk, which is staged there
    pass_turn();
    if (elected) mbarrier_arrive(&s.work_released[opaque(count) & 1]);
  }
  if (elected && wanted) bulk_wait<0>();
}

}  // namespace hf_flash::hopper
