// Backward attention for Hopper, head dims 192 and 256, second of two passes: dq.
//   q, grad_out, grad_q (batch, seq_q, heads, head_dim)    k, v (batch, seq_k, kv_heads, head_dim)
// A block owns 128 queries of one head (two consumer warpgroups, 64 each) and loops over the tiles of 64 keys that
// they see, from the last to the first. dq stays in registers.
#pragma once
#include "backward_256.cuh"

namespace hf_flash::hopper {

// What one block does.
struct DqWork {
  int head, kv_head, batch, first_query;
  int first_tile, last_tile;       // of 64 keys
  int k_length, diagonal;
  RowCoordinates q_rows, k_rows;
  int64_t statistics;              // row of the first query in the workspace
};

template <class Config> struct DqShared {
  using Element = typename Config::Element;
  static constexpr int kPanels = Config::OperandTile::kPanels;
  Element q[2][kPanels][64][64], grad_out[2][kPanels][64][64];   // [warpgroup]
  Element k[2][kPanels][64][64], v[kPanels][64][64];
  float lse[128], delta[128];
  DqWork work;
  uint64_t q_arrived[2], grad_out_arrived[2], k_arrived[2], k_released[2], v_arrived, v_released;
};

template <class Element>
HF_DEVICE void zero_rows(const Tensor& t, const Sequence& sequence, int head, int first, int rows, int head_dim) {
  Element* const base = sequence.q_base<Element>(t, head);
  for (int i = threadIdx.x; i < rows * (head_dim / 8); i += blockDim.x) {
    const int row = first + i / (head_dim / 8);
    if (row < sequence.q_length)
      *reinterpret_cast<uint4*>(base + row * t.row_stride + i % (head_dim / 8) * 8) = make_uint4(0, 0, 0, 0);
  }
}

template <class Config> HF_DEVICE void load_dq_operands(const WideArguments& a, DqShared<Config>& s) {
  const DqWork& w = s.work;
  using T = typename Config::OperandTile;
  const auto load_queries = [&](void* tile, const CUtensorMap* map, uint64_t* arrived, int warpgroup) {
    const int row = w.first_query + warpgroup * 64;
    if (row >= w.k_length - w.diagonal)   // no queries: whatever the tile holds, their dq is not stored
      return mbarrier_arrive(arrived);
    mbarrier_expect_bytes(arrived, T::bytes(64));
    T::template load<64>(tile, map, arrived, a.copies, w.q_rows.row + row, w.head, w.q_rows.outer);
  };
  const auto load_keys = [&](void* tile, const CUtensorMap* map, uint64_t* arrived, int key_tile) {
    mbarrier_expect_bytes(arrived, T::bytes(64));
    T::template load<64>(tile, map, arrived, a.copies, w.k_rows.row + key_tile * 64, w.kv_head, w.k_rows.outer);
  };
  load_queries(s.q[0], &a.q, &s.q_arrived[0], 0);
  load_keys(s.k[0], &a.k, &s.k_arrived[0], w.last_tile - 1);
  load_queries(s.q[1], &a.q, &s.q_arrived[1], 1);
  load_queries(s.grad_out[0], &a.grad_out, &s.grad_out_arrived[0], 0);
  load_queries(s.grad_out[1], &a.grad_out, &s.grad_out_arrived[1], 1);
  int stage = 1, phase = 0, v_phase = 1;
  HF_NO_UNROLL
  for (int tile = w.last_tile - 1; tile >= w.first_tile; --tile) {
    mbarrier_wait(&s.v_released, v_phase);
    v_phase ^= 1;
    load_keys(s.v, &a.v, &s.v_arrived, tile);
    if (tile == w.first_tile) break;
    mbarrier_wait(&s.k_released[stage], phase ^ 1);
    load_keys(s.k[stage], &a.k, &s.k_arrived[stage], tile - 1);
    if (++stage == 2) stage = 0, phase ^= 1;
  }
}

template <class Config>
HF_DEVICE void accumulate_dq(const WideArguments& a, DqShared<Config>& s, const Range tiles) {
  const DqWork& w = s.work;
  using Element = typename Config::Element;
  using T = typename Config::OperandTile;
  constexpr int kHeadDim = Config::kHeadDim;
  const int warpgroup = uniform(threadIdx.x / 128) - 1;
  const int thread = threadIdx.x % 128, lane = thread % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0) % 4;
  const bool leader = thread == 0;
  const int query = w.first_query + warpgroup * 64 + warp * 16 + lane / 4;   // of accumulator rows 0; 8 more: rows 1
  float dq[kHeadDim / 2];
  uint32_t ds_packed[16];
  HF_UNROLL
  for (int i = 0; i < kHeadDim / 2; ++i) dq[i] = 0.f;

  // Statistics of this thread's rows 0 and 8.
  const auto lse_of = [&](int row) { return s.lse[warpgroup * 64 + warp * 16 + lane / 4 + row]; };
  const auto delta_of = [&](int row) { return s.delta[warpgroup * 64 + warp * 16 + lane / 4 + row]; };
  // opaque: descriptors are made where they are used, or ptxas keeps one per step in registers and spills.
  const auto multiply_scores = [&](float (&scores)[32], int stage) {
    multiply_rows<Config>(scores, T::k_major(s.q[opaque(warpgroup)]), T::k_major(s.k[stage]));
  };
  const auto multiply_dp = [&](float (&dp)[32]) {
    multiply_rows<Config>(dp, T::k_major(s.grad_out[opaque(warpgroup)]),
                          T::k_major(s.v[Config::kGeneral ? opaque(0) : 0]));
  };
  const auto multiply_dq = [&](int stage) {
    add_product<Config>(dq, ds_packed, T::template mn_major<64>(s.k[stage]));
  };
  // Keys from this on are not seen, counted from this thread's first column.
  int unseen[2];
  HF_UNROLL
  for (int r = 0; r < 2; ++r)
    unseen[r] = (Config::kScores == Scores::kRight
                     ? first_unseen_key(query + 8 * r, w.k_length, w.diagonal, a.p.window_right)
                     : w.k_length) - 2 * (lane % 4);
  const auto weigh = [&](float (&scores)[32], int tile) {
    if constexpr (Config::kGeneral) {
      const int inside = opaque(thread), row = w.first_query + warpgroup * 64 + inside / 32 * 16 + inside % 32 / 4;
      const ScoreTransform<Element, false> transform{
          a.scores, a.p, w.k_length, w.diagonal, w.batch, w.head, row, tile * 64 + 2 * (inside % 4)};
      uint32_t unused[16];
      transform.template weigh<0>(scores, unused, transform.dropped(),
                                  [&](int) { return make_float2(lse_of(0), lse_of(8)); });
    } else {
      HF_UNROLL
      for (int r = 0; r < 2; ++r) {
        const int limit = unseen[r] - tile * 64;
        HF_UNROLL
        for (int i = 0; i < 8; ++i) {
          if (8 * i >= limit) scores[4 * i + 2 * r] = -INFINITY;
          if (8 * i + 1 >= limit) scores[4 * i + 2 * r + 1] = -INFINITY;
        }
      }
      const float lse[2] = {lse_of(0), lse_of(8)};
      HF_UNROLL
      for (int i = 0; i < 32; ++i) scores[i] = ex2(fmaf(scores[i], a.scores.scale_log2, -lse[i / 2 % 2]));
    }
  };
  const auto differentiate = [&](const float (&weights)[32], float (&dp)[32]) {
    const float delta[2] = {delta_of(0), delta_of(8)};
    HF_UNROLL
    for (int i = 0; i < 32; ++i)
      dp[i] = Config::kGeneral ? score_gradient(weights[i], dp[i] * a.scores.keep_scale, delta[i / 2 % 2])
                               : weights[i] * (dp[i] - delta[i / 2 % 2]);
    HF_UNROLL
    for (int i = 0; i < 16; ++i) ds_packed[i] = pack<Element>(dp[2 * i], dp[2 * i + 1]);
  };

  // Scores and dp of one tile, to ds_packed. The general form starts dp after the weights, for want of registers;
  // else it runs under them. previous: the stage of the previous tile, whose dq is under way, or -1.
  int stage = 0, phase = 0, v_phase = 0;
  const auto multiply_tile = [&](int tile, int previous) {
    float scores[32], dp[32];
    const auto start_dp = [&] {
      mbarrier_wait(&s.v_arrived, v_phase);
      v_phase ^= 1;
      multiply_dp(dp);
    };
    mbarrier_wait(&s.k_arrived[stage], phase);
    multiply_scores(scores, stage);
    if (previous < 0) mbarrier_wait(&s.grad_out_arrived[warpgroup], 0);
    if constexpr (Config::kGeneral) {
      wgmma_wait<0>();
    } else {
      start_dp();
      wgmma_wait<1>();
    }
    pin(scores);
    if (previous >= 0) {
      pin(dq);
      if (leader) mbarrier_arrive(&s.k_released[previous]);
    }
    weigh(scores, tile);
    if constexpr (Config::kGeneral) start_dp();
    wgmma_wait<0>();
    pin(dp);
    if (leader) mbarrier_arrive(&s.v_released);
    differentiate(scores, dp);
  };

  if (thread < 64) {               // by plain loads and stores, as in the other passes
    s.lse[warpgroup * 64 + thread] = a.workspace.lse_log2[w.statistics + warpgroup * 64 + thread];
    s.delta[warpgroup * 64 + thread] = a.workspace.delta[w.statistics + warpgroup * 64 + thread];
  }
  barrier_sync(1 + warpgroup, 128);
  mbarrier_wait(&s.q_arrived[warpgroup], 0);
  multiply_tile(tiles.end - 1, -1);
  HF_NO_UNROLL
  for (int tile = tiles.end - 2; tile >= tiles.begin; --tile) {
    const int previous = stage;
    if (++stage == 2) stage = 0, phase ^= 1;
    multiply_dq(previous);         // of the previous tile, then scores and dp of this one
    multiply_tile(tile, previous);
  }
  multiply_dq(stage);
  wgmma_wait<0>();
  pin(dq);
  barrier_sync(1 + warpgroup, 128);   // this warpgroup is done with its queries, whose place the result takes
  const int row = w.first_query + warpgroup * 64;
  store_sums<Config>(dq, a.p.scale, s.q[warpgroup], &a.grad_q, row < w.k_length - w.diagonal, a.copies,
                     w.q_rows.row + row, w.head, w.q_rows.outer, 1 + warpgroup);
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1) backward_dq_kernel(const __grid_constant__ WideArguments a) {
  HF_DYNAMIC_SHARED(memory);
  auto& s = *reinterpret_cast<DqShared<Config>*>(memory);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  const TilePlace place = a.queries.place(blockIdx.x);
  const Sequence sequence(a.p, place.batch);
  const Mask mask(sequence.q_length, sequence.k_length, a.p.window_left, a.p.window_right);
  // Under a causal mask the last queries see most keys: start with them.
  const int tile = ceil_div(sequence.q_length, Config::kDqRows) - 1 - place.tile, first_query = tile * Config::kDqRows;
  if (tile < 0) return;
  const Range keys = mask.keys(first_query, min(first_query + Config::kDqRows, sequence.q_length));
  if (keys.empty()) {
    zero_rows<typename Config::Element>(a.p.grad_q, sequence, place.head, first_query, Config::kDqRows, a.p.head_dim);
    return;
  }
  const Range tiles{uniform(keys.begin / 64), uniform(ceil_div(keys.end, 64))};
  if (threadIdx.x == 0) {
    DqWork& w = s.work;
    w.head = place.head, w.kv_head = place.head / (a.p.heads / a.p.kv_heads), w.batch = place.batch;
    w.first_query = first_query;
    w.first_tile = tiles.begin, w.last_tile = tiles.end;
    w.k_length = sequence.k_length, w.diagonal = mask.diagonal;
    w.q_rows = a.q_layout.sequence(place.batch, sequence.q_row, sequence.q_length);
    w.k_rows = a.k_layout.sequence(place.batch, sequence.k_row, sequence.k_length);
    w.statistics = (a.queries.first_tile(place.batch, place.head) + tile) * Config::kDqRows;

    mbarrier_init(&s.v_arrived, 1);
    mbarrier_init(&s.v_released, 2);
    for (int i = 0; i < 2; ++i) {
      mbarrier_init(&s.q_arrived[i], 1);
      mbarrier_init(&s.grad_out_arrived[i], 1);
      mbarrier_init(&s.k_arrived[i], 1);
      mbarrier_init(&s.k_released[i], 2);
    }
    fence_mbarrier_init();
  }
  __syncthreads();

  if (warpgroup == 0) {
    registers_shrink<Config::kProducerRegisters>();
    if (threadIdx.x == 0) load_dq_operands<Config>(a, s);
  } else {
    registers_grow<Config::kConsumerRegisters>();
    accumulate_dq<Config>(a, s, tiles);
  }
}

}  // namespace hf_flash::hopper
